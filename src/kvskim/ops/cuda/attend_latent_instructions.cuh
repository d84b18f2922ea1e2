// Instructions of the kernel of latent attention beyond those of the attend kernel.
#pragma once
#include <cuda.h>

#include "attend_instructions.cuh"

namespace kvskim {

// As copy16_or_zero, four bytes.
__device__ __forceinline__ void copy4_or_zero(uint32_t shared, const void* global, bool present) {
  const int bytes = present ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// From shared memory, if `present`; else the value stays.
__device__ __forceinline__ void load_shared_if(bool present, float4& v, uint32_t address) {
  asm volatile("{\n .reg .pred present;\n setp.ne.u32 present, %5, 0;\n @present ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
               : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w) : "r"(address), "r"(static_cast<uint32_t>(present)) : "memory");
}
__device__ __forceinline__ void load_shared_if(bool present, float2& v, uint32_t address) {
  asm volatile("{\n .reg .pred present;\n setp.ne.u32 present, %3, 0;\n @present ld.shared.v2.f32 {%0, %1}, [%2];\n}"
               : "+f"(v.x), "+f"(v.y) : "r"(address), "r"(static_cast<uint32_t>(present)) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// The value is to be computed here, ahead of a wait, and not where it is used.
__device__ __forceinline__ void keep_ready(uint32_t& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void keep_ready(uint16_t*& value) { asm volatile("" : "+l"(value)); }

// Barriers among Threads threads of a CTA, whole warps of them; number 0 is __syncthreads(). Who only arrives does not wait.
template <int Number, int Threads>
__device__ __forceinline__ void barrier_of() {
  asm volatile("bar.sync %0, %1;" ::"n"(Number), "n"(Threads) : "memory");
}
template <int Number, int Threads>
__device__ __forceinline__ void arrive_at_barrier_of() {
  asm volatile("bar.arrive %0, %1;" ::"n"(Number), "n"(Threads) : "memory");
}

// ---- signals: barriers in shared memory (PTX ISA, mbarrier) ----
// Each of `arrivals`, and all bytes announced, end a phase of a signal; phases are told apart by their parity.

__device__ __forceinline__ void prepare_signal(uint32_t signal, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(signal), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void publish_signals() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive_at(uint32_t signal) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(signal) : "memory"); }
// Bytes that the copy engine brings, before or after this.
__device__ __forceinline__ void arrive_expecting(uint32_t signal, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(signal), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_for(uint32_t signal, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile("{\n .reg .pred complete;\n mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n selp.u32 %0, 1, 0, complete;\n}"
                 : "=r"(done) : "r"(signal), "r"(parity) : "memory");
  } while (!done);
}
// ---- thread-block clusters ----

// As cluster_arrive() of attend_instructions.cuh, but orders no memory: ordering makes every thread wait until its stores are visible on the whole
// device.
__device__ __forceinline__ void cluster_meet() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }

// Before the barrier behind which send() reads what this thread has stored.
__device__ __forceinline__ void make_stores_sendable() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// True in one lane of a whole warp. The compiler then knows that only one asks the copy engine, and leaves out a loop over lanes.
__device__ __forceinline__ bool elected() {
  uint32_t one;
  asm volatile("{\n .reg .pred one;\n elect.sync _|one, 0xffffffff;\n selp.u32 %0, 1, 0, one;\n}" : "=r"(one));
  return one;
}

// Copies a multiple of 16 bytes into the shared memory of another CTA (`to`, `signal`: remote_address()) and announces them at a signal there.
__device__ __forceinline__ void send(uint32_t to, uint32_t from, uint32_t bytes, uint32_t signal) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "r"(from), "r"(bytes),
               "r"(signal)
               : "memory");
}

// The description of a tensor, a kernel argument, to where the copy engine looks for it.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Copies the page that begins at a token of a block of a kv head, as the tensor's description says, and announces its bytes at a signal.
__device__ __forceinline__ void load_page(uint32_t to, const CUtensorMap* page_map, int token, int head, int block, uint32_t signal) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, %3, %4, %5}], [%6];" ::"r"(to), "l"(page_map), "r"(0),
      "r"(token), "r"(head), "r"(block), "r"(signal)
      : "memory");
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
