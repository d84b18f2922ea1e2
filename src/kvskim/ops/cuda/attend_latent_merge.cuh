// What the kernel of latent attention is told, and how the parts of a request are put together.
#pragma once
#include "attend_latent_instructions.cuh"

namespace kvskim {

constexpr int kLatentChannels = 512, kRotaryChannels = 64;
constexpr int kLatentRowBytes = 2 * (kLatentChannels + kRotaryChannels);
constexpr int kLogitWarps = 4, kValueWarps = 4;
constexpr int kLatentHeads = 16;         // of a block
constexpr int kLatentCluster = 16;       // CTAs of the largest cluster
constexpr int kLatentFours = kLatentChannels / 4;  // what is put together at a time: four channels
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
  int query_unit;         // bytes: rows of both parts of the query begin at multiples of it, 4 or 16
  bool settled;           // kQueriesSettled
  int full_pages;         // of a request that is attended whole; only where settled
  int cluster, clusters;  // CTAs of a cluster; clusters that may share a request
  int share;              // fours that each CTA of a cluster puts together
  int share_inverse;      // four / share = four * share_inverse >> 16 for all fours
  int pages_per_split;    // pages of a CTA that are worth another cluster
  int pages_per_block;
  uint32_t block_multiplier;  // page / pages_per_block = page * block_multiplier >> block_shift for all pages below 2^27
  int block_shift;
  float logit_scale;      // scale * k_scale * log2(e)
  float softcap_2;        // softcap * log2(e); 0 for none
  float softcap_inverse;  // 2 / softcap
  float v_scale;

  // How many fours apart the rows of heads lie in what a CTA is sent, an odd number, for the banks; and how much it is from each CTA.
  __device__ __forceinline__ int pitch() const { return share | 1; }
  __device__ __forceinline__ int part_bytes() const { return kLatentHeads * pitch() * 16; }
};

__host__ __device__ constexpr int latent_share(int cluster) { return ceil_div(kLatentFours, cluster); }
constexpr int kLatentPairBytes = kLatentHeads * 8;  // (maximum, sum) of each head

// Room for what a CTA of the cluster that needs most of it is sent.
constexpr int largest_latent_parts() {
  int most = 0;
  for (int c = 1; c <= kLatentCluster; ++c) {
    const int parts = c * kLatentHeads * (latent_share(c) | 1) * 16;
    most = most > parts ? most : parts;
  }
  return most;
}

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

// Whose sums a CTA puts together: the query heads, cluster `number` of `live`, CTA `rank` of `cluster`.
struct LatentPlace {
  int request, pair, block, first_head, members, cluster, number, rank, live;
};

// The channels of this CTA from what it has of them itself, from `parts` and `pairs`, which the other CTAs of its cluster have left in its shared memory,
// and, where several clusters share a request, from what those leave in global memory. By all threads.
// own_parts, parts: [CTA of the cluster][head] of pitch fours; own_pairs: [head]; pairs: [CTA of the cluster][head].
template <bool HALF, int THREADS>
__device__ __forceinline__ void put_latent_together(const LatentParameters& a, const uint8_t* own_parts, const uint8_t* own_pairs, const uint8_t* parts,
                                                    const uint8_t* pairs, bool* last, const LatentPlace& at) {
  const int share = at.cluster > 1 ? a.share : kLatentFours, pitch = share | 1;
  const int first_four = at.rank * share, fours = min(share, kLatentFours - first_four);
  const int64_t first_part = static_cast<int64_t>(at.pair) * a.clusters, all_parts = static_cast<int64_t>(a.requests) * a.heads * a.clusters;
  float4* const left = reinterpret_cast<float4*>(a.partials);
  float2* const left_pairs = reinterpret_cast<float2*>(a.partials + all_parts * a.group * kLatentChannels);
  const auto line_of = [&](int part, int member) { return (first_part + part) * a.group + at.block * kLatentHeads + member; };
  for (int i = threadIdx.x; i < at.members * fours; i += THREADS) {
    const int member = i / fours, own = i - member * fours, four = first_four + own;
    float most, sum;
    const float4 v = merge_latent(
        at.cluster, most, sum,
        [&](int other) { return reinterpret_cast<const float4*>(other == at.rank ? own_parts : parts)[(other * kLatentHeads + member) * pitch + own]; },
        [&](int other) {
          return other == at.rank ? reinterpret_cast<const float2*>(own_pairs)[member] : reinterpret_cast<const float2*>(pairs)[other * kLatentHeads + member];
        });
    if (at.live == 1) {
      write_latent<HALF>(a, at.request, at.first_head + member, 4 * four, v, most, sum);
    } else {
      __stcg(left + line_of(at.number, member) * kLatentFours + four, v);
      // Every rank has the same pair, and leaves it: it knows only of those that others of its rank have left.
      if (four == first_four) __stcg(left_pairs + line_of(at.number, member), make_float2(most, sum));
    }
  }
  if (at.live == 1) return;

  // The channels of this rank in all clusters: the last CTA to come puts them together. One thread fences for all, which it has met: not each warp.
  __syncthreads();
  unsigned* ticket = a.tickets + (static_cast<int64_t>(at.pair) * a.blocks + at.block) * kLatentCluster + at.rank;
  const unsigned wrap = at.live - 1;  // to zero with the last arrival
  if (threadIdx.x == 0) {
    __threadfence();
    *last = atomicInc(ticket, wrap) == wrap;
    __threadfence();
  }
  __syncthreads();
  if (!*last) return;
  for (int i = threadIdx.x; i < at.members * fours; i += THREADS) {
    const int member = i / fours, four = first_four + i - member * fours;
    float most, sum;
    const float4 v = merge_latent(
        at.live, most, sum, [&](int part) { return __ldcg(left + line_of(part, member) * kLatentFours + four); },
        [&](int part) { return __ldcg(left_pairs + line_of(part, member)); });
    write_latent<HALF>(a, at.request, at.first_head + member, 4 * four, v, most, sum);
  }
}

}  // namespace kvskim
