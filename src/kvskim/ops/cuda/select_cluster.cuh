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
    int inside;                // how many those are, zeros left out
    unsigned long long mass;   // forced share plus the mass above all of those, in units of 2^-31
};

template <int WARPS>
struct Shared {
    float partial[WARPS][MAX_GROUP];
    float forced[MAX_GROUP];
    float weight[MAX_GROUP];  // of a query head in the group-mean mass: 1 / (normaliser * group)
    float peak[MAX_CLUSTER][MAX_GROUP];
    Tally warp_tally[3][WARPS];
    Tally cluster_tally[3][MAX_CLUSTER];
    Descent descent[3];  // one for each pass
    int scan_count[WARPS];
    unsigned long long scan_mass[WARPS];
    uint32_t list_length;               // keys in this block's own list, and in the list of the cluster
    uint32_t list_total;
    uint32_t list_offset[MAX_CLUSTER];  // where this block's keys begin in the list that another block receives
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
__device__ __forceinline__ uint32_t warp_sum(uint32_t value) { return __reduce_add_sync(0xffffffffu, value); }

template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}

// Adds up the tallies of all threads of the cluster. Sums are taken in a fixed order; every thread gets the same counts, and the
// first warp of each block the mass. `phase` names the call site; each is used once, so no buffer is written while it may still be read.
template <int WARPS>
__device__ Totals total(Shared<WARPS>& shared, const Place& place, int phase, Tally mine) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // A block has at most 2^15 pages: both counts fit in one word.
    const uint32_t of_lanes = warp_sum(static_cast<uint32_t>(mine.above) | static_cast<uint32_t>(mine.equal) << 16);
    mine = {static_cast<int>(of_lanes & 0xffff), static_cast<int>(of_lanes >> 16), warp_sum(mine.mass)};
    if (lane == 0) shared.warp_tally[phase][warp] = mine;
    __syncthreads();
    const Tally of_warp = lane < WARPS ? shared.warp_tally[phase][lane] : Tally{0, 0, 0.0f};
    const uint32_t both = static_cast<uint32_t>(of_warp.above) | static_cast<uint32_t>(of_warp.equal) << 16;
    const uint32_t before = warp_sum(lane < warp ? both : 0u), block = warp_sum(both);
    Totals totals = {{static_cast<int>(block & 0xffff), static_cast<int>(block >> 16), 0.0f},
                     static_cast<int>(before & 0xffff),
                     static_cast<int>(before >> 16)};
    if (warp == 0) totals.all.mass = warp_sum(of_warp.mass);
    if (place.alone()) return totals;
    if (warp == 0 && lane < place.active) *place.of(&shared.cluster_tally[phase][place.rank], lane) = totals.all;
    place.synchronise();
    const Tally of_rank = lane < place.active ? shared.cluster_tally[phase][lane] : Tally{0, 0, 0.0f};
    totals.above_before += warp_sum(lane < place.rank ? of_rank.above : 0);
    totals.equal_before += warp_sum(lane < place.rank ? of_rank.equal : 0);
    totals.all = {warp_sum(of_rank.above), warp_sum(of_rank.equal), warp == 0 ? warp_sum(of_rank.mass) : 0.0f};
    return totals;
}

}  // namespace kvskim::selection
