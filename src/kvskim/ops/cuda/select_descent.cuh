// Finds where a selection ends without sorting: a radix descent over the bits of the keys, 11, 11 and 10 of them at a time.
//
// The selected pages are the first k in the order "larger key first". k is the smallest count with
//     k >= most,  or  k >= least and mass of the first k (with the forced share) >= target.
// Both sides only grow with k, so each pass can find the histogram bin in which the condition first holds, and the next pass
// looks at the keys of that bin alone. Without masses, they are gathered in a list first: mostly they are few, so that what
// remains is done within a block. An exact count is least = most. All masses are integers: their sums do not depend on
// the order of the additions.
#pragma once

#include "select_cluster.cuh"

namespace kvskim::selection {

constexpr int PASSES = 3;
constexpr int BINS = 2048;  // of each pass; the last one uses half of them
constexpr int ALL_BINS = PASSES * BINS;
// Up to so many keys in the bin of the first pass are gathered in a list, and up to so many of a list are ranked without passes.
constexpr int LIST_KEYS = 2048;
constexpr int RANKED_KEYS = 64;
// In clusters of up to so many blocks, each block adds up the first histogram of all and finds the bin by itself; in larger ones the
// first block does it for the others, which costs one more barrier but sends less.
constexpr int BLOCKS_MERGING = 16;

// The bits that a pass looks at are [shift, shift + digits); those above were settled by the passes before.
struct Pass {
    int index;

    __device__ int digits() const { return index == 2 ? 10 : 11; }
    __device__ int shift() const { return index == 0 ? 21 : index == 1 ? 10 : 0; }
    __device__ int first_bin() const { return index * BINS; }
};

// Bins of all passes: how many keys, and with BY_MASS (the rule coverage) their mass as a 64-bit sum in two halves.
struct Histograms {
    uint32_t* count;
    uint32_t* mass_low;
    uint32_t* mass_high;
    float* list;       // room for two lists of LIST_KEYS; unless BY_MASS
    uint32_t* merged;  // the first pass of all blocks together; unless BY_MASS
};

struct Goal {
    int least;
    int most;
    unsigned long long target;  // 0 unless the rule is coverage

    __device__ bool reached(int count, unsigned long long mass) const { return count >= most || (count >= least && mass >= target); }
};

// A cut: keys above `key` are selected, and of those equal to it the first `equals` in page order.
struct Cut {
    float key;
    int equals;
    int count;  // how many are selected in all
};

// Bits that order like the keys. Keys are never NaN nor -0; without `is_signed` they are not negative.
__device__ __forceinline__ uint32_t ordered_bits(float key, bool is_signed) {
    const uint32_t bits = __float_as_uint(key);
    if (!is_signed) return bits << 1;
    return (bits & 0x80000000u) ? ~bits : (bits | 0x80000000u);
}

__device__ __forceinline__ float key_of_bits(uint32_t ordered, bool is_signed) {
    if (!is_signed) return __uint_as_float(ordered >> 1);
    return __uint_as_float((ordered & 0x80000000u) ? (ordered & 0x7fffffffu) : ~ordered);
}

// floor(mass * 2^31 + 0.5) of a mass clamped to 0..1, exactly; 0 for a broken mass.
__device__ __forceinline__ uint32_t fixed_mass(float mass) {
    if (!(mass < INFINITE)) return 0;
    const float scaled = fminf(fmaxf(mass, 0.0f), 1.0f) * 2147483648.0f;
    const uint32_t whole = __float2uint_rz(scaled);
    return whole + (scaled - __uint2float_rz(whole) >= 0.5f ? 1u : 0u);
}

// Adds to a 64-bit sum kept in two words; exact in any order, because each wrap of the low word is seen by one adder.
__device__ __forceinline__ void add_wide(uint32_t* low, uint32_t* high, uint32_t add_low, uint32_t add_high) {
    const uint32_t before = atomicAdd(low, add_low);
    add_high += (before + add_low < before) ? 1u : 0u;
    if (add_high) atomicAdd(high, add_high);
}

// Counts a key in the bin that its leading bits name. Keys whose bits are all 0 are never counted: there may be very many, and if
// the goal is not reached by the others, they are the cut.
template <bool BY_MASS>
__device__ __forceinline__ void count_key(const Histograms& histograms, Pass pass, uint32_t bits, float key) {
    if (bits == 0) return;
    const int bin = pass.first_bin() + ((bits >> pass.shift()) & ((1 << pass.digits()) - 1));
    atomicAdd(&histograms.count[bin], 1u);
    if constexpr (BY_MASS) add_wide(&histograms.mass_low[bin], &histograms.mass_high[bin], fixed_mass(key), 0);
}

// One thread finds the bin in which the goal is first reached and tells every block.
template <int THREADS, bool BY_MASS>
__device__ void find_bin(Shared<THREADS / 32>& shared, const Place& place, const Histograms& histograms, const Goal& goal, Pass pass,
                         const Descent& state) {
    constexpr int EACH = BINS / THREADS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Thread 0 has the highest bins.
    const int top = pass.first_bin() + BINS - 1 - threadIdx.x * EACH;
    const auto mass_of = [&](int bin) {
        return (static_cast<unsigned long long>(histograms.mass_high[bin]) << 32) + histograms.mass_low[bin];
    };
    int count = 0;
    unsigned long long mass = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        count += histograms.count[top - i];
        if constexpr (BY_MASS) mass += mass_of(top - i);
    }
    const int warp_count = warp_sum(count);
    const unsigned long long warp_mass = BY_MASS ? warp_sum(mass) : 0;
    if (lane == 0) {
        shared.scan_count[warp] = warp_count;
        shared.scan_mass[warp] = warp_mass;
    }
    __syncthreads();
    int count_before = state.above + warp_sum(lane < warp ? shared.scan_count[lane] : 0);
    unsigned long long mass_before = state.mass;
    if constexpr (BY_MASS) mass_before += warp_sum(lane < warp ? shared.scan_mass[lane] : 0ull);
    // One warp has the bin, the last one if the goal is not reached: then the cut is a key that was not counted, in the lowest bin.
    if (goal.reached(count_before, mass_before)) return;
    if (warp < THREADS / 32 - 1 && !goal.reached(count_before + warp_count, mass_before + warp_mass)) return;
    count_before -= count;
    mass_before -= mass;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int lower_count = __shfl_up_sync(0xffffffffu, count, distance);
        if (lane >= distance) count += lower_count;
        if constexpr (BY_MASS) {
            const unsigned long long lower_mass = __shfl_up_sync(0xffffffffu, mass, distance);
            if (lane >= distance) mass += lower_mass;
        }
    }
    count += count_before;
    mass += mass_before;
