// Choice of the attend kernel for values in host memory, and its instances for head dim 64.
#include "attend_launch.cuh"

namespace kvskim {

cudaError_t launch_attend_tiered(const AttendParameters& a, int dim, int kind, int flags, cudaStream_t stream) {
  switch (dim) {
    case 64: return launch_attend_tiered_kind<64>(a, kind, flags, stream);
    case 96: return launch_attend_tiered_96(a, kind, flags, stream);
    case 128: return launch_attend_tiered_128(a, kind, flags, stream);
    case 256: return launch_attend_tiered_256(a, kind, flags, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace kvskim
