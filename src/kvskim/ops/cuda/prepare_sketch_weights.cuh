// Int8 weights of the digits of five half rows, and the scales of their modes, for a slice of columns. A column is one (request, query head).
#pragma once
#include "attend_instructions.cuh"
#include "prepare_sketch.cuh"

namespace kvskim {

// Two fp16 as a sum of two bf16 pairs: 8 + 8 bits of mantissa hold the 11 of fp16, so the split is exact but for the smallest subnormals.
__device__ __forceinline__ void split_half(uint32_t x, uint32_t& high, uint32_t& low) {
  const float2 f = __half22float2(reinterpret_cast<const __half2&>(x));
  const __nv_bfloat162 h = __floats2bfloat162_rn(f.x, f.y);
  const float2 back = __bfloat1622float2(h);
  high = reinterpret_cast<const uint32_t&>(h);
  low = bf16_pair(f.x - back.x, f.y - back.y);
}

// One step of 32 channels: rows (a: rows g, b: rows g + 8) times columns.
template <bool HALF>
__device__ __forceinline__ void multiply_step(float (&sum)[4], const uint4& a, const uint4& b, const uint4& x) {
  if constexpr (HALF) {
    uint4 high, low;
    split_half(x.x, high.x, low.x), split_half(x.y, high.y, low.y), split_half(x.z, high.z, low.z), split_half(x.w, high.w, low.w);
    mma_16816<false>(sum, a.x, b.x, a.y, b.y, high.x, high.y);
    mma_16816<false>(sum, a.z, b.z, a.w, b.w, high.z, high.w);
    mma_16816<false>(sum, a.x, b.x, a.y, b.y, low.x, low.y);
    mma_16816<false>(sum, a.z, b.z, a.w, b.w, low.z, low.w);
  } else {
    mma_16816<false>(sum, a.x, b.x, a.y, b.y, x.x, x.y);
    mma_16816<false>(sum, a.z, b.z, a.w, b.w, x.z, x.w);
  }
}

// Queries of COLUMNS columns in shared memory, a slice of 32 STEPS channels of each, zeros past the end of the rows. Each thread of a CTA copies kCopies
// pieces of 16 bytes.
template <int COLUMNS, int STEPS, bool LONG>
struct StagedQueries {
  static constexpr int kPieces = 4 * STEPS, kCopies = ceil_div(COLUMNS * kPieces, kPrepareThreads);
  // From one column to the next: 64 more than a multiple of 128, so that the eight lanes that read at once, of two columns, read different banks.
  static constexpr int kColumnBytes = 64 * (STEPS | 1), kBytes = COLUMNS * kColumnBytes;

