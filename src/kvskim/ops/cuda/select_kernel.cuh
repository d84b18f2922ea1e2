// Scores -> page table: which pages each (request, kv head) attends. One launch, one thread-block cluster per (request, kv head).
//
// Every block of the cluster takes an equal, contiguous part of the request's candidate pages, so the cost follows the live
// length; blocks without pages return at once. Per block:
//   1. add up the partial sums of the score kernel: the normaliser of every query head;
//   2. read the scores once; the ranking key of every page (its group-mean mass) stays in shared memory;
//   3. find what is selected: for a threshold within its limits a count is all it takes; the best k are found by select_search.cuh; how many
//      they are under the rule coverage, by select_descent.cuh;
//   4. prefix sums over warps and blocks, then write the selected pages in ascending order.
// Of more than 16 query heads a lane has eight, and the lanes of a page add up what they have (select_scores.cuh).
// What limits it is latency: of two loads in a row, of about 2000 exponentials per block, and of each exchange among blocks.
// The rules are those of kvskim/rules; equal keys are taken in page order. Whatever the inputs, nothing is written beyond
// table_capacity entries of a table.
#pragma once
#include <map>
#include <mutex>
#include <tuple>

#include "common.cuh"
#include "select_descent.cuh"
#include "select_scores.cuh"
#include "select_search.cuh"

