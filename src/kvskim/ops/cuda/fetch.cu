// Makes the selected pages hot, see kvskim.ops.fetch: one cluster of CTAs decides what is copied where, and copies it.
//
// Entries of all page tables are numbered by row, kv head and place in the table, and each CTA has a run of them. Missing pages are claimed in the
// directory itself: entry e lowers a 0 to e - 2^31, and the lowest entry that selects a page wins. Then each CTA knows how many claims it has won,
// and how many slots of each age class it could give away; CTAs tell one another these numbers, and prefix sums over them number the pages to
// copy and the slots to copy them to. So the outcome doesn't depend on the order in which threads run.
#include "attend_instructions.cuh"
#include "attend_occupancy.cuh"

namespace kvskim {

// Half the registers of an SM: a CTA of attend, which is launched while this kernel runs, finds room beside one of its CTAs.
constexpr int kFetchWarps = 16;
constexpr int kFetchThreads = 32 * kFetchWarps;
constexpr int kFetchCluster = 16;
constexpr int kAgeClasses = 16;  // kvskim.tier.pages.AGE_CLASSES
constexpr int kInUse = -1;
constexpr int kCopiesLater = 4;  // launch flag
static_assert(kFetchWarps >= kAgeClasses && kFetchWarps <= 32 && kFetchThreads >= kFetchCluster * kAgeClasses);
constexpr int kFetchPairs = 32768;  // most (row, kv head) of a launch: their first entries are kept in shared memory

struct FetchParameters {
  const uint4* host;  // [pages, heads, page_pieces]
  uint4* hot;         // [slots, page_pieces]
  int* directory;     // [pages, heads]
  int* owner;         // [slots]
  int* stamp;         // [slots]
  int* clock;         // [1]
  long long* counters;  // [3]: selected, missing, fetched
  const int* block_table;
  int64_t block_table_stride;
  const int* seq_lens;
  const int* pages;
  const int* counts;
  int* missing;  // [slots]: page * heads + head of the pages to copy
  int* victims;  // [slots]: where to
  int* fetched_pages;  // [1]: how many
  int pairs, heads, slots, table_capacity, pages_per_block;
  int page_pieces;  // pieces of 16 bytes of a page of one kv head
  int copies;       // 0: another kernel copies; until then missing pages are not hot, and the slots that they get are empty
};

__device__ __forceinline__ void cluster_barrier() {
  cluster_arrive();
  cluster_wait();
}

__device__ __forceinline__ void store_remote(uint32_t address, int v) {
  asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

__device__ __forceinline__ int warp_inclusive(int x, int lane) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int y = __shfl_up_sync(kAllLanes, x, offset);
    if (lane >= offset) x += y;
  }
  return x;
}

// Sum of `x` over the threads of the CTA ahead of this one; `total` becomes the sum over all. `sums`: room for one number of each warp.
__device__ __forceinline__ int block_prefix(int x, int* sums, int& total) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int inclusive = warp_inclusive(x, lane);
  if (lane == 31) sums[warp] = inclusive;
  __syncthreads();
  const int of_lane = lane < kFetchWarps ? sums[lane] : 0;
  const int to_lane = warp_inclusive(of_lane, lane);
  total = __shfl_sync(kAllLanes, to_lane, 31);
  const int ahead = __shfl_sync(kAllLanes, to_lane - of_lane, warp);
  __syncthreads();  // the room may be used again
  return ahead + inclusive - x;
}

__device__ __forceinline__ int total_pages(const FetchParameters& a, int request) {
  return (max(a.seq_lens[request], 0) + kPageTokens - 1) / kPageTokens;
}

// As kvskim.tier.torch_pages.age_classes. Past L1, because other CTAs write stamps in the same launch.
__device__ __forceinline__ int age_class(const FetchParameters& a, int slot, int now) {
  const int age = static_cast<int>(static_cast<unsigned>(now) - static_cast<unsigned>(__ldcg(a.stamp + slot)));
  if (__ldcg(a.owner + slot) < 0) return kAgeClasses - 1;
  if (age == 0) return kInUse;
  return age < 0 ? kAgeClasses - 2 : min(31 - __clz(age), kAgeClasses - 2);
}

