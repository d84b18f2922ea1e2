// Int8 weights for long rows and few columns, by pairs of CTAs: each multiplies half of the channels, for the columns of both, and finishes half of the
// columns. A CTA reads half as much of the query matrix as one that has all channels, and holds all of it in registers before it waits for the kernel
// ahead; behind the wait it reads only queries. The halves are added up through the shared memory of the pair, a thread-block cluster, by messages
// (select_exchange.cuh): a cluster barrier would make every thread wait until its stores are visible on the whole device.
#pragma once
#include "prepare_sketch_weights.cuh"
#include "select_exchange.cuh"

namespace kvskim {

constexpr int kHalfSteps = 9;  // of 32 channels: rows of up to 576

// OWN: column tiles that a CTA finishes. ROOM: there is room for what the other CTA sends, beside the queries; else it waits until these are done with.
template <int OWN>
struct HalvesShape {
  static constexpr bool ROOM = OWN <= 2;
  static constexpr int kQueryBytes = StagedQueries<16 * OWN, kHalfSteps, true>::kBytes;
  static constexpr int kReceivedBytes = kPrepareWarps * OWN * 512;               // products of the other half, as the lanes hold them
  static constexpr int kRowBytes = kBundleSlots * (8 * OWN + 1) * 4;             // sums of both; behind the products
  static constexpr int kReceived = ROOM ? kQueryBytes : 0, kRows = ROOM ? 0 : kReceivedBytes;
  static constexpr int kBytes = ROOM ? kQueryBytes + kReceivedBytes : kReceivedBytes + kRowBytes;
  static_assert(kQueryBytes <= kBytes && kRows + kRowBytes <= (ROOM ? kReceived : kBytes));
};

// `part`: which half of the channels, and of the columns of the pair, which begin at first_column. See prepare_weights for what is left unsaid here.
template <bool HALF, int OWN>
__device__ __forceinline__ void prepare_half(const PrepareArguments& p, int bundle, int part, const QueryHeads<true>& heads, int first_column) {
  constexpr int TILES = 2 * OWN, kColumns = 8 * TILES;
  using Shape = HalvesShape<OWN>;
  using Queries = StagedQueries<kColumns, kHalfSteps, true>;
  __shared__ __align__(16) uint8_t memory[Shape::kBytes];
  __shared__ int column_max[kBundleRows][8 * OWN], column_sum[kBundleRows][8 * OWN];
  __shared__ selection::Arrival arrival;  // of the products of the other half
  auto& row_weight = *reinterpret_cast<float (*)[kBundleSlots][8 * OWN + 1]>(memory + Shape::kRows);
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
  const int half = warp >> 1, unit = warp & 1, steps = p.dim / 32, first_step = kHalfSteps * part;
  const BundleRow own = p.bundles.row[bundle][half];
  const bool used = own.slot >= 0;
  const int64_t slot = heads.head * kSlots + own.slot + sketch::unit_slots * unit;

  if (p.settled && p.full_pages > 0) {
    bool scored = false;
    for (int r = first_column >> p.column_shift; r << p.column_shift < first_column + kColumns && r < p.requests; ++r)
      scored |= ceil_div(p.seq_lens[r], kPageTokens) > p.full_pages;
    if (!scored) return wait_previous_kernel();  // both CTAs of a pair
  }
  if (tid == 0) {
    selection::prepare(arrival);
    selection::publish_arrivals();
    int rows = 0;
    for (const BundleRow& row : p.bundles.row[bundle]) rows += row.slot >= 0;
    selection::expect(arrival, rows * 2 * OWN * 512);
  }
  if constexpr (Shape::ROOM) selection::arrive_at_start();  // tells the other that this CTA's memory may be written

  uint4 a[2][kHalfSteps];
  uint32_t slot_rows = 0, digits = 0;
  if (used) {
    const uint2 coefficients = load8_here(p.slot_coefficient + slot + 4 * q);
    digits = load4_here(p.slot_digit + slot + 4 * q);
    const __nv_bfloat16* rows = p.query_matrix + (slot + g) * p.dim + 8 * q;
#pragma unroll
    for (int s = 0; s < kHalfSteps; ++s) {
      a[0][s] = load16_here(rows + 32 * (first_step + s), first_step + s < steps);
      a[1][s] = load16_here(rows + 8 * p.dim + 32 * (first_step + s), first_step + s < steps);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int coefficient = static_cast<int16_t>((i < 2 ? coefficients.x : coefficients.y) >> (16 * (i & 1)));
      slot_rows |= static_cast<uint32_t>(max(0, min(coefficient - (own.slot - sketch::half_row * half), kBundleSlots - 1))) << (8 * i);
    }
  }
  for (int i = tid; i < kBundleRows * 8 * OWN; i += kPrepareThreads) (&column_max[0][0])[i] = (&column_sum[0][0])[i] = 0;

  const uint16_t* from[Queries::kCopies];
  bool inside[Queries::kCopies];
#pragma unroll
  for (int i = 0; i < Queries::kCopies; ++i) {
    from[i] = Queries::locate(p, heads, first_column, 32 * first_step, i, inside[i]);
    keep_here(from[i]);
  }
  if (!p.early) wait_previous_kernel();
#pragma unroll
  for (int i = 0; i < Queries::kCopies; ++i) Queries::copy(memory, i, from[i], inside[i]);
  Queries::wait();

  float sum[TILES][4] = {};  // the own column tiles first
  const auto multiply = [&](int first, int end) {
    if (used)
#pragma unroll
      for (int n = first; n < end; ++n)
#pragma unroll
        for (int s = 0; s < kHalfSteps; ++s)
          multiply_step<HALF>(sum[n], a[0][s], a[1][s], Queries::piece(memory, 8 * ((n + part * OWN) % TILES) + g, s, q));
  };
  float4* const received = reinterpret_cast<float4*>(memory + Shape::kReceived) + warp * OWN * 32 + lane;
  const auto send = [&]() {
    if (used)
#pragma unroll
      for (int n = 0; n < OWN; ++n) {
        const float(&x)[4] = sum[OWN + n];
        selection::send(reinterpret_cast<uint4*>(received + n * 32),
                        make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])), arrival, part ^ 1);
      }
  };
  if constexpr (Shape::ROOM) {
    selection::wait_for_all_at_start();
    // One tile has too few products to overlap with.
    multiply(OWN == 1 ? 0 : OWN, TILES);
    send();
    if (OWN > 1) multiply(0, OWN);
    __syncthreads();  // all warps have left the queries
  } else {
    multiply(0, TILES);
    cluster_arrive();
    cluster_wait();
    send();
  }
  if (used) {
    selection::wait(arrival);
#pragma unroll
    for (int n = 0; n < OWN; ++n) {
      const float4 other = received[n * 32];
      const float both[4] = {sum[n][0] + other.x, sum[n][1] + other.y, sum[n][2] + other.z, sum[n][3] + other.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) row_weight[16 * warp + 8 * (i >> 1) + g][8 * n + 2 * q + (i & 1)] = both[i] * p.scale;
    }
  }
  __syncthreads();
  quantize_weights<OWN, true>(p, bundle, heads, first_column + part * 8 * OWN, own, slot_rows, digits, row_weight, column_max, column_sum);
  wait_previous_kernel();
}

}  // namespace kvskim
