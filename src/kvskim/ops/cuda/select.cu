// Entry of select, and its instances for up to 16 columns of scores.
#include "select_kernel.cuh"

namespace kvskim::selection {

// Blocks per cluster: enough for the shared memory, and then as many as fill the processors while each has pages to work on.
int choose_cluster(int rows, int page_capacity, int columns, int processors) {
    const int alone = pages_of(PAGES_ALONE, columns);
    int cluster = 1;
    while (page_capacity > cluster * PAGES_PER_BLOCK) cluster *= 2;
    while (cluster < 8 && 2 * cluster * rows <= processors && page_capacity > cluster * alone) cluster *= 2;
    // Clusters of 16 need a whole group of processors each, of which the device has few.
    if (cluster == 8 && 4 * cluster * rows <= processors && page_capacity > cluster * alone) cluster = MAX_CLUSTER;
    return cluster;
}

}  // namespace kvskim::selection

// Returns a CUDA error code. padded_group is 4, 8, 16, 32, 64 or 128; rule and combine as the enumerations above; budget_pages -1: use fraction
// (units of 2^-40); coverage in units of 2^-31; max_pages -1: no limit; cluster 0: chosen here; keys_out may be null;
// flags: LaunchFlags of common.cuh.
extern "C" int kvskim_select(const void* scores, const float* base, const float* forced, const float* partials, const int* seq_lens,
                             const int* ready, int* pages, int* counts, float* covered, float* keys_out, int requests, int heads,
                             int page_capacity, int group, int padded_group, int chunks, int table_capacity, int rule, int combine, float tau,
                             int budget_pages, long long fraction, long long coverage, int min_pages, int max_pages, int sink, int window,
                             int full_pages, int cluster, int flags, cudaStream_t stream) {
    using namespace kvskim::selection;
    const int rows = requests * heads;
    if (rows == 0) return cudaSuccess;
    int device = 0, processors = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    const bool chosen = cluster == 0;
    if (chosen) cluster = choose_cluster(rows, page_capacity, padded_group, processors);
    const bool is_power = cluster > 0 && (cluster & (cluster - 1)) == 0;
    const int per_block = is_power ? block_share(page_capacity, cluster) : 0;
    const int room = table_capacity - sink - window;
    if (!is_power || cluster > MAX_CLUSTER || per_block > PAGES_PER_BLOCK || room < 0 || group < 1 || group > padded_group || sink < 0 ||
        window < 1 || min_pages < 0 || full_pages < 0 || page_capacity < 1 || (combine != SOFTMAX && rule != BUDGET))
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
    p.sink = sink, p.window = window, p.full_pages = full_pages, p.cluster = cluster;
    p.settled = flags & kvskim::kRecordsSettled;
    const Way way{rows * cluster > processors, (flags & kvskim::kOverlapPrevious) != 0, chosen};
    switch (padded_group) {
        case 4: return launch<4>(p, requests, way, stream);
        case 8: return launch<8>(p, requests, way, stream);
        case 16: return launch<16>(p, requests, way, stream);
        default: return launch_wide(p, padded_group, requests, way, stream);
    }
}
