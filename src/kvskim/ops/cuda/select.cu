// Scores -> page table: which pages each (request, kv head) attends. One launch, one thread-block cluster per (request, kv head).
//
// Every block of the cluster takes an equal, contiguous part of the request's candidate pages, so the cost follows the live
// length; blocks without pages return at once. Per block:
//   1. add up the partial sums of the score kernel: the normaliser of every query head;
//   2. read the scores once; the ranking key of every page (its group-mean mass) stays in shared memory;
//   3. find the cut: for a threshold within its limits a count is all it takes, otherwise select_descent.cuh;
//   4. prefix sums over warps and blocks, then write the selected pages in ascending order.
// The rules are those of kvskim/rules; equal keys are taken in page order. Whatever the inputs, nothing is written beyond
// table_capacity entries of a table.
#include "common.cuh"
#include "select_descent.cuh"
#include "select_scores.cuh"

namespace kvskim::selection {

enum Rule { THRESHOLD = 0, BUDGET = 1, COVERAGE = 2 };
enum Combine { SOFTMAX = 0, PEAK = 1, MAXIMUM = 2 };

constexpr int TILE_PAGES = 16;
constexpr int FRACTION_BITS = 40;
constexpr long long FRACTION_SLACK = 1 << 20;
// Up to so many pages one block is faster alone than with others.
constexpr int PAGES_ALONE = 2048;
constexpr int PAGES_PER_BLOCK = 32768;

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
    int cluster, block_capacity;  // blocks per cluster, pages that fit in the shared memory of one
};

__device__ __forceinline__ int budget_of(const Parameters& p, int total_pages) {
    const long long pages = p.budget_pages >= 0
                                ? p.budget_pages
                                : (total_pages * p.fraction + (1ll << FRACTION_BITS) - 1 - FRACTION_SLACK) >> FRACTION_BITS;
    return static_cast<int>(max(pages - p.sink - p.window, 0ll));
}

