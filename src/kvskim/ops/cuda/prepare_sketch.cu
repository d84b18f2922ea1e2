// Query preparation of the sketch selector: int8 weights of all digits of a record, their scales, the score of the mean key, and the exact
// log-mass of the pages that are always attended. One launch in front of score_sketch.cu.
//
// For a request, kv head and query head, with row = a coefficient and slot = a digit (docs/how-it-works.md, section "The sketch record"):
//   w[row]  = scale * query_matrix[row] . q                            tensor cores, rows x columns (query heads)
//   W[slot] = w[slot_coefficient] 4^slot_digit;  a = max_mode |W| / 127;  W8 = round(W / a), halves to even
//   base    = scale * mean . q;   forced = log sum over tokens of the first and last pages of exp(logit) - base
//
// A CTA is one role of a slice of columns: roles 0..15 are the token modes (each has its own rows, slots and scale, so nothing is shared
// between CTAs), roles 16.. are the always-attended pages of the slice's requests. A column is one (request, query head).
#include "common.cuh"
#include "score_sketch.cuh"

namespace kvskim {
namespace {

__constant__ SketchProgram program = make_sketch_program();

constexpr int kThreads = 256, kWarps = kThreads / 32, kMaxRows = 160;

struct PrepareArguments {
  const uint16_t* query;
  int64_t query_row_stride, query_head_stride;
  const __nv_bfloat16* query_matrix;   // [H, 1024, D]
  const int* coefficient_count;        // [H, 16]
  const int16_t* slot_coefficient;     // [H, 1024]
  const uint8_t* slot_digit;           // [H, 1024]
  const float* mean;                   // [H, D]
  const uint8_t* key_cache;
  int64_t key_block_stride, key_token_stride, key_head_stride;  // elements
  const int* block_table;
  int64_t block_table_stride;
  const int* seq_lens;
  uint8_t* weights;
  float4* scales;
  float *base, *forced;                // [R, H, padded group]
  int requests, heads, group, dim, page_shift, sink_pages, window_pages, settled;
  float scale, softcap, key_scale;
};

__device__ __forceinline__ uint32_t bf16_pair(float x, float y) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const uint32_t&>(v);
}

// Two fp16 as a sum of two bf16 pairs: 8 + 8 bits of mantissa hold the 11 of fp16, so the split is exact but for the smallest subnormals.
__device__ __forceinline__ void split_half(uint32_t x, uint32_t& high, uint32_t& low) {
  const float2 f = __half22float2(reinterpret_cast<const __half2&>(x));
  const __nv_bfloat162 h = __floats2bfloat162_rn(f.x, f.y);
  const float2 back = __bfloat1622float2(h);
  high = reinterpret_cast<const uint32_t&>(h);
  low = bf16_pair(f.x - back.x, f.y - back.y);
}

template <bool HALF>
__device__ __forceinline__ float element(uint16_t x) {
  if constexpr (HALF) return __half2float(__ushort_as_half(x));
  else return __uint_as_float(static_cast<uint32_t>(x) << 16);
}

// Eight consecutive keys of one token as four pairs in the type of the query.
template <bool HALF, bool FLOAT8>
__device__ __forceinline__ uint4 load_keys(const uint8_t* cache, int64_t element_offset) {
  if constexpr (!FLOAT8) return load16(cache + 2 * element_offset);
  const uint2 raw = *reinterpret_cast<const uint2*>(cache + element_offset);
  uint32_t out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto pair = static_cast<__nv_fp8x2_storage_t>((i < 2 ? raw.x : raw.y) >> (16 * (i & 1)));
    const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3);
    if constexpr (HALF) out[i] = static_cast<uint32_t>(h.x) | static_cast<uint32_t>(h.y) << 16;
    else {
      const float2 f = __half22float2(__half2(h));
      out[i] = bf16_pair(f.x, f.y);  // exact: e4m3 has 4 bits of mantissa
    }
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

template <bool HALF, int TILES>
__device__ void prepare_mode(const PrepareArguments& p, int mode, int head, int first_column) {
  __shared__ float row_weight[kMaxRows][8 * TILES + 1];
  __shared__ int slot_row[kMaxRows], column_max[8 * TILES], column_sum[8 * TILES];
  __shared__ float slot_power[kMaxRows];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
  const int start = program.start[mode], half_rows = program.rows[mode], slots = 32 * half_rows;
  const int columns = padded_group(p.group), steps = p.dim / 32;

  // Everything that does not depend on the query, before the kernel ahead of this one has ended.
  const int count = min(__ldg(p.coefficient_count + head * kModes + mode), slots);
  const __nv_bfloat16* matrix = p.query_matrix + (static_cast<int64_t>(head) * kSlots + start) * p.dim;
  for (int64_t offset = tid * 64; offset < static_cast<int64_t>(count) * p.dim; offset += kThreads * 64)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(matrix + offset));
  for (int u = tid; u < slots; u += kThreads) {
    const int digit = p.slot_digit[head * kSlots + start + u];
    slot_power[u] = digit < 4 && count > 0 ? static_cast<float>(1 << (2 * digit)) : 0.f;
    slot_row[u] = digit < 4 ? max(0, min(p.slot_coefficient[head * kSlots + start + u] - start, count - 1)) : 0;
  }
  if (tid < 8 * TILES) column_max[tid] = column_sum[tid] = 0;
  constexpr int kEarly = 4;  // steps of 32 channels of the first rows, loaded early
  uint4 early[2][kEarly];
  auto row_address = [&](int tile, int half) {
    return matrix + static_cast<int64_t>(min(tile * 16 + 8 * half + g, count - 1)) * p.dim + 8 * q;
  };
#pragma unroll
  for (int s = 0; s < kEarly; ++s)
    if (warp * 16 < count && s < steps) {
      early[0][s] = load16(row_address(warp, 0) + 32 * s);
      early[1][s] = load16(row_address(warp, 1) + 32 * s);
    }
  if (!p.settled) wait_previous_kernel();

