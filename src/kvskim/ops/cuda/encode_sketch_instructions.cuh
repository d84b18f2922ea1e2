// Instructions of encode_sketch beyond those in attend_instructions.cuh.
#pragma once
#include "attend_instructions.cuh"

namespace kvskim {

// Two floats to two fp16 numbers, the first in the low half; what is too large becomes the largest finite number, NaN stays NaN.
__device__ __forceinline__ uint32_t pack_saturated(float low, float high) {
  uint32_t d;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// Largest integer not above x, limited to -128 .. 127; 0 for NaN.
__device__ __forceinline__ int floor_to_byte(float x) {
  int d;
  asm("{.reg .s16 byte; cvt.rmi.s8.f32 byte, %1; cvt.s32.s16 %0, byte;}" : "=r"(d) : "f"(x));
  return d;
}

// Asks for the 32 bytes around an address to be brought into the L2 cache.
__device__ __forceinline__ void prefetch_to_l2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global) : "memory"); }

// Makes the compiler forget what it knows of a value, and so compute anew what is made of it: kept in registers, that would be too much.
__device__ __forceinline__ void renew(uint32_t& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void renew(int& x) { asm volatile("" : "+r"(x)); }

__device__ __forceinline__ void forget_memory() { asm volatile("" ::: "memory"); }

}  // namespace kvskim
