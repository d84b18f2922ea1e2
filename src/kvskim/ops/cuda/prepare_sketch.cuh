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
  const uint16_t* rest;                // channels from `split` on, where they have memory of their own
  int64_t rest_row_stride, rest_head_stride;
  int split;                           // dim where they have not; a multiple of 32
  const __nv_bfloat16* query_matrix;   // [H, 1024, D]
  const int16_t* slot_coefficient;     // [H, 1024]
  const uint8_t* slot_digit;           // [H, 1024]
  const float* mean;                   // [H, D]
  const uint8_t* key_cache;
  int64_t key_block_stride, key_token_stride, key_head_stride;  // elements
  const int* directory;                // [blocks, H]: slot + 1 of a hot copy, or 0 or less; null where the keys are in GPU memory
  int64_t hot_offset;                  // elements from key_cache to the first slot
  const int* block_table;
  int64_t block_table_stride;
  const int* seq_lens;
  uint8_t* weights;
  float4* scales;
  float *base, *forced;                // [R, H, padded group]
  int blocks, live_blocks;             // of 16 columns of a padded group, 1 for smaller ones; and of those, blocks with query heads
  int requests, heads, group, dim, page_shift, sink_pages, window_pages, full_pages, settled;
  int early;                           // kQueriesSettled
  int column_shift;                    // log2 of the columns of a block: of the padded group, at most 16
  int forced_requests, forced_roles;   // requests of a CTA of always-attended pages (1 or 2); such CTAs per head
  int float8;                          // keys are float8
  float scale, softcap, key_scale;
  Bundles bundles;
};

// Up to 16 query heads of one kv head: what a CTA prepares. LONG: see kLongSteps; else the block is the group.
template <bool LONG>
struct QueryHeads {
  int head, block;

  __device__ __forceinline__ QueryHeads(const PrepareArguments& p, int index)
      : head(LONG ? index / p.live_blocks : index), block(LONG ? index - head * p.live_blocks : 0) {}

  __device__ __forceinline__ int count(const PrepareArguments& p) const {
    return LONG ? min(p.group - kBlockColumns * block, kBlockColumns) : p.group;
  }
  // Which of the blocks of all requests and kv heads: they lie as those of so many kv heads would.
  __device__ __forceinline__ int64_t place(const PrepareArguments& p, int request) const {
    const int64_t row = static_cast<int64_t>(request) * p.heads + head;
    return LONG ? row * p.blocks + block : row;
  }
  // The query of a column of the block; columns past the group repeat its last query head. `rest`: so that its channels count on from `split`.
  __device__ __forceinline__ const uint16_t* query(const PrepareArguments& p, int request, int member) const {
    return p.query + request * p.query_row_stride + query_head(p, member) * p.query_head_stride;
  }
  __device__ __forceinline__ const uint16_t* rest(const PrepareArguments& p, int request, int member) const {
    return p.rest + request * p.rest_row_stride + query_head(p, member) * p.rest_head_stride - p.split;
  }

 private:
  __device__ __forceinline__ int query_head(const PrepareArguments& p, int member) const {
    return head * p.group + min(LONG ? kBlockColumns * block + member : member, p.group - 1);
  }
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

// The same of what another kernel has written that has ended, though this one has not waited for it: past the L1 cache, which may hold what was there
// before.
__device__ __forceinline__ uint4 load16_fresh(const void* p, bool wanted) {
  uint4 v = make_uint4(0, 0, 0, 0);
  asm volatile("{.reg .pred wanted; setp.ne.s32 wanted,%5,0; @wanted ld.global.cg.v4.u32 {%0,%1,%2,%3},[%4];}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(p), "r"(static_cast<int>(wanted)) : "memory");
  return v;
}
__device__ __forceinline__ uint2 load8_fresh(const void* p, bool wanted) {
  uint2 v = make_uint2(0, 0);
  asm volatile("{.reg .pred wanted; setp.ne.s32 wanted,%3,0; @wanted ld.global.cg.v2.u32 {%0,%1},[%2];}"
               : "+r"(v.x), "+r"(v.y) : "l"(p), "r"(static_cast<int>(wanted)) : "memory");
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

// Steps of 32 channels that are loaded together; steps past the end are zeros. Short rows are one load. Long ones, which may be in two parts and of
// any group, are one load after the other: so for these as many steps as registers allow with one CTA on a multiprocessor.
constexpr int kShortSteps = 4, kLongSteps = 9;

// Calls load(first step) for all groups of so many steps.
template <int STEPS, bool LONG, class Load>
__device__ __forceinline__ void for_steps(int steps, const Load& load) {
  if constexpr (!LONG) {
    load(0);
  } else {
#pragma unroll 1
    for (int first = 0; first < steps; first += STEPS) load(first);
  }
}

__device__ __forceinline__ uint32_t bf16_pair(float x, float y) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const uint32_t&>(v);
}

}  // namespace kvskim
