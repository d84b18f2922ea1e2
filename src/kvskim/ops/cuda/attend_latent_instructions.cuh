// Instructions of the kernel of latent attention beyond those of the attend kernel.
#pragma once
#include "attend_instructions.cuh"

namespace kvskim {

// copy16 of attend_instructions.cuh, both addresses plus Offset.
template <int Offset>
__device__ __forceinline__ void copy16_at(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0 + %2], [%1 + %2], 16;" ::"r"(shared), "l"(global), "n"(Offset) : "memory");
}

// Barrier among Threads threads of a CTA, whole warps of them; number 0 is __syncthreads().
template <int Number, int Threads>
__device__ __forceinline__ void barrier_of() {
  asm volatile("bar.sync %0, %1;" ::"n"(Number), "n"(Threads) : "memory");
}

// Reads from the shared memory of another CTA of the cluster, see remote_address().
__device__ __forceinline__ float4 load_remote4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ float2 load_remote2(uint32_t address) {
  float2 v;
  asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

// Two 16-bit numbers times a factor that is a power of two: exact, but for fp16 below its normal numbers.
template <bool HALF>
__device__ __forceinline__ uint32_t scale_pair(uint32_t pair, float factor) {
  const uint32_t by = pack<HALF>(factor, factor);
  uint32_t d;
  if constexpr (HALF)
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(pair), "r"(by));
  else
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(pair), "r"(by));
  return d;
}

}  // namespace kvskim
