// What the selection kernel shares between the threads of a warp, of a block and of a thread-block cluster.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "select_exchange.cuh"

namespace kvskim::selection {

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr int MAX_CLUSTER = 16;
constexpr float INFINITE = __builtin_huge_valf();
static_assert(WARPS >= MAX_CLUSTER, "each warp sends to one block of the cluster");

// Sums of one pass over the keys: of a warp, of a block, or of the cluster.
struct alignas(16) Tally {
    int above;   // keys above the cut
    int equal;   // keys equal to the cut
    float mass;  // finite keys above the cut, added up
    int unused;  // makes it one message
};

// Totals over the cluster, and what lies before this warp in page order.
struct Totals {
    Tally all;
    int above_before;
    int equal_before;
};

// The occasions on which tallies are added up. Each happens at most once, so no buffer is written while it may still be read.
enum Phase { COUNTING, CUTTING, WEIGHING, PHASES };

// Where the descent (select_descent.cuh) stands: the cut is one of the keys whose leading bits are `prefix`.
struct Descent {
    uint32_t prefix;
    int above;                // keys above all of those
    unsigned long long mass;  // forced share plus the mass above all of those, in units of 2^-31
};

// Of each column of the scores.
template <int GROUP>
struct ColumnsShared {
    float partial[WARPS][GROUP];
    float forced[GROUP];
    float weight[GROUP];  // of a query head in the group-mean mass: 1 / (normaliser * group)
    float peak[MAX_CLUSTER][GROUP];
};

struct Shared {
    Tally warp_tally[PHASES][WARPS];
    Tally cluster_tally[PHASES][MAX_CLUSTER];  // of every block
    Arrival tallies_arrive[PHASES];
    Descent descent[3];  // one for each pass
    int scan_count[WARPS];
    unsigned long long scan_mass[WARPS];
};

// This block's place in the cluster. Only the first `active` blocks of a cluster have pages; the others have returned.
struct Place {
    int rank;
    int active;

    __device__ bool alone() const { return active == 1; }

    // Barrier over the threads of all active blocks (threads that have exited are not waited for) that orders all their accesses.
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

// Adds up the tallies of the threads of this block, with one barrier. Sums are taken in a fixed order; every thread gets the same counts,
// and the first warp the mass.
__device__ __forceinline__ Totals total_of_block(Shared& shared, Phase phase, Tally mine) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // A block has at most 2^15 pages: both counts fit in one word.
    const uint32_t of_lanes = warp_sum(static_cast<uint32_t>(mine.above) | static_cast<uint32_t>(mine.equal) << 16);
    mine = {static_cast<int>(of_lanes & 0xffff), static_cast<int>(of_lanes >> 16), warp_sum(mine.mass), 0};
    if (lane == 0) shared.warp_tally[phase][warp] = mine;
    __syncthreads();
    const Tally of_warp = lane < WARPS ? shared.warp_tally[phase][lane] : Tally{0, 0, 0.0f, 0};
    const uint32_t both = static_cast<uint32_t>(of_warp.above) | static_cast<uint32_t>(of_warp.equal) << 16;
    const uint32_t before = warp_sum(lane < warp ? both : 0u), block = warp_sum(both);
    Totals totals = {{static_cast<int>(block & 0xffff), static_cast<int>(block >> 16), 0.0f, 0},
                     static_cast<int>(before & 0xffff),
                     static_cast<int>(before >> 16)};
    if (warp == 0) totals.all.mass = warp_sum(of_warp.mass);
    return totals;
}

// The rest of the way from the totals of this block to those of the cluster. `more_bytes`: of other messages to this block that use the
// same arrival, and that this waits for too.
__device__ __forceinline__ void total_of_cluster(Shared& shared, const Place& place, Phase phase, Totals& totals, uint32_t more_bytes) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp == 0) {
        if (lane == 0) expect(shared.tallies_arrive[phase], place.active * static_cast<uint32_t>(sizeof(Tally)) + more_bytes);
        const Tally& mine = totals.all;
        if (lane < place.active)
            send(reinterpret_cast<uint4*>(&shared.cluster_tally[phase][place.rank]),
                 uint4{static_cast<uint32_t>(mine.above), static_cast<uint32_t>(mine.equal), __float_as_uint(mine.mass), 0},
                 shared.tallies_arrive[phase], lane);
    }
    wait(shared.tallies_arrive[phase]);
    const Tally of_rank = lane < place.active ? shared.cluster_tally[phase][lane] : Tally{0, 0, 0.0f, 0};
    totals.above_before += warp_sum(lane < place.rank ? of_rank.above : 0);
    totals.equal_before += warp_sum(lane < place.rank ? of_rank.equal : 0);
    totals.all = {warp_sum(of_rank.above), warp_sum(of_rank.equal), warp == 0 ? warp_sum(of_rank.mass) : 0.0f, 0};
}

// Both.
__device__ __forceinline__ Totals total(Shared& shared, const Place& place, Phase phase, Tally mine) {
    Totals totals = total_of_block(shared, phase, mine);
    if (!place.alone()) total_of_cluster(shared, place, phase, totals, 0);
    return totals;
}

}  // namespace kvskim::selection