  // The query of this lane's column in each tile; null for columns without one.
  const uint16_t* query[TILES];
  bool any = false;
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const int column = first_column + 8 * n + g, request = column / columns, member = column % columns;
    const bool live = request < p.requests && ceil_div(p.seq_lens[request], kPageTokens) > p.window_pages;
    any = any || live;
    query[n] = live && member < p.group ? p.query + request * p.query_row_stride + (head * p.group + member) * p.query_head_stride + 8 * q : nullptr;
  }
  wait_previous_kernel();
  // Every warp sees all columns of the slice, so the CTA leaves as one.
  if (!__any_sync(~0u, any)) return;

  for (int tile = warp; tile * 16 < count; tile += kWarps) {
    float sum[TILES][4] = {};
    auto step = [&](const uint4& a, const uint4& b, int s) {
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        const uint4 x = query[n] ? load16(query[n] + 32 * s) : make_uint4(0, 0, 0, 0);
        if constexpr (HALF) {
          uint4 high, low;
          split_half(x.x, high.x, low.x), split_half(x.y, high.y, low.y), split_half(x.z, high.z, low.z), split_half(x.w, high.w, low.w);
          mma_16816<false>(sum[n], a.x, b.x, a.y, b.y, high.x, high.y);
          mma_16816<false>(sum[n], a.z, b.z, a.w, b.w, high.z, high.w);
          mma_16816<false>(sum[n], a.x, b.x, a.y, b.y, low.x, low.y);
          mma_16816<false>(sum[n], a.z, b.z, a.w, b.w, low.z, low.w);
        } else {
          mma_16816<false>(sum[n], a.x, b.x, a.y, b.y, x.x, x.y);
          mma_16816<false>(sum[n], a.z, b.z, a.w, b.w, x.z, x.w);
        }
      }
    };
    const bool loaded = tile == warp;
#pragma unroll
    for (int s = 0; s < kEarly; ++s)
      if (s < steps) {
        if (!loaded) early[0][s] = load16(row_address(tile, 0) + 32 * s), early[1][s] = load16(row_address(tile, 1) + 32 * s);
        step(early[0][s], early[1][s], s);
      }
