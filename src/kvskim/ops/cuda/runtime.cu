// What every user of the library needs: the text of an error code.
#include <cuda_runtime.h>

extern "C" const char* kvskim_error_string(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
