// Putting splits together through global memory: the CTA that arrives last adds up what all have left there.
#pragma once
#include "attend_merge.cuh"

namespace kvskim {

// Where the splits of a (request, kv head) leave their parts.
template <int DIM>
struct TicketMerge {
  float4* outputs;  // [splits, columns]
  float2* pairs;    // [splits, group]: maximum, sum
  unsigned* ticket;
  int columns;

  __device__ __forceinline__ TicketMerge(const AttendParameters& a, int pair) {
    columns = a.group * (DIM / 4);
    const int64_t first = static_cast<int64_t>(pair) * a.splits, all = static_cast<int64_t>(a.requests) * a.heads * a.splits;
    outputs = reinterpret_cast<float4*>(a.partials) + first * columns;
    pairs = reinterpret_cast<float2*>(a.partials + all * a.group * DIM) + first * a.group;
    ticket = a.tickets + pair;
  }

  __device__ __forceinline__ void leave(const AttendParameters& a, int split, int c, const float4& output, float maximum, float sum) const {
    __stcg(outputs + split * columns + c, output);
    if (c % (DIM / 4) == 0) __stcg(pairs + split * a.group + c / (DIM / 4), make_float2(maximum, sum));
  }

  // Called by all threads of a CTA after its last leave(). `shared`: room for splits * group pairs.
  __device__ __forceinline__ void finish(const AttendParameters& a, uint8_t* shared, int request, int head, int splits, bool half) const {
    constexpr int kFours = DIM / 4;
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(ticket, splits - 1) == splits - 1;  // wraps to zero with the last arrival
    __syncthreads();
    if (!last) return;
    __threadfence();

    // The first partials are requested before the maxima are known.
    constexpr int kBatch = 16;
    float4 batch[kBatch];
    const auto request_batch = [&](int c, int start) {
#pragma unroll
      for (int s = 0; s < kBatch; ++s)
        if (start + s < splits) batch[s] = __ldcg(outputs + (start + s) * columns + c);
    };
    if (threadIdx.x < columns) request_batch(threadIdx.x, 0);
    float2* all = reinterpret_cast<float2*>(shared);  // [splits, group]
    for (int i = threadIdx.x; i < splits * a.group; i += kAttendThreads) all[i] = __ldcg(pairs + i);
    __syncthreads();

    for (int c = threadIdx.x; c < columns; c += kAttendThreads) {
      const int member = c / kFours;
      float maximum = kLowest, sum = 0.f;
      float4 output = make_float4(0.f, 0.f, 0.f, 0.f);
      for (int s = 0; s < splits; ++s) maximum = fmaxf(maximum, all[s * a.group + member].x);
      for (int start = 0; start < splits; start += kBatch) {
        if (start > 0 || c != threadIdx.x) request_batch(c, start);
#pragma unroll
        for (int s = 0; s < kBatch; ++s) {
          if (start + s < splits) {
            const float2 one = all[(start + s) * a.group + member];
            const float weight = exp2_fast(one.x - maximum);
            sum = fmaf(weight, one.y, sum);
            add_weighted(output, weight, batch[s]);
          }
        }
      }
      write_result(a, request, head * a.group + member, c % kFours * 4, output, maximum, sum, half);
    }
  }
};

}  // namespace kvskim
