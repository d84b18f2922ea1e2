// Instructions of the kernel of latent attention beyond those of the attend kernel.
#pragma once
#include "attend_instructions.cuh"

namespace kvskim {

// copy16 of attend_instructions.cuh, both addresses plus Offset.
template <int Offset>
__device__ __forceinline__ void copy16_at(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0 + %2], [%1 + %2], 16;" ::"r"(shared), "l"(global), "n"(Offset) : "memory");
}

// As copy16_or_zero, four bytes.
__device__ __forceinline__ void copy4_or_zero(uint32_t shared, const void* global, bool present) {
  const int bytes = present ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

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
// When the copies that this thread has begun so far have come.
__device__ __forceinline__ void arrive_after_copies(uint32_t signal) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(signal) : "memory");
}
// Bytes that come from other CTAs, before or after this.
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
// The first phase of a signal for what other CTAs send.
__device__ __forceinline__ void wait_for_sent(uint32_t signal) {
  uint32_t done;
  do {
    asm volatile(
        "{\n .reg .pred complete;\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%1], 0;\n selp.u32 %0, 1, 0, complete;\n}"
        : "=r"(done) : "r"(signal) : "memory");
  } while (!done);
}

// ---- thread-block clusters ----

// As cluster_arrive() of attend_instructions.cuh, but orders no memory: ordering makes every thread wait until its stores are visible on the whole
// device.
__device__ __forceinline__ void cluster_meet() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }

// Before the barrier behind which send() reads what this thread has stored.
__device__ __forceinline__ void make_stores_sendable() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copies a multiple of 16 bytes into the shared memory of another CTA (`to`, `signal`: remote_address()) and announces them at a signal there.
__device__ __forceinline__ void send(uint32_t to, uint32_t from, uint32_t bytes, uint32_t signal) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "r"(from), "r"(bytes),
               "r"(signal)
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
