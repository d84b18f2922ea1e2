// Sparse paged decode attention over a page table per (request, kv head); the kernel is in attend_kernel.cuh.
#include "attend_launch.cuh"

// Strides count elements. Rows of `dim` elements are contiguous and 16-byte aligned in the caches, 8-byte aligned in query and out.
//   query [requests, heads * group, dim], key_cache and value_cache [blocks, pages_per_block * 16, heads, dim], block_table [requests, ...],
//   seq_lens [requests], pages [requests, heads, table_capacity], counts [requests, heads], out like query, lse [requests, heads * group] or null,
//   partials: requests * heads * splits * group * (dim + 2) floats, 16-byte aligned (not used when splits is 1),
//   tickets: requests * heads unsigned, zero before the first launch; every launch leaves them zero.
// cluster above 1: so many CTAs share each (request, kv head) as a thread-block cluster (fewer where a GPU can't have that many), splits and
// pages_per_split don't matter, and partials and tickets are not used.
// host_pages not null: the values, or with parts = 2 keys and values, are in host memory, and the caches of these are not read. host_pages
// [pages, heads, parts, 16, dim] by physical page (block * pages_per_block + page in block), at an address that the device reads;
// hot_pages [slots, parts, 16, dim]; directory [pages, heads]: slot + 1, or 0.
// query_type and cache_type are ElementType; cache_type equals query_type or is e4m3. At most `splits` CTAs share a (request, kv head), and
// no more than its count needs at pages_per_split pages each.
extern "C" int kvskim_attend(const void* query, int64_t query_request_stride, int64_t query_head_stride, const void* key_cache,
                             int64_t key_block_stride, int64_t key_token_stride, int64_t key_head_stride, const void* value_cache,
                             int64_t value_block_stride, int64_t value_token_stride, int64_t value_head_stride, const void* host_pages,
                             const void* hot_pages, const int* directory, int parts, const int* block_table,
                             int64_t block_table_stride, const int* seq_lens, const int* pages, const int* counts, void* out,
                             int64_t out_request_stride, int64_t out_head_stride, float* lse, float* partials, unsigned* tickets, int requests,
                             int heads, int group, int dim, int pages_per_block, int table_capacity, int splits, int pages_per_split, int cluster,
                             int query_type, int cache_type, float scale, float softcap, float k_scale, float v_scale, int flags,
                             cudaStream_t stream) {
  using namespace kvskim;
  if (requests < 0 || requests > 65535 || heads < 1 || group < 1 || group > 16 || pages_per_block < 1 || splits < 1 || splits > kAttendMaximumSplits ||
      pages_per_split < 1 || cluster < 0 || cluster > kAttendMaximumCluster)
    return cudaErrorInvalidValue;
  if ((query_type != kBFloat16 && query_type != kFloat16) || (cache_type != query_type && cache_type != kFloat8E4M3))
    return cudaErrorInvalidValue;
  if (host_pages && parts != 1 && parts != 2) return cudaErrorInvalidValue;
  if (requests == 0) return cudaSuccess;
  const int64_t bytes = cache_type == kFloat8E4M3 ? 1 : 2;
  AttendParameters a{};
  a.query = static_cast<const uint16_t*>(query);
  a.query_request_stride = query_request_stride;
  a.query_head_stride = query_head_stride;
  a.key = {static_cast<const uint8_t*>(key_cache), key_block_stride * bytes, key_token_stride * bytes, key_head_stride * bytes};
  a.value = {static_cast<const uint8_t*>(value_cache), value_block_stride * bytes, value_token_stride * bytes, value_head_stride * bytes};
  a.tier = {static_cast<const uint8_t*>(host_pages), static_cast<const uint8_t*>(hot_pages), directory, parts};
  a.block_table = block_table;
  a.block_table_stride = block_table_stride;
  a.seq_lens = seq_lens;
  a.pages = pages;
  a.counts = counts;
  a.out = static_cast<uint16_t*>(out);
  a.out_request_stride = out_request_stride;
  a.out_head_stride = out_head_stride;
  a.lse = lse;
  a.partials = partials;
  a.tickets = tickets;
  a.requests = requests;
  a.heads = heads;
  a.group = group;
  a.pages_per_block = pages_per_block;
  a.block_shift = 27;  // with 2^shift >= pages_per_block * 2^27 the rounded-up reciprocal divides exactly
  while (static_cast<int64_t>(pages_per_block) << 27 > int64_t{1} << a.block_shift) ++a.block_shift;
  a.block_multiplier = static_cast<uint32_t>(((int64_t{1} << a.block_shift) + pages_per_block - 1) / pages_per_block);
  a.table_capacity = table_capacity;
  a.clustered = cluster > 1;
  a.splits = a.clustered ? cluster : splits;
  a.pages_per_split = a.clustered ? 1 : pages_per_split;  // an idle CTA of a cluster would save nothing
  a.query_half = query_type == kFloat16;
  a.logit_scale = scale * k_scale * kLog2E;
  a.softcap_2 = softcap * kLog2E;
  a.softcap_inverse = softcap > 0.f ? 2.f / softcap : 0.f;
  a.v_scale = v_scale;
  if (host_pages) return launch_attend_tiered(a, dim, cache_type, flags, stream);
  switch (dim) {
    case 64: return launch_attend_kind<64>(a, cache_type, flags, stream);
    case 96: return launch_attend_96(a, cache_type, flags, stream);
    case 128: return launch_attend_128(a, cache_type, flags, stream);
    case 256: return launch_attend_256(a, cache_type, flags, stream);
    default: return cudaErrorInvalidValue;
  }
}
