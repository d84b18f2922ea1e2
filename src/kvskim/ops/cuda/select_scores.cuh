// What turns the scores of a page into its ranking key, and the sums over a request that this needs.
#pragma once

#include "common.cuh"
#include "select_cluster.cuh"

namespace kvskim::selection {

constexpr float EXPONENT_LIMIT = 83.0f;
// So many threads add up the partial sums, whatever the size of the block: the order of the additions, and so the last bit of every
// mass, must not depend on how a launch was cut into blocks.
constexpr int SUMMING_THREADS = 512;

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

// The scores of one page for all query heads of the group; padded columns are zeroed when they are read.
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

    __device__ __forceinline__ __half2 pair(int i, const uint32_t (&used)[GROUP / 2]) const {
        const uint32_t word = words[i] & used[i];
        return *reinterpret_cast<const __half2*>(&word);
    }
};

// What turns scores into keys: sum_g weight_g exp(min(score_g - offset_g, 83)); for combine "max", max_g (score_g + offset_g).
template <int GROUP>
struct Weights {
    float offset[GROUP];
    float weight[GROUP];
    uint32_t used[GROUP / 2];  // mask of the columns that are query heads

    __device__ __forceinline__ explicit Weights(int group) {
#pragma unroll
        for (int i = 0; i < GROUP / 2; ++i) used[i] = (2 * i < group ? 0xffffu : 0u) | (2 * i + 1 < group ? 0xffff0000u : 0u);
    }

    __device__ __forceinline__ float sum(const Page<GROUP>& page) const {
        float total = 0.0f;
        __half2 largest = __half2half2(__ushort_as_half(0));
#pragma unroll
        for (int i = 0; i < GROUP / 2; ++i) {
            const __half2 pair = page.pair(i, used);
            largest = __hmax2_nan(largest, pair);
            const float2 score = __half22float2(pair);
            // Subtract first and scale after: the difference is small where the mass is large, so little is lost by rounding.
            const float x = min_nan((score.x - offset[2 * i]) * kLog2E, EXPONENT_LIMIT * kLog2E);
            const float y = min_nan((score.y - offset[2 * i + 1]) * kLog2E, EXPONENT_LIMIT * kLog2E);
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
            const float2 score = __half22float2(page.pair(i, used));
            if (2 * i < group) largest = max_nan(largest, score.x + offset[2 * i]);
            if (2 * i + 1 < group) largest = max_nan(largest, score.y + offset[2 * i + 1]);
        }
        return largest + 0.0f;  // no -0
    }
};

// Adds up the valid partial sums in a fixed order: shared.weight[g] = 1 / ((1 + sum_g) * group). `first` is the partial sum that comes
// first for this thread, `own_forced` the value of the query head of this warp; their loads need not wait for the length.
template <int GROUP, int THREADS>
__device__ void reduce_partials(Shared<THREADS / 32>& shared, const float* partials, float first, float own_forced, int chunks,
                                int group) {
    constexpr int WARPS = THREADS / 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sum = threadIdx.x < chunks * GROUP ? first : 0.0f;
    if (threadIdx.x < SUMMING_THREADS)
        for (int i = threadIdx.x + SUMMING_THREADS; i < chunks * GROUP; i += SUMMING_THREADS) sum += partials[i];
#pragma unroll
    for (int distance = 16; distance >= GROUP; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (lane < GROUP) shared.partial[warp][lane] = sum;
    __syncthreads();
    if (warp < GROUP) {
        sum = warp_sum(lane < WARPS ? shared.partial[lane][warp] : 0.0f);
        if (lane == 0) {
            shared.weight[warp] = 1.0f / ((1.0f + sum) * group);
            shared.forced[warp] = own_forced;
        }
    }
    __syncthreads();
}

// The largest finite score of every query head over the whole cluster, 0 if there is none, into weights.offset.
template <int GROUP, int THREADS>
__device__ void find_peaks(Shared<THREADS / 32>& shared, const Place& place, const __half* scores, int length, Weights<GROUP>& weights) {
    constexpr int WARPS = THREADS / 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float peak[GROUP];
#pragma unroll
    for (int g = 0; g < GROUP; ++g) peak[g] = -INFINITE;
#pragma unroll 1
    for (int i = threadIdx.x; i < length; i += THREADS) {
        Page<GROUP> page;
        page.load(scores + static_cast<size_t>(i) * GROUP);
#pragma unroll
        for (int g = 0; g < GROUP / 2; ++g) {
            const float2 score = __half22float2(page.pair(g, weights.used));
            if (score.x < INFINITE) peak[2 * g] = fmaxf(peak[2 * g], score.x);
            if (score.y < INFINITE) peak[2 * g + 1] = fmaxf(peak[2 * g + 1], score.y);
        }
    }
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) peak[g] = fmaxf(peak[g], __shfl_xor_sync(0xffffffffu, peak[g], distance));
        if (lane == 0) shared.partial[warp][g] = peak[g];
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
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        float largest = -INFINITE;
#pragma unroll 1
        for (int other = 0; other < place.active; ++other) largest = fmaxf(largest, shared.peak[other][g]);
        weights.offset[g] = largest > -INFINITE ? largest : 0.0f;
    }
}

}  // namespace kvskim::selection
