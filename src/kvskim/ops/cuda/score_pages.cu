// Scores of records that code each page by itself, bf16 queries, and the entry for both types of query. The kernel stands in score_pages.cuh.
#include "score_pages.cuh"

namespace kvskim {
cudaError_t launch_page_scores_half(int form, int head_dim, const PageScores& p, cudaStream_t stream);  // score_pages_half.cu
}

// records [N, H, width], 16-byte aligned; query rows 16-byte aligned, strides in elements; scores fp16 [R, H, capacity, Gp], Gp the group padded
// to 4, 8 or 16; forced float32 [R, H, Gp]; partials float32 [R, H, chunks, Gp]. form: PageForm. offsets: seven bytes into a record, in the
// order of PageScores. A request of at most full_pages pages is left alone.
extern "C" int kvskim_score_pages(int form, const void* query, int64_t query_stride_request, int64_t query_stride_head, int element,
                                  const void* records, int64_t record_bytes, const void* block_table, int64_t block_table_stride,
                                  const void* seq_lens, const void* forced, void* scores, void* partials, int requests, int heads, int group,
                                  int head_dim, int capacity, int chunks, int page_shift, int sink_pages, int window_pages, int full_pages,
                                  int width, int rank, const int* offsets, float scale, void* stream) {
  using namespace kvskim;
  if (requests == 0 || heads == 0 || capacity == 0) return cudaSuccess;
  if (group < 1 || group > 16 || chunks < 1 || window_pages < 1 || sink_pages < 0 || rank < 0 || rank > 8) return cudaErrorInvalidValue;
  if ((reinterpret_cast<uintptr_t>(records) | reinterpret_cast<uintptr_t>(query) | 2 * query_stride_request | 2 * query_stride_head) & 15)
    return cudaErrorMisalignedAddress;
  const PageScores p{static_cast<const uint8_t*>(records), record_bytes, static_cast<const int*>(block_table), block_table_stride,
                     static_cast<const int*>(seq_lens), static_cast<const uint8_t*>(query), 2 * query_stride_request, 2 * query_stride_head,
                     static_cast<const float*>(forced), static_cast<__half*>(scores), static_cast<float*>(partials), requests, heads, group,
                     capacity, chunks, page_shift, sink_pages, window_pages, full_pages, width, rank, offsets[0], offsets[1], offsets[2],
                     offsets[3], offsets[4], offsets[5], offsets[6], scale};
  const auto s = static_cast<cudaStream_t>(stream);
  if (element == kFloat16) return launch_page_scores_half(form, head_dim, p, s);
  if (element != kBFloat16) return cudaErrorInvalidValue;
  return launch_page_dim<false>(form, head_dim, p, s);
}
