// Sparse paged decode attention over latent rows, where values are the first 512 of the 576 channels of the keys; the kernel is in attend_latent.cuh.
#include "attend_latent.cuh"
#include "attend_occupancy.cuh"

namespace kvskim {
namespace {

// Ring of a CTA that has a multiprocessor to itself, and of one that shares it with another.
constexpr int kLongRing = 8, kShortRing = 4;

// Describes the cache to the copy engine, a page to a copy, its lines' pieces swapped as LatentLine says. Strides are multiples of 16 bytes.
cudaError_t describe_pages(LatentParameters& a, bool half) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(entry) : nullptr;
  }();
  if (!encode) return cudaErrorNotSupported;
  constexpr int kLines = kLatentRowBytes / 128;
  // How many blocks there are isn't known here: those of the block table are.
  const cuuint64_t sizes[5] = {64, kLines, static_cast<cuuint64_t>(a.pages_per_block) * kPageTokens, static_cast<cuuint64_t>(a.heads), 1u << 30};
  const cuuint64_t strides[4] = {128, static_cast<cuuint64_t>(a.token_bytes), static_cast<cuuint64_t>(a.heads > 1 ? a.head_bytes : kLatentRowBytes),
                                 static_cast<cuuint64_t>(a.block_bytes)};
  const cuuint32_t box[5] = {64, kLines, kPageTokens, 1, 1}, steps[5] = {1, 1, 1, 1, 1};
  const CUresult result =
      encode(&a.page_map, half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, const_cast<uint8_t*>(a.cache), sizes, strides, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// While there are fewer requests than multiprocessors: clusters that all run at once, a CTA on a multiprocessor, and as many for a long request as do.
// A cluster lies within a group of processors, so what fits is asked for. CTAs that could share a multiprocessor would crowd on those that the kernel
// ahead has left first. With more requests, a CTA or two on a multiprocessor.
template <bool HALF>
cudaError_t launch_latent(LatentParameters a, bool crowded, int flags, cudaStream_t stream) {
  const auto alone = attend_latent_kernel<HALF, kLongRing>, shared = attend_latent_kernel<HALF, kShortRing>;
  constexpr int kAlone = LatentShape<kLongRing>::kBytes, kShared = LatentShape<kShortRing>::kBytes;
  constexpr int kLongThreads = LatentShape<kLongRing>::kThreads;
  static_assert(kAlone >= shared_bytes_for_residents(1) && kAlone <= kMaximumShared && 2 * (kShared + 1024) <= 228 * 1024);
  const cudaError_t described = describe_pages(a, HALF);
  if (described != cudaSuccess) return described;
  const int rows = a.heads * a.blocks * a.requests;
  int resident = 0;
  for (;; --a.cluster) {
    const cudaError_t error = resident_clusters(reinterpret_cast<const void*>(alone), kLongThreads, kAlone, a.cluster, resident);
    if (error != cudaSuccess) return error;
    if (rows <= resident || a.cluster == 1) break;
  }
  a.share = latent_share(a.cluster);
  a.share_inverse = ceil_div(1 << 16, a.share), a.place_inverse = ceil_div(1 << 20, a.share);
  if (!crowded) a.clusters = max(1, min(a.clusters, resident / rows));
  const dim3 grid(a.heads * a.blocks, a.requests, a.cluster * a.clusters);
  if (rows <= resident) return launch_cluster(alone, grid, kLongThreads, kAlone, a.cluster, stream, flags, a);
  return launch_cluster(shared, grid, LatentShape<kShortRing>::kThreads, kShared, a.cluster, stream, flags, a);
}

}  // namespace
}  // namespace kvskim

