// Instances of the attend kernel for head dim 96.
#include "attend_launch.cuh"

namespace kvskim {

cudaError_t launch_attend_96(const AttendParameters& a, int kind, int flags, cudaStream_t stream) {
  return launch_attend_kind<96>(a, kind, flags, stream);
}

}  // namespace kvskim
