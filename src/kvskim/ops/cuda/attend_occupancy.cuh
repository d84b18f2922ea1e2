// Launching with thread-block clusters, and how many clusters run at once.
#pragma once
#include <map>
#include <mutex>
#include <tuple>

#include "common.cuh"

namespace kvskim {

constexpr int larger(int a, int b) { return a > b ? a : b; }

// Least dynamic shared memory of a CTA with which no more than `residents` fit on an SM (228 KB, of which each CTA takes 1 KB beside its own).
constexpr int shared_bytes_for_residents(int residents) { return (228 * 1024 / (residents + 1) / 128 - 8 + 1) * 128; }

constexpr int kMaximumShared = 226 * 1024;

// The same for all launches of a kernel, so that one doesn't take from another. With less than all memory of an SM as shared memory, a CTA that
// asks for half of it would leave no room for those of the kernels around.
inline cudaError_t allow_cluster(const void* kernel, int cluster) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaximumShared);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error == cudaSuccess && cluster > 8) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  return error;
}

inline cudaLaunchConfig_t cluster_configuration(cudaLaunchAttribute (&attributes)[2], dim3 grid, int threads, int shared_bytes, int cluster,
                                                int flags) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = attributes;
  if (cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {1, 1, static_cast<unsigned>(cluster)};
  }
  if (flags & kOverlapPrevious) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  return config;
}

// How many clusters (CTAs when the size is 1) run at once on the current device; 0 when it can't run one. Asked once for each kernel and shape.
inline cudaError_t resident_clusters(const void* kernel, int threads, int shared_bytes, int cluster, int& count) {
  static std::mutex mutex;
  static std::map<std::tuple<int, const void*, int, int>, int> known;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const std::lock_guard<std::mutex> guard(mutex);
  const auto [entry, is_new] = known.try_emplace({device, kernel, shared_bytes, cluster}, 0);
  if (is_new) {
    error = allow_cluster(kernel, cluster);
    if (error == cudaSuccess && cluster > 1) {
      cudaLaunchAttribute attributes[2]{};
      const cudaLaunchConfig_t config = cluster_configuration(attributes, dim3(1, 1, cluster), threads, shared_bytes, cluster, 0);
      if (cudaOccupancyMaxActiveClusters(&entry->second, kernel, &config) != cudaSuccess) {
        cudaGetLastError();  // a cluster of that size is not possible here
        entry->second = 0;
      }
    } else if (error == cudaSuccess) {
      int processors = 0, blocks = 0;
      error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
      if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes);
      entry->second = processors * blocks;
    }
    if (error != cudaSuccess) {
      known.erase(entry);
      return error;
    }
  }
  count = entry->second;
  return cudaSuccess;
}

// As launch() of common.cuh, with clusters along z.
template <class Parameters>
cudaError_t launch_cluster(void (*kernel)(Parameters), dim3 grid, int threads, int shared_bytes, int cluster, cudaStream_t stream, int flags,
                           const Parameters& parameters) {
  const cudaError_t error = allow_cluster(reinterpret_cast<const void*>(kernel), cluster);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config = cluster_configuration(attributes, grid, threads, shared_bytes, cluster, flags);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, parameters);
}

}  // namespace kvskim
