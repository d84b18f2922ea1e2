// Finds where a selection by coverage ends without sorting: a radix descent over the bits of the masses, 11, 11 and 10 of them at a time.
//
// The selected pages are the first k in the order "larger mass first". k is the smallest count with
//     k >= most,  or  k >= least and mass of the first k (with the forced share) >= target.
// Both sides only grow with k, so each pass can find the histogram bin in which the condition first holds, and the next pass
// looks at the masses of that bin alone. They are added up as integers: the sums do not depend on the order of the additions.
#pragma once

#include "select_rows.cuh"

namespace kvskim::selection {

constexpr int DESCENT_PASSES = 3;
constexpr int DESCENT_BINS = 2048;  // of each pass; the last one uses half of them
constexpr int ALL_DESCENT_BINS = DESCENT_PASSES * DESCENT_BINS;

// The bits that a pass looks at are [shift, shift + digits); those above were settled by the passes before.
struct Pass {
    int index;

    __device__ int digits() const { return index == 2 ? 10 : 11; }
    __device__ int shift() const { return index == 0 ? 21 : index == 1 ? 10 : 0; }
    __device__ int first_bin() const { return index * DESCENT_BINS; }
};

// Bins of all passes: how many pages, and their mass as a 64-bit sum in two halves.
struct Histograms {
    uint32_t* count;
    uint32_t* mass_low;
    uint32_t* mass_high;
};

struct Goal {
    int least;
    int most;
    unsigned long long target;  // in units of 2^-31

    __device__ bool reached(int count, unsigned long long mass) const { return count >= most || (count >= least && mass >= target); }
};

// A cut: pages with more mass than `key` are selected, and of those with just as much the first `equals` in page order.
struct Cut {
    float key;
    int equals;
    int count;  // how many are selected in all
};

// Bits that order like the masses, which are never negative, -0 or NaN.
__device__ __forceinline__ uint32_t descent_bits(float mass) { return __float_as_uint(mass) << 1; }

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
__device__ __forceinline__ void count_key(const Histograms& histograms, Pass pass, uint32_t bits, float key) {
    if (bits == 0) return;
    const int bin = pass.first_bin() + ((bits >> pass.shift()) & ((1 << pass.digits()) - 1));
    atomicAdd(&histograms.count[bin], 1u);
    add_wide(&histograms.mass_low[bin], &histograms.mass_high[bin], fixed_mass(key), 0);
}

// One thread finds the bin in which the goal is first reached and tells every block.
__device__ inline void find_descent_bin(Shared& shared, const Place& place, const Histograms& histograms, const Goal& goal, Pass pass,
                                 const Descent& state) {
    constexpr int EACH = DESCENT_BINS / THREADS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Thread 0 has the highest bins.
    const int top = pass.first_bin() + DESCENT_BINS - 1 - threadIdx.x * EACH;
    const auto mass_of = [&](int bin) {
        return (static_cast<unsigned long long>(histograms.mass_high[bin]) << 32) + histograms.mass_low[bin];
    };
    int count = 0;
    unsigned long long mass = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        count += histograms.count[top - i];
        mass += mass_of(top - i);
    }
    const int warp_count = warp_sum(count);
    const unsigned long long warp_mass = warp_sum(mass);
    if (lane == 0) {
        shared.scan_count[warp] = warp_count;
        shared.scan_mass[warp] = warp_mass;
    }
    __syncthreads();
    int count_before = state.above + warp_sum(lane < warp ? shared.scan_count[lane] : 0);
    unsigned long long mass_before = state.mass + warp_sum(lane < warp ? shared.scan_mass[lane] : 0ull);
    // One warp has the bin, the last one if the goal is not reached: then the cut is a key that was not counted, in the lowest bin.
    if (goal.reached(count_before, mass_before)) return;
    if (warp < WARPS - 1 && !goal.reached(count_before + warp_count, mass_before + warp_mass)) return;
    count_before -= count;
    mass_before -= mass;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int lower_count = __shfl_up_sync(0xffffffffu, count, distance);
        if (lane >= distance) count += lower_count;
        const unsigned long long lower_mass = __shfl_up_sync(0xffffffffu, mass, distance);
        if (lane >= distance) mass += lower_mass;
    }
    count += count_before;
    mass += mass_before;
