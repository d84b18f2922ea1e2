// Putting splits together inside a thread-block cluster: each CTA owns a slice of the result and receives that slice of every other CTA in its
// shared memory, so nothing passes through global memory and one cluster barrier is all that is waited for.
#pragma once
#include "attend_merge.cuh"

namespace kvskim {

// What a CTA receives: [splits, slice] weighted values (four dims each), then [splits, group] pairs of maximum and sum.
template <int DIM, int TILES>
struct ClusterMerge {
  static constexpr int kFours = DIM / 4;
  static constexpr int kOutputs = TILES * 8 * kFours + kAttendMaximumCluster;  // a slice is rounded up, for each of the splits
  static constexpr int kBytes = kOutputs * 16 + kAttendMaximumCluster * TILES * 8 * 8;
  static_assert(kFours >= kAttendMaximumCluster);  // every peer gets the pair of a head from one of its kFours columns
};

// Sends column c (four dims of a head) of this CTA to its owner, and now and then the maximum and sum of the head to one CTA.
// All CTAs with work must have begun: cluster_wait() after a cluster_arrive() of theirs.
template <int DIM, int TILES>
__device__ __forceinline__ void send_column(const AttendParameters& a, const uint8_t* received, int split, int splits, int c, const float4& output,
                                            float maximum, float sum) {
  using Cluster = ClusterMerge<DIM, TILES>;
  const int slice = ceil_div(a.group * Cluster::kFours, splits), owner = c / slice;
  const uint32_t outputs = shared_address(received), pairs = outputs + Cluster::kOutputs * 16;
  store_remote(remote_address(outputs + (split * slice + c - owner * slice) * 16, owner), output);
  const int peer = c % Cluster::kFours, member = c / Cluster::kFours;
  if (peer < splits) store_remote(remote_address(pairs + (split * a.group + member) * 8, peer), make_float2(maximum, sum));
}

// Reduces the slice of this CTA over the splits and writes it. Called after the cluster barrier that follows all sends; nobody touches the
// memory of another CTA after it, so a CTA may end at any time.
template <int DIM, int TILES>
__device__ __forceinline__ void reduce_received(const AttendParameters& a, const uint8_t* received, int request, int head, int split, int splits,
                                                bool half) {
  using Cluster = ClusterMerge<DIM, TILES>;
  const float4* outputs = reinterpret_cast<const float4*>(received);
  const float2* pairs = reinterpret_cast<const float2*>(received + Cluster::kOutputs * 16);
  const int columns = a.group * Cluster::kFours, slice = ceil_div(columns, splits);
  for (int i = threadIdx.x; i < slice && split * slice + i < columns; i += kAttendThreads) {
    const int c = split * slice + i, member = c / Cluster::kFours;
    float maximum = kLowest, sum = 0.f;
    float4 output = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int s = 0; s < splits; ++s) maximum = fmaxf(maximum, pairs[s * a.group + member].x);
#pragma unroll 4
    for (int s = 0; s < splits; ++s) {
      const float2 one = pairs[s * a.group + member];
      const float weight = exp2_fast(one.x - maximum);
      sum = fmaf(weight, one.y, sum);
      add_weighted(output, weight, outputs[s * slice + i]);
    }
    write_result(a, request, head * a.group + member, c % Cluster::kFours * 4, output, maximum, sum, half);
  }
}

}  // namespace kvskim
