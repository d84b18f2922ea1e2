// Scores of 256-byte sketch records: estimated log attention mass of every page for every query head, and the sums that turn it into a
// share of the attention. docs/how-it-works.md, section "The sketch record":
//   y_mode = a_mode sum_slots W8 (digit - 3/2);  logit_t = sum_mode T[t, mode] y_mode;  S = log sum_t exp(logit_t)
//
// A warp takes tiles of one (request, kv head): int8 tensor-core products of 16 pages x 8 columns (query heads), or 8 x 16, accumulate the 16
// modes, the inverse DCT and the log-sum-exp run in registers (score_sketch_transform.cuh), and the records of the warp's next tile are on their way
// meanwhile. One wave of CTAs; a warp whose first tile is past the request's end leaves at once, so the cost follows the live length.
// What bounds it up to 8 columns is the stream of records, and, before the first tile can be multiplied, that of the weights to all multiprocessors. With
// 16 columns no one unit is full: shared memory, mostly with weights, and the schedulers work half of the time, exponentials nearly so, and warps wait for
// each in turn.
#include "score_sketch_memory.cuh"
#include "score_sketch_transform.cuh"
#include "score_sketch_wide.cuh"

namespace kvskim {
namespace {

constexpr int kWarps = 4, kWideWarps = 8;  // of a CTA; and of one for 16 columns

template <bool FIRST>
__device__ __forceinline__ void multiply(int (&d)[4], const int4& start, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const int c0 = FIRST ? start.x : d[0], c1 = FIRST ? start.y : d[1], c2 = FIRST ? start.z : d[2], c3 = FIRST ? start.w : d[3];
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c0), "r"(c1), "r"(c2), "r"(c3));
}

// What is needed once for each tile. Three CTAs of the variant for 4 columns should fit in the 16 KB of shared memory that a multiprocessor is divided
// for by the preparation; else it would have to be idle before the scan may begin there.
struct alignas(16) WarpConstants {
  int entry[32];           // of a lane: of the block table, for the tile behind the one whose records are on their way
  const uint8_t* records;  // of physical page 0
  const int* entries;      // of the block table
  float* partials;         // of this warp's tiles
};

// COLUMNS (query heads): 8, or 4 that are put into the tensor core twice (its columns 4..7 repeat 0..3), so that lanes q < 2 of a quad can finish
// page g and lanes q >= 2 page g + 8. For 16 see score_sketch_wide.cuh; of more query heads each block of 16 has CTAs of its own and has weights and
// scales as a kv head of its own would.
// TOGETHER: the warps of a CTA have the same kv head, and chunks is a multiple of their number. Else they have neighbouring heads.
template <int COLUMNS>
struct ScoreShape {
  static constexpr bool weights_in_registers = COLUMNS == 4;  // else in shared memory
  static constexpr int lanes = COLUMNS * 4;                   // lanes with weights of their own
  static constexpr int vectors = kProducts / 2 * lanes;       // 16-byte vectors of weights
  static constexpr int scales = kModes * COLUMNS / 2;         // float4
  // Scales and offsets of the modes, then, as if they were two more modes, minus the forced log-masses in log2, and kMagicBits.
  static constexpr int all_scales = scales + 2 * (COLUMNS / 2);
  static constexpr int head_bytes = (weights_in_registers ? 0 : vectors * 16) + all_scales * 16;
  // Warps of one kv head share what it has in shared memory: for each warp apart it would be 20 MB in all, which takes as long as a tile does.
  static constexpr int bytes(bool together) {
    return kWarps * static_cast<int>(sizeof(WarpConstants)) + (together && !weights_in_registers ? 1 : kWarps) * head_bytes;
  }
};

