// What the attend kernel keeps of the pages seen so far, and how the warps of a CTA are put together.
#pragma once
#include "attend_instructions.cuh"

namespace kvskim {

constexpr int kAttendWarps = 4;
constexpr int kAttendThreads = 32 * kAttendWarps;
constexpr int kAttendMaximumSplits = 128;
constexpr int kAttendMaximumCluster = 16;

// A paged cache of keys or values; strides in bytes.
struct CacheView {
  const uint8_t* data;
  int64_t block_bytes, token_bytes, head_bytes;
};

// Values, or keys and values, in host memory: page by page and head by head, each one or two runs of kPageTokens rows, in `host`; copies of some in
// the slots of `hot`. directory[page * heads + head] is the slot + 1, or 0 or less where there is no copy.
struct HostTier {
  const uint8_t* host;
  const uint8_t* hot;
  const int* directory;
  int parts;  // 1: values, 2: keys, then values
};

struct AttendParameters {
  const uint16_t* query;
  int64_t query_request_stride, query_head_stride;
  CacheView key, value;      // a cache whose rows are in a tier is not used
  HostTier tier;
  const int* block_table;
  int64_t block_table_stride;
  const int* seq_lens;
  const int* pages;
  const int* counts;
  uint16_t* out;
  int64_t out_request_stride, out_head_stride;
  float* lse;                // may be null
  float* partials;           // [requests, heads, splits, group, DIM] weighted values, then [requests, heads, splits, group, 2] maximum and sum
  unsigned* tickets;         // [requests, heads], zero between launches
  int requests, heads, group, table_capacity, splits, pages_per_split, query_half;
  int clustered;             // the splits of a (request, kv head) are the CTAs of a cluster; partials and tickets are not used
  int pages_per_block;
  uint32_t block_multiplier; // page / pages_per_block = page * block_multiplier >> block_shift for all pages below 2^27
  int block_shift;
  float logit_scale;         // scale * k_scale * log2(e)
  float softcap_2;           // softcap * log2(e); 0 for none
  float softcap_inverse;     // 2 / softcap
  float v_scale;
};

// Weights are exp2(x - maximum) with a maximum that may lag behind the true one by kSlack: the accumulators are then rescaled only
// when a logit passes it, and most pages need neither a reduction nor a rescaling. exp2(kSlack) = 256 is far below fp16's limit.
constexpr float kSlack = 8.f;
// Stands for minus infinity where a difference of two of them must not be NaN.
constexpr float kLowest = -1e30f;

// cap * tanh(x / cap), x and the result in base 2 (times log2 e); cap_2 = cap * log2 e, twice_inverse = 2 / cap.
__device__ __forceinline__ float soft_cap(float x, float cap_2, float twice_inverse) {
  const float e = exp2_fast(x * twice_inverse);  // exp(2 x / cap): infinite or zero at the ends, where the result is +-cap
  return cap_2 * (1.f - __fdividef(2.f, 1.f + e));
}

// Accumulators of one warp. A lane holds, of every 16 x 8 tile, rows lane / 4 and lane / 4 + 8 of two neighbouring heads.
template <int DIM, int TILES>
struct AttendState {
  float output[DIM / 16][TILES][4];
  float maximum[TILES][2];  // the same in all lanes that hold a head
  float sum[TILES][2];      // of this lane's tokens only, until finish()

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int k = 0; k < DIM / 16; ++k) output[k][tile][0] = output[k][tile][1] = output[k][tile][2] = output[k][tile][3] = 0.f;
      maximum[tile][0] = maximum[tile][1] = kLowest;
      sum[tile][0] = sum[tile][1] = 0.f;
    }
  }

  // x: logits in base 2 of tokens row, row + 8 (x[0], x[2]: first head; x[1], x[3]: second head). Replaced by the weights.
  __device__ __forceinline__ void add_logits(int tile, float (&x)[4]) {
    float largest[2] = {fmaxf(x[0], x[2]), fmaxf(x[1], x[3])};
    if (__any_sync(kAllLanes, largest[0] > maximum[tile][0] + kSlack || largest[1] > maximum[tile][1] + kSlack)) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) largest[c] = fmaxf(largest[c], __shfl_xor_sync(kAllLanes, largest[c], offset));
        const float raised = fmaxf(maximum[tile][c], largest[c]);
        const float shrink = exp2_fast(maximum[tile][c] - raised);
        maximum[tile][c] = raised;
        sum[tile][c] *= shrink;
#pragma unroll
        for (int k = 0; k < DIM / 16; ++k) {
          output[k][tile][c] *= shrink;
          output[k][tile][c + 2] *= shrink;
        }
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) x[c] = exp2_fast(x[c] - maximum[tile][c % 2]);
    sum[tile][0] += x[0] + x[2];
    sum[tile][1] += x[1] + x[3];
  }

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) sum[tile][c] += __shfl_xor_sync(kAllLanes, sum[tile][c], offset);
      }
    }
  }
};