  // Where this thread's piece i is. Columns past the group or the batch repeat another: what comes of them is not read or not written.
  static __device__ __forceinline__ const uint16_t* locate(const PrepareArguments& p, const QueryHeads<LONG>& heads, int first_column, int first_channel,
                                                           int i, bool& inside) {
    const int index = threadIdx.x + i * kPrepareThreads, local = index / kPieces, channel = first_channel + (index - local * kPieces) * 8;
    const int column = first_column + local, request = min(column >> p.column_shift, p.requests - 1), member = column & ((1 << p.column_shift) - 1);
    inside = channel < p.dim;
    if constexpr (LONG)
      if (channel >= p.split) return heads.rest(p, request, member) + channel;
    return heads.query(p, request, member) + channel;
  }
  // Copies it, past the L1 cache.
  static __device__ __forceinline__ void copy(uint8_t* to, int i, const uint16_t* from, bool inside) {
    const int index = threadIdx.x + i * kPrepareThreads, local = index / kPieces, piece = index - local * kPieces;
    if (index < COLUMNS * kPieces) copy16_or_zero(shared_address(to + local * kColumnBytes + 16 * piece), from, inside);
  }
  // All pieces of all threads are there.
  static __device__ __forceinline__ void wait() {
    commit_copies();
    wait_copies<0>();
    __syncthreads();
  }
  // The channels of a step that lane q of a quad multiplies.
  static __device__ __forceinline__ uint4 piece(const uint8_t* staged, int column, int step, int q) {
    return *reinterpret_cast<const uint4*>(staged + column * kColumnBytes + 64 * step + 16 * q);
  }
};

// From the weights of the rows to the digits' int8 weights and the scales of the modes. `row_weight` is complete; maxima and sums are zero.
template <int TILES, bool LONG>
__device__ __forceinline__ void quantize_weights(const PrepareArguments& p, int bundle, const QueryHeads<LONG>& heads, int first_column,
                                                 const BundleRow& own, uint32_t slot_rows, uint32_t digits,
                                                 float (&row_weight)[kBundleSlots][8 * TILES + 1], int (&column_max)[kBundleRows][8 * TILES],
                                                 int (&column_sum)[kBundleRows][8 * TILES]) {
  constexpr int kColumns = 8 * TILES;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3, unit = warp & 1, columns = 1 << p.column_shift;
  const bool used = own.slot >= 0;
  float weight[TILES][4];
  if (used)
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      int largest = 0;  // of the bits: orders as the magnitudes do, with NaN above all
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int digit = digits >> (8 * i) & 0xff;
        weight[n][i] = digit < sketch::positions ? row_weight[slot_rows >> (8 * i) & 0xff][8 * n + g] * __int_as_float((127 + 2 * digit) << 23) : 0.f;
        largest = max(largest, __float_as_int(weight[n][i]) & 0x7fffffff);
      }
      largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
      if (q == 0) atomicMax(&column_max[own.first][8 * n + g], largest);
    }
  __syncthreads();

  if (used)
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      const int local = 8 * n + g, column = first_column + local, request = column >> p.column_shift, member = column & (columns - 1);
      const float largest = __int_as_float(column_max[own.first][local]);
      const float inverse = largest > 1e-30f ? __fdiv_rn(127.f, largest) : 0.f;  // NaN and next to nothing: all weights 0
      uint32_t packed = 0;
      int total = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int w = __float2int_rn(weight[n][i] * inverse);
        total += w;
        packed |= static_cast<uint32_t>(w & 0xff) << (8 * i);
      }
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      if (q == 0) atomicAdd(&column_sum[own.first][local], total);
      if (request < p.requests) {
        // A lane of the score kernel loads 16 bytes: of up to 8 columns those of two products, of 16 those of two columns.
        const int lane_vector = columns == kBlockColumns ? (own.product * (kBlockColumns / 2) + member / 2) * 4 + q
                                                         : (own.product / 2 * columns + member) * 4 + q;
        const int word = columns == kBlockColumns ? 2 * unit + (member & 1) : 2 * (own.product & 1) + unit;
        uint8_t* to = p.weights + (heads.place(p, request) << p.column_shift) * kWeightBytes;
        *reinterpret_cast<uint32_t*>(to + lane_vector * 16 + word * 4) = packed;
      }
    }
  __syncthreads();

  for (int i = tid; i < kBundleRows * kColumns; i += kPrepareThreads) {
    const int place = i / kColumns, local = i % kColumns, column = first_column + local;
    const int request = column >> p.column_shift, member = column & (columns - 1);
    const BundleRow of = p.bundles.row[bundle][place];
    if (of.slot < 0 || of.first != place || request >= p.requests) continue;
    // The digits count from the middle, -3/2 .. 3/2: their bias and the accumulator's start go into the offset, with the rounded weights.
    // Bias and start together are a multiple of 1/2 below 2^24: whole part and half are exact, so the offset is rounded once.
    const float scale = __fdiv_rn(__int_as_float(column_max[place][local]), 127.f) * p.bundles.fold[of.mode];
    const int bias = 3 * p.bundles.power[of.mode] * column_sum[place][local];
    const float whole = static_cast<float>(static_cast<int>(kMagic) + (bias >> 1)), half_unit = (bias & 1) ? 0.5f : 0.f;
    float* to = reinterpret_cast<float*>(p.scales) + (heads.place(p, request) << p.column_shift) * (kScaleBytes / 4);
    to += of.mode * columns * 2 + member / 2 * 4 + (member & 1);
    to[0] = scale;
    to[2] = -fmaf(scale, whole, scale * half_unit);
  }
}

