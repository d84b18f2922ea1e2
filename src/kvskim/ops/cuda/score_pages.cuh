// Scores of records that code each page by itself: mean, r8, rki4, quad, clse, minmax. See docs/how-it-works.md, section "Scores".
//
// A warp serves one kv head of a request and every `chunks`-th tile of 16 pages, eight pages at a time. Their records go to shared memory by
// asynchronous copies, one group of eight ahead. Products run on tensor cores with the queries as A operand (16 x channels) and what eight
// columns hold as B: eight pages for the mean and for minmax, the directions of four pages at rank 2, of one page at rank 8. Lane (g, q) of
// a warp then has results of query heads g and g + 8, and finishes pages q and q + 4.
//
// Integer codes become 16-bit floats exactly: a code laid under the exponent of 128 or 1024 is that number plus the code. Records of an
// odd number of words begin at any even address, so they are copied from the 16-byte border below and read by shifts.
#pragma once
#include "attend_instructions.cuh"

namespace kvskim {

enum class PageForm { kMean, kInt8, kInt4, kQuad, kClse, kBounds };

struct PageScores {
  const uint8_t* records;
  int64_t record_bytes;  // of the whole cache
  const int* block_table;
  int64_t block_table_stride;
  const int* seq_lens;
  const uint8_t* query;
  int64_t query_stride_request, query_stride_head;  // bytes
  const float* forced;
  __half* scores;
  float* partials;
  int requests, heads, group, capacity, chunks, page_shift, sink_pages, window_pages, full_pages;
  int width, rank;  // bytes of a record, its directions
  int mean_scale_at, vectors_at, vector_scale_at, coordinates_at, coordinate_scale_at, energies_at, residual_at;  // bytes into a record
  float scale;
};

namespace {

constexpr int kPageWarps = 8, kStagePages = 8, kStages = 2, kPageShared = 227 * 1024;  // at most so many warps, so many bytes of shared memory
constexpr float kLogPage = 2.772588722239781f;

// Bytes of shared memory between two pages of a stage: room for 15 bytes ahead of the record, an odd number of 16-byte pieces.
__host__ __device__ constexpr int page_pitch(int width) { return ((width + 30) / 16 | 1) * 16; }

// ---- reading a record: offsets into shared memory, even ----

__device__ __forceinline__ const uint8_t* page_memory() {
  extern __shared__ __align__(16) uint8_t shared[];
  return shared;
}
template <int COUNT>
__device__ __forceinline__ void read_words(uint32_t (&words)[COUNT], int at) {
  const uint32_t* const from = reinterpret_cast<const uint32_t*>(page_memory() + (at & ~3));
  const int shift = (at & 3) * 8;
  uint32_t low = from[0];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const uint32_t high = from[i + 1];
    words[i] = __funnelshift_r(low, high, shift);
    low = high;
  }
}
__device__ __forceinline__ float read_bfloat16(int at) {
  return __uint_as_float(uint32_t(*reinterpret_cast<const uint16_t*>(page_memory() + at)) << 16);
}
// Two neighbouring bfloat16 numbers.
__device__ __forceinline__ float2 read_pair(int at) { return make_float2(read_bfloat16(at), read_bfloat16(at + 2)); }

// ---- codes to 16-bit floats ----

template <bool HALF>
__device__ __forceinline__ uint32_t subtract_pair(uint32_t x, float number) {
  if constexpr (HALF) {
    const __half2 d = __hsub2(*reinterpret_cast<const __half2*>(&x), __float2half2_rn(number));
    return *reinterpret_cast<const uint32_t*>(&d);
  } else {
    const __nv_bfloat162 d = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&x), __float2bfloat162_rn(number));
    return *reinterpret_cast<const uint32_t*>(&d);
  }
}