// The share of one CTA in `count` things.
__device__ __forceinline__ int share_start(int count, int rank, int ctas) {
  return static_cast<int>(min(static_cast<int64_t>(ceil_div(count, ctas)) * rank, static_cast<int64_t>(count)));
}

struct FetchShared {
  int sums[kFetchWarps];
  int found[kFetchCluster][2];           // of each CTA: selected pages, claims that won
  int ages[kFetchCluster][kAgeClasses];  // of each CTA: slots of each class
  int own_ages[kAgeClasses];
  int next_order[kAgeClasses];  // number of the next victim of each class
  int in_warp[kFetchWarps][kAgeClasses];
  int possible;  // victims
};

__global__ void __launch_bounds__(kFetchThreads, 2) fetch_kernel(const __grid_constant__ FetchParameters a) {
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  FetchShared& shared = *reinterpret_cast<FetchShared*>(shared_bytes);
  int* const sums = shared.sums;
  int* const starts = reinterpret_cast<int*>(shared_bytes + sizeof(FetchShared));  // [pairs + 1]: first entry of each (row, kv head)
  const int rank = blockIdx.z, ctas = gridDim.z;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;

  wait_previous_kernel();
  allow_next_kernel();
  const int now = __ldcg(a.clock);

  int entries = 0;
  for (int base = 0; base < a.pairs; base += kFetchThreads) {
    const int pair = base + thread;
    int count = 0;
    if (pair < a.pairs) {
      const int total = total_pages(a, pair / a.heads);
      count = min(max(a.counts[pair], 0), total);
      if (count < total) count = min(count, a.table_capacity);
    }
    int sum;
    const int before = block_prefix(count, sums, sum);
    if (pair < a.pairs) starts[pair] = entries + before;
    entries += sum;
  }
  if (thread == 0) starts[a.pairs] = entries;
  __syncthreads();

  // page * heads + head of an entry, or -1 where the table names no page of the request.
  const auto locate = [&](int entry) {
    int pair = 0, beyond = a.pairs;
    while (beyond - pair > 1) {
      const int middle = (pair + beyond) / 2;
      if (starts[middle] <= entry)
        pair = middle;
      else
        beyond = middle;
    }
    const int request = pair / a.heads, index = entry - starts[pair], total = total_pages(a, request);
    const bool identity = starts[pair + 1] - starts[pair] == total;
    const int page = identity ? index : a.pages[static_cast<int64_t>(pair) * a.table_capacity + index];
    if (page < 0 || page >= total) return -1;
    const int block = a.block_table[request * a.block_table_stride + page / a.pages_per_block];
    return (block * a.pages_per_block + page % a.pages_per_block) * a.heads + pair % a.heads;
  };
  const auto claim = [](int entry) { return static_cast<int>(static_cast<unsigned>(entry) + 0x80000000u); };

  // ---- mark: stamp the slots in use, claim the pages that are missing ----
  const int first = share_start(entries, rank, ctas), end = share_start(entries, rank + 1, ctas);
  for (int entry = first + thread; entry < end; entry += kFetchThreads) {
    const int key = locate(entry);
    if (key < 0) continue;
    const int place = __ldcg(a.directory + key);  // a place that is positive stays so: only zeros are claimed
    if (place > 0)
      __stcg(a.stamp + place - 1, now);
    else
      atomicMin(a.directory + key, claim(entry));
  }
  cluster_barrier();

  // ---- count ----
  int selected = 0, won = 0;
  for (int entry = first + thread; entry < end; entry += kFetchThreads) {
    const int key = locate(entry);
    if (key < 0) continue;
    ++selected;
    won += __ldcg(a.directory + key) == claim(entry);
  }
  int own_selected, own_won;
  block_prefix(selected, sums, own_selected);
  block_prefix(won, sums, own_won);
  if (thread < ctas) {
    const uint32_t peer = remote_address(shared_address(shared.found[rank]), thread);
    store_remote(peer, own_selected);
    store_remote(peer + 4, own_won);
  }
  cluster_barrier();
  int all_selected = 0, missing = 0, order = 0;
  for (int c = 0; c < ctas; ++c) {
    all_selected += shared.found[c][0];
    if (c == rank) order = missing;
    missing += shared.found[c][1];
  }
  int fetched = 0;

  if (missing > 0) {
    const int first_slot = share_start(a.slots, rank, ctas), end_slot = share_start(a.slots, rank + 1, ctas);
    if (thread < kAgeClasses) shared.own_ages[thread] = 0;
    __syncthreads();
    for (int base = first_slot; base < end_slot; base += kFetchThreads) {
      const int slot = base + thread;
      const int age = slot < end_slot ? age_class(a, slot, now) : kInUse;
      const unsigned alike = __match_any_sync(kAllLanes, age);
      if (age >= 0 && lane == __ffs(alike) - 1) atomicAdd(shared.own_ages + age, __popc(alike));
    }
    __syncthreads();
    if (thread < ctas * kAgeClasses) {
      const int peer = thread / kAgeClasses, age = thread % kAgeClasses;
      store_remote(remote_address(shared_address(&shared.ages[rank][age]), peer), shared.own_ages[age]);
    }
    cluster_barrier();
    if (warp == 0) {
      int everywhere = 0, earlier = 0;
      for (int c = 0; c < ctas; ++c) {
        if (c == rank) earlier = everywhere;
        everywhere += lane < kAgeClasses ? shared.ages[c][lane] : 0;
      }
      int this_or_older = everywhere;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int y = __shfl_down_sync(kAllLanes, this_or_older, offset);
        if (lane + offset < 32) this_or_older += y;
      }
      if (lane < kAgeClasses) shared.next_order[lane] = this_or_older - everywhere + earlier;
      if (lane == 0) shared.possible = this_or_older;
    }
    __syncthreads();
    fetched = min(missing, shared.possible);

    // ---- list the pages to copy; take back the claims of the rest ----
    for (int base = first; base < end; base += kFetchThreads) {
      const int entry = base + thread;
      const int key = entry < end ? locate(entry) : -1;
      const bool mine = key >= 0 && __ldcg(a.directory + key) == claim(entry);
      int sum;
      const int number = order + block_prefix(mine, sums, sum);
      if (mine && number < fetched) __stcg(a.missing + number, key);
      if (mine && (number >= fetched || !a.copies)) __stcg(a.directory + key, 0);
      order += sum;
    }

    // ---- list the victims; what they held is no longer hot ----
    for (int base = first_slot; base < end_slot; base += kFetchThreads) {
      const int slot = base + thread;
      const int age = slot < end_slot ? age_class(a, slot, now) : kInUse;
      const unsigned alike = __match_any_sync(kAllLanes, age), ahead = alike & ((1u << lane) - 1u);
      if (lane < kAgeClasses) shared.in_warp[warp][lane] = 0;
      __syncwarp();
      if (age >= 0 && ahead == 0) shared.in_warp[warp][age] = __popc(alike);
      __syncthreads();
      if (warp < kAgeClasses) {  // warp c puts the warps' numbers of class c in a row
        const int of_lane = lane < kFetchWarps ? shared.in_warp[lane][warp] : 0, to_lane = warp_inclusive(of_lane, lane);
        const int start = shared.next_order[warp];
        if (lane < kFetchWarps) shared.in_warp[lane][warp] = start + to_lane - of_lane;
        __syncwarp();
        if (lane == 31) shared.next_order[warp] = start + to_lane;
      }
      __syncthreads();
      if (age >= 0) {
        const int number = shared.in_warp[warp][age] + __popc(ahead);
        if (number < fetched) {
          __stcg(a.victims + number, slot);
          const int former = __ldcg(a.owner + slot);
          if (former >= 0) __stcg(a.directory + former, 0);
          __stcg(a.owner + slot, -1);
          __stcg(a.stamp + slot, now);
        }
      }
      __syncthreads();
    }
    cluster_barrier();

    // ---- copy: a warp has a page at a time ----
    for (int i = warp * ctas + rank; i < (a.copies ? fetched : 0); i += kFetchWarps * ctas) {
      const int key = __ldcg(a.missing + i), slot = __ldcg(a.victims + i);
      const uint4* from = a.host + static_cast<int64_t>(key) * a.page_pieces;
      uint4* to = a.hot + static_cast<int64_t>(slot) * a.page_pieces;
      constexpr int kPieces = 8;  // of a lane under way
      for (int piece = lane; piece < a.page_pieces; piece += 32 * kPieces) {
        uint4 v[kPieces];
#pragma unroll
        for (int j = 0; j < kPieces; ++j)
          if (piece + 32 * j < a.page_pieces) v[j] = __ldcg(from + piece + 32 * j);
#pragma unroll
        for (int j = 0; j < kPieces; ++j)
          if (piece + 32 * j < a.page_pieces) to[piece + 32 * j] = v[j];
      }
      if (lane == 0) {
        a.owner[slot] = key;
        a.directory[key] = slot + 1;
      }
    }
  }

  // Every CTA has read the clock: it has passed a barrier since.
  if (rank == 0 && thread == 0) {
    a.counters[0] += all_selected;
    a.counters[1] += missing;
    a.counters[2] += fetched;
    *a.fetched_pages = fetched;
    *a.clock = static_cast<int>(static_cast<unsigned>(now) + 1u);
  }
}

}  // namespace kvskim

