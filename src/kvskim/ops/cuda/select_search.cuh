// Finds the best k pages of a cluster without sorting, for a k that is known.
//
// A larger key comes first, and among equal keys the lower page. The search narrows a range of keys that holds the k-th: each pass counts the keys
// of the range in 256 bins and goes on with the bin that the k-th lies in. It ends
//   - when that bin has few pages, mostly after one pass: they are listed, and the k-th is found by comparing all with all; or
//   - when all keys of the range are equal, however many they are: then the first of them in page order are taken.
// Every block of a cluster follows the same range. A pass costs one exchange, of histograms and of what the blocks have in the range and above it;
// the list costs another.
#pragma once

#include "select_bins.cuh"
#include "select_rows.cuh"

namespace kvskim::selection {

constexpr int PAGE_BITS = 19;
// Each pass but the first divides the range, at first of up to 2^32 keys, by 256; the last finds one key left.
constexpr int PASSES = 6;
constexpr int LISTED = 128;
// Bytes from the histogram of one block to that of the next: 16-bit counts, a RangeTally, and a gap that keeps four blocks in different banks.
constexpr int HISTOGRAM_STRIDE = 2 * BINS + 32;

// What a warp or a block has in the range of a pass.
struct alignas(16) RangeTally {
    uint32_t pages;  // how many above the range, and 2^16 times how many inside; a block has at most 2^15
    float mass;      // finite keys above the range, added up
    uint32_t lowest, highest;  // ordered bits of the keys inside
};

struct alignas(16) SearchShared {
    uint32_t bins[PASSES][BINS];  // of this block
    uint32_t merged[BINS];        // of the cluster
    RangeTally tally[2][WARPS];   // of each warp, for this pass and the one before
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

// A page's place in the order of a selection as a whole number. No two are equal.
__device__ __forceinline__ uint64_t order_value(uint32_t bits, int page) {
    return static_cast<uint64_t>(bits) << PAGE_BITS | static_cast<uint32_t>((1 << PAGE_BITS) - 1 - page);
}

__device__ __forceinline__ int page_of(uint64_t value) { return (1 << PAGE_BITS) - 1 - static_cast<int>(value & ((1 << PAGE_BITS) - 1)); }

// Keys from low to high (ordered bits), one of which is the k-th.
struct Range {
    uint32_t low, high;
    int above;   // pages of the cluster whose keys are larger
    int inside;  // pages of the cluster in the range

    // Width of a bin of the next pass, as a power of two.
    __device__ int shift() const { return max(24 - __clz(static_cast<int>(high - low)), 0); }
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

// Adds up what the lanes have; all lanes get the sums.
__device__ __forceinline__ RangeTally sum_of_warp(const RangeTally& mine) {
    return {warp_sum(mine.pages), warp_sum(mine.mass), __reduce_min_sync(0xffffffffu, mine.lowest), __reduce_max_sync(0xffffffffu, mine.highest)};
}

// Where this block's part of an exchange lies in each block.
__device__ __forceinline__ uint8_t* part_of(uint8_t* inbox, int rank) { return inbox + rank * HISTOGRAM_STRIDE; }

// Sends this block's histogram, and from the second pass on its tally, to all blocks, waits for theirs, and adds the histograms up. This block's
// must be complete.
__device__ __forceinline__ void merge_histograms(SearchShared& search, uint8_t* inbox, const Place& place, int pass, const RangeTally& of_block) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Arrival& arrival = search.histograms_arrive[pass];
    if (threadIdx.x == 0) expect(arrival, place.active * (2 * BINS + (pass > 0 ? static_cast<uint32_t>(sizeof(RangeTally)) : 0)));
    if (warp < place.active) {
        const uint4* from = reinterpret_cast<const uint4*>(search.bins[pass]) + 2 * lane;
        const uint4 a = from[0], b = from[1];
        const uint4 packed = {a.x | a.y << 16, a.z | a.w << 16, b.x | b.y << 16, b.z | b.w << 16};
        uint4* to = reinterpret_cast<uint4*>(part_of(inbox, place.rank));
        send(to + lane, packed, arrival, warp);
        if (pass > 0 && lane == 0)
            send(to + 32, uint4{of_block.pages, __float_as_uint(of_block.mass), of_block.lowest, of_block.highest}, arrival, warp);
    }
    wait(arrival);
    // Each warp adds up 16 bins: 8 words with two counts each, of 4 blocks at a time.
    static_assert(16 * WARPS == BINS);
    const int word = lane % 8;
    uint32_t even = 0, odd = 0;
#pragma unroll
    for (int i = 0; i < MAX_CLUSTER / 4; ++i) {
        const int other = lane / 8 + 4 * i;
        const uint32_t both = other < place.active ? reinterpret_cast<const uint32_t*>(part_of(inbox, other))[8 * warp + word] : 0;
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

// The lowest `count` bits of those set in `bits`; count is at most their number.
__device__ __forceinline__ uint32_t lowest_bits(uint32_t bits, int count) {
    int end = 0;  // the most positions with at most so many bits
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        if (__popc(bits & ((1u << (end + step)) - 1)) <= count) end += step;
    // Position 31 is left: it is taken only where all are.
    return count == __popc(bits) ? bits : bits & ((1u << end) - 1);
}

// Adds to `rows` the first `left` pages of `equal` in page order, or all; left may be negative.
__device__ __forceinline__ void keep_first(Rows& rows, const Rows& equal, int left) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int part = 0; part < Rows::PARTS; ++part) {
        const int own = __popc(equal.bits[part]);
        int upto = own;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, upto, distance);
            if (lane >= distance) upto += other;
        }
        rows.bits[part] |= lowest_bits(equal.bits[part], min(max(left - (upto - own), 0), own));
        left -= __shfl_sync(0xffffffffu, upto, 31);
    }
}