// Strides count elements. query [requests, heads * group, 512] and rest [requests, heads * group, 64] with rows at multiples of query_unit bytes, 4 or
// 16; cache [blocks, pages_per_block * 16, heads, 576] with rows at multiples of 16 bytes; block_table [requests, ...], seq_lens [requests],
// pages [requests, heads, table_capacity], counts [requests, heads], out [requests, heads * group, 512] with rows at multiples of 8 bytes,
// lse [requests, heads * group] or null, partials: requests * heads * clusters * group * 514 floats, 16-byte aligned (not used when clusters is 1),
// tickets: requests * heads * ceil(group / 16) * 16 unsigned, zero before the first launch; every launch leaves them zero.
// `cluster` CTAs, up to 16, share each (request, kv head, 16 query heads), fewer where a GPU can't have so many at once; up to `clusters` such
// clusters, and no more than its count needs at pages_per_split pages a CTA, nor, unless `crowded`, than run at once.
// flags: kOverlapPrevious; kQueriesSettled: all that is read here but pages and counts was complete before the kernel ahead let this one begin, as behind
// select. Then requests of up to full_pages pages, whose count must be all of them, are attended without waiting for that kernel.
// type is ElementType of query, cache and out.
extern "C" int kvskim_attend_latent(const void* query, int64_t query_request_stride, int64_t query_head_stride, const void* rest,
                                    int64_t rest_request_stride, int64_t rest_head_stride, const void* cache, int64_t block_stride,
                                    int64_t token_stride, int64_t head_stride, const int* block_table, int64_t block_table_stride,
                                    const int* seq_lens, const int* pages, const int* counts, void* out, int64_t out_request_stride,
                                    int64_t out_head_stride, float* lse, float* partials, unsigned* tickets, int requests, int heads, int group,
                                    int pages_per_block, int table_capacity, int query_unit, int full_pages, int cluster, int clusters,
                                    int pages_per_split, int crowded, int type, float scale, float softcap, float k_scale, float v_scale, int flags,
                                    cudaStream_t stream) {
  using namespace kvskim;
  if (requests < 0 || requests > 65535 || heads < 1 || group < 1 || group > kLargestGroup || pages_per_block < 1 || cluster < 1 ||
      cluster > kLatentCluster || clusters < 1 || cluster * clusters > 65535 || pages_per_split < 1)
    return cudaErrorInvalidValue;
  if ((type != kBFloat16 && type != kFloat16) || (query_unit != 4 && query_unit != 16)) return cudaErrorInvalidValue;
  if (requests == 0) return cudaSuccess;
  LatentParameters a{};
  a.query = static_cast<const uint16_t*>(query);
  a.query_request_stride = query_request_stride, a.query_head_stride = query_head_stride;
  a.rest = static_cast<const uint16_t*>(rest);
  a.rest_request_stride = rest_request_stride, a.rest_head_stride = rest_head_stride;
  a.cache = static_cast<const uint8_t*>(cache);
  a.block_bytes = 2 * block_stride, a.token_bytes = 2 * token_stride, a.head_bytes = 2 * head_stride;
  a.block_table = block_table, a.block_table_stride = block_table_stride;
  a.seq_lens = seq_lens, a.pages = pages, a.counts = counts;
  a.out = static_cast<uint16_t*>(out);
  a.out_request_stride = out_request_stride, a.out_head_stride = out_head_stride;
  a.lse = lse, a.partials = partials, a.tickets = tickets;
  a.requests = requests, a.heads = heads, a.group = group, a.blocks = ceil_div(group, kLatentHeads);
  a.table_capacity = table_capacity;
  a.query_unit = query_unit;
  a.settled = flags & kQueriesSettled;
  a.full_pages = full_pages;
  a.cluster = cluster, a.clusters = clusters, a.pages_per_split = pages_per_split;
  a.pages_per_block = pages_per_block;
  a.block_shift = 27;  // with 2^shift >= pages_per_block * 2^27 the rounded-up reciprocal divides exactly
  while (static_cast<int64_t>(pages_per_block) << 27 > int64_t{1} << a.block_shift) ++a.block_shift;
  a.block_multiplier = static_cast<uint32_t>(((int64_t{1} << a.block_shift) + pages_per_block - 1) / pages_per_block);
  a.logit_scale = scale * k_scale * kLog2E;
  a.softcap_2 = softcap * kLog2E;
  a.softcap_inverse = softcap > 0.f ? 2.f / softcap : 0.f;
  a.v_scale = v_scale;
  return type == kFloat16 ? launch_latent<true>(a, crowded != 0, flags, stream) : launch_latent<false>(a, crowded != 0, flags, stream);
}
