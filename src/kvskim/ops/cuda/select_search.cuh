// Finds the best k pages of a cluster without sorting, for a k that is known.
//
// A page's place in the order of a selection is a whole number, its order value: the bits of its key, and below them its index, so that a
// larger key comes first and among equal keys the lower page. No two are equal. The search narrows a range of values that holds the k-th:
// each pass counts the values of the range in 256 bins and goes on with the bin that the k-th lies in. As soon as that bin has few values,
// one mostly, at most two passes, they are listed and the k-th is found by comparing all with all. Every block of a cluster follows the
// same range; a pass costs one exchange of histograms, the list another.
#pragma once

#include "select_rows.cuh"

namespace kvskim::selection {

constexpr int BINS = 256;
constexpr int PAGE_BITS = 19;
constexpr int ORDER_BITS = 32 + PAGE_BITS;
// Each pass but the first divides the range by 256, and a range of up to LISTED values ends the search.
constexpr int PASSES = 8;
constexpr int LISTED = 128;
// Bytes from the histogram of one block to that of the next: 16-bit counts, and a gap that keeps four blocks in different banks.
constexpr int HISTOGRAM_STRIDE = 2 * BINS + 32;

struct alignas(16) SearchShared {
    uint32_t bins[PASSES][BINS];  // of this block
    uint32_t merged[BINS];        // of the cluster
    uint64_t own[LISTED];         // order values in the last range, of this block
    uint64_t listed[LISTED];      // and of the cluster
    float sorted[LISTED];         // keys of those that are selected, in order
    uint64_t last;                // the k-th order value
    uint32_t own_length;
    Arrival histograms_arrive[PASSES];
};

// Where the histograms of a pass arrive, in the dynamic shared memory; two passes later they are replaced. No block can be two passes ahead of
// another, because it needs the histograms of all for the pass between.
constexpr int inbox_bytes(int cluster) { return cluster > 1 ? 2 * cluster * HISTOGRAM_STRIDE : 0; }
__device__ __forceinline__ int inbox_offset(const Place& place, int pass) { return pass % 2 * place.active * HISTOGRAM_STRIDE; }

// Bits that order like the keys. Keys are never NaN nor -0; without `is_signed` they are not negative.
__device__ __forceinline__ uint32_t ordered_bits(float key, bool is_signed) {
    const uint32_t bits = __float_as_uint(key);
    if (!is_signed) return bits;
    return (bits & 0x80000000u) ? ~bits : (bits | 0x80000000u);
}

__device__ __forceinline__ float key_of_bits(uint32_t ordered, bool is_signed) {
    if (!is_signed) return __uint_as_float(ordered);
    return __uint_as_float((ordered & 0x80000000u) ? (ordered & 0x7fffffffu) : ~ordered);
}

__device__ __forceinline__ uint64_t order_value(uint32_t bits, int page) {
    return static_cast<uint64_t>(bits) << PAGE_BITS | static_cast<uint32_t>((1 << PAGE_BITS) - 1 - page);
}

__device__ __forceinline__ int page_of(uint64_t value) { return (1 << PAGE_BITS) - 1 - static_cast<int>(value & ((1 << PAGE_BITS) - 1)); }

// How the first pass divides all keys: bin = (bits >> shift) - lowest, limited to 0..255.
struct FirstBins {
    int shift;
    int lowest;

    // Masses: 32 octaves below `2^top`, eight bins each. Signed keys: sign and the leading seven bits of the exponent.
    __device__ static FirstBins choose(bool is_signed, int top) { return is_signed ? FirstBins{24, 0} : FirstBins{20, (127 + top - 32) * 8}; }

    __device__ __forceinline__ int bin(uint32_t bits) const { return min(max(static_cast<int>(bits >> shift) - lowest, 0), BINS - 1); }
};

// Order values from low to low + size - 1, one of which is the k-th.
struct Range {
    uint64_t low;
    uint64_t size;
    int above;   // pages of the cluster whose values are larger
    int inside;  // pages of the cluster in the range

