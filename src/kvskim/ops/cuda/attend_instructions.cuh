// Instructions of the attend kernel beyond those in common.cuh: asynchronous copies, matrix loads, conversions.
#pragma once
#include "common.cuh"

namespace kvskim {

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// 16 bytes from global to shared memory, past L1.
__device__ __forceinline__ void copy16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// As copy16, but writes zeros and reads nothing when `present` is false.
__device__ __forceinline__ void copy16_or_zero(uint32_t shared, const void* global, bool present) {
  const int bytes = present ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int Pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Four 8x8 matrices of 16-bit elements. Lanes 8i..8i+7 give the row addresses of matrix i; lane (4a + b) receives of each matrix
// row a, columns 2b and 2b + 1.
__device__ __forceinline__ void load_matrices(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(address) : "memory");
}

// The same, transposed: lane (4a + b) receives column a, rows 2b and 2b + 1.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(address) : "memory");
}

// ---- thread-block clusters ----
// The barrier of all threads of a cluster that have not exited, in two halves. Writes ahead of the arrival, also to the shared memory of
// others, are seen after the wait.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// The same place in the shared memory of another CTA of the cluster.
__device__ __forceinline__ uint32_t remote_address(uint32_t shared, int rank) {
  uint32_t d;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(d) : "r"(shared), "r"(rank));
  return d;
}
__device__ __forceinline__ void store_remote(uint32_t address, const float4& v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
__device__ __forceinline__ void store_remote(uint32_t address, const float2& v) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
}

// ---- fragments ----

// Transposes one 8x8 matrix of 16-bit elements held across the warp.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Two floats to two 16-bit numbers, the first in the low half.
template <bool HALF>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t d;
  if constexpr (HALF)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// Two e4m3 numbers to two fp16 numbers. Exact.
__device__ __forceinline__ uint32_t widen(uint16_t pair) {
  uint32_t d;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(pair));
  return d;
}

// Two 16-bit numbers, fp16 or bf16, to two floats.
__device__ __forceinline__ float2 unpack(uint32_t pair, bool half) {
  if (half) {
    __half2 h;
    *reinterpret_cast<uint32_t*>(&h) = pair;
    return __half22float2(h);
  }
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

}  // namespace kvskim
