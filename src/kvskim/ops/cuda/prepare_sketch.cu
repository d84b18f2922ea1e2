// Query preparation of the sketch selector: int8 weights of all digits of a record, their scales, the score of the mean key, and the exact
// log-mass of the pages that are always attended. One launch in front of score_sketch.cu.
//
// For a request, kv head and query head, with row = a coefficient and slot = a digit (docs/how-it-works.md, section "The sketch record"):
//   w[row]  = scale * query_matrix[row] . q                            tensor cores, rows x columns (query heads)
//   W[slot] = w[slot_coefficient] 4^slot_digit;  a = max_mode |W| / 127;  W8 = round(W / a), halves to even
//   base    = scale * mean . q;   forced = log sum over tokens of the first and last pages of exp(logit) - base
//
// What bounds it is latency: every CTA has one chain of loads, all but the first part of it after the wait for the kernel ahead, and all CTAs fit the
// machine at once. With kQueriesSettled only the keys of the always-attended pages wait.
// The first CTAs of a head do the always-attended pages of one or two requests; each of the others five half rows of a slice of columns.
#include <type_traits>

#include "attend_occupancy.cuh"
#include "prepare_sketch_forced.cuh"
#include "prepare_sketch_halves.cuh"

namespace kvskim {
namespace {

constexpr int kMultiprocessors = 132;  // of the machines that this is tuned for; only the number of columns per CTA depends on it

template <bool HALF, int TILES, bool LONG>
__global__ void __launch_bounds__(kPrepareThreads, LONG ? 1 : 2) prepare_sketch_kernel(const __grid_constant__ PrepareArguments p) {
  allow_next_kernel();
  const int role = blockIdx.x;
  const QueryHeads<LONG> heads(p, blockIdx.y);
  if (role < p.forced_roles) return prepare_forced<HALF, LONG>(p, role, heads);
  const int rest = role - p.forced_roles, slice = rest / kBundles;
  prepare_weights<HALF, TILES, LONG>(p, rest - slice * kBundles, heads, slice * 8 * TILES);
}

// Long rows, by pairs of CTAs along z.
template <bool HALF, int OWN>
__global__ void __launch_bounds__(kPrepareThreads, 1) prepare_sketch_halves_kernel(const __grid_constant__ PrepareArguments p) {
  allow_next_kernel();
  const int role = blockIdx.x, part = blockIdx.z;
  const QueryHeads<true> heads(p, blockIdx.y);
  if (role < p.forced_roles) return prepare_forced<HALF, true>(p, 2 * role + part, heads);
  const int rest = role - p.forced_roles, slice = rest / kBundles;
  prepare_half<HALF, OWN>(p, rest - slice * kBundles, part, heads, slice * 16 * OWN);
}

int slices(const PrepareArguments& p, int tiles) { return ceil_div(p.requests << p.column_shift, 8 * tiles); }

template <bool HALF, int TILES, bool LONG>
cudaError_t launch_prepare(const PrepareArguments& p, int flags, cudaStream_t stream) {
  const dim3 grid(p.forced_roles + kBundles * slices(p, TILES), p.heads * p.live_blocks);
  return launch(prepare_sketch_kernel<HALF, TILES, LONG>, grid, kPrepareThreads, 0, stream, flags, p);
}

template <bool HALF, int OWN>
cudaError_t launch_halves(PrepareArguments p, int flags, cudaStream_t stream) {
  p.forced_requests = 1;
  p.forced_roles = ceil_div(p.requests, 2);  // a request a CTA
  const dim3 grid(p.forced_roles + kBundles * slices(p, 2 * OWN), p.heads * p.live_blocks, 2);
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config = cluster_configuration(attributes, grid, kPrepareThreads, 0, 2, flags);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, prepare_sketch_halves_kernel<HALF, OWN>, p);
}

// Columns per CTA: as few as still fit one CTA on each multiprocessor; more would read the query matrix more often. Of short rows so many that two on
// each are enough, if they can be: what is left for a second wave takes as long as the first.
template <bool HALF, bool LONG>
cudaError_t launch_sliced(const PrepareArguments& p, int flags, cudaStream_t stream) {
  const int heads = p.heads * p.live_blocks;
  if constexpr (LONG) {
    // Whatever the number of columns, the sum over the channels is of these halves: scores don't depend on what is in a batch.
    const auto fits = [&](int own) { return 2 * (kBundles * slices(p, 2 * own) + ceil_div(p.requests, 2)) * heads <= kMultiprocessors; };
    if (p.dim > 32 * kHalfSteps && p.dim <= 2 * 32 * kHalfSteps) {
      if (fits(1)) return launch_halves<HALF, 1>(p, flags, stream);
      return fits(2) ? launch_halves<HALF, 2>(p, flags, stream) : launch_halves<HALF, 4>(p, flags, stream);
    }
  }
  if (kBundles * slices(p, 1) * heads <= kMultiprocessors) return launch_prepare<HALF, 1, LONG>(p, flags, stream);
  if (kBundles * slices(p, 2) * heads <= kMultiprocessors) return launch_prepare<HALF, 2, LONG>(p, flags, stream);
  if constexpr (!LONG)
    if ((kBundles * slices(p, 4) + p.forced_roles) * heads > 2 * kMultiprocessors) return launch_prepare<HALF, 8, LONG>(p, flags, stream);
  return launch_prepare<HALF, 4, LONG>(p, flags, stream);
}

template <bool HALF>
cudaError_t launch_long_or_short(const PrepareArguments& p, int flags, cudaStream_t stream) {
  const bool is_short = p.dim <= 32 * kShortSteps && p.split == p.dim && p.blocks == 1;
  return is_short ? launch_sliced<HALF, false>(p, flags, stream) : launch_sliced<HALF, true>(p, flags, stream);
}

}  // namespace
}  // namespace kvskim