    __device__ __forceinline__ bool holds(uint64_t value) const { return value - low < size; }
    // Width of a bin of the next pass, as a power of two.
    __device__ int shift() const { return max(64 - __clzll(static_cast<long long>(size - 1)) - 8, 0); }
};

// The bin that holds the `wanted`-th page from the top. Every warp finds it by itself, which saves telling the others.
struct Found {
    int bin, above, inside;
};

__device__ __forceinline__ Found find_bin(const uint32_t* bins, int wanted) {
    const int lane = threadIdx.x % 32, first = 8 * (31 - lane);  // lane 0 has the highest bins
    const uint4 low = *reinterpret_cast<const uint4*>(bins + first), high = *reinterpret_cast<const uint4*>(bins + first + 4);
    const uint32_t counts[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += counts[i];
    int upto = sum;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, upto, distance);
        if (lane >= distance) upto += other;
    }
    int above = upto - sum;
    const int holder = __ffs(__ballot_sync(0xffffffffu, above < wanted && wanted <= upto)) - 1;
    Found found = {0, 0, 0};
#pragma unroll
    for (int i = 7; i >= 0; --i) {
        if (above < wanted) found = {first + i, above, static_cast<int>(counts[i])};
        above += counts[i];
    }
    return {__shfl_sync(0xffffffffu, found.bin, holder), __shfl_sync(0xffffffffu, found.above, holder),
            __shfl_sync(0xffffffffu, found.inside, holder)};
}

// Sends this block's histogram to all blocks, waits for theirs, and adds them up. This block's must be complete.
__device__ __forceinline__ void merge_histograms(SearchShared& search, uint8_t* inbox, const Place& place, int pass) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    inbox += inbox_offset(place, pass);
    Arrival& arrival = search.histograms_arrive[pass];
    if (threadIdx.x == 0) expect(arrival, place.active * 2 * BINS);
    if (warp < place.active) {
        const uint4* from = reinterpret_cast<const uint4*>(search.bins[pass]) + 2 * lane;
        const uint4 a = from[0], b = from[1];
        const uint4 packed = {a.x | a.y << 16, a.z | a.w << 16, b.x | b.y << 16, b.z | b.w << 16};
        send(reinterpret_cast<uint4*>(inbox + place.rank * HISTOGRAM_STRIDE) + lane, packed, arrival, warp);
    }
    wait(arrival);
    // Each warp adds up 16 bins: 8 words with two counts each, of 4 blocks at a time.
    static_assert(16 * WARPS == BINS);
    const int word = lane % 8;
    uint32_t even = 0, odd = 0;
#pragma unroll
    for (int i = 0; i < MAX_CLUSTER / 4; ++i) {
        const int other = lane / 8 + 4 * i;
        const uint32_t both = other < place.active ? reinterpret_cast<const uint32_t*>(inbox + other * HISTOGRAM_STRIDE)[8 * warp + word] : 0;
        even += both & 0xffff, odd += both >> 16;
    }
#pragma unroll
    for (int distance = 8; distance < 32; distance *= 2) {
        even += __shfl_xor_sync(0xffffffffu, even, distance);
        odd += __shfl_xor_sync(0xffffffffu, odd, distance);
    }
    if (lane < 8) *reinterpret_cast<uint2*>(&search.merged[16 * warp + 2 * word]) = uint2{even, odd};
    __syncthreads();
}

// Selects the best k pages. k is at least 1 and at most the number of pages in the cluster. `counted`: this block's keys are in the histogram
// of the first pass already; otherwise it is empty. The keys from warp_begin to warp_end are those of this warp, and each lane reads here
// those that it wrote; first_page is the index of the block's first page. For all threads of all active blocks.
__device__ __forceinline__ Selection select_best(Shared& shared, SearchShared& search, uint8_t* inbox, const Place& place, const float* keys,
                                                 int warp_begin, int warp_end, int first_page, FirstBins first_bins, bool is_signed,
                                                 bool counted, int k) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Range range = {0, 1ull << ORDER_BITS, 0, 0};
    Found found;
#pragma unroll 1
    for (int pass = 0;; ++pass) {
        const int shift = range.shift();
        if (pass > 0 || !counted) {
#pragma unroll 1
            for (int i = warp_begin + lane; i < warp_end; i += 32) {
                const uint32_t bits = ordered_bits(keys[i], is_signed);
                const uint64_t value = order_value(bits, first_page + i);
                if (pass == 0 || range.holds(value))
                    atomicAdd(&search.bins[pass][pass == 0 ? first_bins.bin(bits) : static_cast<int>((value - range.low) >> shift)], 1u);
            }
        }
        __syncthreads();
        if (!place.alone()) merge_histograms(search, inbox, place, pass);
        found = find_bin(place.alone() ? search.bins[pass] : search.merged, k - range.above);
        range.above += found.above;
        range.inside = found.inside;
        if (pass == 0) {
            const int width = first_bins.shift + PAGE_BITS;
            const uint64_t end = found.bin == BINS - 1 ? 1ull << ORDER_BITS : static_cast<uint64_t>(found.bin + 1 + first_bins.lowest) << width;
            range.low = found.bin == 0 ? 0 : static_cast<uint64_t>(found.bin + first_bins.lowest) << width;
            range.size = end - range.low;
        } else {
            const uint64_t offset = static_cast<uint64_t>(found.bin) << shift, left = range.size - offset, width = 1ull << shift;
            range.low += offset;
            range.size = left < width ? left : width;
        }
        if (range.inside <= LISTED) {
            inbox += inbox_offset(place, pass);
            break;
        }
    }

    // Pages above the range are selected; those inside are listed.
    const uint32_t lowest_bits = static_cast<uint32_t>(range.low >> PAGE_BITS);
    Rows above, inside;
    float mass = 0.0f;