template <int COLUMNS, int CTAS, bool TOGETHER>
__global__ void __launch_bounds__(kWarps * 32, CTAS) score_sketch_kernel(const __grid_constant__ ScoreArguments p) {
  using Shape = ScoreShape<COLUMNS>;
  constexpr bool WEIGHTS_IN_REGISTERS = Shape::weights_in_registers;
  extern __shared__ __align__(16) uint8_t shared[];
  allow_next_kernel();
  // From one lane: so the compiler knows that what follows from it is the same in all lanes.
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  constexpr bool share = !WEIGHTS_IN_REGISTERS && TOGETHER;
  WarpConstants& constants = reinterpret_cast<WarpConstants*>(shared)[warp];
  uint4* shared_weights = reinterpret_cast<uint4*>(shared + kWarps * sizeof(WarpConstants) + (share ? 0 : warp * Shape::head_bytes));
  float4* shared_scales = reinterpret_cast<float4*>(shared_weights) + (WEIGHTS_IN_REGISTERS ? 0 : Shape::vectors);

  // Neighbouring CTAs, or warps, take the heads of the same pages, whose records are neighbours in memory.
  const int pair = TOGETHER ? blockIdx.x : blockIdx.x * kWarps + warp, rest = pair / p.heads, head = pair - rest * p.heads;
  const int shares = TOGETHER ? p.chunks / kWarps : p.chunks, request = rest / shares;
  const int first_chunk = (rest - request * shares) * (TOGETHER ? kWarps : 1), chunk = first_chunk + (TOGETHER ? warp : 0);
  if (!p.settled) wait_previous_kernel();
  const int length = request < p.requests ? p.seq_lens[request] : 0, total = ceil_div(length, kPageTokens);
  // A request that has just found all but the last token of its prompt in the prefix cache may share its last full page with a row that
  // completes this page in the same step: then the kernels ahead make its record, and with a window of one page it is a candidate here.
  if (p.window_pages == 1 && (length & (kPageTokens - 1)) == 1) wait_previous_kernel();
  const int pages = total > p.full_pages ? total - p.window_pages : 0;
  // Even a warp without work waits: the end of this grid must mean that the kernel ahead has ended too, for the one behind reads its results.
  if ((share ? first_chunk : chunk) * kTilePages >= pages) return wait_previous_kernel();
  const int row = request * p.heads + head;

  // Of the 16 pages of a tile a lane looks up one: even lanes that of row g, odd ones that of row g + 8, which their neighbour needs too. Pages past
  // the end repeat the last page: its record is valid, its results are not written.
  int own_page = chunk * kTilePages + g + 8 * (q & 1);
  const int last_page = pages - 1, stride = p.chunks * kTilePages;
  const uint32_t page_bytes = p.heads * sketch::record_bytes;
  const uint8_t* lane_records = p.records + head * sketch::record_bytes + 16 * q;
  const int* entries = p.block_table + request * p.block_table_stride;
  auto clamped = [&](int page) { return min(page, last_page); };
  auto entry_at = [&](const int* table, int page) { return element(table, static_cast<uint32_t>(clamped(page)) >> p.page_shift, sizeof(int)); };
  auto physical_page = [&](int entry, int page) { return BlockTable{nullptr, p.page_shift}.physical(entry, clamped(page)); };
  uint4 record[2][kRecordVectors];
  auto load_records = [&](const uint8_t* base, int entry, int page) {
    const int physical = physical_page(entry, page);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint8_t* from = element(base, __shfl_sync(~0u, physical, h, 2), page_bytes);
#pragma unroll
      for (int j = 0; j < kRecordVectors; ++j) record[h][j] = load_record(from + 64 * j);
    }
  };
  const int first_entry = load_here(entry_at(entries, own_page));
  copy_int(&constants.entry[lane], entry_at(entries, own_page + stride));
  load_records(lane_records, first_entry, own_page);
  wait_previous_kernel();

  // All loads before the first use of one: then they take one latency together.
  constexpr int kPairs = COLUMNS / 2;
  const int reader = share ? threadIdx.x : lane, forced_pair = reader % kPairs;
  const float2 forced = load_here(reinterpret_cast<const float2*>(p.forced + static_cast<int64_t>(row) * COLUMNS) + forced_pair);
  const int weight_lane = lane % Shape::lanes;
  uint4 register_weights[kProducts / 2];
  const uint4* weights = reinterpret_cast<const uint4*>(p.weights) + static_cast<int64_t>(row) * Shape::vectors;
  const float4* scales = p.scales + static_cast<int64_t>(row) * Shape::scales;
  const auto copy = [&](auto* to, const auto* from, auto count) {
    constexpr int kCount = decltype(count)::value, kReaders = share ? 32 * kWarps : 32;
#pragma unroll
    for (int i = 0; i < ceil_div(kCount, kReaders); ++i)
      if (kCount % kReaders == 0 || i * kReaders + reader < kCount) copy_vector(to + i * kReaders + reader, from + i * kReaders + reader);
  };
  if constexpr (!WEIGHTS_IN_REGISTERS) copy(shared_weights, weights, std::integral_constant<int, Shape::vectors>{});
  copy(shared_scales, scales, std::integral_constant<int, Shape::scales>{});
  if constexpr (WEIGHTS_IN_REGISTERS)