#pragma unroll 2
    for (int s = kEarly; s < steps; ++s) step(load16(row_address(tile, 0) + 32 * s), load16(row_address(tile, 1) + 32 * s), s);
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) row_weight[16 * tile + 8 * (i >> 1) + g][8 * n + 2 * q + (i & 1)] = sum[n][i] * p.scale;
  }
  __syncthreads();

  // A warp takes a half row of a column tile; lane (g, q) the eight slots that it holds in the tensor-core fragment of column g.
  auto slot_weight = [&](int column, int half_row, int i) {
    const int u = 32 * half_row + 16 * (i >> 2) + 4 * q + (i & 3);
    const float power = slot_power[u];
    return power == 0.f ? 0.f : row_weight[slot_row[u]][column] * power;
  };
  for (int item = warp; item < TILES * half_rows; item += kWarps) {
    const int column = 8 * (item / half_rows) + g;
    int largest = 0;  // of the bits: orders as the magnitudes do, with NaN above all
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = max(largest, __float_as_int(slot_weight(column, item % half_rows, i)) & 0x7fffffff);
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
    if (q == 0) atomicMax(&column_max[column], largest);
  }
  __syncthreads();
  const int tile_columns = min(columns, 8);
  for (int item = warp; item < TILES * half_rows; item += kWarps) {
    const int local = 8 * (item / half_rows) + g, half_row = item % half_rows, column = first_column + local;
    const int request = column / columns, member = column % columns;
    const float unit = __fdiv_rn(__int_as_float(column_max[local]), 127.f);
    uint32_t packed[2] = {0, 0};
    int total = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int w = unit > 0.f ? __float2int_rn(__fdiv_rn(slot_weight(local, half_row, i), unit)) : 0;
      total += w;
      packed[i >> 2] |= static_cast<uint32_t>(w & 0xff) << (8 * (i & 3));
    }
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (q == 0) atomicAdd(&column_sum[local], total);
    if (request < p.requests) {
      const int product = program.index[mode][half_row];
      uint8_t* to = p.weights + (static_cast<int64_t>(request) * p.heads + head) * columns * kWeightBytes;
      to += (member / tile_columns) * tile_columns * kWeightBytes;
      to += ((product / 2 * tile_columns + member % tile_columns) * 4 + q) * 16 + (product & 1) * 8;
      *reinterpret_cast<uint2*>(to) = make_uint2(packed[0], packed[1]);
    }
  }
  __syncthreads();
  if (tid < 8 * TILES) {
    const int column = first_column + tid, request = column / columns, member = column % columns;
    if (request < p.requests) {
      const int power = 1 << (2 * program.position[mode]);
      const double unit = __fdiv_rn(__int_as_float(column_max[tid]), 127.f);
      constexpr double folds[kModes] = {sketch_fold(0),  sketch_fold(1),  sketch_fold(2),  sketch_fold(3), sketch_fold(4),  sketch_fold(5),
                                        sketch_fold(6),  sketch_fold(7),  sketch_fold(8),  sketch_fold(9), sketch_fold(10), sketch_fold(11),
                                        sketch_fold(12), sketch_fold(13), sketch_fold(14), sketch_fold(15)};
      double fold = 0;
#pragma unroll
      for (int m = 0; m < kModes; ++m) fold = m == mode ? folds[m] : fold;
      // The digits count from the middle, -3/2 .. 3/2: their bias and the accumulator's start go into the offset, with the rounded weights.
      const float s = static_cast<float>(unit * fold / power);
      const float offset = static_cast<float>(-static_cast<double>(s) * (static_cast<double>(kMagic) + 1.5 * power * column_sum[tid]));
      float* to = reinterpret_cast<float*>(p.scales) + (static_cast<int64_t>(request) * p.heads + head) * columns * (kScaleBytes / 4);
      to += (member / tile_columns) * tile_columns * (kScaleBytes / 4) + mode * tile_columns * 2 + (member % tile_columns) / 2 * 4 + (member & 1);
      to[0] = s;
      to[2] = offset;
    }
  }
}