namespace kvskim::selection {

enum Rule { THRESHOLD = 0, BUDGET = 1, COVERAGE = 2 };
enum Combine { SOFTMAX = 0, PEAK = 1, MAXIMUM = 2 };

constexpr int TILE_PAGES = 16;
constexpr int FRACTION_BITS = 40;
constexpr long long FRACTION_SLACK = 1 << 20;
// Up to so many pages one block is faster alone than with others, and fewer than so many are not worth a block of a cluster.
constexpr int PAGES_ALONE = 2048;
constexpr int LEAST_PAGES = 1024;
// Of 16 columns half as many, of more 16 / columns of them: they take longer.
__host__ __device__ constexpr int pages_of(int pages, int columns) { return columns < 16 ? pages : columns == 16 ? pages / 2 : pages * 16 / columns; }

struct Parameters {
    const __half* scores;    // [requests, heads, page_capacity, padded group]
    const float* base;       // [requests, heads, padded group]
    const float* forced;     // [requests, heads, padded group]
    const float* partials;   // [requests, heads, chunks, padded group]
    const int* seq_lens;     // [requests]
    const int* ready;        // [1]
    int* pages;              // [requests, heads, table_capacity]
    int* counts;             // [requests, heads]
    float* covered;          // [requests, heads]
    float* keys_out;         // [requests, heads, page_capacity] or null: the ranking keys, for tests
    long long fraction;      // budget in units of 2^-40 of all pages; used when budget_pages < 0
    unsigned long long target;  // coverage in units of 2^-31
    int heads, page_capacity, group, chunks, table_capacity;
    int rule, combine;
    float tau;
    int budget_pages, min_pages, limit;  // limit: most candidates, from max_pages and table_capacity
    int sink, window;
    int full_pages;               // a request of at most so many pages is attended whole
    int cluster, block_capacity;  // blocks per cluster, pages that fit in the shared memory of one
    bool settled;                 // the lengths may be read before the kernel ahead has ended
};

__device__ __forceinline__ int budget_of(const Parameters& p, int total_pages) {
    const long long pages = p.budget_pages >= 0
                                ? p.budget_pages
                                : (total_pages * p.fraction + (1ll << FRACTION_BITS) - 1 - FRACTION_SLACK) >> FRACTION_BITS;
    return static_cast<int>(max(pages - p.sink - p.window, 0ll));
}

// RESIDENT: blocks that share a processor. One has registers to load all pages of a thread, mostly, before the first is needed.
template <int GROUP, bool IS_SOFTMAX, bool BY_MASS, int RESIDENT>
__global__ void __launch_bounds__(THREADS, RESIDENT) select_kernel(const __grid_constant__ Parameters p) {
    using Columns = Slice<GROUP>;
    constexpr bool SLICED = Columns::LANES > 1;
    constexpr int UNROLL = SLICED ? 1 : GROUP < 16 && RESIDENT == 1 ? 8 : 4;  // rows of 32 pages under way
    constexpr int LOADS = UNROLL * Columns::LANES;
    constexpr int TOGETHER = 2;                   // pages of a thread that are turned into keys together
    // Partial sums of a thread that are loaded before the length of the request is known. Alone on a processor as many as four rows have where one wave of
    // the score kernel's warps, up to 16 on each of 132 processors, is shared out among them: a rest would cost the latency of a load more.
    constexpr int EARLY = RESIDENT == 1 && GROUP <= 16 ? (GROUP == 8 ? 9 : 8) : 4;
    constexpr int LEAST = pages_of(LEAST_PAGES, GROUP);
    __shared__ Shared shared;
    __shared__ ColumnsShared<GROUP> of_columns;
    extern __shared__ __align__(16) float keys[];  // [block_capacity], then what the search or the descent needs
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    SearchShared& search = *reinterpret_cast<SearchShared*>(keys + p.block_capacity);
    uint8_t* inbox = reinterpret_cast<uint8_t*>(&search + 1);
    uint32_t* bins = reinterpret_cast<uint32_t*>(keys + p.block_capacity);
    const Histograms histograms = {bins, bins + ALL_DESCENT_BINS, bins + 2 * ALL_DESCENT_BINS};
    constexpr int ZEROS = BY_MASS ? 3 * ALL_DESCENT_BINS : PASSES * BINS;
#pragma unroll 1
    for (int i = threadIdx.x; i < ZEROS / 4; i += THREADS) reinterpret_cast<uint4*>(bins)[i] = uint4{0, 0, 0, 0};
    if (threadIdx.x == 0) {
        if (!BY_MASS) search.own_length = 0;
        if (p.cluster > 1) {
            for (Arrival& arrival : shared.tallies_arrive) prepare(arrival);
            if (!BY_MASS)
                for (Arrival& arrival : search.histograms_arrive) prepare(arrival);
            publish_arrivals();
        }
    }
    // Every block of a cluster must have come so far before anything is written into its shared memory. The descent writes into what was
    // zeroed here, so with it the zeros must be visible too.
    if (p.cluster > 1) {
        if constexpr (BY_MASS) __cluster_barrier_arrive();
        else arrive_at_start();
    }
    const auto wait_for_start = [&]() {
        if (p.cluster == 1) return;
        if constexpr (BY_MASS) __cluster_barrier_wait();
        else wait_for_all_at_start();
    };
    int seq_len = p.settled ? p.seq_lens[blockIdx.z] : 0;
    wait_previous_kernel();

    const int row = blockIdx.z * p.heads + blockIdx.y;
    const auto take_whole = [&](int total_pages) {
        wait_for_start();
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            p.counts[row] = total_pages;
            p.covered[row] = total_pages ? 1.0f : 0.0f;
        }
    };
    if (p.settled) {
        // Ahead of the loads, which a block that ends would still wait for.
        const int settled_pages = (max(seq_len, 0) + kPageTokens - 1) / kPageTokens;
        if (settled_pages <= p.full_pages) return take_whole(settled_pages);
    }
    const __half* scores = p.scores + (static_cast<size_t>(row) * p.page_capacity + p.sink) * GROUP;
    const Columns slice = Columns::of_lane(p.group);
    Page<Columns::COLUMNS> loaded[LOADS];
    // The page that load u of a lane is of, in the rows from `first` on.
    auto loaded_page = [&](int first, int u) { return first + (SLICED ? (lane & ~(Columns::LANES - 1)) + u : 32 * u + lane); };
    auto scores_of = [&](int i) { return scores + static_cast<size_t>(i) * GROUP + slice.first; };
    auto load = [&](int first, int end) {
#pragma unroll
        for (int u = 0; u < LOADS; ++u) {
            const int i = loaded_page(first, u);
            if (i < end) loaded[u].load(scores_of(i));
            else loaded[u] = {};
        }
    };
    // Everything that can be on its way before the length is known: it lies within the buffers, and what is beyond the length is not used.
    if (!p.settled) seq_len = p.seq_lens[blockIdx.z];
    const int ready = *p.ready;
    const float* partials = p.partials + static_cast<size_t>(row) * p.chunks * GROUP;
    float early[EARLY];
#pragma unroll
    for (int i = 0; i < EARLY; ++i) {
        const int at = threadIdx.x + i * THREADS;
        early[i] = at < p.chunks * GROUP ? partials[at] : 0.0f;
    }
    const int column = own_column<GROUP>();
    const float own_forced = column >= 0 ? p.forced[row * GROUP + column] : 0.0f;
    const bool by_capacity = p.cluster == 1 && p.block_capacity <= UNROLL * THREADS;
    int per_warp = (p.block_capacity + THREADS - 1) / THREADS * 32;
    if (by_capacity) load(warp * per_warp, min((warp + 1) * per_warp, p.page_capacity - p.sink));
    const int total_pages = (max(seq_len, 0) + kPageTokens - 1) / kPageTokens;
    const int candidates = min(total_pages - p.window, p.page_capacity) - p.sink;
    const int most = min(candidates, p.limit);
    const int budget = p.rule == BUDGET ? min(budget_of(p, total_pages), most) : -1;
    const bool whole = total_pages <= p.full_pages || candidates <= p.min_pages || budget == candidates || ready == 0;
    Place place = {static_cast<int>(blockIdx.x), 1};
    if (whole) return take_whole(total_pages);

