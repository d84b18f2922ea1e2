// Instances of the attend kernel for values in host memory and head dim 128.
#include "attend_launch.cuh"

namespace kvskim {

cudaError_t launch_attend_tiered_128(const AttendParameters& a, int kind, int flags, cudaStream_t stream) {
  return launch_attend_tiered_kind<128>(a, kind, flags, stream);
}

}  // namespace kvskim