// Signed nibbles i and i + 4 of a word.
template <bool HALF>
__device__ __forceinline__ uint32_t nibble_pair(uint32_t word, int i) {
  constexpr uint32_t magic = HALF ? 0x64086408u : 0x43084308u;  // 1024 or 128, the sign bit of the nibble flipped
  return subtract_pair<HALF>((word >> 4 * i & 0x000f000fu) ^ magic, HALF ? 1032.f : 136.f);
}

// Signed byte i of two words, whose sign bits have been flipped.
template <bool HALF>
__device__ __forceinline__ uint32_t byte_pair(uint32_t first, uint32_t second, int i) {
  if constexpr (HALF) {
    const uint32_t both = __byte_perm(first, second, (4 + i) << 4 | i);
    return subtract_pair<true>(__byte_perm(both, 0x64646464u, 0x4140), 1152.f);
  } else {
    constexpr float magic = 8388736.f;  // 2^23 + 128
    return pack<false>(__uint_as_float(__byte_perm(first, 0x4b000000u, 0x7650 | i)) - magic,
                       __uint_as_float(__byte_perm(second, 0x4b000000u, 0x7650 | i)) - magic);
  }
}

// ---- queries ----

// A operands of both halves of the query heads. Lane (g, q) holds channels q D / 4 and following of heads g and g + 8; a product of 16
// channels takes four of each lane: in a group of eight channels 0, 4 and 1, 5, then 2, 6 and 3, 7 (NATURAL: 0, 1 and 2, 3, then 4 to 7).
template <int D, bool WIDE>
struct Queries {
  static constexpr int groups = D / 32;
  uint32_t low[groups][4], high[WIDE ? groups : 1][4];
};

template <bool NATURAL>
__device__ __forceinline__ void order_channels(uint32_t (&to)[4], const uint4& v) {
  if constexpr (NATURAL) {
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else {
    to[0] = __byte_perm(v.x, v.z, 0x5410), to[1] = __byte_perm(v.x, v.z, 0x7632);
    to[2] = __byte_perm(v.y, v.w, 0x5410), to[3] = __byte_perm(v.y, v.w, 0x7632);
  }
}

template <bool NATURAL, int D, bool WIDE>
__device__ __forceinline__ void load_queries(Queries<D, WIDE>& queries, const PageScores& p, int request, int head, int lane) {
  const int g = lane >> 2, q = lane & 3;
  const uint8_t* const row = p.query + request * p.query_stride_request + int64_t(head) * p.group * p.query_stride_head + q * (D / 2);
  const uint4 none = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    order_channels<NATURAL>(queries.low[i], g < p.group ? load16(row + g * p.query_stride_head + 16 * i) : none);
    if constexpr (WIDE) order_channels<NATURAL>(queries.high[i], g + 8 < p.group ? load16(row + (g + 8) * p.query_stride_head + 16 * i) : none);
  }
}

// sum += queries times 16 channels: `step` 0 or 1 of group i.
template <bool HALF, int D, bool WIDE>
__device__ __forceinline__ void multiply_channels(float (&sum)[4], const Queries<D, WIDE>& queries, int i, int step, uint32_t b0, uint32_t b1) {
  mma_16816<HALF>(sum, queries.low[i][2 * step], WIDE ? queries.high[WIDE ? i : 0][2 * step] : 0u, queries.low[i][2 * step + 1],
                  WIDE ? queries.high[WIDE ? i : 0][2 * step + 1] : 0u, b0, b1);
}

// Products with int8 codes of this lane's column, from its first channel on.
template <bool HALF, int D, bool WIDE>
__device__ __forceinline__ void multiply_bytes(float (&sum)[4], const Queries<D, WIDE>& queries, int column) {
  uint32_t words[D / 16];
  read_words(words, column);
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    const uint32_t first = words[2 * i] ^ 0x80808080u, second = words[2 * i + 1] ^ 0x80808080u;
    multiply_channels<HALF>(sum, queries, i, 0, byte_pair<HALF>(first, second, 0), byte_pair<HALF>(first, second, 1));
    multiply_channels<HALF>(sum, queries, i, 1, byte_pair<HALF>(first, second, 2), byte_pair<HALF>(first, second, 3));
  }
}

