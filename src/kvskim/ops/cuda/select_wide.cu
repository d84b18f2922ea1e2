// Instances of select for 32, 64 and 128 columns of scores: many query heads on one kv head, as in latent attention.
#include "select_kernel.cuh"

namespace kvskim::selection {

cudaError_t launch_wide(const Parameters& p, int padded_group, int requests, const Way& way, cudaStream_t stream) {
    switch (padded_group) {
        case 32: return launch<32>(p, requests, way, stream);
        case 64: return launch<64>(p, requests, way, stream);
        case 128: return launch<128>(p, requests, way, stream);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace kvskim::selection
