// The scan for blocks of 16 columns. Here the columns are the rows of the tensor core's tile and the pages its columns: a tile of 8 pages x 16 columns
// has as many sums as one of 16 pages x 8 columns, but a lane takes apart the digits of one record and not of two, and every record is read by one warp.
#pragma once
#include "score_sketch_memory.cuh"
#include "score_sketch_transform.cuh"

namespace kvskim {

constexpr int kWidePages = 8, kWidePairs = kBlockColumns / 2;  // of a tile: pages, and pairs of columns

// Row g of the tensor core's tile is column 2 g, row g + 8 column 2 g + 1, so that a lane has neighbouring columns and stores them together.
template <int WARPS>
struct WideShared {
  uint4 weights[kProducts][32];         // [product][lane]: first operand of the product
  float4 scales[kModes][kWidePairs];    // (scale, scale, offset, offset)
  ColumnPair columns[kWidePairs];
  int4 start;                           // kMagicBits
  float mass[WARPS][kBlockColumns];
};

template <bool FIRST>
__device__ __forceinline__ void multiply_wide(int (&d)[4], const int4& start, const uint4& a, uint32_t b0, uint32_t b1) {
  const int c0 = FIRST ? start.x : d[0], c1 = FIRST ? start.y : d[1], c2 = FIRST ? start.z : d[2], c3 = FIRST ? start.w : d[3];
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "r"(c0), "r"(c1), "r"(c2), "r"(c3));
}

// Weights, scales and the rest of what the columns need, into shared memory. The caller waits for the copies.
template <int WARPS>
__device__ __forceinline__ void copy_columns(WideShared<WARPS>& shared, const ScoreArguments& p, int row, int block) {
  const int64_t weight_row = static_cast<int64_t>(row) * p.blocks + block;
  const int pair = threadIdx.x % kWidePairs;
  const float2 forced = load_here(reinterpret_cast<const float2*>(p.forced + weight_row * kBlockColumns) + pair);
  const auto copy = [](auto& to, const auto* from) {
    constexpr int kVectors = sizeof(to) / 16;
#pragma unroll
    for (int i = 0; i < ceil_div(kVectors, WARPS * 32); ++i) {
      const int at = i * WARPS * 32 + threadIdx.x;
      if (kVectors % (WARPS * 32) == 0 || at < kVectors) copy_vector(reinterpret_cast<uint4*>(&to) + at, reinterpret_cast<const uint4*>(from) + at);
    }
  };
  copy(shared.weights, p.weights + weight_row * static_cast<int64_t>(sizeof(shared.weights)));
  copy(shared.scales, p.scales + weight_row * static_cast<int64_t>(sizeof(shared.scales) / 16));
  if (threadIdx.x < kWidePairs) {
    __half* scores = p.scores + (static_cast<int64_t>(static_cast<uint32_t>(row) * p.capacity) * p.blocks + block) * kBlockColumns + 2 * pair;
    ColumnPair& to = shared.columns[pair];
    to.minus_forced[0] = forced.x * -kLog2E, to.minus_forced[1] = forced.y * -kLog2E, to.scores = scores;
  }
  if (threadIdx.x == 0) shared.start = make_int4(kMagicBits, kMagicBits, kMagicBits, kMagicBits);
}