template <bool HALF, int D, bool WIDE>
__device__ __forceinline__ void multiply_nibbles(float (&sum)[4], const Queries<D, WIDE>& queries, int column) {
  uint32_t words[D / 32];
  read_words(words, column);
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    multiply_channels<HALF>(sum, queries, i, 0, nibble_pair<HALF>(words[i], 0), nibble_pair<HALF>(words[i], 1));
    multiply_channels<HALF>(sum, queries, i, 1, nibble_pair<HALF>(words[i], 2), nibble_pair<HALF>(words[i], 3));
  }
}

// minmax: positive parts of the queries meet the upper bounds, negative ones the lower.
template <int D, bool WIDE>
__device__ __forceinline__ void multiply_bounds(float (&sum)[4], const Queries<D, WIDE>& queries, int record, int q) {
  auto part = [](uint32_t x, bool upper) {
    const __nv_bfloat162 v = *reinterpret_cast<const __nv_bfloat162*>(&x), zero = __float2bfloat162_rn(0.f);
    const __nv_bfloat162 d = upper ? __hmax2(v, zero) : __hmin2(v, zero);
    return *reinterpret_cast<const uint32_t*>(&d);
  };
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      const uint4 bound = *reinterpret_cast<const uint4*>(page_memory() + record + upper * 2 * D + q * (D / 2) + 16 * i);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const uint32_t* const low = queries.low[i] + 2 * step;
        const uint32_t* const high = queries.high[WIDE ? i : 0] + 2 * step;
        mma_16816<false>(sum, part(low[0], upper), WIDE ? part(high[0], upper) : 0u, part(low[1], upper), WIDE ? part(high[1], upper) : 0u,
                         step ? bound.z : bound.x, step ? bound.w : bound.y);
      }
    }
  }
}

// ---- what follows from the projections z = scale q . v ----

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

// log sum exp over the 16 tokens of a page whose logits four lanes hold.
__device__ __forceinline__ float quad_log_sum(float a, float b, float c, float d) {
  const float peak = quad_max(fmaxf(fmaxf(a, b), fmaxf(c, d)));
  const float sum = exp2_fast((a - peak) * kLog2E) + exp2_fast((b - peak) * kLog2E) + exp2_fast((c - peak) * kLog2E) + exp2_fast((d - peak) * kLog2E);
  return peak + kLn2 * log2_fast(quad_sum(sum));
}

// Log-masses of one page, of heads g and g + 8, from the coordinates of its tokens: `sum` are products with its directions 2 q and 2 q + 1.
template <bool WIDE>
__device__ __forceinline__ float2 tokens_of_page(const float (&sum)[4], const PageScores& p, int record, int g, int q) {
  const bool has = 2 * q < p.rank;
  const float2 size = has ? read_pair(record + p.vector_scale_at + 4 * q) : make_float2(0.f, 0.f);
  // Zero where this lane has no direction, even if the columns held infinities.
  float z[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) z[i] = has ? sum[i] * (p.scale * (i % 2 ? size.y : size.x)) : 0.f;
  const uint32_t high[2] = {pack<false>(z[0], z[1]), pack<false>(z[2], z[3])};
  uint32_t low[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 rounded = unpack(high[i], false);
    low[i] = pack<false>(z[2 * i] - rounded.x, z[2 * i + 1] - rounded.y);
  }
  float logit[2][4] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint8_t* const from = page_memory() + record + p.coordinates_at + (g + 8 * half) * p.rank + 2 * q;
    const uint32_t codes = has ? (uint32_t(from[0]) | uint32_t(from[1]) << 8) ^ 0x8080u : 0x8080u;
    const uint32_t b = byte_pair<false>(codes, codes >> 8, 0);
    mma_16816<false>(logit[half], high[0], WIDE ? high[1] : 0u, low[0], WIDE ? low[1] : 0u, b, b);
    const float2 token = read_pair(record + p.coordinate_scale_at + 4 * q + 16 * half);
#pragma unroll
    for (int i = 0; i < 4; ++i) logit[half][i] *= i % 2 ? token.y : token.x;
  }
  return make_float2(quad_log_sum(logit[0][0], logit[0][1], logit[1][0], logit[1][1]),
                     WIDE ? quad_log_sum(logit[0][2], logit[0][3], logit[1][2], logit[1][3]) : 0.f);
}