// Exact log-mass of the always-attended pages of one request, and the score of the mean key.
template <bool HALF, bool FLOAT8>
__device__ void prepare_forced(const PrepareArguments& p, int request, int head) {
  __shared__ float warp_max[kWarps][16], warp_sum[kWarps][16], mean_score[16];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
  const int columns = padded_group(p.group), tiles = columns == 16 ? 2 : 1, steps = p.dim / 32;
  if (!p.settled) wait_previous_kernel();
  const int length = request < p.requests ? p.seq_lens[request] : 0;
  if (length <= 0) return wait_previous_kernel();
  const int pages = ceil_div(length, kPageTokens), first = min(p.sink_pages, pages), last = min(p.window_pages, pages - first);
  const BlockTable table{p.block_table + request * p.block_table_stride, p.page_shift};
  auto page_of = [&](int i) { return i < first ? i : pages - last + (i - first); };
  int block = warp < first + last ? table.entry(page_of(warp)) : 0;
  wait_previous_kernel();

  const uint16_t* queries = p.query + request * p.query_row_stride + head * p.group * p.query_head_stride;
  const int block_tokens = kPageTokens << p.page_shift;
  const float factor = p.scale * p.key_scale;
  float largest[2][2], sums[2][2] = {};
#pragma unroll
  for (int n = 0; n < 2; ++n) largest[n][0] = largest[n][1] = -INFINITY;
  for (int i = warp; i < first + last; i += kWarps) {
    const int page = page_of(i), token = (page * kPageTokens) & (block_tokens - 1);
    // Tokens past the end may lie in memory that was never written: their row is read from the page's first token instead and left out.
    const bool inside[2] = {page * kPageTokens + g < length, page * kPageTokens + g + 8 < length};
    int64_t row[2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
      row[h] = block * p.key_block_stride + (token + (inside[h] ? g + 8 * h : 0)) * p.key_token_stride + head * p.key_head_stride + 8 * q;
    if (i + kWarps < first + last) block = table.entry(page_of(i + kWarps));
    float sum[2][4] = {};
#pragma unroll 4
    for (int s = 0; s < steps; ++s) {
      const uint4 a = load_keys<HALF, FLOAT8>(p.key_cache, row[0] + 32 * s), b = load_keys<HALF, FLOAT8>(p.key_cache, row[1] + 32 * s);
#pragma unroll
      for (int n = 0; n < 2; ++n)
        if (n < tiles) {
          const int member = 8 * n + g;
          const uint4 x = member < p.group ? load16(queries + member * p.query_head_stride + 32 * s + 8 * q) : make_uint4(0, 0, 0, 0);
          mma_16816<HALF>(sum[n], a.x, b.x, a.y, b.y, x.x, x.y);
          mma_16816<HALF>(sum[n], a.z, b.z, a.w, b.w, x.z, x.w);
        }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float logit[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float x = sum[n][2 * h + c] * factor;
          if (p.softcap > 0.f) x = p.softcap * tanhf(x / p.softcap);
          logit[h] = inside[h] ? x : -INFINITY;
        }
        float m = fmaxf(logit[0], logit[1]);
#pragma unroll
        for (int x = 4; x < 32; x <<= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, x));
        m = fmaxf(m, largest[n][c]);
        sums[n][c] = sums[n][c] * expf(largest[n][c] - m) + (expf(logit[0] - m) + expf(logit[1] - m));
        largest[n][c] = m;
      }
  }
  // The last warps first: with few pages they have nothing else to do.
  for (int member = kWarps - 1 - warp; member < columns; member += kWarps) {
    float sum = 0.f;
    if (member < p.group)
      for (int d = lane; d < p.dim; d += 32) sum = fmaf(element<HALF>(queries[member * p.query_head_stride + d]), p.mean[head * p.dim + d], sum);
#pragma unroll
    for (int i = 16; i; i >>= 1) sum += __shfl_xor_sync(~0u, sum, i);
    if (lane == 0) mean_score[member] = sum * p.scale;
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float total = sums[n][c];
#pragma unroll
      for (int x = 4; x < 32; x <<= 1) total += __shfl_xor_sync(~0u, total, x);
      if (g == 0) warp_max[warp][8 * n + 2 * q + c] = largest[n][c], warp_sum[warp][8 * n + 2 * q + c] = total;
    }
  __syncthreads();
  if (tid < columns) {
    float m = -INFINITY, total = 0.f;
    for (int w = 0; w < kWarps; ++w) m = fmaxf(m, warp_max[w][tid]);
    for (int w = 0; w < kWarps; ++w)
      if (w < first + last) total += warp_sum[w][tid] * expf(warp_max[w][tid] - m);
    const int64_t to = (static_cast<int64_t>(request) * p.heads + head) * columns + tid;
    p.base[to] = mean_score[tid];
    p.forced[to] = tid < p.group ? m + logf(total) - mean_score[tid] : 0.f;
  }
}

template <bool HALF, bool FLOAT8, int TILES>
__global__ void __launch_bounds__(kThreads) prepare_sketch_kernel(const __grid_constant__ PrepareArguments p) {
  allow_next_kernel();
  const int role = blockIdx.x, head = blockIdx.y, first_column = blockIdx.z * 8 * TILES;
  if (role < kModes) return prepare_mode<HALF, TILES>(p, role, head, first_column);
  const int columns = padded_group(p.group);
  // With 16 columns and slices of 8, two slices share a request; the first of them does its pages.
  const bool mine = first_column % columns == 0;
  prepare_forced<HALF, FLOAT8>(p, mine ? first_column / columns + (role - kModes) : p.requests, head);
}