#pragma unroll 1
    for (int bin = top; bin > top - EACH; --bin) {
        const int inside = histograms.count[bin];
        const unsigned long long next_mass = mass + mass_of(bin);
        if (!goal.reached(count, mass) && (bin == pass.first_bin() || goal.reached(count + inside, next_mass))) {
            const uint32_t prefix = (state.prefix << pass.digits()) | (bin - pass.first_bin());  // the prefix is 0 at first
#pragma unroll 1
            for (int other = 0; other < place.active; ++other)
                *place.of(&shared.descent[pass.index], other) = {prefix, count, mass};
        }
        count += inside;
        mass = next_mass;
    }
}

// One pass.
__device__ inline void descend(Shared& shared, const Place& place, const Histograms& histograms, const Goal& goal, const float* keys, int length,
                        Pass pass, Descent& state) {
#pragma unroll 2
    for (int i = threadIdx.x; i < length; i += THREADS) {
        const float key = keys[i];
        const uint32_t bits = descent_bits(key);
        if (pass.index > 0 && (bits >> (pass.shift() + pass.digits())) != state.prefix) continue;
        count_key(histograms, pass, bits, key);
    }
    if (!place.alone()) __syncthreads();
    if (place.rank > 0) {
        // The histogram of the first block becomes that of the cluster.
        uint32_t* count = place.of(histograms.count, 0);
        uint32_t* mass_low = place.of(histograms.mass_low, 0);
        uint32_t* mass_high = place.of(histograms.mass_high, 0);
#pragma unroll 1
        for (int bin = pass.first_bin() + threadIdx.x; bin < pass.first_bin() + DESCENT_BINS; bin += THREADS) {
            if (histograms.count[bin] == 0) continue;
            atomicAdd(&count[bin], histograms.count[bin]);
            add_wide(&mass_low[bin], &mass_high[bin], histograms.mass_low[bin], histograms.mass_high[bin]);
        }
    }
    place.synchronise();
    if (place.rank == 0) find_descent_bin(shared, place, histograms, goal, pass, state);
    place.synchronise();
    state = shared.descent[pass.index];
}

// The histograms must be zero, and every block of the cluster must know it. The goal must not be reached by no page at all, and must be
// reached by all pages: 1 <= most <= number of keys in the cluster.
__device__ inline Cut find_cut(Shared& shared, const Place& place, const Histograms& histograms, const Goal& goal, const float* keys, int length,
                        unsigned long long forced_mass) {
    Descent state = {0, 0, forced_mass};
#pragma unroll 1
    for (int index = 0; index < DESCENT_PASSES; ++index) descend(shared, place, histograms, goal, keys, length, Pass{index}, state);
    Cut cut;
    cut.key = __uint_as_float(state.prefix >> 1);
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

// Rows of the pages that a cut selects, of which the rule coverage takes as many equal ones as it needs.
__device__ __forceinline__ Selection rows_of_cut(Shared& shared, const Place& place, const Cut& cut, const float* keys, int warp_begin,
                                                 int warp_end) {
    const int lane = threadIdx.x % 32;
    Tally tally = {0, 0, 0.0f, 0};
#pragma unroll 2
    for (int i = warp_begin + lane; i < warp_end; i += 32) {
        const float key = keys[i];
        tally.above += key > cut.key;
        tally.equal += key == cut.key;
        tally.mass += key > cut.key && key < INFINITE ? key : 0.0f;
    }
    const Totals totals = total(shared, place, CUTTING, tally);
    Selection selection = {Rows{}, totals.above_before + min(totals.equal_before, cut.equals), cut.count,
                           totals.all.mass + (cut.key < INFINITE ? cut.equals * cut.key : 0.0f)};
    int equals_left = max(cut.equals - totals.equal_before, 0);
    const uint32_t lower_lanes = (1u << lane) - 1;
#pragma unroll 1
    for (int first = warp_begin; first < warp_end; first += 32) {
        const int i = first + lane;
        const float key = i < warp_end ? keys[i] : -INFINITE;
        const bool is_equal = i < warp_end && key == cut.key;
        const uint32_t equal_lanes = __ballot_sync(0xffffffffu, is_equal);
        const bool selected = key > cut.key || (is_equal && __popc(equal_lanes & lower_lanes) < equals_left);
        selection.rows.keep((first - warp_begin) / 32, __ballot_sync(0xffffffffu, selected));
        equals_left = max(equals_left - __popc(equal_lanes), 0);
    }
    return selection;
}

}  // namespace kvskim::selection
