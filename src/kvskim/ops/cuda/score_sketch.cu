// Scores of 256-byte sketch records: estimated log attention mass of every page for every query head, and the sums that turn it into a
// share of the attention. docs/how-it-works.md, section "The sketch record":
//   y_mode = a_mode sum_slots W8 (digit - 3/2);  logit_t = sum_mode T[t, mode] y_mode;  S = log sum_t exp(logit_t)
//
// A warp takes tiles of 16 pages of one (request, kv head): int8 tensor-core products of 16 pages x 8 columns (query heads) accumulate the 16
// modes, the inverse DCT and the log-sum-exp run in registers, and the records of the warp's next tile are on their way meanwhile.
// One wave of CTAs; a warp whose first tile is past the request's end leaves at once, so the cost follows the live length.
#include <type_traits>
#include <utility>

#include "common.cuh"
#include "score_sketch.cuh"

namespace kvskim {
namespace {

constexpr int kWarps = 4, kTilePages = 16, kRecordVectors = sketch::record_bytes / 64;  // 16-byte loads per lane and record

struct ScoreArguments {
  const uint8_t* records;  // [N, H, 256]
  const int* block_table;
  int64_t block_table_stride;
  const int* seq_lens;
  const uint8_t* weights;  // score_sketch.cuh
  const float4* scales;
  const float* forced;     // [R, H, Gp]
  __half* scores;          // [R, H, capacity, Gp]
  float* partials;         // [R, H, chunks, Gp]
  int blocks, live_blocks;  // of 16 columns of a padded group, 1 for smaller ones; and of those, blocks with query heads
  int requests, heads, capacity, chunks, page_shift, sink_pages, window_pages, full_pages, settled;
};

template <class Body, int... I>
__device__ __forceinline__ void unrolled_(Body body, std::integer_sequence<int, I...>) {
  (body(std::integral_constant<int, I>{}), ...);
}
// body(0), ..., body(N - 1) with compile-time arguments.
template <int N, class Body>
__device__ __forceinline__ void unrolled(Body body) {
  unrolled_(body, std::make_integer_sequence<int, N>{});
}

// A plain load with a memory clobber: together with a __syncwarp after it, this keeps ptxas from sinking the loads behind the exponentials.
// SHARED: other warps of the multiprocessor want the same record.
template <bool SHARED>
__device__ __forceinline__ uint4 load_record(const uint8_t* p) {
  uint4 v;
  if constexpr (SHARED)
    asm volatile("ld.global.L2::256B.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  else
    asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}

template <int I>
__device__ __forceinline__ uint32_t component(const uint4& v) {
  if constexpr (I == 0) return v.x;
  else if constexpr (I == 1) return v.y;
  else if constexpr (I == 2) return v.z;
  else return v.w;
}

template <bool FIRST>
__device__ __forceinline__ void multiply(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const int c0 = FIRST ? kMagicBits : d[0], c1 = FIRST ? kMagicBits : d[1], c2 = FIRST ? kMagicBits : d[2], c3 = FIRST ? kMagicBits : d[3];
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c0), "r"(c1), "r"(c2), "r"(c3));
}

// Inverse DCT of 16 points with mode 0 left out, split into even and odd modes; the DCT-IV parts go through complex FFTs of half the length.
// A rotation is a + tan b; its cosine is folded into the inputs (sketch_fold) or into the next butterfly: 24 + 30 + 16 operations.
__device__ __forceinline__ void even_part(float (&even)[8], float z2, float z4, float z6, float z8, float z10, float z12, float z14) {
  constexpr float t8 = sketch_tangent(4), c8 = sketch_cosine(4);
  const float v0 = fmaf(t8, z12, z4), v1 = fmaf(t8, z4, -z12);
  const float e0 = fmaf(c8, v0, z8), e3 = fmaf(-c8, v0, z8), e1 = fmaf(c8, v1, -z8), e2 = fmaf(-c8, v1, -z8);
  const float ur = z10 + z6, ui = z6 - z10;
  const float r0 = z2 + ur, i0 = z14 + ui, r1 = z2 - ur, i1 = z14 - ui;
  constexpr float t0 = sketch_tangent(2), t1 = sketch_tangent(10), k0 = sketch_cosine(2), k1 = sketch_cosine(10);
  const float a0 = fmaf(t0, i0, r0), a3 = fmaf(t0, r0, -i0), a2 = fmaf(t1, i1, r1), a1 = fmaf(t1, r1, -i1);
  even[0] = fmaf(k0, a0, e0), even[7] = fmaf(-k0, a0, e0), even[3] = fmaf(k0, a3, e3), even[4] = fmaf(-k0, a3, e3);
  even[1] = fmaf(k1, a1, e1), even[6] = fmaf(-k1, a1, e1), even[2] = fmaf(k1, a2, e2), even[5] = fmaf(-k1, a2, e2);
}

// Adds the odd modes and returns the sum over the 16 tokens of 2^logit.
__device__ __forceinline__ float odd_sum(const float (&even)[8], float z1, float z3, float z5, float z7, float z9, float z11, float z13, float z15) {
  constexpr float t4 = sketch_tangent(4), t12 = sketch_tangent(12);
  const float ar = fmaf(t4, z11, z5), ai = fmaf(-t4, z5, z11), br = z9 + z7, bi = z7 - z9;
  const float cr = fmaf(t12, z3, z13), ci = fmaf(-t12, z13, z3);
  const float s0r = z1 + br, s0i = z15 + bi, d0r = z1 - br, d0i = z15 - bi;
  const float s1r = ar + cr, s1i = ai + ci, d1r = ar - cr, d1i = ai - ci;
  const float re[4] = {s0r + s1r, d0r + d1i, s0r - s1r, d0r - d1i}, im[4] = {s0i + s1i, d0i - d1r, s0i - s1i, d0i + d1r};
  float s[8];
  unrolled<4>([&](auto index) {
    constexpr int k = decltype(index)::value;
    constexpr float t = sketch_tangent(4 * k + 1), c = sketch_cosine(4 * k + 1);
    const float o0 = fmaf(t, im[k], re[k]), o1 = fmaf(t, re[k], -im[k]);
    s[2 * k] = exp2_fast(fmaf(c, o0, even[2 * k])) + exp2_fast(fmaf(-c, o0, even[2 * k]));
    s[2 * k + 1] = exp2_fast(fmaf(c, o1, even[7 - 2 * k])) + exp2_fast(fmaf(-c, o1, even[7 - 2 * k]));
  });
  return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

// COLUMNS of a column tile: 8 query heads, or 4 that are put into the tensor core twice (its columns 4..7 repeat 0..3), so that lanes
// q < 2 of a quad can finish page g and lanes q >= 2 page g + 8. TILES column tiles per warp. WEIGHTS_IN_REGISTERS: else in shared memory.
// BLOCKED: the padded group has several blocks of these columns; a block has weights and scales as a kv head of its own would.
template <int COLUMNS, int TILES, bool WEIGHTS_IN_REGISTERS>
struct ScoreShape {
  static constexpr int lanes = COLUMNS * 4;                       // lanes with weights of their own
  static constexpr int vectors = kProducts / 2 * lanes;           // 16-byte vectors of weights of a column tile
  static constexpr int scales = kModes * COLUMNS / 2;             // float4 of a column tile
  static constexpr int padded = COLUMNS * TILES;
  static constexpr int warp_bytes = (WEIGHTS_IN_REGISTERS ? 0 : TILES * vectors * 16) + TILES * (scales + COLUMNS / 2) * 16;
};

template <int COLUMNS, int TILES, bool WEIGHTS_IN_REGISTERS, int CTAS, bool BLOCKED>
__global__ void __launch_bounds__(kWarps * 32, CTAS) score_sketch_kernel(const __grid_constant__ ScoreArguments p) {
  using Shape = ScoreShape<COLUMNS, TILES, WEIGHTS_IN_REGISTERS>;
  static_assert(TILES == 1 || !WEIGHTS_IN_REGISTERS, "two column tiles keep their weights in shared memory");
  extern __shared__ __align__(16) uint8_t shared[];
  allow_next_kernel();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  uint4* shared_weights = reinterpret_cast<uint4*>(shared + warp * Shape::warp_bytes);
  // Of each column tile: scales and offsets of the modes, then, as if they were a 17th mode, the forced log-masses.
  float4* shared_scales = reinterpret_cast<float4*>(shared_weights) + (WEIGHTS_IN_REGISTERS ? 0 : TILES * Shape::vectors);

  // Neighbouring warps take the blocks of columns of the same records, and the heads of the same pages, whose records are neighbours in memory.
  const int index = blockIdx.x * kWarps + warp, pair = BLOCKED ? index / p.live_blocks : index, block = BLOCKED ? index - pair * p.live_blocks : 0;
  const int rest = pair / p.heads;
  const int head = pair - rest * p.heads, request = rest / p.chunks, chunk = rest - request * p.chunks;
  if (!p.settled) wait_previous_kernel();
  const int length = request < p.requests ? p.seq_lens[request] : 0, total = ceil_div(length, kPageTokens);
  // A request that has just found all but the last token of its prompt in the prefix cache may share its last full page with a row that
  // completes this page in the same step: then the kernels ahead make its record, and with a window of one page it is a candidate here.
  if (p.window_pages == 1 && (length & (kPageTokens - 1)) == 1) wait_previous_kernel();
  const int pages = total > p.full_pages ? total - p.window_pages : 0;
  // Even a warp without work waits: the end of this grid must mean that the kernel ahead has ended too, for the one behind reads its results.
  if (chunk * kTilePages >= pages) return wait_previous_kernel();
  const int row = request * p.heads + head, columns = BLOCKED ? p.blocks * Shape::padded : Shape::padded, first_column = block * Shape::padded;
  const int weight_row = BLOCKED ? row * p.blocks + block : row;

  // Pages past the end repeat the last page: its record is valid, its results are not written.
  const BlockTable table{p.block_table + request * p.block_table_stride, p.page_shift};
  auto page_of = [&](int tile, int half) { return min(tile * kTilePages + 8 * half + g, pages - 1); };
  int entry[2];
  auto look_up = [&](int tile) { entry[0] = table.entry(page_of(tile, 0)), entry[1] = table.entry(page_of(tile, 1)); };
  uint4 record[2][kRecordVectors];
  auto load_records = [&](int tile) {
    const uint8_t* from[2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
      from[h] = p.records + (static_cast<int64_t>(table.physical(entry[h], page_of(tile, h))) * p.heads + head) * sketch::record_bytes + 16 * q;
#pragma unroll
    for (int j = 0; j < kRecordVectors; ++j) record[0][j] = load_record<BLOCKED>(from[0] + 64 * j), record[1][j] = load_record<BLOCKED>(from[1] + 64 * j);
  };
  look_up(chunk);
  load_records(chunk);
  look_up(chunk + p.chunks);
  wait_previous_kernel();

  const int weight_lane = lane % Shape::lanes;
  uint4 register_weights[kProducts / 2];
  const uint4* weights = reinterpret_cast<const uint4*>(p.weights) + static_cast<int64_t>(weight_row) * (TILES * Shape::vectors);
  if constexpr (WEIGHTS_IN_REGISTERS) {
#pragma unroll
    for (int i = 0; i < kProducts / 2; ++i) register_weights[i] = weights[i * Shape::lanes + weight_lane];
  } else {
#pragma unroll
    for (int i = 0; i < TILES * Shape::vectors / 32; ++i) shared_weights[i * 32 + lane] = weights[i * 32 + lane];
  }
#pragma unroll
  for (int c = 0; c < TILES; ++c) {
    const float4* scales = p.scales + (static_cast<int64_t>(weight_row) * TILES + c) * Shape::scales;
    float4* to = shared_scales + c * (Shape::scales + COLUMNS / 2);
#pragma unroll
    for (int i = 0; i < Shape::scales / 32; ++i) to[i * 32 + lane] = scales[i * 32 + lane];
    if (lane < COLUMNS / 2) {
      const float2 forced = *reinterpret_cast<const float2*>(p.forced + static_cast<int64_t>(weight_row) * Shape::padded + c * COLUMNS + 2 * lane);
      to[Shape::scales + lane] = make_float4(forced.x * kLog2E, forced.y * kLog2E, 0.f, 0.f);
    }
  }
  __syncwarp();

  // Values of this lane: (column tile, page half, column) for 8 columns; two columns of one page for 4.
  constexpr int kValues = COLUMNS == 8 ? 4 : 2, kAll = TILES * kValues;
  const bool low = q < 2;
  const int column_pair = COLUMNS == 8 ? q : q & 1;
  float mass[TILES][2] = {};
  const uint32_t first_page = static_cast<uint32_t>(row) * p.capacity;
  const float4* lane_scales = shared_scales + column_pair;

  for (int tile = chunk; tile * kTilePages < pages; tile += p.chunks) {
    asm volatile("" ::: "memory");  // or the weights in shared memory are hoisted into registers
    int sum[TILES][kModes][4];
    uint4 fragment[TILES][kProducts / 2];
    auto product = [&](auto which) {
      constexpr int i = decltype(which)::value;
      constexpr SketchProduct o = kSketchProgram.product[i];
      constexpr uint32_t mask = 0x03030303u << (2 * o.position);
#pragma unroll
      for (int c = 0; c < TILES; ++c) {
        if constexpr (WEIGHTS_IN_REGISTERS) fragment[c][i / 2] = register_weights[i / 2];
        else if constexpr (i % 2 == 0) fragment[c][i / 2] = shared_weights[c * Shape::vectors + i / 2 * Shape::lanes + weight_lane];
        multiply<o.first>(sum[c][o.mode], component<o.word % 4>(record[0][o.word / 4]) & mask, component<o.word % 4>(record[1][o.word / 4]) & mask,
                          component<o.word % 4 + 1>(record[0][o.word / 4]) & mask, component<o.word % 4 + 1>(record[1][o.word / 4]) & mask,
                          component<2 * (i % 2)>(fragment[c][i / 2]), component<2 * (i % 2) + 1>(fragment[c][i / 2]));
      }
    };
    // Value of a mode, scaled for the inverse transform, in units of log2.
    auto mode_value = [&](int mode, float (&z)[kAll]) {
#pragma unroll
      for (int c = 0; c < TILES; ++c) {
        const float4 s = lane_scales[c * (Shape::scales + COLUMNS / 2) + mode * (COLUMNS / 2)];
        const auto& a = sum[c][mode];
        if constexpr (COLUMNS == 8) {
          z[c * 4 + 0] = fmaf(__int_as_float(a[0]), s.x, s.z), z[c * 4 + 1] = fmaf(__int_as_float(a[1]), s.y, s.w);
          z[c * 4 + 2] = fmaf(__int_as_float(a[2]), s.x, s.z), z[c * 4 + 3] = fmaf(__int_as_float(a[3]), s.y, s.w);
        } else {
          z[0] = fmaf(__int_as_float(low ? a[0] : a[2]), s.x, s.z), z[1] = fmaf(__int_as_float(low ? a[1] : a[3]), s.y, s.w);
        }
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
    if ((tile + p.chunks) * kTilePages < pages) {
      load_records(tile + p.chunks);
      look_up(tile + 2 * p.chunks);
    }
    __syncwarp();  // keeps ptxas from sinking the loads behind the exponentials
    {
      float z1[kAll], z3[kAll], z5[kAll], z7[kAll], z9[kAll], z11[kAll], z13[kAll], z15[kAll];
      mode_value(1, z1), mode_value(3, z3), mode_value(5, z5), mode_value(7, z7), mode_value(9, z9), mode_value(11, z11);
      mode_value(13, z13), mode_value(15, z15);
#pragma unroll
      for (int v = 0; v < kAll; ++v) total[v] = odd_sum(even[v], z1[v], z3[v], z5[v], z7[v], z9[v], z11[v], z13[v], z15[v]);
    }
    // The largest token lies at most 2^128 above the page's mean logit, which is mode 0: without it no exponential overflows in practice.
    float score[kAll];  // in units of log2
#pragma unroll
    for (int v = 0; v < kAll; ++v) score[v] = mean[v] + fminf(log2_fast(total[v]), 128.f);
    auto finish = [&](int page, int c, float x, float y) {
      // NaN becomes the largest score here and in the sums: a broken estimate may cost time, never quality.
      __half2 h = __floats2half2_rn(x * kLn2, y * kLn2);
      h = __hmax2(__hmin2(h, __float2half2_rn(60000.f)), __float2half2_rn(-60000.f));
      const int64_t at = static_cast<int64_t>(first_page + page) * columns + first_column + c * COLUMNS + 2 * column_pair;
      if (page < pages) *reinterpret_cast<__half2*>(p.scores + at) = h;
      const float4 forced = lane_scales[c * (Shape::scales + COLUMNS / 2) + Shape::scales];
      constexpr float cap = 83.f * kLog2E;
      const float mx = exp2_fast(fminf(x - forced.x, cap)), my = exp2_fast(fminf(y - forced.y, cap));
      const bool candidate = page >= p.sink_pages && page < pages;
      mass[c][0] += candidate ? mx : 0.f, mass[c][1] += candidate ? my : 0.f;
    };
    const int page = tile * kTilePages + g;
#pragma unroll
    for (int c = 0; c < TILES; ++c) {
      if constexpr (COLUMNS == 8) {
        finish(page, c, score[4 * c], score[4 * c + 1]);
        finish(page + 8, c, score[4 * c + 2], score[4 * c + 3]);
      } else {
        finish(page + (low ? 0 : 8), 0, score[0], score[1]);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < TILES; ++c)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float m = mass[c][i];
#pragma unroll
      for (int x = COLUMNS == 8 ? 4 : 2; x < 32; x <<= 1) m += __shfl_xor_sync(~0u, m, x);
      if (lane < COLUMNS / 2) p.partials[(static_cast<int64_t>(row) * p.chunks + chunk) * columns + first_column + c * COLUMNS + 2 * column_pair + i] = m;
    }
}

template <int COLUMNS, int TILES, bool WEIGHTS_IN_REGISTERS, int CTAS, bool BLOCKED = false>
cudaError_t launch_score(const ScoreArguments& p, int flags, cudaStream_t stream) {
  const int64_t warps = static_cast<int64_t>(p.requests) * p.heads * p.chunks * p.live_blocks;
  return launch(score_sketch_kernel<COLUMNS, TILES, WEIGHTS_IN_REGISTERS, CTAS, BLOCKED>, dim3(static_cast<unsigned>((warps + kWarps - 1) / kWarps)),
                kWarps * 32, kWarps * ScoreShape<COLUMNS, TILES, WEIGHTS_IN_REGISTERS>::warp_bytes, stream, flags, p);
}

// CTAs per multiprocessor of the variant for 4, 8 and 16 columns (a block of a larger group): measured best.
constexpr int resident_ctas(int padded) { return padded == 4 ? 3 : padded == 8 ? 4 : 2; }

}  // namespace
}  // namespace kvskim

// Chunks that the tiles of a (request, kv head) are dealt to, one warp each: as many as give one full wave of warps.
extern "C" int kvskim_score_sketch_chunks(int requests, int heads, int padded, int capacity, int multiprocessors) {
  using namespace kvskim;
  const int64_t warps = static_cast<int64_t>(multiprocessors) * resident_ctas(padded) * kWarps;
  const int64_t rows = static_cast<int64_t>(requests) * heads * (padded > kBlockColumns ? padded / kBlockColumns : 1);
  const int64_t share = rows > 0 ? warps / rows : 1, most = ceil_div(capacity, kTilePages);
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
                         static_cast<const float*>(forced), static_cast<__half*>(scores), static_cast<float*>(partials), blocks,
                         ceil_div(group, kBlockColumns), requests, heads, capacity, chunks, page_shift, sink_pages, window_pages, full_pages,
                         (flags & kRecordsSettled) != 0};
  const auto s = static_cast<cudaStream_t>(stream);
  if (padded == 4) return launch_score<4, 1, true, resident_ctas(4)>(p, flags, s);
  if (padded == 8) return launch_score<8, 1, false, resident_ctas(8)>(p, flags, s);
  if (blocks == 1) return launch_score<8, 2, false, resident_ctas(16)>(p, flags, s);
  return launch_score<8, 2, false, resident_ctas(16), true>(p, flags, s);
}