template <bool HALF, bool FLOAT8, int TILES>
cudaError_t launch_prepare(const PrepareArguments& p, int flags, cudaStream_t stream) {
  const int columns = padded_group(p.group), per_slice = max(1, 8 * TILES / columns);
  const dim3 grid(kModes + per_slice, p.heads, ceil_div(p.requests * columns, 8 * TILES));
  return launch(prepare_sketch_kernel<HALF, FLOAT8, TILES>, grid, kThreads, 0, stream, flags, p);
}

}  // namespace
}  // namespace kvskim

// Bytes of the weights that kvskim_prepare_sketch writes and kvskim_score_sketch reads; 16-byte alignment.
extern "C" int64_t kvskim_sketch_weight_bytes(int requests, int heads, int group) {
  return static_cast<int64_t>(requests) * heads * kvskim::padded_group(group) * (kvskim::kWeightBytes + kvskim::kScaleBytes);
}

// query [R, H G, D] of query_type (kBFloat16, kFloat16), strides in elements; key_cache of the same type or of kFloat8E4M3.
// Pointers that are read in 16 bytes (query rows, key rows, query_matrix, weights) must be so aligned; dim a multiple of 32.
extern "C" int kvskim_prepare_sketch(const void* query, int64_t query_row_stride, int64_t query_head_stride, int query_type,
                                     const void* query_matrix, const void* coefficient_count, const void* slot_coefficient,
                                     const void* slot_digit, const void* mean, const void* key_cache, int64_t key_block_stride,
                                     int64_t key_token_stride, int64_t key_head_stride, int key_type, const void* block_table,
                                     int64_t block_table_stride, const void* seq_lens, void* weights, void* base, void* forced, int requests,
                                     int heads, int group, int dim, int page_shift, int sink_pages, int window_pages, float scale,
                                     float softcap, float key_scale, int flags, void* stream) {
  using namespace kvskim;
  if (requests == 0 || heads == 0) return cudaSuccess;
  if (group < 1 || group > 16 || dim < 32 || dim % 32 || window_pages < 1 || sink_pages < 0) return cudaErrorInvalidValue;
  if (key_type != kFloat8E4M3 && key_type != query_type) return cudaErrorInvalidValue;
  const int columns = padded_group(group);
  uint8_t* scales = static_cast<uint8_t*>(weights) + static_cast<int64_t>(requests) * heads * columns * kWeightBytes;
  const PrepareArguments p{static_cast<const uint16_t*>(query), query_row_stride, query_head_stride,
                           static_cast<const __nv_bfloat16*>(query_matrix), static_cast<const int*>(coefficient_count),
                           static_cast<const int16_t*>(slot_coefficient), static_cast<const uint8_t*>(slot_digit),
                           static_cast<const float*>(mean), static_cast<const uint8_t*>(key_cache), key_block_stride, key_token_stride,
                           key_head_stride, static_cast<const int*>(block_table), block_table_stride, static_cast<const int*>(seq_lens),
                           static_cast<uint8_t*>(weights), reinterpret_cast<float4*>(scales), static_cast<float*>(base),
                           static_cast<float*>(forced), requests, heads, group, dim, page_shift, sink_pages, window_pages, (flags & kRecordsSettled) != 0,
                           scale, softcap, key_scale};
  // Few columns: more CTAs. Many: a CTA reads its rows of the matrix once for 32 columns.
  const bool wide = static_cast<int64_t>(requests) * columns * heads > 256;
  const auto s = static_cast<cudaStream_t>(stream);
  const bool half = query_type == kFloat16, float8 = key_type == kFloat8E4M3;
  const auto run = half ? (float8 ? (wide ? launch_prepare<true, true, 4> : launch_prepare<true, true, 1>)
                                  : (wide ? launch_prepare<true, false, 4> : launch_prepare<true, false, 1>))
                        : (float8 ? (wide ? launch_prepare<false, true, 4> : launch_prepare<false, true, 1>)
                                  : (wide ? launch_prepare<false, false, 4> : launch_prepare<false, false, 1>));
  return run(p, flags, s);
}