// The same at rank 2 with int4 coordinates, all tokens in one lane.
__device__ __forceinline__ float tokens_of_lane(float z0, float z1, int codes, int sizes) {
  float logit[kPageTokens], peak = -INFINITY;
#pragma unroll
  for (int t = 0; t < kPageTokens; ++t) {
    const int byte = page_memory()[codes + t];
    logit[t] = (float(((byte & 15) ^ 8) - 8) * z0 + float((byte >> 4 ^ 8) - 8) * z1) * read_bfloat16(sizes + 2 * t);
    peak = fmaxf(peak, logit[t]);
  }
  float sum = 0.f;
#pragma unroll
  for (int t = 0; t < kPageTokens; ++t) sum += exp2_fast((logit[t] - peak) * kLog2E);
  return peak + kLn2 * log2_fast(sum);
}

// ---- the kernel ----

template <PageForm FORM, bool HALF, int D, bool WIDE>
__global__ void __launch_bounds__(kPageWarps * 32, D == 256 ? 1 : 2) score_pages_kernel(const __grid_constant__ PageScores p) {
  extern __shared__ __align__(16) uint8_t shared[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const int pitch = page_pitch(p.width);
  const int stages = warp * (kStages * kStagePages) * pitch;

  // Neighbouring warps take the heads of the same pages, whose records are neighbours in memory.
  const int index = blockIdx.x * (blockDim.x >> 5) + warp, rest = index / p.heads;
  const int head = index - rest * p.heads, request = rest / p.chunks, chunk = rest - request * p.chunks;
  if (request >= p.requests) return;
  const int total = ceil_div(p.seq_lens[request], kPageTokens);
  const int pages = total > p.full_pages ? total - p.window_pages : 0;
  if (chunk * kPageTokens >= pages) return;
  const int row = request * p.heads + head;
  const BlockTable table{p.block_table + request * p.block_table_stride, p.page_shift};

  // Group n of eight pages of this warp; pages past the end repeat the last one, their results are not written.
  const int tiles = ceil_div(ceil_div(pages, 16) - chunk, p.chunks), groups = 2 * tiles;
  auto first_page = [&](int n) { return (chunk + (n >> 1) * p.chunks) * 16 + 8 * (n & 1); };
  auto look_up = [&](int n) {  // of page lane % 8 of the group: where its record lies
    const int page = min(first_page(n) + (lane & 7), pages - 1);
    return (int64_t(table.physical(table.entry(page), page)) * p.heads + head) * p.width;
  };
  auto copy_records = [&](int n, int64_t at) {
    const uint32_t stage = shared_address(shared) + stages + (n % kStages) * (kStagePages * pitch);
#pragma unroll
    for (int j = 0; j < kStagePages; ++j) {
      const int64_t from = __shfl_sync(kAllLanes, at, j);
      const int pieces = ceil_div(int(from & 15) + p.width, 16);
      for (int i = lane; i < pieces; i += 32) {
        const int64_t byte = (from & ~int64_t(15)) + 16 * i;
        const int present = int(min(p.record_bytes - byte, int64_t(16)));
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(stage + j * pitch + 16 * i),
                     "l"(p.records + byte), "r"(present) : "memory");
      }
    }
    commit_copies();
  };

  int64_t current = look_up(0), next = groups > 1 ? look_up(1) : 0;
  copy_records(0, current);
  Queries<D, WIDE> queries;
  load_queries<FORM == PageForm::kBounds>(queries, p, request, head, lane);
  float energy[2] = {};  // |scale q|^2 of heads g and g + 8
  if constexpr (FORM == PageForm::kClse) {
#pragma unroll
    for (int i = 0; i < D / 32; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = unpack(queries.low[i][j], HALF);
        energy[0] += x.x * x.x + x.y * x.y;
        if constexpr (WIDE) {
          const float2 y = unpack(queries.high[i][j], HALF);
          energy[1] += y.x * y.x + y.y * y.y;
        }
      }
#pragma unroll
    for (int i = 0; i < 2; ++i) energy[i] = quad_sum(energy[i]) * p.scale * p.scale;
  }
  const float* const forced_row = p.forced + int64_t(row) * padded_group(p.group);
  const float forced[2] = {g < p.group ? forced_row[g] : 0.f, WIDE && g + 8 < p.group ? forced_row[g + 8] : 0.f};
  float mass[2] = {};

  for (int n = 0; n < groups; ++n) {
    if (n + 1 < groups) {
      copy_records(n + 1, next);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncwarp();
    const int start = int(current & 15);  // of page lane % 8
    current = next;
    if (n + 2 < groups) next = look_up(n + 2);
    const int stage = stages + (n % kStages) * (kStagePages * pitch);
    auto record_of = [&](int page) { return stage + page * pitch + __shfl_sync(kAllLanes, start, page); };
    const int column = record_of((g >> 1) + 4 * (g & 1));  // so that column 2 q is page q, column 2 q + 1 page q + 4
    const int own[2] = {record_of(q), record_of(q + 4)};

    float score[2][2];  // [page q or q + 4][head g or g + 8]
    {
      float sum[4] = {};
      if constexpr (FORM == PageForm::kBounds) multiply_bounds(sum, queries, column, q);
      else multiply_bytes<HALF>(sum, queries, column + q * (D / 4));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float factor = FORM == PageForm::kBounds ? p.scale : p.scale * read_bfloat16(own[j] + p.mean_scale_at);
        score[j][0] = sum[j] * factor, score[j][1] = sum[2 + j] * factor;
      }
    }
    if constexpr (FORM == PageForm::kInt8 || FORM == PageForm::kInt4) {
#pragma unroll 2
      for (int page = 0; page < kStagePages; ++page) {
        const int record = record_of(page);
        const int direction = min(g, p.rank - 1);  // columns past the last repeat it; their projections are dropped
        float sum[4] = {};
        if constexpr (FORM == PageForm::kInt8) multiply_bytes<HALF>(sum, queries, record + p.vectors_at + direction * D + q * (D / 4));
        else multiply_nibbles<HALF>(sum, queries, record + p.vectors_at + direction * (D / 2) + q * (D / 8));
        const float2 deviation = tokens_of_page<WIDE>(sum, p, record, g, q);
        const bool first = page == q, second = page == q + 4;
        score[0][0] = first ? score[0][0] + deviation.x : score[0][0], score[1][0] = second ? score[1][0] + deviation.x : score[1][0];
        score[0][1] = first ? score[0][1] + deviation.y : score[0][1], score[1][1] = second ? score[1][1] + deviation.y : score[1][1];
      }
    } else if constexpr (FORM == PageForm::kQuad || FORM == PageForm::kClse) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int record = record_of(4 * j + (g >> 1));
        float sum[4] = {};
        multiply_nibbles<HALF>(sum, queries, record + p.vectors_at + (g & 1) * (D / 2) + q * (D / 8));
        const float2 size = read_pair(own[j] + p.vector_scale_at);
#pragma unroll
        for (int h = 0; h < (WIDE ? 2 : 1); ++h) {
          const float z0 = sum[2 * h] * (p.scale * size.x), z1 = sum[2 * h + 1] * (p.scale * size.y);
          if constexpr (FORM == PageForm::kQuad) {
            const float2 spread = read_pair(own[j] + p.energies_at);
            score[j][h] += (z0 * z0 * spread.x + z1 * z1 * spread.y) / 32.f + kLogPage;
          } else {
            const float outside = energy[h] - z0 * z0 - z1 * z1;
            uint32_t residual[1];
            read_words(residual, own[j] + p.residual_at);
            score[j][h] += tokens_of_lane(z0, z1, own[j] + p.coordinates_at, own[j] + p.coordinate_scale_at);
            score[j][h] += (outside < 0.f ? 0.f : outside) * (__uint_as_float(residual[0]) / (32 * (D - 2)));
          }
        }
      }
    } else if constexpr (FORM == PageForm::kMean) {
#pragma unroll
      for (int j = 0; j < 2; ++j) score[j][0] += kLogPage, score[j][1] += kLogPage;
    }
    __syncwarp();  // the stage is free for the copy after the next

