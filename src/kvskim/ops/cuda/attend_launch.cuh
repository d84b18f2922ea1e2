// Choice of the attend kernel for a shape. Instances are spread over several sources so that they compile side by side.
#pragma once
#include "attend_kernel.cuh"
#include "attend_occupancy.cuh"

namespace kvskim {

// Few CTAs are spread evenly by asking for so much shared memory that no more than one, or two, fit on an SM. Otherwise those that are
// launched while the kernel ahead still fills some SMs would crowd on the others. No limit when the grid is larger than that.
template <int DIM, int TILES, int KIND, bool TIERED>
cudaError_t launch_attend(AttendParameters a, int flags, cudaStream_t stream) {
  using Shape = AttendShape<DIM, TILES, KIND, false>;
  using DeepShape = AttendShape<DIM, TILES, KIND, Shape::kBlocks != 1>;  // the same where one CTA fills an SM anyway
  const auto kernel = attend_kernel<DIM, TILES, KIND, false, TIERED>;
  const auto deep_kernel = attend_kernel<DIM, TILES, KIND, Shape::kBlocks != 1, TIERED>;

  while (true) {
    const int cluster = a.clustered ? a.splits : 1;
    const int own = a.clustered ? Shape::kClusterShared : Shape::kShared;
    const int one = larger(a.clustered ? DeepShape::kClusterShared : DeepShape::kShared, shared_bytes_for_residents(1));
    const int two = larger(own, shared_bytes_for_residents(2));
    const int64_t clusters = static_cast<int64_t>(a.heads) * a.requests * (a.clustered ? 1 : a.splits);
    const dim3 grid(a.heads, a.requests, a.splits);
    int resident = 0;
    cudaError_t error = resident_clusters(reinterpret_cast<const void*>(deep_kernel), kAttendThreads, one, cluster, resident);
    if (error != cudaSuccess) return error;
    if (clusters <= resident) return launch_cluster(deep_kernel, grid, kAttendThreads, one, cluster, stream, flags, a);
    error = resident_clusters(reinterpret_cast<const void*>(kernel), kAttendThreads, two, cluster, resident);
    if (error != cudaSuccess) return error;
    if (clusters <= resident) return launch_cluster(kernel, grid, kAttendThreads, two, cluster, stream, flags, a);
    if (cluster > 1 && resident == 0) {  // a part of a GPU may be too small for a large cluster
      a.splits /= 2;
      a.clustered = a.splits > 1;
      continue;
    }
    return launch_cluster(kernel, grid, kAttendThreads, own, cluster, stream, flags, a);
  }
}

template <int DIM, int KIND, bool TIERED>
cudaError_t choose_tiles(const AttendParameters& a, int flags, cudaStream_t stream) {
  return a.group <= 8 ? launch_attend<DIM, 1, KIND, TIERED>(a, flags, stream) : launch_attend<DIM, 2, KIND, TIERED>(a, flags, stream);
}

template <int DIM>
cudaError_t launch_attend_kind(const AttendParameters& a, int kind, int flags, cudaStream_t stream) {
  switch (kind) {
    case kBFloat16: return choose_tiles<DIM, kBFloat16, false>(a, flags, stream);
    case kFloat16: return choose_tiles<DIM, kFloat16, false>(a, flags, stream);
    case kFloat8E4M3: return choose_tiles<DIM, kFloat8E4M3, false>(a, flags, stream);
    default: return cudaErrorInvalidValue;
  }
}

// The same with values in host memory, which are never e4m3.
template <int DIM>
cudaError_t launch_attend_tiered_kind(const AttendParameters& a, int kind, int flags, cudaStream_t stream) {
  switch (kind) {
    case kBFloat16: return choose_tiles<DIM, kBFloat16, true>(a, flags, stream);
    case kFloat16: return choose_tiles<DIM, kFloat16, true>(a, flags, stream);
    default: return cudaErrorInvalidValue;
  }
}

// Defined in attend.cu (64), attend_96.cu, attend_128.cu, attend_256.cu, and with a tier attend_tiered.cu (64), attend_tiered_96.cu and so on.
cudaError_t launch_attend_96(const AttendParameters& a, int kind, int flags, cudaStream_t stream);
cudaError_t launch_attend_128(const AttendParameters& a, int kind, int flags, cudaStream_t stream);
cudaError_t launch_attend_256(const AttendParameters& a, int kind, int flags, cudaStream_t stream);
cudaError_t launch_attend_tiered(const AttendParameters& a, int dim, int kind, int flags, cudaStream_t stream);
cudaError_t launch_attend_tiered_96(const AttendParameters& a, int kind, int flags, cudaStream_t stream);
cudaError_t launch_attend_tiered_128(const AttendParameters& a, int kind, int flags, cudaStream_t stream);
cudaError_t launch_attend_tiered_256(const AttendParameters& a, int kind, int flags, cudaStream_t stream);

}  // namespace kvskim
