// What turns the scores of a page into its ranking key, and the sums over a request that this needs.
#pragma once

#include "common.cuh"
#include "select_cluster.cuh"

namespace kvskim::selection {

constexpr float EXPONENT_LIMIT = 83.0f;
// Scores up to so much above the offset, with room for the rounding of that sum, need no limit.
constexpr float ORDINARY_LIMIT = 80.0f;

// NaN if either is NaN, unlike fminf and fmaxf: a broken score must stay visible.
__device__ __forceinline__ float min_nan(float a, float b) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

__device__ __forceinline__ float max_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// How a page's columns are shared out: up to 16 are one lane's, of more a lane has eight, and neighbouring lanes have the page together.
template <int GROUP>
struct Slice {
    static constexpr int LANES = GROUP <= 16 ? 1 : GROUP / 8;
    static constexpr int COLUMNS = GROUP / LANES;
    int index;  // which of the page's slices
    int first;  // column
    int group;  // columns that are query heads

    __device__ __forceinline__ Slice(int i, int all) : index(i), first(i * COLUMNS), group(LANES == 1 ? all : min(max(all - first, 0), COLUMNS)) {}
    __device__ __forceinline__ static Slice of_lane(int all) { return {LANES == 1 ? 0 : static_cast<int>(threadIdx.x % LANES), all}; }
};

// Value of a page from those of its slices, for LANES pages at once: every lane has slice `index` of all of them, and gets page `index` of them.
// leaf(i, j, a, b) gives this lane's values a and b of pages i and j. What is added to what does not depend on the lane.
template <int LANES, int STEP, typename Leaf, typename Join>
__device__ __forceinline__ float join_slices(int index, int page, const Leaf& leaf, const Join& join) {
    float low, high;
    if constexpr (2 * STEP == LANES) {
        leaf(page, page + STEP, low, high);
    } else {
        low = join_slices<LANES, 2 * STEP>(index, page, leaf, join);
        high = join_slices<LANES, 2 * STEP>(index, page + STEP, leaf, join);
    }
    const bool upper = index & STEP;
    const float other = __shfl_xor_sync(0xffffffffu, upper ? low : high, STEP);
    return join(upper ? high : low, other);
}

// The scores of one page, or of a slice of it.
template <int GROUP>
struct Page {
    uint32_t words[GROUP / 2];

    __device__ __forceinline__ void load(const __half* source) {
        if constexpr (GROUP == 4) {
            const uint2 v = *reinterpret_cast<const uint2*>(source);
            words[0] = v.x, words[1] = v.y;
        } else {
#pragma unroll
            for (int i = 0; i < GROUP / 8; ++i) {
                const uint4 v = reinterpret_cast<const uint4*>(source)[i];
                words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
            }
        }
    }

    // Two columns, also padded ones.
    __device__ __forceinline__ __half2 pair(int i) const { return *reinterpret_cast<const __half2*>(&words[i]); }

    // Two columns; zeros for those that are not query heads.
    __device__ __forceinline__ __half2 used_pair(int i, int group) const {
        const uint32_t word = words[i] & ((2 * i < group ? 0xffffu : 0u) | (2 * i + 1 < group ? 0xffff0000u : 0u));
        return *reinterpret_cast<const __half2*>(&word);
    }
};

// What turns scores into keys: sum_g weight_g exp(min(score_g - offset_g, 83)); for combine "max", max_g (score_g + offset_g).
// Columns that are not query heads have offset 0 and weight 0.
template <int GROUP>
struct Weights {
    float shift[GROUP];   // offset in units of log2; as it is for combine "max"
    float weight[GROUP];
    __half2 ordinary;     // where no score is larger, none is broken or needs the limit of the exponent

    // The difference score log2(e) - shift is rounded once, so it is exact where the mass is large. What the shift itself lost by rounding is
    // put into the weight.
    __device__ __forceinline__ void set(int g, float offset, float value) {
        shift[g] = offset * kLog2E;
        weight[g] = value * fmaf(fmaf(offset, -kLog2E, shift[g]), kLn2, 1.0f);
    }