template <int GROUP, bool IS_SOFTMAX, bool BY_MASS, int THREADS>
__global__ void __launch_bounds__(THREADS, GROUP == 16 ? 1 : 1024 / THREADS) select_kernel(const __grid_constant__ Parameters p) {
    constexpr int WARPS = THREADS / 32;
    constexpr int UNROLL = 4;
    __shared__ Shared<WARPS> shared;
    extern __shared__ __align__(16) float keys[];  // [block_capacity], then the histograms and lists
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t* bins = reinterpret_cast<uint32_t*>(keys + p.block_capacity);
    const Histograms histograms = {bins, bins + ALL_BINS, bins + 2 * ALL_BINS, reinterpret_cast<float*>(bins + ALL_BINS + BINS),
                                   bins + ALL_BINS};
#pragma unroll 1
    for (int i = threadIdx.x; i < (BY_MASS ? 3 * ALL_BINS : BINS) / 4; i += THREADS) reinterpret_cast<uint4*>(bins)[i] = uint4{0, 0, 0, 0};
    if (!BY_MASS && p.cluster > 1) {
#pragma unroll 1
        for (int i = threadIdx.x; i < BINS / 4; i += THREADS) reinterpret_cast<uint4*>(histograms.merged)[i] = uint4{0, 0, 0, 0};
    }
    if (threadIdx.x == 0) shared.list_length = shared.list_total = 0;
    // Every block of a cluster must have come so far before anything is written into its shared memory.
    if (p.cluster > 1) __cluster_barrier_arrive();
    const auto wait_for_start = [&]() {
        if (p.cluster > 1) __cluster_barrier_wait();
    };
    wait_previous_kernel();

    const int row = blockIdx.z * p.heads + blockIdx.y;
    const __half* scores = p.scores + (static_cast<size_t>(row) * p.page_capacity + p.sink) * GROUP;
    Page<GROUP> loaded[UNROLL];
    auto load = [&](int first, int end) {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int i = first + 32 * u + lane;
            if (i < end) loaded[u].load(scores + static_cast<size_t>(i) * GROUP);
        }
    };
    // Everything that can be on its way before the length is known: it lies within the buffers, and what is beyond the length is not used.
    const int seq_len = p.seq_lens[blockIdx.z], ready = *p.ready;
    const float* partials = p.partials + static_cast<size_t>(row) * p.chunks * GROUP;
    const float first_partial = threadIdx.x < min(p.chunks * GROUP, SUMMING_THREADS) ? partials[threadIdx.x] : 0.0f;
    const float own_forced = warp < GROUP && lane == 0 ? p.forced[row * GROUP + warp] : 0.0f;
    const bool by_capacity = p.cluster == 1 && p.block_capacity <= UNROLL * THREADS;
    int per_warp = (p.block_capacity + THREADS - 1) / THREADS * 32;
    if (by_capacity) load(warp * per_warp, min((warp + 1) * per_warp, p.page_capacity - p.sink));
    const int total_pages = (max(seq_len, 0) + kPageTokens - 1) / kPageTokens;
    const int candidates = min(total_pages - p.window, p.page_capacity) - p.sink;
    const int most = min(candidates, p.limit);
    const int budget = p.rule == BUDGET ? min(budget_of(p, total_pages), most) : -1;
    const bool whole = total_pages == 0 || candidates <= p.min_pages || budget == candidates || ready == 0;
    Place place = {static_cast<int>(blockIdx.x), 1};
    if (whole) {
        wait_for_start();
        if (place.rank == 0 && threadIdx.x == 0) {
            p.counts[row] = total_pages;
            p.covered[row] = total_pages ? 1.0f : 0.0f;
        }
        return;
    }

    // This block's pages, and within them each warp's: both contiguous, so that page order is rank, warp, iteration, lane.
    int per_block = candidates;
    if (p.cluster > 1) {
        per_block = (max((candidates + p.cluster - 1) / p.cluster, PAGES_ALONE) + 31) / 32 * 32;
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
    reduce_partials<GROUP, THREADS>(shared, partials, first_partial, own_forced, chunks, p.group);

    Weights<GROUP> weights(p.group);
    auto use_mass = [&]() {
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            weights.offset[g] = g < p.group ? shared.forced[g] : 0.0f;
            weights.weight[g] = g < p.group ? shared.weight[g] : 0.0f;
        }
    };
    if constexpr (IS_SOFTMAX) {
        use_mass();
    } else {
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            weights.offset[g] = g < p.group ? p.base[row * GROUP + g] : 0.0f;
            weights.weight[g] = g < p.group ? 1.0f : 0.0f;
        }
        wait_for_start();
        if (p.combine == PEAK) find_peaks<GROUP, THREADS>(shared, place, scores, length, weights);
    }
    const bool is_signed = !IS_SOFTMAX && p.combine == MAXIMUM;

    // Keys. A threshold counts the pages that reach it on the way; coverage counts the broken ones, which it takes in any case.
    const float count_from = !BY_MASS && p.rule == THRESHOLD ? p.tau : INFINITE;
    const bool counted = !BY_MASS && p.rule == BUDGET;  // a budget always needs the search: its first pass is done on the way
    Tally tally = {0, 0, 0.0f};