#pragma unroll
    for (int i = 0; i < kProducts / 2; ++i) register_weights[i] = weights[i * Shape::lanes + weight_lane];
  if (reader < kPairs) {
    float4* to = shared_scales + Shape::scales + forced_pair;
    __half* scores = p.scores + static_cast<int64_t>(static_cast<uint32_t>(row) * p.capacity) * COLUMNS + 2 * forced_pair;
    reinterpret_cast<ColumnPair&>(*to) = {{forced.x * -kLog2E, forced.y * -kLog2E}, scores};
    to[kPairs] = make_float4(kMagic, kMagic, kMagic, kMagic);
  }

  // Values of this lane: (page half, column) for 8 columns; two columns of one page for 4.
  constexpr int kAll = COLUMNS == 4 ? 2 : 4;
  const bool low = q < 2;
  const int column_pair = COLUMNS == 4 ? q & 1 : q;
  if (lane == 0) constants.entries = entries, constants.records = p.records + head * sketch::record_bytes;
  if (lane == 0) constants.partials = p.partials + (static_cast<int64_t>(row) * p.chunks + chunk) * COLUMNS;
  wait_copies();
  if constexpr (share) __syncthreads();
  else __syncwarp();
  float mass[2] = {};
  const float4* lane_scales = shared_scales + column_pair;

  int tiles = __shfl_sync(~0u, ceil_div(ceil_div(pages, kTilePages) - chunk, p.chunks), 0);
  if (share && tiles == 0) return;
  for (; tiles > 0; --tiles) {
    asm volatile("" ::: "memory");  // or the weights in shared memory are hoisted into registers
    int sum[kModes][4];
    const int4 start = reinterpret_cast<const int4&>(lane_scales[Shape::scales + kPairs]);
    uint4 fragment[kProducts / 2];
    auto product = [&](auto which) {
      constexpr int i = decltype(which)::value;
      constexpr SketchProduct o = kSketchProgram.product[i];
      constexpr uint32_t mask = 0x03030303u << (2 * o.position);
      if constexpr (WEIGHTS_IN_REGISTERS) fragment[i / 2] = register_weights[i / 2];
      else if constexpr (i % 2 == 0) fragment[i / 2] = shared_weights[i / 2 * Shape::lanes + weight_lane];
      multiply<o.first>(sum[o.mode], start, component<o.word % 4>(record[0][o.word / 4]) & mask, component<o.word % 4>(record[1][o.word / 4]) & mask,
                        component<o.word % 4 + 1>(record[0][o.word / 4]) & mask, component<o.word % 4 + 1>(record[1][o.word / 4]) & mask,
                        component<2 * (i % 2)>(fragment[i / 2]), component<2 * (i % 2) + 1>(fragment[i / 2]));
    };
    // Value of a mode, scaled for the inverse transform, in units of log2; mode 0, which has no part in it, in nats.
    auto mode_value = [&](int mode, float (&z)[kAll]) {
      const float4 s = lane_scales[mode * kPairs];
      const auto& a = sum[mode];
      if constexpr (COLUMNS == 4) {
        z[0] = fmaf(__int_as_float(low ? a[0] : a[2]), s.x, s.z), z[1] = fmaf(__int_as_float(low ? a[1] : a[3]), s.y, s.w);
      } else {
        z[0] = fmaf(__int_as_float(a[0]), s.x, s.z), z[1] = fmaf(__int_as_float(a[1]), s.y, s.w);
        z[2] = fmaf(__int_as_float(a[2]), s.x, s.z), z[3] = fmaf(__int_as_float(a[3]), s.y, s.w);
      }
    };
    float even[kAll][8], mean[kAll], total[kAll];
    unrolled<kSketchProgram.even>(product);
    {
      float z2[kAll], z4[kAll], z6[kAll], z8[kAll], z10[kAll], z12[kAll], z14[kAll];
      mode_value(0, mean), mode_value(2, z2), mode_value(4, z4), mode_value(6, z6), mode_value(8, z8), mode_value(10, z10);
      mode_value(12, z12), mode_value(14, z14);
#pragma unroll
      for (int v = 0; v < kAll; ++v) even_part(even[v], z2[v], z4[v], z6[v], z8[v], z10[v], z12[v], z14[v]);
    }
    if constexpr (WEIGHTS_IN_REGISTERS) __syncwarp();  // the odd products may not start before the even accumulators are free
    unrolled<kProducts - kSketchProgram.even>([&](auto which) { product(std::integral_constant<int, kSketchProgram.even + decltype(which)::value>{}); });
    if (tiles > 1) {
      wait_copies();
      load_records(constants.records + 16 * q, constants.entry[lane], own_page + stride);
      copy_int(&constants.entry[lane], entry_at(constants.entries, own_page + 2 * stride));
    }
    __syncwarp();  // keeps ptxas from sinking the loads behind the exponentials
    {
      float z1[kAll], z3[kAll], z5[kAll], z7[kAll], z9[kAll], z11[kAll], z13[kAll], z15[kAll];
      mode_value(1, z1), mode_value(3, z3), mode_value(5, z5), mode_value(7, z7), mode_value(9, z9), mode_value(11, z11);
      mode_value(13, z13), mode_value(15, z15);
#pragma unroll
      for (int v = 0; v < kAll; ++v) total[v] = token_sum(even[v], odd_part(z1[v], z3[v], z5[v], z7[v], z9[v], z11[v], z13[v], z15[v]));
    }
    float score[kAll];
#pragma unroll
    for (int v = 0; v < kAll; ++v) score[v] = page_score(total[v], mean[v]);
    const int page = own_page & ~8;
    auto finish = [&](int half, float x, float y) {
      const __half2 h = stored_scores(x, y);
      const ColumnPair& of = reinterpret_cast<const ColumnPair&>(lane_scales[Shape::scales]);
      const bool written = page + 8 * half < pages;
      if (written) store_scores(element(of.scores, page, COLUMNS * sizeof(__half)) + 8 * half * COLUMNS, h);
      const float mx = page_mass(x, of.minus_forced[0]), my = page_mass(y, of.minus_forced[1]);
      if (written && page + 8 * half >= p.sink_pages) mass[0] += mx, mass[1] += my;
    };
    if constexpr (COLUMNS == 4) {
      finish(low ? 0 : 1, score[0], score[1]);
    } else {
      finish(0, score[0], score[1]);
      finish(1, score[2], score[3]);
    }
    own_page += stride;
  }
  wait_copies();  // the last one is not used
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float m = mass[i];
#pragma unroll
    for (int x = kPairs; x < 32; x <<= 1) m += __shfl_xor_sync(~0u, m, x);
    if (lane < kPairs) constants.partials[2 * column_pair + i] = m;
  }
}