    // This block's pages, and within them each warp's: both contiguous, so that page order is rank, warp, iteration, lane.
    int per_block = candidates;
    if (p.cluster > 1) {
        const int least = GROUP == 16 && candidates <= 2 * LEAST ? 2 * LEAST : LEAST;  // no exchange for so few
        per_block = (max((candidates + p.cluster - 1) / p.cluster, least) + 31) / 32 * 32;
        per_block = min(per_block, p.block_capacity);
        place.active = (candidates + per_block - 1) / per_block;
        if (place.rank >= place.active) {
            wait_for_start();
            return;
        }
    }
    const int begin = place.rank * per_block;
    const int length = min(per_block, candidates - begin);
    if (!by_capacity) per_warp = (length + THREADS - 1) / THREADS * 32;
    const int warp_begin = warp * per_warp;
    const int warp_end = min(warp_begin + per_warp, length);
    scores += static_cast<size_t>(begin) * GROUP;

    // The first scores are on their way while the partial sums are added up.
    if (!by_capacity) load(warp_begin, warp_end);
    const int chunks = min(p.chunks, (total_pages - p.window + TILE_PAGES - 1) / TILE_PAGES);
    reduce_partials<GROUP, EARLY>(of_columns, partials, early, own_forced, chunks, p.group);

    Weights<Columns::COLUMNS> weights;
    auto use_mass = [&](const Columns& of) {
        float smallest = INFINITE;
#pragma unroll
        for (int g = 0; g < Columns::COLUMNS; ++g) {
            const float offset = g < of.group ? of_columns.forced[of.first + g] : 0.0f;
            weights.set(g, offset, g < of.group ? of_columns.weight[of.first + g] : 0.0f);
            if (g < of.group) smallest = min_nan(smallest, offset);
        }
        weights.finish(smallest);
    };
    if constexpr (IS_SOFTMAX) {
        use_mass(slice);
    } else {
        wait_for_start();
        if (p.combine == PEAK) {
            find_peaks<GROUP>(of_columns, place, scores, length, slice, weights);
        } else {
#pragma unroll
            for (int g = 0; g < Columns::COLUMNS; ++g) weights.shift[g] = g < slice.group ? p.base[row * GROUP + slice.first + g] : 0.0f;
        }
    }
    const bool is_signed = !IS_SOFTMAX && p.combine == MAXIMUM;
    const auto bins_for = [&](int k) {
        if constexpr (IS_SOFTMAX) {
            // The masses of all pages, with those always attended, add up to 1.
            float forced_mass = 0.0f;
            if constexpr (SLICED) {
                for (int g = lane; g < p.group; g += 32) forced_mass += of_columns.weight[g];
                forced_mass = warp_sum(forced_mass);
            } else {
#pragma unroll
                for (int g = 0; g < GROUP; ++g) forced_mass += g < p.group ? of_columns.weight[g] : 0.0f;
            }
            return PivotBins::choose(__fdividef(1.0f - forced_mass, static_cast<float>(candidates)), k);
        } else {
            return PlainBins::choose(is_signed, GROUP <= 16 ? 4 : GROUP <= 32 ? 5 : GROUP <= 64 ? 6 : 7);  // a sum of exponentials of at most 1
        }
    };
    const auto first_bins = bins_for(budget);