// Bytes of the weights that kvskim_prepare_sketch writes and kvskim_score_sketch reads; 16-byte alignment.
extern "C" int64_t kvskim_sketch_weight_bytes(int requests, int heads, int group) {
  const int columns = kvskim::padded_group(group) * kvskim::column_blocks(group);
  return static_cast<int64_t>(requests) * heads * columns * (kvskim::kWeightBytes + kvskim::kScaleBytes);
}

// query [R, H G, D] of query_type (kBFloat16, kFloat16), strides in elements; key_cache of the same type or of kFloat8E4M3. rest not null: its
// channels from `split` on, a multiple of 32, are rest [R, H G, D - split]. Groups of up to 128.
// Pointers that are read in 16 bytes (query rows, key rows, query_matrix, mean, weights) must be so aligned, slot tables to 8; dim a
// multiple of 32. Rows of query_matrix that no coefficient uses must be zero. Queries of padded rows (length 0) are read but not used.
// directory [blocks, H] not null: key_cache is in host memory, its blocks are pages, and hot [slots, ...] has copies of some (block, head), slot
// directory - 1, at distances of key_head_stride, their tokens at distances of key_token_stride. Not for kFloat8E4M3.
// A request of at most full_pages pages is attended whole and not scored: nothing need be written for it.
// flags: kOverlapPrevious, kRecordsSettled, kQueriesSettled.
extern "C" int kvskim_prepare_sketch(const void* query, int64_t query_row_stride, int64_t query_head_stride, const void* rest,
                                     int64_t rest_row_stride, int64_t rest_head_stride, int split, int query_type, const void* query_matrix, const void* slot_coefficient, const void* slot_digit, const void* mean,
                                     const void* key_cache, int64_t key_block_stride, int64_t key_token_stride, int64_t key_head_stride,
                                     int key_type, const void* hot, const int* directory, const void* block_table, int64_t block_table_stride, const void* seq_lens, void* weights,
                                     void* base, void* forced, int requests, int heads, int group, int dim, int page_shift, int sink_pages,
                                     int window_pages, int full_pages, float scale, float softcap, float key_scale, int flags, void* stream) {
  using namespace kvskim;
  if (requests == 0 || heads == 0) return cudaSuccess;
  if (group < 1 || group > kLargestGroup || dim < 32 || dim % 32 || window_pages < 1 || sink_pages < 0) return cudaErrorInvalidValue;
  if (key_type != kFloat8E4M3 && key_type != query_type) return cudaErrorInvalidValue;
  if (!rest) split = dim;
  if (split < 32 || split > dim || split % 32) return cudaErrorInvalidValue;
  if (directory && (key_type == kFloat8E4M3 || page_shift != 0)) return cudaErrorInvalidValue;
  const int64_t hot_offset = directory ? (reinterpret_cast<intptr_t>(hot) - reinterpret_cast<intptr_t>(key_cache)) / 2 : 0;
  const int columns = padded_group(group), column_shift = columns == 4 ? 2 : columns == 8 ? 3 : 4;
  // Two requests share a CTA where a request has few pages: fewer CTAs of mostly idle warps.
  const int forced_requests = requests > 1 && sink_pages + window_pages <= kPrepareWarps ? 2 : 1;
  const int blocks = column_blocks(group);
  uint8_t* scales = static_cast<uint8_t*>(weights) + static_cast<int64_t>(requests) * heads * blocks * columns * kWeightBytes;
  constexpr Bundles bundles = make_bundles();
  const PrepareArguments p{static_cast<const uint16_t*>(query), query_row_stride, query_head_stride, static_cast<const uint16_t*>(rest),
                           rest_row_stride, rest_head_stride, split,
                           static_cast<const __nv_bfloat16*>(query_matrix), static_cast<const int16_t*>(slot_coefficient),
                           static_cast<const uint8_t*>(slot_digit), static_cast<const float*>(mean), static_cast<const uint8_t*>(key_cache),
                           key_block_stride, key_token_stride, key_head_stride, directory, hot_offset, static_cast<const int*>(block_table),
                           block_table_stride,
                           static_cast<const int*>(seq_lens), static_cast<uint8_t*>(weights), reinterpret_cast<float4*>(scales),
                           static_cast<float*>(base), static_cast<float*>(forced), blocks, ceil_div(group, kBlockColumns), requests, heads, group, dim, page_shift, sink_pages,
                           window_pages, full_pages, (flags & kRecordsSettled) != 0, (flags & kQueriesSettled) != 0, column_shift, forced_requests, ceil_div(requests, forced_requests),
                           key_type == kFloat8E4M3, scale, softcap, key_scale, bundles};
  const auto s = static_cast<cudaStream_t>(stream);
  return query_type == kFloat16 ? launch_long_or_short<true>(p, flags, s) : launch_long_or_short<false>(p, flags, s);
}
