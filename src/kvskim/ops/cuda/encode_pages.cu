// Records of the selectors that code each page by itself (r8, rki4, quad, clse, minmax, mean), from slot_mapping alone.
// Formats: src/kvskim/selectors, one file each; the steps shared by the eigen records are in page_eigen.cuh.
//
// One warp codes one (page, kv head): keys minus the offset of their head go to shared memory as float32, the record is put together in
// shared memory and written out at once. Head dims are a run-time number, any multiple of 8.
#include "page_eigen.cuh"

namespace kvskim {
namespace {

constexpr int kWarps = 4;
constexpr int kLargestWindow = 64;  // slots; all of them may complete a page
constexpr int kMaximumRank = 16;

enum PageRecord { kMean = 0, kMinMax = 1, kPrincipal = 2, kQuad = 3, kClse = 4 };

struct EncodePages {
  const uint8_t* keys;
  int64_t block_stride, token_stride, head_stride;  // bytes
  int block_shift;                                  // log2(pages per block)
  const int64_t* slot_mapping;
  int tokens, window;
  const float* offset;
  PageRecord kind;
  int rank, bits;  // bits of the directions, or of the bounds
  uint8_t* records;
  int64_t pages;
  int heads, head_dim, record_bytes;
  float key_scale;
};

// ---- keys of a page ----

// Four consecutive channels of a token, float32, as the reference computes them: no fused multiply-add.
template <ElementType Element>
__device__ __forceinline__ void load_channels(float (&x)[4], const uint8_t* from, float key_scale) {
  if constexpr (Element == kFloat8E4M3) {
    const uint32_t raw = *reinterpret_cast<const uint32_t*>(from);
    const float2 low = unpack(widen(uint16_t(raw)), true), high = unpack(widen(uint16_t(raw >> 16)), true);
    x[0] = __fmul_rn(low.x, key_scale), x[1] = __fmul_rn(low.y, key_scale);
    x[2] = __fmul_rn(high.x, key_scale), x[3] = __fmul_rn(high.y, key_scale);
  } else {
    const uint2 raw = *reinterpret_cast<const uint2*>(from);
    const float2 low = unpack(raw.x, Element == kFloat16), high = unpack(raw.y, Element == kFloat16);
    x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
  }
}

template <ElementType Element>
__device__ __forceinline__ void load_page(float (&x)[kPageTokens][4], const EncodePages& p, const uint8_t* keys, int head, int channel) {
  const float4 offset = *reinterpret_cast<const float4*>(p.offset + int64_t(head) * p.head_dim + channel);
#pragma unroll
  for (int token = 0; token < kPageTokens; ++token) {
    load_channels<Element>(x[token], keys + token * p.token_stride + channel * (Element == kFloat8E4M3 ? 1 : 2), p.key_scale);
    x[token][0] = __fsub_rn(x[token][0], offset.x), x[token][1] = __fsub_rn(x[token][1], offset.y);
    x[token][2] = __fsub_rn(x[token][2], offset.z), x[token][3] = __fsub_rn(x[token][3], offset.w);
  }
}

// ---- minmax: bounds, rounded outwards ----

// Largest bfloat16 not above x, as bits.
__device__ __forceinline__ uint32_t floor_bfloat16(float x) {
  if (!(fabsf(x) <= INFINITY)) return kBFloat16NaN;
  const int bits = __float_as_int(x);
  return uint32_t((bits < 0 ? bits + 0xffff : bits) >> 16) & 0xffffu;
}
__device__ __forceinline__ uint32_t ceil_bfloat16(float x) { return floor_bfloat16(-x) ^ 0x8000u; }
__device__ __forceinline__ float bfloat16_value(uint32_t bits) { return __uint_as_float(bits << 16); }

// 4-bit codes of one bound, `zero + code * scale`, still a bound after decoding.
__device__ void code_bound(uint8_t* codes, uint8_t* range, const float* bound, int head_dim, bool upper, int lane) {
  float lowest = INFINITY, highest = -INFINITY;
  for (int d = lane; d < head_dim; d += 32) lowest = fminf(lowest, bound[d]), highest = fmaxf(highest, bound[d]);
  const bool valid = __all_sync(kAllLanes, lowest <= highest || lane >= head_dim);  // not NaN
  lowest = -warp_maximum(-lowest), highest = warp_maximum(highest);
  const uint32_t zero_bits = valid ? floor_bfloat16(lowest) : kBFloat16NaN;
  const float zero = bfloat16_value(zero_bits);
  // The tiny factor keeps zero + 15 scale at or above the largest bound in spite of float32 rounding.
  uint32_t scale_bits = valid ? ceil_bfloat16(__fmul_rn(__fdiv_rn(__fsub_rn(highest, zero), 15.f), 1.000001f)) : kBFloat16NaN;
  if (bfloat16_value(scale_bits) < kSmallestScale) scale_bits = bfloat16_bits(kSmallestScale);
  const float scale = bfloat16_value(scale_bits);
  auto code = [&](float value) -> uint32_t {
    if (!valid) return 0;
    const float steps = __fdiv_rn(__fsub_rn(value, zero), scale);
    float c = fminf(fmaxf(upper ? ceilf(steps) : floorf(steps), 0.f), 15.f);
    const float decoded = __fadd_rn(zero, __fmul_rn(c, scale));
    if (upper ? decoded < value : decoded > value) c += upper ? 1.f : -1.f;
    return uint32_t(fminf(fmaxf(c, 0.f), 15.f));
  };
  for (int pair = lane; pair < head_dim / 2; pair += 32) codes[pair] = uint8_t(code(bound[2 * pair]) | code(bound[2 * pair + 1]) << 4);
  if (lane == 0) store16(range, scale_bits), store16(range + 2, zero_bits);
}

// ---- the kernels: one page by one warp; `rows` are padded rows of head_dim floats in shared memory, `record` too ----

template <ElementType Element>
__device__ void encode_minmax(const EncodePages& p, const uint8_t* keys, int head, float* rows, uint8_t* record, int lane) {
  const int stride = row_stride(p.head_dim);
  bool finite = true;
  for (int channel = 4 * lane; channel < p.head_dim; channel += 128) {
    float x[kPageTokens][4];
    load_page<Element>(x, p, keys, head, channel);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float low = x[0][i], high = x[0][i];
#pragma unroll
      for (int token = 0; token < kPageTokens; ++token) {
        finite &= fabsf(x[token][i]) < INFINITY;
        low = fminf(low, x[token][i]), high = fmaxf(high, x[token][i]);
      }
      rows[channel + i] = low, rows[stride + channel + i] = high;
    }
  }
  finite = __all_sync(kAllLanes, finite);
  if (!finite)
    for (int d = lane; d < p.head_dim; d += 32) rows[d] = NAN, rows[stride + d] = NAN;
  __syncwarp();
  if (p.bits == 16) {
    for (int d = lane; d < p.head_dim; d += 32) {
      store16(record + 2 * d, floor_bfloat16(rows[d]));
      store16(record + 2 * (p.head_dim + d), ceil_bfloat16(rows[stride + d]));
    }
  } else {
    code_bound(record, record + p.head_dim, rows, p.head_dim, false, lane);
    code_bound(record + p.head_dim / 2, record + p.head_dim + 4, rows + stride, p.head_dim, true, lane);
  }
}

// Centred keys into rows 0..15, their mean into row 16. True when no key is infinite or NaN.
template <ElementType Element>
__device__ void centre_page(const EncodePages& p, const uint8_t* keys, int head, float* rows, int lane, bool keep_tokens) {
  const int stride = row_stride(p.head_dim);
  for (int channel = 4 * lane; channel < p.head_dim; channel += 128) {
    float x[kPageTokens][4];
    load_page<Element>(x, p, keys, head, channel);
    float mean[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float sum = x[0][i];
#pragma unroll
      for (int token = 1; token < kPageTokens; ++token) sum = __fadd_rn(sum, x[token][i]);
      mean[i] = sum * (1.f / kPageTokens);
    }
    *reinterpret_cast<float4*>(rows + kPageTokens * stride + channel) = make_float4(mean[0], mean[1], mean[2], mean[3]);
    if (keep_tokens) {
#pragma unroll
      for (int token = 0; token < kPageTokens; ++token)
        *reinterpret_cast<float4*>(rows + token * stride + channel) =
            make_float4(x[token][0] - mean[0], x[token][1] - mean[1], x[token][2] - mean[2], x[token][3] - mean[3]);
    }
  }
  __syncwarp();
}

// Mean int8 and its scale at the head of the record; the scale of a page that is not finite is NaN, which makes its score NaN: selected.
__device__ void write_mean(uint8_t* record, const float* mean, int head_dim, bool finite, int lane) {
  const uint32_t scale = finite ? code_vector(record, mean, head_dim, 8, lane) : kBFloat16NaN;
  if (!finite)
    for (int d = lane; d < head_dim; d += 32) record[d] = 0;
  if (lane == 0) store16(record + head_dim, scale);
}

template <ElementType Element>
__device__ void encode_mean(const EncodePages& p, const uint8_t* keys, int head, float* rows, uint8_t* record, int lane) {
  centre_page<Element>(p, keys, head, rows, lane, false);
  const float* mean = rows + kPageTokens * row_stride(p.head_dim);
  bool finite = true;
  for (int d = lane; d < p.head_dim; d += 32) finite &= fabsf(mean[d]) < INFINITY;
  write_mean(record, mean, p.head_dim, __all_sync(kAllLanes, finite), lane);
}

template <ElementType Element>
__device__ void encode_eigen(const EncodePages& p, const uint8_t* keys, int head, float* rows, float* vectors, uint8_t* record, int lane) {
  const int stride = row_stride(p.head_dim), rank = p.rank;
  centre_page<Element>(p, keys, head, rows, lane, true);
  float column[8];
  const float trace = gram_column(column, rows, p.head_dim, lane);
  const bool finite = fabsf(trace) < INFINITY;
  // Row k of `vectors`: u_k; then the energies.
  float* const energies = vectors + kMaximumRank * kPageTokens;
  decompose_gram(column, finite ? trace : 0.f, rank, vectors, energies, lane);
  __syncwarp();
  write_mean(record, rows + kPageTokens * stride, p.head_dim, finite, lane);

  uint8_t* const codes = record + p.head_dim + 2;
  const int code_bytes = p.head_dim * p.bits / 8;
  uint8_t* const scales = codes + rank * code_bytes;
  float* const direction = rows + (kPageTokens + 1) * stride;
  float kept = 0.f;
  for (int k = 0; k < rank; ++k) {
    kept += energies[k];
    const float inverse = 1.f / sqrtf(energies[k]);
    for (int channel = 4 * lane; channel < p.head_dim; channel += 128) {
      float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
      if (finite) {
#pragma unroll
        for (int token = 0; token < kPageTokens; ++token) {
          const float4 x = *reinterpret_cast<const float4*>(rows + token * stride + channel);
          const float u = vectors[k * kPageTokens + token] * inverse;
          v.x += u * x.x, v.y += u * x.y, v.z += u * x.z, v.w += u * x.w;
        }
      }
      *reinterpret_cast<float4*>(direction + channel) = v;
    }
    __syncwarp();
    const uint32_t scale = code_vector(codes + k * code_bytes, direction, p.head_dim, p.bits, lane);
    if (lane == 0) store16(scales + 2 * k, scale);
    __syncwarp();
  }
  uint8_t* const rest = scales + 2 * rank;
  if (p.kind == kQuad) {
    if (lane < rank) store16(rest + 2 * lane, bfloat16_bits(energies[lane]));
    return;
  }
  // Coordinates: one scale per token; lane t codes token t. Four-bit codes of neighbouring tokens may share a byte, so they go through
  // shared memory.
  const int bits = p.kind == kClse ? 4 : 8;
  uint8_t* const coordinates = p.kind == kClse ? reinterpret_cast<uint8_t*>(direction) : rest;
  uint8_t* const coordinate_scales = rest + kPageTokens * rank * bits / 8;
  if (lane < kPageTokens) {
    float largest = 0.f;
    for (int k = 0; k < rank; ++k) largest = fmaxf(largest, fabsf(vectors[k * kPageTokens + lane] * sqrtf(energies[k])));
    const uint32_t scale = scale_bits(largest, bits);
    for (int k = 0; k < rank; ++k)
      coordinates[lane * rank + k] = uint8_t(code_of(vectors[k * kPageTokens + lane] * sqrtf(energies[k]), scale, bits));
    store16(coordinate_scales + 2 * lane, scale);
  }
  if (p.kind == kClse) {
    __syncwarp();
    for (int i = lane; i < kPageTokens * rank / 2; i += 32) rest[i] = uint8_t((coordinates[2 * i] & 15) | coordinates[2 * i + 1] << 4);
    uint8_t* const residual_at = coordinate_scales + 2 * kPageTokens;
    if (lane == 0) {
      const uint32_t residual = __float_as_uint(finite ? fmaxf(trace - kept, 0.f) : 0.f);
      store16(residual_at, residual & 0xffffu), store16(residual_at + 2, residual >> 16);
    }
    for (uint8_t* at = residual_at + 4 + lane; at < record + p.record_bytes; at += 32) *at = 0;
  }
}

// Padded float rows, eigenvectors and energies, record: bytes of shared memory of one warp.
__host__ __device__ int float_rows(PageRecord kind) { return kind == kMean ? kPageTokens + 1 : kind == kMinMax ? 2 : kPageTokens + 2; }
__host__ __device__ int vector_floats(PageRecord kind) { return kind >= kPrincipal ? kMaximumRank * kPageTokens + kMaximumRank : 0; }
__host__ __device__ int warp_bytes(PageRecord kind, int head_dim, int record_bytes) {
  return 4 * (float_rows(kind) * row_stride(head_dim) + vector_floats(kind)) + (record_bytes + 15) / 16 * 16;
}

template <ElementType Element>
__global__ void __launch_bounds__(32 * kWarps) encode_pages_kernel(const EncodePages p) {
  extern __shared__ __align__(16) uint8_t shared[];
  int* const list = reinterpret_cast<int*>(shared);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, head = blockIdx.x;
  wait_previous_kernel();
  allow_next_kernel();

  // Every warp makes the same list for itself: at most two votes, and no barrier.
  int count = 0;
  for (int i = 0; i < p.window; i += 32) {
    const int token = blockIdx.y * p.window + i + lane;
    const int64_t slot = i + lane < p.window && token < p.tokens ? p.slot_mapping[token] : -1;
    const bool complete = slot >= 0 && (slot & 15) == 15 && (slot >> 4) < p.pages;
    const uint32_t votes = __ballot_sync(kAllLanes, complete);
    if (complete) list[warp * kLargestWindow + count + __popc(votes & ((1u << lane) - 1))] = int(slot >> 4);
    count += __popc(votes);
  }
  __syncwarp();

  uint8_t* const own = shared + kWarps * kLargestWindow * 4 + warp * warp_bytes(p.kind, p.head_dim, p.record_bytes);
  float* const rows = reinterpret_cast<float*>(own);
  float* const vectors = rows + float_rows(p.kind) * row_stride(p.head_dim);
  uint8_t* const record = reinterpret_cast<uint8_t*>(vectors + vector_floats(p.kind));
  for (int index = warp; index < count; index += kWarps) {
    const int page = list[warp * kLargestWindow + index];
    const int block = page >> p.block_shift, first_token = (page & ((1 << p.block_shift) - 1)) * kPageTokens;
    const uint8_t* keys = p.keys + block * p.block_stride + first_token * p.token_stride + head * p.head_stride;
    switch (p.kind) {
      case kMean: encode_mean<Element>(p, keys, head, rows, record, lane); break;
      case kMinMax: encode_minmax<Element>(p, keys, head, rows, record, lane); break;
      default: encode_eigen<Element>(p, keys, head, rows, vectors, record, lane);
    }
    __syncwarp();
    uint16_t* const to = reinterpret_cast<uint16_t*>(p.records + (int64_t(page) * p.heads + head) * p.record_bytes);
    for (int i = lane; i < p.record_bytes / 2; i += 32) to[i] = reinterpret_cast<const uint16_t*>(record)[i];
    __syncwarp();
  }
}

}  // namespace
}  // namespace kvskim