// host [pages, heads, page_bytes] at an address that the device reads; hot [slots, page_bytes]; directory [pages, heads], owner and stamp [slots],
// clock [1], counters [3]: see kvskim.tier.pages.HostTier. block_table [pairs / heads, ...], seq_lens [pairs / heads], pages [pairs, table_capacity],
// counts [pairs]: the selection. missing and victims [slots], fetched_pages [1]: room to work in, and with the flag kCopiesLater what is to be copied.
// page_bytes is a multiple of 16, as all addresses of pages are.
extern "C" int kvskim_fetch(const void* host, void* hot, int* directory, int* owner, int* stamp, int* clock, int64_t* counters, const int* block_table,
                            int64_t block_table_stride, const int* seq_lens, const int* pages, const int* counts, int* missing, int* victims,
                            int* fetched_pages, int pairs, int heads, int slots, int table_capacity, int pages_per_block, int page_bytes, int flags,
                            cudaStream_t stream) {
  using namespace kvskim;
  if (pairs < 0 || pairs > kFetchPairs || heads < 1 || slots < 1 || table_capacity < 0 || pages_per_block < 1 || page_bytes < 16 || page_bytes % 16)
    return cudaErrorInvalidValue;
  if (pairs == 0) return cudaSuccess;
  FetchParameters a{};
  a.host = static_cast<const uint4*>(host);
  a.hot = static_cast<uint4*>(hot);
  a.directory = directory;
  a.owner = owner;
  a.stamp = stamp;
  a.clock = clock;
  a.counters = reinterpret_cast<long long*>(counters);
  a.block_table = block_table;
  a.block_table_stride = block_table_stride;
  a.seq_lens = seq_lens;
  a.pages = pages;
  a.counts = counts;
  a.missing = missing;
  a.victims = victims;
  a.pairs = pairs;
  a.heads = heads;
  a.slots = slots;
  a.table_capacity = table_capacity;
  a.pages_per_block = pages_per_block;
  a.fetched_pages = fetched_pages;
  a.page_pieces = page_bytes / 16;
  a.copies = (flags & kCopiesLater) == 0;
  // Rounded up, so that few sizes have to be looked up.
  const int shared_bytes = static_cast<int>(sizeof(FetchShared)) + ceil_div(pairs + 1, 1024) * 1024 * static_cast<int>(sizeof(int));
  for (int cluster = kFetchCluster; cluster >= 1; cluster /= 2) {
    int resident = 0;
    const cudaError_t error = resident_clusters(reinterpret_cast<const void*>(fetch_kernel), kFetchThreads, shared_bytes, cluster, resident);
    if (error != cudaSuccess) return error;
    if (resident > 0) return launch_cluster(fetch_kernel, dim3(1, 1, cluster), kFetchThreads, shared_bytes, cluster, stream, flags, a);
  }
  return cudaErrorInvalidConfiguration;
}
