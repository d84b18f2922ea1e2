// How the first pass of the search divides all keys into bins. Which bin a key falls into never falls with the key, and the keys of a bin are known
// exactly.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kvskim::selection {

constexpr int BINS = 256;

// Keys by their ordered bits (ordered_bits in select_search.cuh), both ends included.
struct KeyRange {
    uint32_t low;
    uint32_t high;
};

// By leading bits. Keys that are not negative: 32 octaves below `2^top`, eight bins each. Signed keys: sign and the leading seven bits of the
// exponent.
struct PlainBins {
    int shift;
    int lowest;

    __device__ static PlainBins choose(bool is_signed, int top) { return is_signed ? PlainBins{24, 0} : PlainBins{20, (127 + top - 32) * 8}; }

    __device__ __forceinline__ int bin(uint32_t bits) const { return min(max(static_cast<int>(bits >> shift) - lowest, 0), BINS - 1); }

    __device__ KeyRange range(int bin) const {
        const uint32_t low = static_cast<uint32_t>(bin + lowest) << shift, width = 1u << shift;
        return {bin == 0 ? 0 : low, bin == BINS - 1 ? 0xffffffffu : low + (width - 1)};
    }
};

// Of masses, by their distance from a pivot, which should be their mean: where all pages have about the same mass, leading bits would put them
// into the same bin. At or above the pivot: eight bins to each octave of the distance. Below it: eight to each octave of the key, for where few pages
// hold most of the mass, and the k-th page lies far below the mean.
struct PivotBins {
    static constexpr int FINEST = 12;       // the bins begin at a distance of the pivot / 2^FINEST, as far as there are enough of them
    static constexpr int LEAST_LOWER = 48;  // bins below the pivot
    float pivot;
    int lowest;  // leading bits of the distance that would fall into bin 0
    int lower;   // bins below the pivot

    // Masses add up to at most 1, so the k-th is at most 1 / k: what is above the power of two at or above that needs no bins.
    __device__ static PivotBins choose(float mean, int k) {
        const float pivot = mean > 0.0f && mean < 1.0f ? mean : 0.0f;
        const int top = 127 - (31 - __clz(max(k, 1)));
        const int octaves = max(top - static_cast<int>(__float_as_uint(pivot) >> 23) + FINEST, 1);
        return {pivot, top * 8 - BINS, max(BINS - 8 * octaves, LEAST_LOWER)};
    }

    // The distance is rounded down: it reaches the lower end of a bin if and only if the exact distance does.
    __device__ __forceinline__ int bin(uint32_t bits) const {
        const uint32_t pivot_bits = __float_as_uint(pivot);
        const int distance = static_cast<int>(__float_as_uint(__fsub_rd(__uint_as_float(bits), pivot))) >> 20;
        const int above = min(max(distance - lowest, lower), BINS - 1);
        const int below = max(static_cast<int>(bits >> 20) - static_cast<int>(pivot_bits >> 20) + lower - 1, 0);
        return bits >= pivot_bits ? above : below;
    }

    // The smallest key in the bin or above it, for a bin above `lower`.
    __device__ uint32_t lowest_of(int bin) const {
        return __float_as_uint(__fadd_ru(pivot, __uint_as_float(static_cast<uint32_t>(bin + lowest) << 20)));
    }

    __device__ KeyRange range(int bin) const {
        const uint32_t pivot_bits = __float_as_uint(pivot);
        if (bin < lower) {
            const uint32_t cell = (pivot_bits >> 20) - (lower - 1) + bin;
            return {bin == 0 ? 0 : cell << 20, bin == lower - 1 ? pivot_bits - 1 : ((cell + 1) << 20) - 1};
        }
        return {bin == lower ? pivot_bits : lowest_of(bin), bin == BINS - 1 ? 0x7f800000u : lowest_of(bin + 1) - 1};
    }
};

}  // namespace kvskim::selection