template <int DIM, int TILES>
struct AttendMerge {
  static constexpr int kStride = DIM + 4;  // floats of a head's row: spreads the four lanes of a quad over the banks
  static constexpr int kRows = kAttendWarps * TILES * 8;
  static constexpr int kOutputBytes = kRows * kStride * 4;
  static constexpr int kPairBytes = kAttendMaximumSplits * TILES * 8 * 8;
  static constexpr int kWarpBytes = kOutputBytes + kRows * 8;
  static constexpr int kSharedBytes = kWarpBytes > kPairBytes ? kWarpBytes : kPairBytes;
};

__device__ __forceinline__ void write_four(const AttendParameters& a, int request, int head, int dim, float4 v, bool half) {
  uint2 packed;
  packed.x = half ? pack<true>(v.x, v.y) : pack<false>(v.x, v.y);
  packed.y = half ? pack<true>(v.z, v.w) : pack<false>(v.z, v.w);
  *reinterpret_cast<uint2*>(a.out + request * a.out_request_stride + head * a.out_head_stride + dim) = packed;
}

__device__ __forceinline__ void write_lse(const AttendParameters& a, int request, int head, float maximum, float sum) {
  if (a.lse) a.lse[request * a.heads * a.group + head] = sum == 0.f ? -INFINITY : kLn2 * maximum + logf(sum);
}

// An empty row: zeros, with no weight.
template <int DIM>
__device__ __forceinline__ void write_nothing(const AttendParameters& a, int request, int head) {
  for (int c = threadIdx.x; c < a.group * (DIM / 4); c += kAttendThreads) {
    const int member = head * a.group + c / (DIM / 4), dim = c % (DIM / 4) * 4;
    write_four(a, request, member, dim, make_float4(0.f, 0.f, 0.f, 0.f), false);
    if (dim == 0) write_lse(a, request, member, 0.f, 0.f);
  }
}

__device__ __forceinline__ void add_weighted(float4& sum, float weight, const float4& v) {
  sum.x = fmaf(weight, v.x, sum.x);
  sum.y = fmaf(weight, v.y, sum.y);
  sum.z = fmaf(weight, v.z, sum.z);
  sum.w = fmaf(weight, v.w, sum.w);
}

__device__ __forceinline__ void write_result(const AttendParameters& a, int request, int head, int dim, float4 v, float maximum, float sum, bool half) {
  const float norm = sum == 0.f ? 0.f : a.v_scale / sum;  // a sum of NaN stays NaN
  write_four(a, request, head, dim, make_float4(v.x * norm, v.y * norm, v.z * norm, v.w * norm), half);
  if (dim == 0) write_lse(a, request, head, maximum, sum);
}

// Puts the warps of a CTA together: `use` gets, for each four dims of a head, their weighted values and the maximum and sum of the head.
template <int DIM, int TILES, bool INTERLEAVED, class Use>
__device__ __forceinline__ void merge_warps(const AttendParameters& a, const AttendState<DIM, TILES>& state, uint8_t* shared, Use use) {
  using Merge = AttendMerge<DIM, TILES>;
  constexpr int kFours = DIM / 4;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  float* outputs = reinterpret_cast<float*>(shared);
  float2* pairs = reinterpret_cast<float2*>(shared + Merge::kOutputBytes);  // maximum, sum

  __syncthreads();  // all warps have left their rings
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int member = tile * 8 + 2 * quad + c, line = warp * TILES * 8 + member;
      if (member < a.group) {
#pragma unroll
        for (int k = 0; k < DIM / 16; ++k) {
          float* to = outputs + line * Merge::kStride + 16 * k;
          to[INTERLEAVED ? 2 * row : row] = state.output[k][tile][c];
          to[INTERLEAVED ? 2 * row + 1 : row + 8] = state.output[k][tile][c + 2];
        }
        if (row == 0) pairs[line] = make_float2(state.maximum[tile][c], state.sum[tile][c]);
      }
    }
  }
  __syncthreads();

  for (int c = threadIdx.x; c < a.group * kFours; c += kAttendThreads) {
    const int member = c / kFours, dim = c % kFours * 4;
    float maximum = kLowest, sum = 0.f;
    float4 output = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < kAttendWarps; ++w) maximum = fmaxf(maximum, pairs[w * TILES * 8 + member].x);
#pragma unroll
    for (int w = 0; w < kAttendWarps; ++w) {
      const float2 one = pairs[w * TILES * 8 + member];
      const float weight = exp2_fast(one.x - maximum);
      sum = fmaf(weight, one.y, sum);
      add_weighted(output, weight, *reinterpret_cast<const float4*>(outputs + (w * TILES * 8 + member) * Merge::kStride + dim));
    }
    use(c, output, maximum, sum);
  }
}

}  // namespace kvskim