template <int COLUMNS, int CTAS, bool TOGETHER>
cudaError_t launch_score(const ScoreArguments& p, int flags, cudaStream_t stream) {
  const int64_t rows = static_cast<int64_t>(p.requests) * p.heads * p.chunks;
  return launch(score_sketch_kernel<COLUMNS, CTAS, TOGETHER>, dim3(static_cast<unsigned>((rows + kWarps - 1) / kWarps)), kWarps * 32,
                ScoreShape<COLUMNS>::bytes(TOGETHER), stream, flags, p);
}

// CTAs per multiprocessor: measured best.
constexpr int resident_ctas(int padded) { return padded == 4 ? 3 : padded == 8 ? 4 : 2; }

cudaError_t launch_wide(const ScoreArguments& p, int flags, cudaStream_t stream) {
  const int64_t ctas = static_cast<int64_t>(p.requests) * p.heads * p.chunks * p.live_blocks;
  return launch(score_sketch_wide_kernel<kWideWarps, resident_ctas(kBlockColumns)>, dim3(static_cast<unsigned>(ctas)), kWideWarps * 32,
                sizeof(WideShared<kWideWarps>), stream, flags, p);
}

}  // namespace
}  // namespace kvskim

// Chunks that the tiles of a (request, kv head) are dealt to: as many as give one full wave. Up to 8 columns one warp each, and where it costs few of
// them a multiple of a CTA's warps, which then share the weights of the head. With more a CTA each.
extern "C" int kvskim_score_sketch_chunks(int requests, int heads, int padded, int capacity, int multiprocessors) {
  using namespace kvskim;
  const bool blocks = padded >= kBlockColumns;
  const int64_t wave = static_cast<int64_t>(multiprocessors) * resident_ctas(padded) * (blocks ? 1 : kWarps);
  const int64_t rows = static_cast<int64_t>(requests) * heads * (blocks ? padded / kBlockColumns : 1);
  int64_t share = rows > 0 ? wave / rows : 1, most = ceil_div(capacity, kTilePages);
  if (!blocks && share >= 8 * kWarps) share -= share % kWarps, most = (most + kWarps - 1) / kWarps * kWarps;
  return static_cast<int>(share < 1 || most < 1 ? 1 : share < most ? share : most);
}