    // After all columns are set. `smallest`: the smallest offset of a query head; NaN makes no page ordinary.
    __device__ __forceinline__ void finish(float smallest) {
        ordinary = __half2half2(__float2half_rd(smallest < 0.0f || smallest != smallest ? smallest + ORDINARY_LIMIT : ORDINARY_LIMIT));
    }

    // Of PAGES pages, written so that the exponentials of all of them can be under way together.
    template <int PAGES>
    __device__ __forceinline__ void sums(const Page<GROUP>* pages, int group, float (&total)[PAGES]) const {
        __half2 largest = pages[0].pair(0);
#pragma unroll
        for (int i = 1; i < PAGES * GROUP / 2; ++i) largest = __hmax2_nan(largest, pages[i / (GROUP / 2)].pair(i % (GROUP / 2)));
        if (__hble2(largest, ordinary)) {
#pragma unroll
            for (int page = 0; page < PAGES; ++page) total[page] = 0.0f;
#pragma unroll
            for (int i = 0; i < GROUP / 2; ++i) {
#pragma unroll
                for (int page = 0; page < PAGES; ++page) {
                    const float2 score = __half22float2(pages[page].pair(i));
                    total[page] = fmaf(exp2_fast(fmaf(score.x, kLog2E, -shift[2 * i])), weight[2 * i], total[page]);
                    total[page] = fmaf(exp2_fast(fmaf(score.y, kLog2E, -shift[2 * i + 1])), weight[2 * i + 1], total[page]);
                }
            }
        } else {
#pragma unroll
            for (int page = 0; page < PAGES; ++page) total[page] = careful_sum(pages[page], group);
        }
    }

    // The same where a score may be broken or very large, or a padded column may hold anything.
    __device__ __forceinline__ float careful_sum(const Page<GROUP>& page, int group) const {
        float total = 0.0f;
        __half2 largest = __half2half2(__ushort_as_half(0));
#pragma unroll
        for (int i = 0; i < GROUP / 2; ++i) {
            const __half2 pair = page.used_pair(i, group);
            largest = __hmax2_nan(largest, pair);
            const float2 score = __half22float2(pair);
            const float x = min_nan(fmaf(score.x, kLog2E, -shift[2 * i]), EXPONENT_LIMIT * kLog2E);
            const float y = min_nan(fmaf(score.y, kLog2E, -shift[2 * i + 1]), EXPONENT_LIMIT * kLog2E);
            total = fmaf(exp2_fast(x), weight[2 * i], total);
            total = fmaf(exp2_fast(y), weight[2 * i + 1], total);
        }
        // An infinite score is broken although its exponent was limited: 0 * inf makes the sum NaN.
        const float2 worst = __half22float2(largest);
        return fmaf(worst.y, 0.0f, fmaf(worst.x, 0.0f, total));
    }