// All warps of a CTA take tiles of one chunk in turn, two of them the halves of one tile of kTilePages.
template <int WARPS, int CTAS>
__global__ void __launch_bounds__(WARPS * 32, CTAS) score_sketch_wide_kernel(const __grid_constant__ ScoreArguments p) {
  static_assert(WARPS % 2 == 0, "two warps share 16 pages");
  extern __shared__ __align__(16) uint8_t dynamic_shared[];
  WideShared<WARPS>& shared = *reinterpret_cast<WideShared<WARPS>*>(dynamic_shared);
  allow_next_kernel();
  // From one lane: so the compiler knows that what follows from it is the same in all lanes.
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;

  // Neighbouring CTAs take the blocks of columns of the same records, and then the heads of the same pages, whose records are neighbours in memory.
  const int pair = blockIdx.x / p.live_blocks, block = blockIdx.x - pair * p.live_blocks, rest = pair / p.heads, head = pair - rest * p.heads;
  const int request = rest / p.chunks, chunk = rest - request * p.chunks;
  if (!p.settled) wait_previous_kernel();
  const int length = p.seq_lens[request], all_pages = ceil_div(length, kPageTokens);
  // A request that has just found all but the last token of its prompt in the prefix cache may share its last full page with a row that
  // completes this page in the same step: then the kernels ahead make its record, and with a window of one page it is a candidate here.
  if (p.window_pages == 1 && (length & (kPageTokens - 1)) == 1) wait_previous_kernel();
  const int pages = all_pages > p.full_pages ? all_pages - p.window_pages : 0;
  // Even a CTA without work waits: the end of this grid must mean that the kernel ahead has ended too, for the one behind reads its results.
  if (chunk * kTilePages >= pages) return wait_previous_kernel();
  const int row = request * p.heads + head;

  // A lane reads from the record of column g of the tensor core's tile and has the sums of columns 2 q and 2 q + 1. These are pages q and q + 4, so that
  // the scores of a warp are neighbours in memory. Pages past the end repeat the last page: its record is valid, its results are not written.
  const int stride = p.chunks * (kTilePages / 2 * WARPS), record_page = g / 2 + g % 2 * 4;
  int first_page = (chunk + warp / 2 * p.chunks) * kTilePages + warp % 2 * kWidePages;
  const int* entries = p.block_table + request * p.block_table_stride;
  const int lane_offset = head * sketch::record_bytes + 16 * q;
  const uint32_t page_bytes = p.heads * sketch::record_bytes;
  auto clamped = [&](int page) { return min(page + record_page, pages - 1); };
  auto entry_of = [&](int page) { return load_here(element(entries, static_cast<uint32_t>(clamped(page)) >> p.page_shift, sizeof(int))); };
  uint4 record[kRecordVectors];
  auto load_records = [&](int entry, int page) {
    const uint8_t* from = element(p.records, BlockTable{nullptr, p.page_shift}.physical(entry, clamped(page)), page_bytes) + lane_offset;
#pragma unroll
    for (int j = 0; j < kRecordVectors; ++j) record[j] = load_record(from + 64 * j);
  };
  const int first_entry = entry_of(first_page);
  int entry = entry_of(first_page + stride);  // of the tile behind the one whose records are on their way
  load_records(first_entry, first_page);
  wait_previous_kernel();
  copy_columns(shared, p, row, block);
  wait_copies();
  __syncthreads();

  float mass[2] = {};
  const uint4* weights = &shared.weights[0][lane];
  const float4* scales = &shared.scales[0][g];
  for (; first_page < pages; first_page += stride) {
    asm volatile("" ::: "memory");  // or the weights in shared memory are hoisted into registers
    int sum[kModes][4];
    const int4 start = shared.start;
    auto product = [&](auto which) {
      constexpr int i = decltype(which)::value;
      constexpr SketchProduct o = kSketchProgram.product[i];
      constexpr uint32_t mask = 0x03030303u << (2 * o.position);
      multiply_wide<o.first>(sum[o.mode], start, weights[32 * i], component<o.word % 4>(record[o.word / 4]) & mask,
                             component<o.word % 4 + 1>(record[o.word / 4]) & mask);
    };
    // Values of a mode, scaled for the inverse transform, in units of log2; mode 0, which has no part in it, in nats: (column half, page half).
    auto mode_value = [&](int mode, float (&z)[4]) {
      const float4 s = scales[mode * kWidePairs];
      const auto& a = sum[mode];
      z[0] = fmaf(__int_as_float(a[0]), s.x, s.z), z[1] = fmaf(__int_as_float(a[1]), s.x, s.z);
      z[2] = fmaf(__int_as_float(a[2]), s.y, s.w), z[3] = fmaf(__int_as_float(a[3]), s.y, s.w);
    };
    float even[4][8], mean[4], total[4];
    unrolled<kSketchProgram.even>(product);
    {
      float z2[4], z4[4], z6[4], z8[4], z10[4], z12[4], z14[4];
      mode_value(0, mean), mode_value(2, z2), mode_value(4, z4), mode_value(6, z6), mode_value(8, z8), mode_value(10, z10);
      mode_value(12, z12), mode_value(14, z14);
#pragma unroll
      for (int v = 0; v < 4; ++v) even_part(even[v], z2[v], z4[v], z6[v], z8[v], z10[v], z12[v], z14[v]);
    }
    unrolled<kProducts - kSketchProgram.even>([&](auto which) { product(std::integral_constant<int, kSketchProgram.even + decltype(which)::value>{}); });
    if (first_page + stride < pages) {
      load_records(entry, first_page + stride);
      entry = entry_of(first_page + 2 * stride);
    }
    __syncwarp();  // keeps ptxas from sinking the loads behind the exponentials
    {
      float z1[4], z3[4], z5[4], z7[4], z9[4], z11[4], z13[4], z15[4];
      mode_value(1, z1), mode_value(3, z3), mode_value(5, z5), mode_value(7, z7), mode_value(9, z9), mode_value(11, z11);
      mode_value(13, z13), mode_value(15, z15);
#pragma unroll
      for (int v = 0; v < 4; ++v) total[v] = token_sum(even[v], odd_part(z1[v], z3[v], z5[v], z7[v], z9[v], z11[v], z13[v], z15[v]));
    }
    const ColumnPair& of = shared.columns[g];
    __half* scores = element(of.scores, first_page + q, p.blocks * (kBlockColumns * sizeof(__half)));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int page = first_page + q + 4 * half;
      const float x = page_score(total[half], mean[half]), y = page_score(total[2 + half], mean[2 + half]);
      const float mx = page_mass(x, of.minus_forced[0]), my = page_mass(y, of.minus_forced[1]);
      if (page < pages) store_scores(scores + 4 * half * p.blocks * kBlockColumns, stored_scores(x, y));
      if (page < pages && page >= p.sink_pages) mass[0] += mx, mass[1] += my;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int x = 1; x < 4; x <<= 1) mass[i] += __shfl_xor_sync(~0u, mass[i], x);
    if (q == 0) shared.mass[warp][2 * g + i] = mass[i];
  }
  __syncthreads();
  if (threadIdx.x >= kBlockColumns) return;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) sum += shared.mass[i][lane];
  p.partials[((static_cast<int64_t>(row) * p.chunks + chunk) * p.blocks + block) * kBlockColumns + lane] = sum;
}

}  // namespace kvskim