#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int page = first_page(n) + q + 4 * j;
#pragma unroll
      for (int h = 0; h < (WIDE ? 2 : 1); ++h) {
        const int column_of_head = g + 8 * h;
        if (column_of_head >= p.group || page >= pages) continue;
        float x = score[j][h];  // NaN stays NaN: the rule must see a broken estimate
        x = x > 60000.f ? 60000.f : x < -60000.f ? -60000.f : x;
        const __half stored = __float2half_rn(x);
        p.scores[(int64_t(row) * p.capacity + page) * padded_group(p.group) + column_of_head] = stored;
        float excess = __half2float(stored) - forced[h];
        excess = excess > 83.f ? 83.f : excess;
        if (page >= p.sink_pages) mass[h] += exp2_fast(excess * kLog2E);
      }
    }
  }
#pragma unroll
  for (int h = 0; h < (WIDE ? 2 : 1); ++h) {
    const float sum = quad_sum(mass[h]);
    if (q == 0 && g + 8 * h < p.group) p.partials[(int64_t(row) * p.chunks + chunk) * padded_group(p.group) + g + 8 * h] = sum;
  }
}

template <PageForm FORM, bool HALF, int D>
cudaError_t launch_page_scores(const PageScores& p, cudaStream_t stream) {
  const int64_t warps = int64_t(p.requests) * p.heads * p.chunks;
  const int warp_bytes = kStages * kStagePages * page_pitch(p.width), together = min(kPageWarps, kPageShared / warp_bytes);
  const dim3 grid(static_cast<unsigned>((warps + together - 1) / together));
  if (p.group > 8) return launch(score_pages_kernel<FORM, HALF, D, true>, grid, together * 32, together * warp_bytes, stream, 0, p);
  return launch(score_pages_kernel<FORM, HALF, D, false>, grid, together * 32, together * warp_bytes, stream, 0, p);
}

