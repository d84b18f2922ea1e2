// Scores of records that code each page by itself, fp16 queries; a file of its own so that both types compile at the same time.
#include "score_pages.cuh"

namespace kvskim {
cudaError_t launch_page_scores_half(int form, int head_dim, const PageScores& p, cudaStream_t stream) {
  return launch_page_dim<true>(form, head_dim, p, stream);
}
}  // namespace kvskim
