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
constexpr int kLatentPairBytes = kLatentHeads * 8;  // (maximum, sum) of each head
constexpr float kLatentLowest = -1e30f;  // stands for minus infinity where a difference of two of them must not be NaN

struct LatentParameters {
  CUtensorMap page_map;  // the cache as [blocks, heads, tokens of a block, 9 lines, 64 channels], of which a copy is a page
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
  unsigned place_inverse; // i / share = i * place_inverse >> 20 for all places of a part
  int pages_per_split;    // pages of a CTA that are worth another cluster
  int pages_per_block;
  uint32_t block_multiplier;  // page / pages_per_block = page * block_multiplier >> block_shift for all pages below 2^27
  int block_shift;
  float logit_scale;      // scale * k_scale * log2(e)
  float softcap_2;        // softcap * log2(e); 0 for none
  float softcap_inverse;  // 2 / softcap
  float v_scale;

  // What a CTA is sent from each CTA: [head] of `share` fours, then (maximum, sum) of each head. No padding, for little else takes as long as sending. Where
  // rows of heads are multiples of 128 bytes, their fours change places by pairs, so that four rows lie in different banks.
  __device__ __forceinline__ int part_bytes() const { return kLatentHeads * 16 * share + kLatentPairBytes; }
  __device__ __forceinline__ int swizzle(int head) const { return share % 8 == 0 ? (2 * head) & 6 : 0; }
  __device__ __forceinline__ int place_of(int head, int four) const { return (head * share + (four ^ swizzle(head))) * 16; }
  __device__ __forceinline__ int pair_of(int head) const { return kLatentHeads * 16 * share + head * 8; }
};

__host__ __device__ constexpr int latent_share(int cluster) { return ceil_div(kLatentFours, cluster); }

// Room for what a CTA of the cluster that needs most of it is sent.
constexpr int largest_latent_parts() {
  int most = 0;
  for (int c = 1; c <= kLatentCluster; ++c) {
    const int parts = c * (kLatentHeads * latent_share(c) * 16 + kLatentPairBytes);
    most = most > parts ? most : parts;
  }
  return most;
}

__device__ __forceinline__ float latent_soft_cap(float x, float cap_2, float twice_inverse) {
  const float e = exp2_fast(x * twice_inverse);  // exp(2 x / cap): infinite or zero at the ends, where the result is +-cap
  return cap_2 * (1.f - __fdividef(2.f, 1.f + e));
}

template <bool HALF>
__device__ __forceinline__ void write_latent(const LatentParameters& a, uint16_t* to, int request, int query_head, int channel, float4 v, float maximum,
                                             float sum) {
  const float norm = sum == 0.f ? 0.f : __fdividef(a.v_scale, sum);  // a sum of NaN stays NaN
  *reinterpret_cast<uint2*>(to) =
      make_uint2(pack<HALF>(v.x * norm, v.y * norm), pack<HALF>(v.z * norm, v.w * norm));
  if (a.lse && channel == 0) a.lse[request * a.heads * a.group + query_head] = sum == 0.f ? -INFINITY : kLn2 * maximum + logf(sum);
}

__device__ __forceinline__ void add_latent(float4& sum, float weight, const float4& v) {
  sum.x = fmaf(weight, v.x, sum.x), sum.y = fmaf(weight, v.y, sum.y), sum.z = fmaf(weight, v.z, sum.z), sum.w = fmaf(weight, v.w, sum.w);
}

// Sums over parts of which `count` are left, eight at a time: load(i, present, pair, value) gives part i, if there is one, its (maximum, sum) and values.
// No branches within the eight, so that all their loads and exponentials are under way together.
template <class Load>
__device__ __forceinline__ float4 merge_latent(int count, float& maximum, float& sum, Load load) {
  constexpr int kBatch = 8;
  float4 output = make_float4(0.f, 0.f, 0.f, 0.f);
  maximum = kLatentLowest, sum = 0.f;
#pragma unroll 1
  for (int start = 0; start < count; start += kBatch) {
    float4 value[kBatch];
    float2 pair[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      value[i] = make_float4(0.f, 0.f, 0.f, 0.f), pair[i] = make_float2(kLatentLowest, 0.f);
      load(start + i, start + i < count, pair[i], value[i]);
    }
    float raised = maximum;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) raised = fmaxf(raised, pair[i].x);
    const float shrink = exp2_fast(maximum - raised);
    maximum = raised, sum *= shrink;
    output.x *= shrink, output.y *= shrink, output.z *= shrink, output.w *= shrink;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float weight = exp2_fast(pair[i].x - raised);
      sum = fmaf(weight, pair[i].y, sum);
      add_latent(output, weight, value[i]);
    }
  }
  return output;
}

// Whose sums a CTA puts together: the query heads, cluster `number` of `live`, CTA `rank` of `cluster`.
struct LatentPlace {
  int request, pair, block, first_head, members, cluster, number, rank, live;
};