    // Keys. A threshold counts the pages that reach it on the way; coverage counts the broken ones, which it takes in any case; a budget
    // always needs the search, and its first histogram is made on the way.
    const bool counted = !BY_MASS && p.rule == BUDGET;
    const float count_from = !BY_MASS && p.rule == THRESHOLD ? p.tau : INFINITE;
    Rows rows;
    float mass = 0.0f;
    // Of a row of 32 pages, each lane's.
    const auto keep_key = [&](int row_begin, float value) {
        const int i = row_begin + lane;
        float key = value < INFINITE ? value : INFINITE;  // NaN too
        if (!is_signed) key = fmaxf(key, 0.0f);  // what the searches rely on, even if the partial sums are nonsense
        const bool valid = i < warp_end;
        if (valid) {
            keys[i] = key;
            if (counted) atomicAdd(&search.bins[0][first_bins.bin(ordered_bits(key, is_signed))], 1u);
            if (p.keys_out) p.keys_out[static_cast<size_t>(row) * p.page_capacity + p.sink + begin + i] = key;
        }
        if (!counted) {
            const bool reaches = valid && key >= count_from;
            rows.keep((row_begin - warp_begin) / 32, __ballot_sync(0xffffffffu, reaches));
            mass += reaches && key < INFINITE ? key : 0.0f;
        }
    };
    const auto values_of = [&](const Page<Columns::COLUMNS>* pages, float (&values)[TOGETHER]) {
        if (is_signed) {
#pragma unroll
            for (int t = 0; t < TOGETHER; ++t) values[t] = weights.maximum(pages[t], slice.group);
        } else {
            weights.template sums<TOGETHER>(pages, slice.group, values);
        }
    };
    const auto load_next = [&](int first, int u) {
        const int next = loaded_page(first, u) + 32 * UNROLL;
        if (next < warp_end) loaded[u].load(scores_of(next));
    };
#pragma unroll 1
    for (int first = warp_begin; first < warp_end; first += 32 * UNROLL) {
        if constexpr (SLICED) {
            const auto leaf = [&](int i, int j, float& low, float& high) {
                const Page<Columns::COLUMNS> both[TOGETHER] = {loaded[i], loaded[j]};
                float values[TOGETHER];
                values_of(both, values);
                low = values[0], high = values[1];
                load_next(first, i), load_next(first, j);
            };
            const auto join = [&](float a, float b) { return is_signed ? max_nan(a, b) : a + b; };
            keep_key(first, join_slices<Columns::LANES, 1>(slice.index, 0, leaf, join));
        } else {
#pragma unroll
            for (int u = 0; u < UNROLL; u += TOGETHER) {
                if (first + 32 * u >= warp_end) break;
                float values[TOGETHER];
                values_of(&loaded[u], values);
#pragma unroll
                for (int t = 0; t < TOGETHER; ++t) {
                    load_next(first, u + t);
                    keep_key(first + 32 * (u + t), values[t]);
                }
            }
        }
    }
    allow_next_kernel();
    if constexpr (IS_SOFTMAX) wait_for_start();