// Selects the best k pages. k is at least 1 and at most the number of pages in the cluster. `counted`: this block's keys are in the histogram
// of the first pass already; otherwise it is empty. The keys from warp_begin to warp_end are those of this warp, and each lane reads here
// those that it wrote; first_page is the index of the block's first page. For all threads of all active blocks.
template <typename FirstBins>
__device__ __forceinline__ Selection select_best(Shared& shared, SearchShared& search, uint8_t* const inbox, const Place& place, const float* keys,
                                                 int warp_begin, int warp_end, int first_page, const FirstBins& first_bins, bool is_signed,
                                                 bool counted, int k) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (!counted) {
#pragma unroll 1
        for (int i = warp_begin + lane; i < warp_end; i += 32) atomicAdd(&search.bins[0][first_bins.bin(ordered_bits(keys[i], is_signed))], 1u);
    }
    Range range = {0, 0xffffffffu, 0, 0};
    Rows above, inside;
    float mass;
    int pass = 0, bin;
#pragma unroll 1
    for (;; ++pass) {
        __syncthreads();
        RangeTally block = {0, 0.0f, 0, 0};
        uint32_t before = 0;  // pages above and inside that lie before this warp, packed as in a tally
        if (pass > 0) {
            const RangeTally of_warp = lane < WARPS ? search.tally[pass % 2][lane] : RangeTally{0, 0.0f, 0xffffffffu, 0};
            before = warp_sum(lane < warp ? of_warp.pages : 0u);
            block = sum_of_warp(of_warp);
        }
        if (!place.alone()) merge_histograms(search, inbox + inbox_offset(place, pass), place, pass, block);
        if (pass > 0) {
            int above_before = before & 0xffff, inside_before = before >> 16;
            if (!place.alone()) {
                RangeTally of_rank = {0, 0.0f, 0xffffffffu, 0};
                if (lane < place.active) of_rank = *reinterpret_cast<const RangeTally*>(part_of(inbox + inbox_offset(place, pass), lane) + 2 * BINS);
                above_before += warp_sum(lane < place.rank ? static_cast<int>(of_rank.pages & 0xffff) : 0);
                inside_before += warp_sum(lane < place.rank ? static_cast<int>(of_rank.pages >> 16) : 0);
                block = sum_of_warp(of_rank);  // its packed counts may overflow, and are not used
            }
            if (block.lowest == block.highest) {
                const int wanted = k - range.above;
                const float key = key_of_bits(block.lowest, is_signed);
                keep_first(above, inside, wanted - inside_before);
                return {above, above_before + min(inside_before, wanted), k, block.mass + (key < INFINITE ? wanted * key : 0.0f)};
            }
        }
        const Found found = find_bin(place.alone() ? search.bins[pass] : search.merged, k - range.above);
        range.above += found.above;
        range.inside = found.inside;
        bin = found.bin;
        if (pass == 0) {
            const KeyRange of_bin = first_bins.range(bin);
            range.low = of_bin.low, range.high = of_bin.high;
        } else {
            const int shift = range.shift();
            const uint32_t low = range.low + (static_cast<uint32_t>(bin) << shift);
            range.low = max(low, block.lowest);
            range.high = min(low + ((1u << shift) - 1), block.highest);
        }

        // Pages above the range are selected; those inside are listed, or counted in the bins of the next pass.
        const bool few = range.inside <= LISTED;
        const int shift = range.shift();
        RangeTally tally = {0, 0.0f, 0xffffffffu, 0};
        above = inside = Rows{};
        mass = 0.0f;
#pragma unroll 1
        for (int first = warp_begin; first < warp_end; first += 32) {
            const int i = first + lane;
            const float key = i < warp_end ? keys[i] : 0.0f;
            const uint32_t bits = ordered_bits(key, is_signed);
            const bool possible = i < warp_end && bits >= range.low;
            if (!__any_sync(0xffffffffu, possible)) continue;
            const bool is_above = possible && bits > range.high, is_inside = possible && bits <= range.high;
            if (is_inside && few) search.own[atomicAdd(&search.own_length, 1u)] = order_value(bits, first_page + i);
            if (is_inside && !few) {
                atomicAdd(&search.bins[pass + 1][(bits - range.low) >> shift], 1u);
                tally.lowest = min(tally.lowest, bits), tally.highest = max(tally.highest, bits);
            }
            mass += is_above && key < INFINITE ? key : 0.0f;
            const int row = (first - warp_begin) / 32;
            above.keep(row, __ballot_sync(0xffffffffu, is_above));
            inside.keep(row, __ballot_sync(0xffffffffu, is_inside));
        }
        if (few) break;
        tally.pages = static_cast<uint32_t>(above.count()) | static_cast<uint32_t>(inside.count()) << 16;
        tally.mass = mass;
        tally = sum_of_warp(tally);
        if (lane == 0) search.tally[(pass + 1) % 2][warp] = tally;
    }

    Totals totals = total_of_block(shared, CUTTING, {above.count(), 0, mass, 0});
    const uint64_t* list = search.own;
    if (!place.alone()) {
        list = search.listed;
        if (warp < place.active) {
            // The histograms have told every block where its part of the list begins.
            const int own_length = search.own_length;
            const int begin = warp_sum(lane < place.rank ? reinterpret_cast<const uint16_t*>(part_of(inbox + inbox_offset(place, pass), lane))[bin] : 0);
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
