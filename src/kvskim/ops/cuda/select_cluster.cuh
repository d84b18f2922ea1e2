// What the selection kernel shares between the threads of a warp, of a block and of a thread-block cluster.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace kvskim::selection {

constexpr int MAX_CLUSTER = 16;
constexpr int MAX_GROUP = 16;
constexpr float INFINITE = __builtin_huge_valf();

// Sums of one pass over the keys: of a warp, of a block, or of the cluster.
struct Tally {
    int above;   // keys above the cut
    int equal;   // keys equal to the cut
    float mass;  // finite keys above the cut, added up
};

// Totals over the cluster, and what lies before this warp in page order.
struct Totals {
    Tally all;
    int above_before;
    int equal_before;
};

// Where the descent (select_descent.cuh) stands: the cut is one of the keys whose leading bits are `prefix`.
struct Descent {
    uint32_t prefix;
    int above;                 // keys above all of those
    unsigned long long mass;   // forced share plus the mass above all of those, in units of 2^-31
};

template <int WARPS>
struct Shared {
    float partial[WARPS][MAX_GROUP];
    float forced[MAX_GROUP];
    float weight[MAX_GROUP];  // of a query head in the group-mean mass: 1 / (normaliser * group)
    float peak[MAX_CLUSTER][MAX_GROUP];
    Tally warp_tally[WARPS];
    Tally cluster_tally[3][MAX_CLUSTER];
    Descent descent[3];  // one for each pass
    int scan_count[WARPS];
    unsigned long long scan_mass[WARPS];
};

// This block's place in the cluster. Only the first `active` blocks of a cluster have pages; the others have returned.
struct Place {
    int rank;
    int active;

    __device__ bool alone() const { return active == 1; }

    // Barrier over the threads of all active blocks (threads that have exited are not waited for).
    __device__ void synchronise() const {
        if (alone()) {
            __syncthreads();
        } else {
            __cluster_barrier_arrive();
            __cluster_barrier_wait();
        }
    }

    // The same variable in the shared memory of another block.
    template <typename T>
    __device__ T* of(T* variable, int other) const {
        return alone() ? variable : static_cast<T*>(__cluster_map_shared_rank(variable, other));
    }
};

__device__ __forceinline__ int warp_sum(int value) { return __reduce_add_sync(0xffffffffu, value); }

template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}

// Adds up the tallies of all threads of the cluster. Every thread gets the same totals: sums are taken in a fixed order.
// `phase` names the call site; each is used once, so no buffer is written while it may still be read.
template <int WARPS>
__device__ Totals total(Shared<WARPS>& shared, const Place& place, int phase, Tally mine) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    mine = {warp_sum(mine.above), warp_sum(mine.equal), warp_sum(mine.mass)};
    if (lane == 0) shared.warp_tally[warp] = mine;
    __syncthreads();
    const Tally of_warp = lane < WARPS ? shared.warp_tally[lane] : Tally{0, 0, 0.0f};
    int above_before = warp_sum(lane < warp ? of_warp.above : 0);
    int equal_before = warp_sum(lane < warp ? of_warp.equal : 0);
    if (warp == 0) {
        const Tally of_block = {warp_sum(of_warp.above), warp_sum(of_warp.equal), warp_sum(of_warp.mass)};
        if (lane < place.active) *place.of(&shared.cluster_tally[phase][place.rank], lane) = of_block;
    }
    place.synchronise();
    const Tally of_rank = lane < place.active ? shared.cluster_tally[phase][lane] : Tally{0, 0, 0.0f};
    above_before += warp_sum(lane < place.rank ? of_rank.above : 0);
    equal_before += warp_sum(lane < place.rank ? of_rank.equal : 0);
    return {{warp_sum(of_rank.above), warp_sum(of_rank.equal), warp_sum(of_rank.mass)}, above_before, equal_before};
}

}  // namespace kvskim::selection