    // Estimated mass of the always-attended pages; for whole warps.
    const auto forced_share = [&]() {
        float share = lane < p.group ? of_columns.weight[lane] : 0.0f;
        if constexpr (SLICED)
            for (int g = lane + 32; g < p.group; g += 32) share += of_columns.weight[g];
        share = warp_sum(share);
        return share < INFINITE ? share : 0.0f;
    };

    Selection selection = {Rows{}, 0, 0, 0.0f};
    if constexpr (BY_MASS) {
        const int broken = total(shared, place, COUNTING, {rows.count(), 0, mass, 0}).all.above;
        const Goal goal = {min(max(min(p.min_pages, most), broken), most), most, p.target};
        const unsigned long long forced_mass = fixed_mass(forced_share());
        __syncthreads();
        Cut cut = {INFINITE, 0, 0};
        if (!goal.reached(0, forced_mass)) cut = find_cut(shared, place, histograms, goal, keys, length, forced_mass);
        selection = rows_of_cut(shared, place, cut, keys, warp_begin, warp_end);
    } else {
        int count = budget;
        bool found = false;
        if (p.rule == THRESHOLD) {
            const Totals totals = total(shared, place, COUNTING, {rows.count(), 0, mass, 0});
            count = min(max(totals.all.above, p.min_pages), most);
            found = count == totals.all.above;
            if (found) selection = {rows, totals.above_before, count, totals.all.mass};
        }
        if (!found && count > 0)
            selection = select_best(shared, search, inbox, place, keys, warp_begin, warp_end, begin, counted ? first_bins : bins_for(count), is_signed,
                                    counted, count);
    }
    if (selection.count >= candidates) {
        if (place.rank == 0 && threadIdx.x == 0) {
            p.counts[row] = total_pages;
            p.covered[row] = 1.0f;
        }
        return;
    }

    // Write the table: the sink, this warp's pages behind those of all warps before it, the window.
    int* table = p.pages + static_cast<size_t>(row) * p.table_capacity;
    if (place.rank == 0) {
#pragma unroll 1
        for (int i = threadIdx.x; i < p.sink; i += THREADS) table[i] = i;
#pragma unroll 1
        for (int i = threadIdx.x; i < p.window; i += THREADS) table[p.sink + selection.count + i] = total_pages - p.window + i;
        if (threadIdx.x == 0) p.counts[row] = p.sink + selection.count + p.window;
    }
    mass = 0.0f;
    if constexpr (!IS_SOFTMAX && !SLICED) use_mass(slice);
    write_rows(selection, table + p.sink, p.sink + begin + warp_begin, [&](int index) {
        if constexpr (!IS_SOFTMAX) {
            float of_page = 0.0f;
#pragma unroll 1
            for (int i = 0; i < Columns::LANES; ++i) {
                const Columns part(i, p.group);
                if constexpr (SLICED) use_mass(part);
                Page<Columns::COLUMNS> page;
                page.load(scores + static_cast<size_t>(warp_begin + index) * GROUP + part.first);
                of_page += weights.careful_sum(page, part.group);
            }
            mass += of_page < INFINITE ? of_page : 0.0f;
        }
    });
    if constexpr (!IS_SOFTMAX) selection.mass = total(shared, place, WEIGHING, {0, 0, mass, 0}).all.mass;
    if (place.rank == 0 && warp == 0) {
        const float share = forced_share();
        if (lane == 0) p.covered[row] = share + selection.mass;
    }
}

// How a launch is to be: crowded: several blocks share a processor; chosen: the cluster may be made smaller.
struct Way {
    bool crowded, overlap, chosen;
};

// Pages of a row that each block of a cluster takes, whole warps of them.
inline int block_share(int page_capacity, int cluster) { return ((page_capacity + cluster - 1) / cluster + 31) / 32 * 32; }

// Pages that fit in the shared memory of a block.
inline int block_capacity(int page_capacity, int padded_group, int cluster) {
    const int share = block_share(page_capacity, cluster);
    const int alone = pages_of(PAGES_ALONE, padded_group), own = page_capacity < alone ? (page_capacity + 31) / 32 * 32 : alone;
    return share > own ? share : own;
}