#pragma unroll 1
    for (int bin = top; bin > top - EACH; --bin) {
        const int inside = histograms.count[bin];
        const unsigned long long next_mass = mass + (BY_MASS ? mass_of(bin) : 0);
        if (!goal.reached(count, mass) && (bin == pass.first_bin() || goal.reached(count + inside, next_mass))) {
            const uint32_t prefix = (state.prefix << pass.digits()) | (bin - pass.first_bin());  // the prefix is 0 at first
#pragma unroll 1
            for (int other = 0; other < place.active; ++other)
                *place.of(&shared.descent[pass.index], other) = {prefix, count, inside, mass};
        }
        count += inside;
        mass = next_mass;
    }
}

// One pass. `counted`: the keys are in this block's histogram already, and all of its threads know it.
template <int THREADS, bool BY_MASS>
__device__ void descend(Shared<THREADS / 32>& shared, const Place& place, const Histograms& histograms, const Goal& goal,
                        const float* keys, int length, bool is_signed, Pass pass, bool counted, Descent& state) {
#pragma unroll 2
    for (int i = threadIdx.x; i < (counted ? 0 : length); i += THREADS) {
        const float key = keys[i];
        const uint32_t bits = ordered_bits(key, is_signed);
        if (pass.index > 0 && (bits >> (pass.shift() + pass.digits())) != state.prefix) continue;
        count_key<BY_MASS>(histograms, pass, bits, key);
    }
    Histograms merged = histograms;
    Place finding = place;
    if (!place.alone() && !counted) __syncthreads();
    if (!BY_MASS && pass.index == 0 && !place.alone() && place.active <= BLOCKS_MERGING) {
#pragma unroll 1
        for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
            const uint32_t count = histograms.count[bin];  // most bins are empty
#pragma unroll 1
            for (int i = 0; i < (count ? place.active : 0); ++i) {
                const int other = place.rank + i < place.active ? place.rank + i : place.rank + i - place.active;
                atomicAdd(place.of(histograms.merged, other) + bin, count);
            }
        }
        merged.count = histograms.merged;
        finding = {0, 1};
    } else if (place.rank > 0) {
        // The histogram of the first block becomes that of the cluster.
        uint32_t* count = place.of(histograms.count, 0);
        uint32_t* mass_low = BY_MASS ? place.of(histograms.mass_low, 0) : nullptr;
        uint32_t* mass_high = BY_MASS ? place.of(histograms.mass_high, 0) : nullptr;
#pragma unroll 1
        for (int bin = pass.first_bin() + threadIdx.x; bin < pass.first_bin() + BINS; bin += THREADS) {
            if (histograms.count[bin] == 0) continue;
            atomicAdd(&count[bin], histograms.count[bin]);
            if constexpr (BY_MASS) add_wide(&mass_low[bin], &mass_high[bin], histograms.mass_low[bin], histograms.mass_high[bin]);
        }
    }
    if (!place.alone() || !counted) place.synchronise();
    if (finding.rank == 0) find_bin<THREADS, BY_MASS>(shared, finding, merged, goal, pass, state);
    finding.synchronise();
    state = shared.descent[pass.index];
}