#pragma unroll 1
    for (int first = warp_begin; first < warp_end; first += 32) {
        const int i = first + lane;
        const float key = i < warp_end ? keys[i] : 0.0f;
        const uint32_t bits = ordered_bits(key, is_signed);
        const bool possible = i < warp_end && bits >= lowest_bits;
        if (!__any_sync(0xffffffffu, possible)) continue;
        const uint64_t value = order_value(bits, first_page + i);
        const bool is_above = possible && value >= range.low + range.size, is_inside = possible && range.holds(value);
        if (is_inside) search.own[atomicAdd(&search.own_length, 1u)] = value;
        mass += is_above && key < INFINITE ? key : 0.0f;
        const int row = (first - warp_begin) / 32;
        above.keep(row, __ballot_sync(0xffffffffu, is_above));
        inside.keep(row, __ballot_sync(0xffffffffu, is_inside));
    }
    Totals totals = total_of_block(shared, CUTTING, {above.count(), 0, mass, 0});
    const uint64_t* list = search.own;
    if (!place.alone()) {
        list = search.listed;
        if (warp < place.active) {
            // The histograms have told every block where its part of the list begins.
            const int own_length = search.own_length;
            const int begin = warp_sum(lane < place.rank ? reinterpret_cast<const uint16_t*>(inbox + lane * HISTOGRAM_STRIDE)[found.bin] : 0);
            for (int i = lane; i < own_length; i += 32)
                send(&search.listed[begin + i], search.own[i], shared.tallies_arrive[CUTTING], warp);
        }
        total_of_cluster(shared, place, CUTTING, totals, range.inside * static_cast<uint32_t>(sizeof(uint64_t)));
    }

    // Every warp ranks some of the list.
    const int wanted = k - range.above;
    uint64_t others[LISTED / 32];
#pragma unroll
    for (int j = 0; j < LISTED / 32; ++j) others[j] = lane + 32 * j < range.inside ? list[lane + 32 * j] : 0;
#pragma unroll 1
    for (int i = warp; i < range.inside; i += WARPS) {
        const uint64_t value = list[i];
        int larger = 0;
#pragma unroll
        for (int j = 0; j < LISTED / 32; ++j) larger += others[j] > value;
        larger = warp_sum(larger);
        if (lane == 0 && larger < wanted) {
            const float key = key_of_bits(static_cast<uint32_t>(value >> PAGE_BITS), is_signed);
            search.sorted[larger] = key < INFINITE ? key : 0.0f;
            if (larger == wanted - 1) search.last = value;
        }
    }
    __syncthreads();
    const uint64_t last = search.last;

    Selection selection = {above, totals.above_before, k, totals.all.mass};
    int listed_before = 0;
    float listed_mass = 0.0f;
#pragma unroll
    for (int j = 0; j < LISTED / 32; ++j) {
        const int i = lane + 32 * j;
        listed_before += i < range.inside && others[j] >= last && page_of(others[j]) < first_page + warp_begin;
        listed_mass += i < wanted ? search.sorted[i] : 0.0f;
    }
    selection.before += warp_sum(listed_before);
    selection.mass += warp_sum(listed_mass);
#pragma unroll
    for (int part = 0; part < Rows::PARTS; ++part) {
        for (uint32_t left = inside.bits[part]; left; left &= left - 1) {
            const int bit = __ffs(static_cast<int>(left)) - 1, i = warp_begin + Rows::index(part, lane, bit);
            if (order_value(ordered_bits(keys[i], is_signed), first_page + i) >= last) selection.rows.bits[part] |= 1u << bit;
        }
    }
    return selection;
}

}  // namespace kvskim::selection