// kind: 0 mean, 1 minmax, 2 r8 or rki4, 3 quad, 4 clse. bits: of the directions (4, 8), or of the bounds (4, 16). Strides in elements;
// key_cache and all strides aligned to 8 bytes, offset to 16. slot_mapping int64 [tokens]; offset float32 [heads, head_dim];
// records uint8 [pages, heads, record_bytes]. Returns a CUDA error code.
extern "C" int kvskim_encode_pages(const void* key_cache, int element, int64_t block_stride, int64_t token_stride, int64_t head_stride,
                                   int block_size, const int64_t* slot_mapping, int tokens, const float* offset, int kind, int rank, int bits,
                                   uint8_t* records, int64_t pages, int heads, int head_dim, int record_bytes, float key_scale, int flags,
                                   cudaStream_t stream) {
  using namespace kvskim;
  if (tokens == 0 || heads == 0) return cudaSuccess;
  if (head_dim % 8 || record_bytes % 2 || kind < kMean || kind > kClse || rank < 0 || rank > kMaximumRank) return cudaErrorInvalidValue;
  int block_shift = 0;
  while (kPageTokens << block_shift < block_size) ++block_shift;
  if (kPageTokens << block_shift != block_size) return cudaErrorInvalidValue;
  const int64_t bytes = element == kFloat8E4M3 ? 1 : 2;
  const int window = tokens > 2048 ? kLargestWindow : 16;  // few tokens: a decode step, in which every slot may complete a page
  const EncodePages parameters{static_cast<const uint8_t*>(key_cache), block_stride * bytes, token_stride * bytes, head_stride * bytes,
                               block_shift, slot_mapping, tokens, window, offset, static_cast<PageRecord>(kind), rank, bits,
                               records, pages, heads, head_dim, record_bytes, key_scale};
  const dim3 grid(heads, ceil_div(tokens, window));
  const size_t shared_bytes = kWarps * (kLargestWindow * 4 + warp_bytes(parameters.kind, head_dim, record_bytes));
  switch (element) {
    case kBFloat16: return launch(encode_pages_kernel<kBFloat16>, grid, 32 * kWarps, shared_bytes, stream, flags, parameters);
    case kFloat16: return launch(encode_pages_kernel<kFloat16>, grid, 32 * kWarps, shared_bytes, stream, flags, parameters);
    case kFloat8E4M3: return launch(encode_pages_kernel<kFloat8E4M3>, grid, 32 * kWarps, shared_bytes, stream, flags, parameters);
    default: return cudaErrorInvalidValue;
  }
}