// The keys of the bin that the first pass found, from all blocks, into `list` of every block. `own` is this block's part on its way.
template <int THREADS>
__device__ void gather(Shared<THREADS / 32>& shared, const Place& place, const float* keys, int length, bool is_signed,
                       const Descent& state, float* own, float* list) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* target = place.alone() ? list : own;
#pragma unroll 2
    for (int i = threadIdx.x; i < length; i += THREADS) {
        const float key = keys[i];
        const uint32_t bits = ordered_bits(key, is_signed);
        if (bits != 0 && (bits >> Pass{0}.shift()) == state.prefix) target[atomicAdd(&shared.list_length, 1u)] = key;
    }
    if (!place.alone()) {
        __syncthreads();
        const int count = shared.list_length;
        if (threadIdx.x < place.active)
            shared.list_offset[threadIdx.x] = atomicAdd(place.of(&shared.list_total, threadIdx.x), static_cast<uint32_t>(count));
        __syncthreads();
#pragma unroll 1
        for (int other = warp; other < place.active; other += THREADS / 32) {
            float* received = place.of(list, other) + shared.list_offset[other];
#pragma unroll 1
            for (int i = lane; i < count; i += 32) received[i] = own[i];
        }
    }
    place.synchronise();
}

// The cut among a few keys, for an exact count: every warp ranks some of them. shared.descent[2] must hold the answer for the case
// that it is none of them.
template <int THREADS>
__device__ void rank_list(Shared<THREADS / 32>& shared, const Goal& goal, const float* list, int length, bool is_signed, Descent& state) {
    const int lane = threadIdx.x % 32;
    const float not_a_key = __uint_as_float(0x7fffffffu);  // NaN: neither above nor equal to anything
    const float first = lane < length ? list[lane] : not_a_key, second = lane + 32 < length ? list[lane + 32] : not_a_key;
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < length; i += THREADS / 32) {
        const float key = list[i];
        const int above = state.above + __popc(__ballot_sync(0xffffffffu, first > key)) + __popc(__ballot_sync(0xffffffffu, second > key));
        const int equal = __popc(__ballot_sync(0xffffffffu, first == key)) + __popc(__ballot_sync(0xffffffffu, second == key));
        if (lane == 0 && above < goal.least && above + equal >= goal.least)
            shared.descent[2] = {ordered_bits(key, is_signed), above, equal, 0};  // equal keys write the same
    }
    __syncthreads();
    state = shared.descent[2];
}

// The histograms (of the first pass, if there are only counts) must be zero, and every block of the cluster must know it; with
// `counted` this block's keys are in the first one already. The goal must not be reached by no page at all, and must be reached by
// all pages: 1 <= most <= number of keys in the cluster.
template <int THREADS, bool BY_MASS>
__device__ Cut find_cut(Shared<THREADS / 32>& shared, const Place& place, const Histograms& histograms, const Goal& goal,
                        const float* keys, int length, bool is_signed, bool counted, unsigned long long forced_mass) {
    Descent state = {0, 0, 0, forced_mass};
    Place searching = place;
#pragma unroll 1
    for (int index = 0; index < PASSES; ++index) {
        if (!BY_MASS && index == 1) {
            // Mostly few keys are left: then each block takes them all, and goes on without the others.
            const bool listed = state.inside <= LIST_KEYS, ranked = state.inside <= RANKED_KEYS;
            if (ranked) {
                if (threadIdx.x == 0) shared.descent[2] = {0, state.above + state.inside, 0, 0};
            } else {
#pragma unroll 1
                for (int bin = BINS + threadIdx.x; bin < ALL_BINS; bin += THREADS) histograms.count[bin] = 0;
            }
            if (listed) {
                gather<THREADS>(shared, place, keys, length, is_signed, state, histograms.list + LIST_KEYS, histograms.list);
                searching = {0, 1}, keys = histograms.list, length = state.inside;
            } else {
                place.synchronise();
            }
            if (ranked) {
                rank_list<THREADS>(shared, goal, keys, length, is_signed, state);
                break;
            }
        }
        descend<THREADS, BY_MASS>(shared, searching, histograms, goal, keys, length, is_signed, Pass{index}, counted && index == 0, state);
    }
    Cut cut;
    cut.key = key_of_bits(state.prefix, is_signed);
    int needed = 0;
    if (BY_MASS && state.mass < goal.target) {
        const uint32_t each = fixed_mass(cut.key);
        // A page without mass brings the target no nearer: then it is `most` that ends the selection.
        const unsigned long long exact = each ? (goal.target - state.mass + each - 1) / each : ~0ull;
        needed = exact < 0x7fffffffull ? static_cast<int>(exact) : 0x7fffffff;
    }
    cut.equals = min(max(needed, goal.least - state.above), goal.most - state.above);
    cut.count = state.above + cut.equals;
    return cut;
}

}  // namespace kvskim::selection