// records [N, H, 256]; scores fp16 [R, H, capacity, Gp], Gp = the group padded to 4, 8, 16, 32, 64 or 128; partials float32 [R, H, chunks, Gp].
// weights and forced as kvskim_prepare_sketch wrote them. A request of at most full_pages pages is left alone.
extern "C" int kvskim_score_sketch(const void* records, const void* block_table, int64_t block_table_stride, const void* seq_lens,
                                   const void* weights, const void* forced, void* scores, void* partials, int requests, int heads, int group,
                                   int capacity, int chunks, int page_shift, int sink_pages, int window_pages, int full_pages, int flags,
                                   void* stream) {
  using namespace kvskim;
  if (requests == 0 || heads == 0 || capacity == 0) return cudaSuccess;
  if (group < 1 || group > kLargestGroup || chunks < 1 || window_pages < 1 || sink_pages < 0) return cudaErrorInvalidValue;
  if (static_cast<int64_t>(requests) * heads * capacity >= (1LL << 32)) return cudaErrorInvalidValue;
  const int padded = padded_group(group), blocks = column_blocks(group);
  if (static_cast<int64_t>(requests) * heads * chunks * blocks >= (1LL << 31)) return cudaErrorInvalidValue;
  const uint8_t* scales = static_cast<const uint8_t*>(weights) + static_cast<int64_t>(requests) * heads * blocks * padded * kWeightBytes;
  const ScoreArguments p{static_cast<const uint8_t*>(records), static_cast<const int*>(block_table), block_table_stride,
                         static_cast<const int*>(seq_lens), static_cast<const uint8_t*>(weights), reinterpret_cast<const float4*>(scales),
                         static_cast<const float*>(forced), static_cast<__half*>(scores), static_cast<float*>(partials),
                         blocks, ceil_div(group, kBlockColumns), requests, heads, capacity, chunks, page_shift, sink_pages, window_pages,
                         full_pages, (flags & kRecordsSettled) != 0};
  const auto s = static_cast<cudaStream_t>(stream);
  if (padded == kBlockColumns) return launch_wide(p, flags, s);
  const auto launch_columns = [&](auto together) {
    constexpr bool TOGETHER = decltype(together)::value;
    if (padded == 4) return launch_score<4, resident_ctas(4), TOGETHER>(p, flags, s);
    return launch_score<8, resident_ctas(8), TOGETHER>(p, flags, s);
  };
  return chunks % kWarps ? launch_columns(std::false_type{}) : launch_columns(std::true_type{});
}