#pragma unroll 1
    for (int first = warp_begin; first < warp_end; first += 32 * UNROLL) {
        if (first != warp_begin) load(first, warp_end);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int i = first + 32 * u + lane;
            if (i >= warp_end) continue;
            float key = is_signed ? weights.maximum(loaded[u], p.group) : weights.sum(loaded[u]);
            key = key < INFINITE ? key : INFINITE;  // NaN too
            if (!is_signed) key = fmaxf(key, 0.0f);  // what the descent relies on, even if the partial sums are nonsense
            keys[i] = key;
            if (counted) count_key<BY_MASS>(histograms, Pass{0}, ordered_bits(key, is_signed), key);
            if (key >= count_from) {
                ++tally.above;
                tally.mass += key < INFINITE ? key : 0.0f;
            }
            if (p.keys_out) p.keys_out[static_cast<size_t>(row) * p.page_capacity + p.sink + begin + i] = key;
        }
    }
    allow_next_kernel();
    if constexpr (IS_SOFTMAX) wait_for_start();

    // Estimated mass of the always-attended pages; for whole warps.
    const auto forced_share = [&]() {
        const float share = warp_sum(lane < p.group ? shared.weight[lane] : 0.0f);
        return share < INFINITE ? share : 0.0f;
    };

    Totals totals = {{0, 0, 0.0f}, 0, 0};
    if (p.rule != BUDGET) totals = total<WARPS>(shared, place, 0, tally);
    Goal goal = {min(p.min_pages, most), most, 0};
    Cut cut = {p.tau, 0x40000000, totals.all.above};
    bool search = true;
    if (BY_MASS) {
        goal.least = min(max(goal.least, totals.all.above), goal.most);
        goal.target = p.target;
    } else if (p.rule == THRESHOLD) {
        search = cut.count < goal.least || cut.count > goal.most;
        goal.least = goal.most = min(max(cut.count, goal.least), goal.most);
    } else {
        goal.least = goal.most = budget;
    }
    float extra_mass = 0.0f;
    if (search) {
        __syncthreads();
        const unsigned long long forced_mass = BY_MASS ? fixed_mass(forced_share()) : 0;
        if (goal.reached(0, forced_mass)) {
            cut = {INFINITE, 0, 0};
        } else {
            cut = find_cut<THREADS, BY_MASS>(shared, place, histograms, goal, keys, length, is_signed, counted, forced_mass);
        }
        tally = {0, 0, 0.0f};
#pragma unroll 2
        for (int i = warp_begin + lane; i < warp_end; i += 32) {
            const float key = keys[i];
            tally.above += key > cut.key;
            tally.equal += key == cut.key;
            tally.mass += key > cut.key && key < INFINITE ? key : 0.0f;
        }
        totals = total<WARPS>(shared, place, 1, tally);
        extra_mass = cut.key < INFINITE ? cut.equals * cut.key : 0.0f;
    }
    if (cut.count >= candidates) {
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
        for (int i = threadIdx.x; i < p.window; i += THREADS) table[p.sink + cut.count + i] = total_pages - p.window + i;
        if (threadIdx.x == 0) p.counts[row] = p.sink + cut.count + p.window;
    }
    const uint32_t lower_lanes = (1u << lane) - 1;
    int equals_left = max(cut.equals - totals.equal_before, 0);
    int position = p.sink + totals.above_before + min(totals.equal_before, cut.equals);
    float mass = 0.0f;
    if constexpr (!IS_SOFTMAX) use_mass();
#pragma unroll 2
    for (int first = warp_begin; first < warp_end; first += 32) {
        const int i = first + lane;
        const float key = i < warp_end ? keys[i] : -INFINITE;
        const bool is_equal = i < warp_end && key == cut.key;
        const uint32_t equal_lanes = __ballot_sync(0xffffffffu, is_equal);
        const bool selected = key > cut.key || (is_equal && __popc(equal_lanes & lower_lanes) < equals_left);
        const uint32_t selected_lanes = __ballot_sync(0xffffffffu, selected);
        if (selected) {
            table[position + __popc(selected_lanes & lower_lanes)] = p.sink + begin + i;
            if constexpr (!IS_SOFTMAX) {
                Page<GROUP> page;
                page.load(scores + static_cast<size_t>(i) * GROUP);
                const float of_page = weights.sum(page);
                mass += of_page < INFINITE ? of_page : 0.0f;
            }
        }
        position += __popc(selected_lanes);
        equals_left = max(equals_left - __popc(equal_lanes), 0);
    }
    if constexpr (!IS_SOFTMAX) {
        totals = total<WARPS>(shared, place, 2, {0, 0, mass});
        extra_mass = 0.0f;
    }
    if (place.rank == 0 && warp == 0) {
        const float share = forced_share();
        if (lane == 0) p.covered[row] = share + totals.all.mass + extra_mass;
    }
}

template <int GROUP, bool IS_SOFTMAX, bool BY_MASS, int THREADS>
cudaError_t launch_kernel(const Parameters& p, int requests, bool overlap, cudaStream_t stream) {
    const auto kernel = select_kernel<GROUP, IS_SOFTMAX, BY_MASS, THREADS>;
    const int bytes = (p.block_capacity + (BY_MASS ? 3 * ALL_BINS : ALL_BINS + BINS + 2 * LIST_KEYS)) * static_cast<int>(sizeof(float));
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess && p.cluster > 8) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {static_cast<unsigned>(p.cluster), 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(p.cluster, p.heads, requests);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = overlap ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, p);
}

template <int GROUP, bool IS_SOFTMAX, int THREADS>
cudaError_t launch(const Parameters& p, int requests, bool overlap, cudaStream_t stream) {
    if constexpr (IS_SOFTMAX)
        if (p.rule == COVERAGE) return launch_kernel<GROUP, true, true, THREADS>(p, requests, overlap, stream);
    return launch_kernel<GROUP, IS_SOFTMAX, false, THREADS>(p, requests, overlap, stream);
}

