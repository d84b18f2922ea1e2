// What the two halves of prepare_sketch.cu share: their arguments, the split of the half rows over CTAs, and loads that stay where they are written.
#pragma once
#include "common.cuh"
#include "score_sketch.cuh"

namespace kvskim {

// Ten warps: each takes 16 rows of the query matrix and 16 slots, and a bundle is five half rows.
constexpr int kPrepareWarps = 10, kPrepareThreads = 32 * kPrepareWarps;
constexpr int kBundles = 7, kBundleRows = kPrepareWarps / 2, kBundleSlots = sketch::half_row * kBundleRows;

// A half row in its bundle. first: the place in the bundle of the first half row of the same mode. slot < 0: nothing here.
struct alignas(8) BundleRow {
  int16_t slot;
  int8_t mode, first, product;
};

// Whole modes, so that a bundle shares nothing with others. Passed as a kernel argument: constant memory of its own would be cold.
struct Bundles {
  BundleRow row[kBundles][kBundleRows];
  float fold[kModes];  // factor of a mode from its int8 scale to the scale of the accumulator
  int power[kModes];   // 4^position
};

constexpr Bundles make_bundles() {
  constexpr int modes[kBundles][3] = {{0, -1, -1}, {1, 3, -1}, {2, 4, -1}, {5, 6, 11}, {7, 8, 12}, {9, 10, 13}, {14, 15, -1}};
  Bundles b{};
  for (int i = 0; i < kBundles; ++i) {
    int at = 0;
    for (int k = 0; k < 3 && modes[i][k] >= 0; ++k) {
      const int mode = modes[i][k], first = at;
      for (int half_row = 0; half_row < kSketchProgram.rows[mode]; ++half_row)
        b.row[i][at++] = {static_cast<int16_t>(kSketchProgram.start[mode] + sketch::half_row * half_row), static_cast<int8_t>(mode),
                          static_cast<int8_t>(first), static_cast<int8_t>(kSketchProgram.index[mode][half_row])};
    }
    for (; at < kBundleRows; ++at) b.row[i][at] = {-1, 0, 0, 0};
  }
  for (int mode = 0; mode < kModes; ++mode) {
    b.power[mode] = 1 << (2 * kSketchProgram.position[mode]);
    b.fold[mode] = static_cast<float>(sketch_fold(mode) / b.power[mode]);
  }
  return b;
}

constexpr bool bundles_hold_every_half_row() {
  const Bundles b = make_bundles();
  bool seen[kProducts] = {};
  int count = 0;
  for (int i = 0; i < kBundles; ++i)
    for (int k = 0; k < kBundleRows; ++k)
      if (b.row[i][k].slot >= 0 && !seen[b.row[i][k].product]) seen[b.row[i][k].product] = true, ++count;
  return count == kProducts;
}
static_assert(bundles_hold_every_half_row(), "every half row is in one bundle");

struct PrepareArguments {
  const uint16_t* query;
  int64_t query_row_stride, query_head_stride;
  const __nv_bfloat16* query_matrix;   // [H, 1024, D]
  const int16_t* slot_coefficient;     // [H, 1024]
  const uint8_t* slot_digit;           // [H, 1024]
  const float* mean;                   // [H, D]
  const uint8_t* key_cache;
  int64_t key_block_stride, key_token_stride, key_head_stride;  // elements
  const int* block_table;
  int64_t block_table_stride;
  const int* seq_lens;
  uint8_t* weights;
  float4* scales;
  float *base, *forced;                // [R, H, padded group]
  int requests, heads, group, dim, page_shift, sink_pages, window_pages, full_pages, settled;
  int column_shift;                    // log2 of the padded group
  int forced_requests, forced_roles;   // requests of a CTA of always-attended pages (1 or 2); such CTAs per head
  int float8;                          // keys are float8
  float scale, softcap, key_scale;
  Bundles bundles;
};

// Loads that the compiler neither sinks to their use nor moves across the wait for the kernel ahead, so that all of a warp are under way at
// once. With a condition: zeros where it does not hold.
__device__ __forceinline__ uint4 load16_here(const void* p, bool wanted = true) {
  uint4 v = make_uint4(0, 0, 0, 0);
  asm volatile("{.reg .pred wanted; setp.ne.s32 wanted,%5,0; @wanted ld.global.v4.u32 {%0,%1,%2,%3},[%4];}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(p), "r"(static_cast<int>(wanted)) : "memory");
  return v;
}
__device__ __forceinline__ uint2 load8_here(const void* p, bool wanted = true) {
  uint2 v = make_uint2(0, 0);
  asm volatile("{.reg .pred wanted; setp.ne.s32 wanted,%3,0; @wanted ld.global.v2.u32 {%0,%1},[%2];}"
               : "+r"(v.x), "+r"(v.y) : "l"(p), "r"(static_cast<int>(wanted)) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load4_here(const void* p) {
  uint32_t v;
  asm volatile("ld.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// A value that is computed here, not where it is used: addresses, ahead of the wait for the kernel ahead.
template <class T>
__device__ __forceinline__ void keep_here(T& value) {
  asm volatile("" : "+l"(value));
}

// Into the L2 cache: elements of two bytes of a row, from `first` on. The four lanes of a quad share the row, a line of 128 bytes each in turn.
template <class T>
__device__ __forceinline__ void prefetch_row(const T* row, int elements, int first, int quad_lane) {
  static_assert(sizeof(T) == 2);
  for (int at = first + 64 * quad_lane; at < elements; at += 256) asm volatile("prefetch.global.L2 [%0];" ::"l"(row + at));
}

// Steps of 32 channels that are loaded together. Steps past the end are zeros.
constexpr int kSteps = 4;

__device__ __forceinline__ uint32_t bf16_pair(float x, float y) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const uint32_t&>(v);
}

}  // namespace kvskim
