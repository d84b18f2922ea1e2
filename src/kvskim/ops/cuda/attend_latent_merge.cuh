// What the kernel of latent attention is told, and how the parts of a request are put together.
#pragma once
#include "attend_latent_instructions.cuh"

namespace kvskim {

constexpr int kLatentChannels = 512, kRotaryChannels = 64;
constexpr int kLatentWarps = 8, kLatentThreads = 32 * kLatentWarps;
constexpr int kLatentHeads = 16;         // of a block
constexpr int kLatentQuarterSteps = 9;   // of 16 channels
constexpr int kLatentCluster = 16;       // CTAs of the largest cluster
constexpr float kLatentLowest = -1e30f;  // stands for minus infinity where a difference of two of them must not be NaN

struct LatentParameters {
  const uint16_t* query;
  int64_t query_request_stride, query_head_stride;
  const uint16_t* rest;  // the rotary channels of the query
  int64_t rest_request_stride, rest_head_stride;
  const uint8_t* cache;
  int64_t block_bytes, token_bytes, head_bytes;
  const int* block_table;
  int64_t block_table_stride;
  const int* seq_lens;
  const int* pages;
  const int* counts;
  uint16_t* out;
  int64_t out_request_stride, out_head_stride;
  float* lse;         // may be null
  float* partials;    // [requests, heads, clusters, group, 512] weighted values, then [requests, heads, clusters, group, 2] maximum and sum
  unsigned* tickets;  // [requests, heads, blocks, kLatentCluster], zero between launches
  int requests, heads, group, blocks;  // blocks of query heads of a kv head
  int table_capacity;
  int cluster, clusters;  // CTAs of a cluster; clusters that may share a request
  int pages_per_split;    // pages of a CTA that are worth another cluster
  int pages_per_block;
  uint32_t block_multiplier;  // page / pages_per_block = page * block_multiplier >> block_shift for all pages below 2^27
  int block_shift;
  float logit_scale;      // scale * k_scale * log2(e)
  float softcap_2;        // softcap * log2(e); 0 for none
  float softcap_inverse;  // 2 / softcap
  float v_scale;
};

__device__ __forceinline__ float latent_soft_cap(float x, float cap_2, float twice_inverse) {
  const float e = exp2_fast(x * twice_inverse);  // exp(2 x / cap): infinite or zero at the ends, where the result is +-cap
  return cap_2 * (1.f - __fdividef(2.f, 1.f + e));
}

template <bool HALF>
__device__ __forceinline__ void write_latent(const LatentParameters& a, int request, int query_head, int channel, float4 v, float maximum, float sum) {
  const float norm = sum == 0.f ? 0.f : a.v_scale / sum;  // a sum of NaN stays NaN
  *reinterpret_cast<uint2*>(a.out + request * a.out_request_stride + query_head * a.out_head_stride + channel) =
      make_uint2(pack<HALF>(v.x * norm, v.y * norm), pack<HALF>(v.z * norm, v.w * norm));
  if (a.lse && channel == 0) a.lse[request * a.heads * a.group + query_head] = sum == 0.f ? -INFINITY : kLn2 * maximum + logf(sum);
}

__device__ __forceinline__ void add_latent(float4& sum, float weight, const float4& v) {
  sum.x = fmaf(weight, v.x, sum.x), sum.y = fmaf(weight, v.y, sum.y), sum.z = fmaf(weight, v.z, sum.z), sum.w = fmaf(weight, v.w, sum.w);
}

// Sums over `count` parts, with load4(i) and load2(i) the values and the (maximum, sum) of part i. Eight loads are under way at a time.
template <class Load4, class Load2>
__device__ __forceinline__ float4 merge_latent(int count, float& maximum, float& sum, Load4 load4, Load2 load2) {
  constexpr int kBatch = 8;
  float4 output = make_float4(0.f, 0.f, 0.f, 0.f);
  maximum = kLatentLowest, sum = 0.f;
  for (int start = 0; start < count; start += kBatch) {
    float4 value[kBatch];
    float2 pair[kBatch];
    float raised = maximum;
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (start + i < count) pair[i] = load2(start + i), value[i] = load4(start + i);
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (start + i < count) raised = fmaxf(raised, pair[i].x);
    const float shrink = exp2_fast(maximum - raised);
    maximum = raised, sum *= shrink;
    output.x *= shrink, output.y *= shrink, output.z *= shrink, output.w *= shrink;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (start + i < count) {
        const float weight = exp2_fast(pair[i].x - raised);
        sum = fmaf(weight, pair[i].y, sum);
        add_latent(output, weight, value[i]);
      }
    }
  }
  return output;
}

}  // namespace kvskim
