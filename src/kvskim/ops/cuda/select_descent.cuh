// Finds where a selection ends without sorting: a radix descent over the bits of the keys, 11, 11 and 10 of them at a time.
//
// The selected pages are the first k in the order "larger key first". k is the smallest count with
//     k >= most,  or  k >= least and mass of the first k (with the forced share) >= target.
// Both sides only grow with k, so each pass can find the histogram bin in which the condition first holds, and the next pass
// looks at the keys of that bin alone. An exact count is least = most. All masses are integers: their sums do not depend on
// the order of the additions.
#pragma once

#include "select_cluster.cuh"

namespace kvskim::selection {

constexpr int PASSES = 3;
constexpr int BINS = 2048;  // of each pass; the last one uses half of them
constexpr int ALL_BINS = PASSES * BINS;

// The bits that a pass looks at are [shift, shift + digits); those above were settled by the passes before.
struct Pass {
    int index;

    __device__ int digits() const { return index == 2 ? 10 : 11; }
    __device__ int shift() const { return index == 0 ? 21 : index == 1 ? 10 : 0; }
    __device__ int first_bin() const { return index * BINS; }
};

// Bins of all passes: how many keys, and their mass as a 64-bit sum in two halves (null unless the rule is coverage).
struct Histograms {
    uint32_t* count;
    uint32_t* mass_low;
    uint32_t* mass_high;
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

// One thread of the first block finds the bin in which the goal is first reached and tells every block.
template <int THREADS>
__device__ void find_bin(Shared<THREADS / 32>& shared, const Place& place, const Histograms& histograms, const Goal& goal, Pass pass,
                         const Descent& state) {
    constexpr int EACH = BINS / THREADS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool by_mass = histograms.mass_low != nullptr;
    // Thread 0 has the highest bins.
    const int top = pass.first_bin() + BINS - 1 - threadIdx.x * EACH;
    int count = 0;
    unsigned long long mass = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        count += histograms.count[top - i];
        if (by_mass) mass += (static_cast<unsigned long long>(histograms.mass_high[top - i]) << 32) + histograms.mass_low[top - i];
    }
    const int own_count = count;
    const unsigned long long own_mass = mass;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int lower_count = __shfl_up_sync(0xffffffffu, count, distance);
        if (lane >= distance) count += lower_count;
        if (by_mass) {
            const unsigned long long lower_mass = __shfl_up_sync(0xffffffffu, mass, distance);
            if (lane >= distance) mass += lower_mass;
        }
    }
    if (lane == 31) {
        shared.scan_count[warp] = count;
        shared.scan_mass[warp] = mass;
    }
    __syncthreads();
    count += state.above - own_count + warp_sum(lane < warp ? shared.scan_count[lane] : 0);
    mass += state.mass - own_mass;
    if (by_mass) mass += warp_sum(lane < warp ? shared.scan_mass[lane] : 0ull);
    for (int i = 0; i < EACH; ++i) {
        const int next_count = count + histograms.count[top - i];
        unsigned long long next_mass = mass;
        if (by_mass) next_mass += (static_cast<unsigned long long>(histograms.mass_high[top - i]) << 32) + histograms.mass_low[top - i];
        if (!goal.reached(count, mass) && goal.reached(next_count, next_mass)) {
            const uint32_t digit = top - i - pass.first_bin();
            const uint32_t prefix = (state.prefix << pass.digits()) | digit;  // the prefix is 0 at first
#pragma unroll 1
            for (int other = 0; other < place.active; ++other) *place.of(&shared.descent[pass.index], other) = {prefix, count, mass};
        }
        count = next_count;
        mass = next_mass;
    }
}

template <int THREADS>
__device__ void descend(Shared<THREADS / 32>& shared, const Place& place, const Histograms& histograms, const Goal& goal,
                        const float* keys, int length, bool is_signed, Pass pass, Descent& state) {
    const bool by_mass = histograms.mass_low != nullptr;
#pragma unroll 2
    for (int i = threadIdx.x; i < length; i += THREADS) {
        const float key = keys[i];
        const uint32_t bits = ordered_bits(key, is_signed);
        if (pass.index > 0 && (bits >> (pass.shift() + pass.digits())) != state.prefix) continue;
        const int bin = pass.first_bin() + ((bits >> pass.shift()) & ((1 << pass.digits()) - 1));
        atomicAdd(&histograms.count[bin], 1u);
        if (by_mass) add_wide(&histograms.mass_low[bin], &histograms.mass_high[bin], fixed_mass(key), 0);
    }
    if (!place.alone() && place.rank > 0) {
        // The histogram of the first block becomes that of the cluster; most bins are empty.
        __syncthreads();
        uint32_t* count = place.of(histograms.count, 0);
        uint32_t* mass_low = by_mass ? place.of(histograms.mass_low, 0) : nullptr;
        uint32_t* mass_high = by_mass ? place.of(histograms.mass_high, 0) : nullptr;
#pragma unroll 1
        for (int bin = pass.first_bin() + threadIdx.x; bin < pass.first_bin() + BINS; bin += THREADS) {
            if (histograms.count[bin] == 0) continue;
            atomicAdd(&count[bin], histograms.count[bin]);
            if (by_mass) add_wide(&mass_low[bin], &mass_high[bin], histograms.mass_low[bin], histograms.mass_high[bin]);
        }
    }
    place.synchronise();
    if (place.rank == 0) find_bin<THREADS>(shared, place, histograms, goal, pass, state);
    place.synchronise();
    state = shared.descent[pass.index];
}

// The histograms must be zero, and every block of the cluster must know it. The goal must not be reached by no page at all,
// and must be reached by all pages: 1 <= most <= number of keys in the cluster.
template <int THREADS>
__device__ Cut find_cut(Shared<THREADS / 32>& shared, const Place& place, const Histograms& histograms, const Goal& goal,
                        const float* keys, int length, bool is_signed, unsigned long long forced_mass) {
    Descent state = {0, 0, forced_mass};
#pragma unroll 1
    for (int index = 0; index < PASSES; ++index)
        descend<THREADS>(shared, place, histograms, goal, keys, length, is_signed, Pass{index}, state);
    Cut cut;
    cut.key = key_of_bits(state.prefix, is_signed);
    int needed = 0;
    if (state.mass < goal.target) {
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
