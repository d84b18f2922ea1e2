// Messages between the blocks of a thread-block cluster: a store into the shared memory of another block that also counts itself off on
// a barrier there. The receiver waits for the bytes it knows will come; the sender goes on at once. Nothing is fenced: a barrier over the
// cluster that orders memory makes every thread wait until its stores are visible on the whole device. Source: PTX ISA, st.async, mbarrier.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kvskim::selection {

// In shared memory; good for one exchange.
struct Arrival {
    uint64_t state;
};

__device__ __forceinline__ uint32_t shared_address(const void* variable) { return static_cast<uint32_t>(__cvta_generic_to_shared(variable)); }

// The same variable in the shared memory of another block of the cluster.
__device__ __forceinline__ uint32_t remote_address(const void* variable, int rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(variable)), "r"(rank));
    return address;
}

// By one thread, which must call publish_arrivals after the last one and before the cluster meets at its start.
__device__ __forceinline__ void prepare(Arrival& arrival) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&arrival)) : "memory");
}

__device__ __forceinline__ void publish_arrivals() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// The start of a cluster, in two halves: no block may send before all blocks run and have prepared their arrivals.
__device__ __forceinline__ void arrive_at_start() { __cluster_barrier_arrive_relaxed(); }
__device__ __forceinline__ void wait_for_all_at_start() { __cluster_barrier_wait(); }

// By one thread of the receiving block, before or after the messages come: how many bytes they have in all.
__device__ __forceinline__ void expect(Arrival& arrival, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&arrival)), "r"(bytes) : "memory");
}

// Stores into block `rank` what lies in this block at the addresses of `to`; `arrival` is the one of that block.
__device__ __forceinline__ void send(uint4* to, uint4 message, Arrival& arrival, int rank) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote_address(to, rank)),
                 "r"(message.x), "r"(message.y), "r"(message.z), "r"(message.w), "r"(remote_address(&arrival, rank))
                 : "memory");
}

__device__ __forceinline__ void send(uint64_t* to, uint64_t message, Arrival& arrival, int rank) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(remote_address(to, rank)), "l"(message),
                 "r"(remote_address(&arrival, rank))
                 : "memory");
}

// Until everything expected has come; for any number of threads of the receiving block.
__device__ __forceinline__ void wait(Arrival& arrival) {
    uint32_t done;
    do {
        asm volatile(
            "{\n .reg .pred complete;\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%1], 0;\n selp.u32 %0, 1, 0, complete;\n}"
            : "=r"(done)
            : "r"(shared_address(&arrival))
            : "memory");
    } while (!done);
}

}  // namespace kvskim::selection