// Blocks per cluster: enough for the shared memory, and then as many as fill the processors while each has pages to work on.
int choose_cluster(int rows, int page_capacity, int processors) {
    int cluster = 1;
    while (page_capacity > cluster * PAGES_PER_BLOCK) cluster *= 2;
    while (cluster < 8 && 2 * cluster * rows <= processors && page_capacity > cluster * PAGES_ALONE) cluster *= 2;
    // Clusters of 16 need a whole group of processors each, of which the device has few.
    if (cluster == 8 && 4 * cluster * rows <= processors && page_capacity > cluster * PAGES_ALONE) cluster = MAX_CLUSTER;
    return cluster;
}

}  // namespace kvskim::selection

// Returns a CUDA error code. padded_group is 4, 8 or 16; rule and combine as the enumerations above; budget_pages -1: use fraction
// (units of 2^-40); coverage in units of 2^-31; max_pages -1: no limit; cluster 0: chosen here; keys_out may be null;
// flags: LaunchFlags of common.cuh.
extern "C" int kvskim_select(const void* scores, const float* base, const float* forced, const float* partials, const int* seq_lens,
                             const int* ready, int* pages, int* counts, float* covered, float* keys_out, int requests, int heads,
                             int page_capacity, int group, int padded_group, int chunks, int table_capacity, int rule, int combine, float tau,
                             int budget_pages, long long fraction, long long coverage, int min_pages, int max_pages, int sink, int window,
                             int cluster, int flags, cudaStream_t stream) {
    using namespace kvskim::selection;
    const int rows = requests * heads;
    if (rows == 0) return cudaSuccess;
    int device = 0, processors = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    if (cluster == 0) cluster = choose_cluster(rows, page_capacity, processors);
    const bool is_power = cluster > 0 && (cluster & (cluster - 1)) == 0;
    const int per_block = is_power ? ((page_capacity + cluster - 1) / cluster + 31) / 32 * 32 : 0;
    const int room = table_capacity - sink - window;
    if (!is_power || cluster > MAX_CLUSTER || per_block > PAGES_PER_BLOCK || room < 0 || group < 1 || group > padded_group || sink < 0 ||
        window < 1 || min_pages < 0 || page_capacity < 1 || (combine != SOFTMAX && rule != BUDGET))
        return cudaErrorInvalidValue;
    Parameters p;
    p.scores = static_cast<const __half*>(scores);
    p.base = base, p.forced = forced, p.partials = partials, p.seq_lens = seq_lens, p.ready = ready;
    p.pages = pages, p.counts = counts, p.covered = covered, p.keys_out = keys_out;
    p.fraction = fraction, p.target = static_cast<unsigned long long>(coverage);
    p.heads = heads, p.page_capacity = page_capacity, p.group = group, p.chunks = chunks, p.table_capacity = table_capacity;
    p.rule = rule, p.combine = combine, p.tau = tau;
    p.budget_pages = budget_pages, p.min_pages = min_pages;
    p.limit = rule != BUDGET && max_pages >= 0 && max_pages < room ? max_pages : room;
    p.sink = sink, p.window = window, p.cluster = cluster;
    const int alone = page_capacity < PAGES_ALONE ? (page_capacity + 31) / 32 * 32 : PAGES_ALONE;
    p.block_capacity = per_block > alone ? per_block : alone;
    const bool softmax = combine == SOFTMAX, overlap = flags & kvskim::kOverlapPrevious;
    // With more blocks than processors, two smaller ones share a processor; and few pages keep no more threads busy.
    const bool small = rows * cluster > processors || p.block_capacity <= PAGES_ALONE;
    switch (padded_group) {
        case 4:
            if (!softmax) return launch<4, false, 512>(p, requests, overlap, stream);
            return small ? launch<4, true, 512>(p, requests, overlap, stream) : launch<4, true, 1024>(p, requests, overlap, stream);
        case 8:
            if (!softmax) return launch<8, false, 512>(p, requests, overlap, stream);
            return small ? launch<8, true, 512>(p, requests, overlap, stream) : launch<8, true, 1024>(p, requests, overlap, stream);
        case 16:
            return softmax ? launch<16, true, 512>(p, requests, overlap, stream) : launch<16, false, 512>(p, requests, overlap, stream);
        default: return cudaErrorInvalidValue;
    }
}