// Whether a request is padding does not matter here: its query is valid memory, its columns touch no others, and nobody reads its weights.
template <bool HALF, int TILES, bool LONG>
__device__ __forceinline__ void prepare_weights(const PrepareArguments& p, int bundle, const QueryHeads<LONG>& heads, int first_column) {
  constexpr int kColumns = 8 * TILES;
  // Many columns: one load after the other would each take a latency, and registers that hold the rows.
  constexpr bool STAGED = TILES == 8;
  static_assert(!STAGED || !LONG, "staged rows are short");
  // Column tiles whose queries are loaded at once, and steps: what registers allow.
  constexpr int TOGETHER = TILES == 1 || (TILES == 4 && (HALF || !LONG)) ? 1 : 2;
  constexpr int STEPS = !LONG ? kShortSteps : TILES == 1 ? kLongSteps : TILES == 4 && HALF ? 4 : 6;
  static_assert(kBundleSlots <= 256, "the rows of a bundle are counted in bytes");
  __shared__ __align__(16) float row_weight[kBundleSlots][kColumns + 1];  // before the products have ended: the staged queries
  using Queries = StagedQueries<kColumns, kShortSteps, LONG>;
  static_assert(!STAGED || sizeof(row_weight) >= Queries::kBytes);
  __shared__ int column_max[kBundleRows][kColumns], column_sum[kBundleRows][kColumns];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
  const int half = warp >> 1, unit = warp & 1, steps = p.dim / 32;
  const BundleRow own = p.bundles.row[bundle][half];
  const bool used = own.slot >= 0;
  const int64_t slot = heads.head * kSlots + own.slot + sketch::unit_slots * unit;  // the first of this warp's rows, and of its slots

  // Nobody reads the weights of requests that are attended whole. Not worth a load after the wait for the kernel ahead.
  if (p.settled && p.full_pages > 0) {
    bool scored = false;
    for (int r = first_column >> p.column_shift; r << p.column_shift < first_column + kColumns && r < p.requests; ++r)
      scored |= ceil_div(p.seq_lens[r], kPageTokens) > p.full_pages;
    if (!scored) return wait_previous_kernel();
  }

  // Everything that does not depend on the query, before the kernel ahead of this one has ended. Rows past the mode's coefficient count
  // are zero, so the count is not needed.
  uint4 a[2][STEPS];
  const __nv_bfloat16* rows = p.query_matrix + (slot + g) * p.dim + 8 * q;
  auto load_rows = [&](int first_step) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      a[0][s] = load16_here(rows + 32 * (first_step + s), first_step + s < steps);
      a[1][s] = load16_here(rows + 8 * p.dim + 32 * (first_step + s), first_step + s < steps);
    }
  };
  // Lane q holds the slots 4 q .. 4 q + 3 of the unit, as the tensor core of the score kernel does.
  uint32_t slot_rows = 0, digits = 0;  // a byte each
  if (used) {
    const uint2 coefficients = load8_here(p.slot_coefficient + slot + 4 * q);
    digits = load4_here(p.slot_digit + slot + 4 * q);
    load_rows(0);
    // Rows that are longer than one load: the rest goes to the L2 cache now, for behind the wait its loads come one latency after the other.
    if constexpr (LONG) {
      prefetch_row(p.query_matrix + (slot + g) * p.dim, p.dim, STEPS * 32, q);
      prefetch_row(p.query_matrix + (slot + g + 8) * p.dim, p.dim, STEPS * 32, q);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int coefficient = static_cast<int16_t>((i < 2 ? coefficients.x : coefficients.y) >> (16 * (i & 1)));
      slot_rows |= static_cast<uint32_t>(max(0, min(coefficient - (own.slot - sketch::half_row * half), kBundleSlots - 1))) << (8 * i);
    }
  }
  for (int i = tid; i < kBundleRows * kColumns; i += kPrepareThreads) (&column_max[0][0])[i] = (&column_sum[0][0])[i] = 0;
  const int columns = 1 << p.column_shift;
  // Columns past the group or the batch repeat another: what comes of them is not read or not written.
  constexpr bool kAddressesEarly = !STAGED && TILES <= (HALF && !LONG ? 1 : 2);  // else they take registers that the rows need
  const uint16_t *query[TILES], *rest[TILES];
  auto locate_queries = [&](int n) {
    const int column = first_column + 8 * n + g, request = min(column >> p.column_shift, p.requests - 1), member = column & (columns - 1);
    query[n] = heads.query(p, request, member) + 8 * q;
    if constexpr (LONG) rest[n] = heads.rest(p, request, member) + 8 * q;
    if constexpr (kAddressesEarly) keep_here(query[n]);
    if constexpr (LONG && kAddressesEarly) keep_here(rest[n]);
  };
  if constexpr (kAddressesEarly)
#pragma unroll
    for (int n = 0; n < TILES; ++n) locate_queries(n);
  if (!p.early) wait_previous_kernel();

  float sum[TILES][4] = {};
  if constexpr (STAGED) {
    uint8_t* staged = reinterpret_cast<uint8_t*>(row_weight);
#pragma unroll 1
    for (int i = 0; i < Queries::kCopies; ++i) {
      bool inside;
      const uint16_t* from = Queries::locate(p, heads, first_column, 0, i, inside);
      Queries::copy(staged, i, from, inside);
    }
    Queries::wait();
    if (used)
#pragma unroll
      for (int s = 0; s < STEPS; ++s)
        if (s < steps)
#pragma unroll
          for (int n = 0; n < TILES; ++n) multiply_step<HALF>(sum[n], a[0][s], a[1][s], Queries::piece(staged, 8 * n + g, s, q));
    __syncthreads();
  } else if (used) {
    if constexpr (!kAddressesEarly && LONG)
#pragma unroll
      for (int n = 0; n < TILES; ++n) locate_queries(n);
    for_steps<STEPS, LONG>(steps, [&](int first_step) {
      if (LONG && first_step) load_rows(first_step);
#pragma unroll
      for (int n = 0; n < TILES; n += TOGETHER) {
        uint4 x[TOGETHER][STEPS];
        if constexpr (!kAddressesEarly && !LONG)
#pragma unroll
          for (int m = 0; m < TOGETHER; ++m) locate_queries(n + m);
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
#pragma unroll
          for (int m = 0; m < TOGETHER; ++m) {
            const int step = first_step + s;
            x[m][s] = load16_fresh((LONG && 32 * step >= p.split ? rest[n + m] : query[n + m]) + 32 * step, step < steps);
          }
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
#pragma unroll
          for (int m = 0; m < TOGETHER; ++m) multiply_step<HALF>(sum[n + m], a[0][s], a[1][s], x[m][s]);
      }
    });
  }
  if (used) {
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) row_weight[16 * warp + 8 * (i >> 1) + g][8 * n + 2 * q + (i & 1)] = sum[n][i] * p.scale;
  }
  __syncthreads();

  quantize_weights<TILES, LONG>(p, bundle, heads, first_column, own, slot_rows, digits, row_weight, column_max, column_sum);
  wait_previous_kernel();
}

}  // namespace kvskim