    __device__ __forceinline__ float maximum(const Page<GROUP>& page, int group) const {
        float largest = -INFINITE;
#pragma unroll
        for (int i = 0; i < GROUP / 2; ++i) {
            const float2 score = __half22float2(page.pair(i));
            if (2 * i < group) largest = max_nan(largest, score.x + shift[2 * i]);
            if (2 * i + 1 < group) largest = max_nan(largest, score.y + shift[2 * i + 1]);
        }
        return largest + 0.0f;  // no -0
    }
};

// Adds up the valid partial sums in a fixed order, so that the last bit of every mass does not depend on how a launch was cut into blocks:
// shared.weight[g] = 1 / (1 + sum_g) / group. `early` are the partial sums that come first for this thread, `own_forced` the value of column
// own_column(); their loads need not wait for the length.
template <int GROUP>
__device__ __forceinline__ int own_column() {
    if constexpr (GROUP > 16) return threadIdx.x < GROUP ? static_cast<int>(threadIdx.x) : -1;
    return threadIdx.x % 32 == 0 && threadIdx.x / 32 < GROUP ? static_cast<int>(threadIdx.x / 32) : -1;
}

template <int GROUP, int EARLY>
__device__ void reduce_partials(ColumnsShared<GROUP>& shared, const float* partials, const float (&early)[EARLY], float own_forced, int chunks,
                                int group) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < EARLY; ++i) sum += static_cast<int>(threadIdx.x) + i * THREADS < chunks * GROUP ? early[i] : 0.0f;
    for (int i = threadIdx.x + EARLY * THREADS; i < chunks * GROUP; i += THREADS) sum += partials[i];
    if constexpr (GROUP > 16) {
        float* all = &shared.partial[0][0];  // a thread's column is that of all its partial sums
        all[threadIdx.x] = sum;
        __syncthreads();
        sum = 0.0f;
        if (threadIdx.x < GROUP) {
#pragma unroll
            for (int i = 0; i < THREADS / GROUP; ++i) sum += all[threadIdx.x + i * GROUP];
        }
    } else {
#pragma unroll
        for (int distance = 16; distance >= GROUP; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        if (lane < GROUP) shared.partial[warp][lane] = sum;
        __syncthreads();
        if (warp < GROUP) sum = warp_sum(lane < WARPS ? shared.partial[lane][warp] : 0.0f);
    }
    const int column = own_column<GROUP>();
    if (column >= 0) {
        shared.weight[column] = 1.0f / (1.0f + sum) / group;  // group times the sum might overflow
        shared.forced[column] = own_forced;
    }
    __syncthreads();
}

// The largest finite score of every query head over the whole cluster, 0 if there is none, becomes its offset.
template <int GROUP>
__device__ void find_peaks(ColumnsShared<GROUP>& shared, const Place& place, const __half* scores, int length, const Slice<GROUP>& slice,
                           Weights<Slice<GROUP>::COLUMNS>& weights) {
    constexpr int LANES = Slice<GROUP>::LANES, COLUMNS = Slice<GROUP>::COLUMNS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float peak[COLUMNS];
#pragma unroll
    for (int g = 0; g < COLUMNS; ++g) peak[g] = -INFINITE;
#pragma unroll 1
    for (int i = threadIdx.x / LANES; i < length; i += THREADS / LANES) {
        Page<COLUMNS> page;
        page.load(scores + static_cast<size_t>(i) * GROUP + slice.first);
#pragma unroll
        for (int g = 0; g < COLUMNS / 2; ++g) {
            const float2 score = __half22float2(page.used_pair(g, slice.group));
            if (score.x < INFINITE) peak[2 * g] = fmaxf(peak[2 * g], score.x);
            if (score.y < INFINITE) peak[2 * g + 1] = fmaxf(peak[2 * g + 1], score.y);
        }
    }
#pragma unroll
    for (int g = 0; g < COLUMNS; ++g) {
#pragma unroll
        for (int distance = 16; distance >= LANES; distance /= 2) peak[g] = fmaxf(peak[g], __shfl_xor_sync(0xffffffffu, peak[g], distance));
        if (lane < LANES) shared.partial[warp][slice.first + g] = peak[g];
    }
    __syncthreads();
    if (threadIdx.x < GROUP) {
        float largest = -INFINITE;
#pragma unroll 1
        for (int i = 0; i < WARPS; ++i) largest = fmaxf(largest, shared.partial[i][threadIdx.x]);
#pragma unroll 1
        for (int other = 0; other < place.active; ++other) *place.of(&shared.peak[place.rank][threadIdx.x], other) = largest;
    }
    place.synchronise();
    float smallest = INFINITE;
#pragma unroll
    for (int g = 0; g < COLUMNS; ++g) {
        float largest = -INFINITE;
#pragma unroll 1
        for (int other = 0; other < place.active; ++other) largest = fmaxf(largest, shared.peak[other][slice.first + g]);
        if (!(largest > -INFINITE)) largest = 0.0f;
        weights.set(g, g < slice.group ? largest : 0.0f, g < slice.group ? 1.0f : 0.0f);
        if (g < slice.group) smallest = fminf(smallest, largest);
    }
    weights.finish(smallest);
}

}  // namespace kvskim::selection
