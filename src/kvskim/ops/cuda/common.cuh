// Small things that the kernels share: launching with programmatic dependent launch, tensor-core instructions, fast
// exponentials, the paged addresses of a request.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace kvskim {

constexpr int kPageTokens = 16;
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.69314718055994531f;

// Codes of element types in the plain C interfaces.
enum ElementType { kBFloat16 = 0, kFloat16 = 1, kFloat8E4M3 = 2 };

// Flags of the launch functions.
enum LaunchFlags {
  // The launch may begin before the kernel ahead of it in the stream has ended (programmatic dependent launch).
  kOverlapPrevious = 1,
  // Records, block table and lengths that this launch reads were complete before the kernel ahead of it began, so they may be read before
  // it has ended.
  kRecordsSettled = 2,
  // The queries that this launch reads were complete, and all that reads what this launch writes had ended, before the kernel ahead of it let it begin
  // (allow_next_kernel). So it may read the one and write the other before that kernel has ended.
  kQueriesSettled = 4,
};

// ---- programmatic dependent launch: both are no-ops in an ordinary launch ----
// A kernel that calls the first must call the second on every path: its end then means that all kernels ahead of it have ended.

__device__ __forceinline__ void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared_bytes, cudaStream_t stream, int flags,
                   Arguments... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = (flags & kOverlapPrevious) ? 1 : 0;
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

// What the kernel ahead may have written must be read by plain loads after the wait: the compiler may move __ldg ahead of it.
__device__ __forceinline__ uint4 load16(const void* p) { return *static_cast<const uint4*>(p); }

// ---- arithmetic ----

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}

// d += a b, 16 x 8 x 16, bf16 or fp16 operands, float32 accumulators.
template <bool HALF>
__device__ __forceinline__ void mma_16816(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (HALF)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- shapes of a request ----

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Columns that the scores of a group of up to 16 query heads are padded to. Larger groups have blocks of so many: 2, 4 or 8.
__host__ __device__ constexpr int padded_group(int group) { return group <= 4 ? 4 : group <= 8 ? 8 : 16; }
__host__ __device__ constexpr int column_blocks(int group) { return group <= 16 ? 1 : group <= 32 ? 2 : group <= 64 ? 4 : 8; }
constexpr int kBlockColumns = 16, kLargestGroup = 128;

// Physical page of a logical one. Only pages of the request may be asked for. A plain load: it may not move ahead of the wait for the
// kernel that wrote the table, as one through the read-only path (__ldg) could.
struct BlockTable {
  const int* entries;  // of one request
  int shift;           // log2(pages per block)
  __device__ __forceinline__ int entry(int page) const { return entries[page >> shift]; }
  __device__ __forceinline__ int physical(int entry, int page) const { return (entry << shift) | (page & ((1 << shift) - 1)); }
};

}  // namespace kvskim
