// Choice of the attend kernel for a shape. Instances are spread over several sources so that they compile side by side.
#pragma once
#include "attend_kernel.cuh"

namespace kvskim {

template <int DIM, int TILES, int KIND>
cudaError_t launch_attend(const AttendParameters& a, int flags, cudaStream_t stream) {
  const dim3 grid(a.heads, a.requests, a.splits);
  return launch(attend_kernel<DIM, TILES, KIND>, grid, kAttendThreads, AttendShape<DIM, TILES, KIND>::kShared, stream, flags, a);
}

template <int DIM, int KIND>
cudaError_t choose_tiles(const AttendParameters& a, int flags, cudaStream_t stream) {
  return a.group <= 8 ? launch_attend<DIM, 1, KIND>(a, flags, stream) : launch_attend<DIM, 2, KIND>(a, flags, stream);
}

template <int DIM>
cudaError_t launch_attend_kind(const AttendParameters& a, int kind, int flags, cudaStream_t stream) {
  switch (kind) {
    case kBFloat16: return choose_tiles<DIM, kBFloat16>(a, flags, stream);
    case kFloat16: return choose_tiles<DIM, kFloat16>(a, flags, stream);
    case kFloat8E4M3: return choose_tiles<DIM, kFloat8E4M3>(a, flags, stream);
    default: return cudaErrorInvalidValue;
  }
}

// Defined in attend.cu (64 and 96), attend_128.cu, attend_256.cu.
cudaError_t launch_attend_128(const AttendParameters& a, int kind, int flags, cudaStream_t stream);
cudaError_t launch_attend_256(const AttendParameters& a, int kind, int flags, cudaStream_t stream);

}  // namespace kvskim