// The channels of this CTA from what it has of them itself, its part of those at `own_parts`, and from `sent_parts`, which the other CTAs of its cluster
// have left in its shared memory once `received` returns, and, where several clusters share a request, from what those leave in global memory. By all
// threads. Parts are laid out as LatentParameters says, both in the order of CTAs.
template <bool HALF, int THREADS, class Received>
__device__ __forceinline__ void put_latent_together(const LatentParameters& a, uint32_t own_parts, uint32_t sent_parts, bool* last, const LatentPlace& at,
                                                    Received received) {
  const int share = a.share, bytes = a.part_bytes(), first_four = at.rank * share;
  const int64_t first_part = static_cast<int64_t>(at.pair) * a.clusters, all_parts = static_cast<int64_t>(a.requests) * a.heads * a.clusters;
  float4* const left = reinterpret_cast<float4*>(a.partials);
  float2* const left_pairs = reinterpret_cast<float2*>(a.partials + all_parts * a.group * kLatentChannels);
  const auto line_of = [&](int part, int member) { return (first_part + part) * a.group + at.block * kLatentHeads + member; };
  // Of the parts of a large cluster a thread has half, and the 16th lane on from it the others: there are threads enough.
  const bool halved = at.cluster > 8 && 2 * kLatentHeads * share <= THREADS;
  const int half = halved && threadIdx.x % 32 >= 16, places = at.members * share;
  const int first = halved ? threadIdx.x / 32 * 16 + threadIdx.x % 16 : threadIdx.x, round = halved ? THREADS / 2 : THREADS;
  const int parts_each = halved ? (at.cluster + 1) / 2 : at.cluster, first_of = half * parts_each, parts = min(parts_each, at.cluster - first_of);
  const auto member_of = [&](int i) { return static_cast<int>(static_cast<unsigned>(i) * a.place_inverse >> 20); };
  int member = member_of(first), own = first - member * share;
  uint16_t* to = a.out + at.request * a.out_request_stride + (at.first_head + member) * a.out_head_stride + 4 * (first_four + own);
  uint32_t values = a.place_of(member, own), pairs = a.pair_of(member);
  keep_ready(values), keep_ready(pairs), keep_ready(to);
  received();
  // Whole halves of warps, and whole warps where halved: these lanes meet in the loop.
  for (int i = first; i - static_cast<int>(threadIdx.x) % 16 < places; i += round) {
    if (i != first) {
      member = member_of(i), own = i - member * share;
      to = a.out + at.request * a.out_request_stride + (at.first_head + member) * a.out_head_stride + 4 * (first_four + own);
      values = a.place_of(member, own), pairs = a.pair_of(member);
    }
    const bool present = i < places && first_four + own < kLatentFours;
    float most, sum;
    float4 v = merge_latent(present ? parts : 0, most, sum, [&](int part, bool there, float2& pair, float4& value) {
      const int other = first_of + part;
      const uint32_t from = (other == at.rank ? own_parts : sent_parts) + other * bytes;
      load_shared_if(there, pair, from + pairs);
      load_shared_if(there, value, from + values);
    });
    if (halved) {
      const float other_most = __shfl_xor_sync(kAllLanes, most, 16), raised = fmaxf(most, other_most);
      const float weight = exp2_fast(most - raised);
      sum *= weight, v.x *= weight, v.y *= weight, v.z *= weight, v.w *= weight;
      sum += __shfl_xor_sync(kAllLanes, sum, 16);
      v.x += __shfl_xor_sync(kAllLanes, v.x, 16), v.y += __shfl_xor_sync(kAllLanes, v.y, 16);
      v.z += __shfl_xor_sync(kAllLanes, v.z, 16), v.w += __shfl_xor_sync(kAllLanes, v.w, 16);
      most = raised;
    }
    if (!present || half) continue;
    const int four = first_four + own;
    if (at.live == 1) {
      write_latent<HALF>(a, to, at.request, at.first_head + member, 4 * four, v, most, sum);
    } else {
      __stcg(left + line_of(at.number, member) * kLatentFours + four, v);
      // Every rank has the same pair, and leaves it: it knows only of those that others of its rank have left.
      if (own == 0) __stcg(left_pairs + line_of(at.number, member), make_float2(most, sum));
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
  for (int i = threadIdx.x; i < places; i += THREADS) {
    const int member = member_of(i), four = first_four + i - member * share;
    if (four >= kLatentFours) continue;
    float most, sum;
    const float4 v = merge_latent(at.live, most, sum, [&](int part, bool there, float2& pair, float4& value) {
      if (there) pair = __ldcg(left_pairs + line_of(part, member)), value = __ldcg(left + line_of(part, member) * kLatentFours + four);
    });
    write_latent<HALF>(a, a.out + at.request * a.out_request_stride + (at.first_head + member) * a.out_head_stride + 4 * four, at.request,
                       at.first_head + member, 4 * four, v, most, sum);
  }
}

}  // namespace kvskim