// Clusters of a kernel that run at once. Processors come in groups, some of an odd number, and a cluster lies within one: fewer than the number of
// processors would let expect. Asked once for each kernel and shape.
inline cudaError_t clusters_at_once(const void* kernel, cudaLaunchConfig_t config, int cluster, int& count) {
    static std::mutex mutex;
    static std::map<std::tuple<int, const void*, size_t, int>, int> known;
    int device = 0;
    const cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    const std::lock_guard<std::mutex> guard(mutex);
    const auto [entry, is_new] = known.try_emplace({device, kernel, config.dynamicSmemBytes, cluster}, 0);
    if (is_new && cudaOccupancyMaxActiveClusters(&entry->second, kernel, &config) != cudaSuccess) {
        cudaGetLastError();  // a cluster of that size is not possible here
        entry->second = 0;
    }
    count = entry->second;
    return cudaSuccess;
}

template <int GROUP, bool IS_SOFTMAX, bool BY_MASS, int RESIDENT>
cudaError_t launch_kernel(Parameters p, int requests, const Way& way, cudaStream_t stream) {
    const auto kernel = select_kernel<GROUP, IS_SOFTMAX, BY_MASS, RESIDENT>;
    const void* address = reinterpret_cast<const void*>(kernel);
    const auto bytes_of = [](int capacity, int cluster) {
        return capacity * static_cast<int>(sizeof(float)) +
               (BY_MASS ? 3 * ALL_DESCENT_BINS * static_cast<int>(sizeof(uint32_t)) : static_cast<int>(sizeof(SearchShared)) + inbox_bytes(cluster));
    };
    // The same for all launches of a kernel, so that one doesn't take from another.
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes_of(PAGES_PER_BLOCK, MAX_CLUSTER));
    if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = {};
    config.blockDim = dim3(THREADS);
    config.stream = stream;
    config.attrs = attributes;
    while (true) {
        p.block_capacity = block_capacity(p.page_capacity, GROUP, p.cluster);
        attributes[0].id = cudaLaunchAttributeClusterDimension;
        attributes[0].val.clusterDim = {static_cast<unsigned>(p.cluster), 1, 1};
        config.gridDim = dim3(p.cluster, p.heads, requests);
        config.dynamicSmemBytes = bytes_of(p.block_capacity, p.cluster);
        config.numAttrs = 1;
        // Clusters that wait for others to end take twice the time. Fewer blocks each is less: three quarters, then half as many.
        const int fewer = p.cluster % 3 == 0 ? p.cluster / 3 * 2 : p.cluster >= 4 ? p.cluster / 4 * 3 : p.cluster / 2;
        if (!way.chosen || way.crowded || p.cluster == 1 || p.page_capacity > fewer * PAGES_PER_BLOCK) break;
        int at_once = 0;
        error = clusters_at_once(address, config, p.cluster, at_once);
        if (error != cudaSuccess) return error;
        if (p.heads * requests <= at_once) break;
        p.cluster = fewer;
    }
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.numAttrs = way.overlap ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, p);
}

template <int GROUP>
cudaError_t launch(const Parameters& p, int requests, const Way& way, cudaStream_t stream) {
    constexpr int SEVERAL = GROUP >= 16 ? 1 : 2;
    if (p.combine != SOFTMAX) return launch_kernel<GROUP, false, false, SEVERAL>(p, requests, way, stream);
    if (p.rule == COVERAGE) return launch_kernel<GROUP, true, true, SEVERAL>(p, requests, way, stream);
    if (way.crowded) return launch_kernel<GROUP, true, false, SEVERAL>(p, requests, way, stream);
    return launch_kernel<GROUP, true, false, 1>(p, requests, way, stream);
}

// For 32, 64 and 128 columns.
cudaError_t launch_wide(const Parameters& p, int padded_group, int requests, const Way& way, cudaStream_t stream);

}  // namespace kvskim::selection
