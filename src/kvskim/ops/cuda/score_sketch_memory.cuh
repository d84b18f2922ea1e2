// What both scans of sketch records share: arguments, memory instructions, and how a score is stored and summed.
#pragma once
#include "common.cuh"
#include "score_sketch.cuh"

namespace kvskim {

constexpr int kTilePages = 16, kRecordVectors = sketch::record_bytes / 64;  // 16-byte loads per lane and record

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
  int blocks, live_blocks;  // of 16 columns in a padded group; and of those, blocks that are prepared
  int requests, heads, capacity, chunks, page_shift, sink_pages, window_pages, full_pages, settled;
};

// A plain load with a memory clobber: together with a __syncwarp after it, this keeps ptxas from sinking the loads behind the exponentials.
__device__ __forceinline__ uint4 load_record(const uint8_t* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}

// base + index * bytes.
template <class T>
__device__ __forceinline__ T* element(T* base, uint32_t index, uint32_t bytes) {
  T* at;
  asm("mad.wide.u32 %0,%1,%2,%3;" : "=l"(at) : "r"(index), "r"(bytes), "l"(base));
  return at;
}

// Loads that are not moved to where their result is used.
__device__ __forceinline__ int load_here(const int* p) {
  int value;
  asm volatile("ld.global.s32 %0,[%1];" : "=r"(value) : "l"(p));
  return value;
}
__device__ __forceinline__ float2 load_here(const float2* p) {
  float2 v;
  asm volatile("ld.global.v2.f32 {%0,%1},[%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
  return v;
}

// From global to shared memory, without a register for what is on its way. This thread may read it after wait_copies.
__device__ __forceinline__ void copy_int(int* to, const int* from) {
  asm volatile("cp.async.ca.shared.global [%0],[%1],4;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_vector(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Stores to an address that lay in shared memory, of which the compiler does not know that it is global.
__device__ __forceinline__ void store_scores(__half* to, __half2 value) {
  asm volatile("st.global.b32 [%0],%1;" ::"l"(to), "r"(reinterpret_cast<const uint32_t&>(value)) : "memory");
}

template <int I>
__device__ __forceinline__ uint32_t component(const uint4& v) {
  if constexpr (I == 0) return v.x;
  else if constexpr (I == 1) return v.y;
  else if constexpr (I == 2) return v.z;
  else return v.w;
}

// Needed once for each tile: in registers it would take the room of what is needed often.
struct alignas(16) ColumnPair {
  float minus_forced[2];  // log-masses, in log2
  __half* scores;         // of page 0
};

// The scores of two columns of a page as they are stored. NaN becomes the largest score here and in the sums: a broken estimate may cost time, never
// quality.
__device__ __forceinline__ __half2 stored_scores(float x, float y) {
  return __hmax2(__hmin2(__floats2half2_rn(x, y), __float2half2_rn(60000.f)), __float2half2_rn(-60000.f));
}
// Share of a page in the sums.
__device__ __forceinline__ float page_mass(float score, float minus_forced) {
  constexpr float cap = 83.f * kLog2E;
  return exp2_fast(fminf(fmaf(score, kLog2E, minus_forced), cap));
}
// The largest token lies at most 2^128 above the page's mean logit, which is mode 0: without it no exponential overflows in practice.
__device__ __forceinline__ float page_score(float total, float mean) { return fmaf(fminf(log2_fast(total), 128.f), kLn2, mean); }

}  // namespace kvskim