template <bool HALF, int D>
cudaError_t launch_page_form(int form, const PageScores& p, cudaStream_t stream) {
  switch (PageForm(form)) {
    case PageForm::kMean: return launch_page_scores<PageForm::kMean, HALF, D>(p, stream);
    case PageForm::kInt8: return launch_page_scores<PageForm::kInt8, HALF, D>(p, stream);
    case PageForm::kInt4: return launch_page_scores<PageForm::kInt4, HALF, D>(p, stream);
    case PageForm::kQuad: return launch_page_scores<PageForm::kQuad, HALF, D>(p, stream);
    case PageForm::kClse: return launch_page_scores<PageForm::kClse, HALF, D>(p, stream);
    case PageForm::kBounds:
      if constexpr (HALF) return cudaErrorInvalidValue;  // the bounds are bf16 numbers
      else return launch_page_scores<PageForm::kBounds, false, D>(p, stream);
  }
  return cudaErrorInvalidValue;
}

template <bool HALF>
cudaError_t launch_page_dim(int form, int head_dim, const PageScores& p, cudaStream_t stream) {
  switch (head_dim) {
    case 64: return launch_page_form<HALF, 64>(form, p, stream);
    case 128: return launch_page_form<HALF, 128>(form, p, stream);
    case 256: return launch_page_form<HALF, 256>(form, p, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace
}  // namespace kvskim
