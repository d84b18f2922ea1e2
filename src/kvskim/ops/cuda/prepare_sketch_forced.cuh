// Exact log-mass of the pages that are always attended, and the score of the mean key, for one or two requests a CTA.
#pragma once
#include "prepare_sketch.cuh"

namespace kvskim {

template <bool HALF>
__device__ __forceinline__ float2 pair_of(uint32_t x) {
  if constexpr (HALF) return __half22float2(reinterpret_cast<const __half2&>(x));
  else return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}

// Eight float8 keys as four pairs in the type of the query.
template <bool HALF>
__device__ __forceinline__ uint4 widen(uint2 raw) {
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

// Logits before the scale of the 16 tokens of a page: rows at row[0] (tokens g) and row[1] (g + 8), columns of eight query heads.
template <bool HALF, bool FLOAT8, bool LONG>
__device__ __forceinline__ void page_logits(const PrepareArguments& p, const int64_t (&row)[2], const uint16_t* query, const uint16_t* rest,
                                            float (&sum)[4]) {
  constexpr int STEPS = LONG ? kLongSteps : kShortSteps;
  const int steps = p.dim / 32;
  for_steps<STEPS, LONG>(steps, [&](int first_step) {
    using Keys = std::conditional_t<FLOAT8, uint2, uint4>;
    Keys key[2][STEPS];
    uint4 x[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int64_t offset = 32 * (first_step + s);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if constexpr (FLOAT8) key[h][s] = load8_here(p.key_cache + (row[h] + offset), first_step + s < steps);
        else key[h][s] = load16_here(p.key_cache + 2 * (row[h] + offset), first_step + s < steps);
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int step = first_step + s;
      x[s] = load16_here((LONG && 32 * step >= p.split ? rest : query) + 32 * step, step < steps);
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      uint4 a, b;
      if constexpr (FLOAT8) a = widen<HALF>(key[0][s]), b = widen<HALF>(key[1][s]);
      else a = key[0][s], b = key[1][s];
      mma_16816<HALF>(sum, a.x, b.x, a.y, b.y, x[s].x, x[s].y);
      mma_16816<HALF>(sum, a.z, b.z, a.w, b.w, x[s].z, x[s].w);
    }
  });
}

// A warp serves one team: up to eight query heads of one request of the CTA. The warps of a team share its pages.
template <bool HALF, bool LONG>
__device__ __forceinline__ void prepare_forced(const PrepareArguments& p, int role, const QueryHeads<LONG>& heads) {
  __shared__ float warp_max[kPrepareWarps][8], warp_sum[kPrepareWarps][8], mean_score[2][16];
  __shared__ int team_warps[kPrepareWarps];  // of the warp's team those that had pages; 0: its request is not scored
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3, head = heads.head;
  const int columns = 1 << p.column_shift, tiles = columns == 16 ? 2 : 1, teams = p.forced_requests * tiles;
  const int team = warp % teams, start = warp / teams, stride = kPrepareWarps / teams;
  const int first_request = role * p.forced_requests, request = first_request + team / tiles, first_member = 8 * (team % tiles);
  const float* mean = p.mean + head * p.dim;
  if (32 * tid < p.dim) asm volatile("prefetch.global.L2 [%0];" ::"l"(mean + 32 * tid));
  if (!p.settled) wait_previous_kernel();
  int length = request < p.requests && start < stride ? p.seq_lens[request] : 0;
  if (ceil_div(length, kPageTokens) <= p.full_pages) length = 0;  // not scored: as if it were padding
  const int pages = length > 0 ? ceil_div(length, kPageTokens) : 0, first = min(p.sink_pages, pages), last = min(p.window_pages, pages - first);
  const BlockTable table{p.block_table + request * p.block_table_stride, p.page_shift};
  auto page_of = [&](int i) { return i < first ? i : pages - last + (i - first); };
  const int block_tokens = kPageTokens << p.page_shift;
  // The keys of a page. Tokens past the end may lie in memory that was never written: their row is read from the page's first token
  // instead and left out.
  int tokens = 0;  // of the page that are inside
  int64_t row[2] = {0, 0};
  auto locate = [&](int i) {
    const int page = page_of(i), token = (page * kPageTokens) & (block_tokens - 1);
    const int64_t entry = table.entry(page);
    int64_t block = entry * p.key_block_stride + head * p.key_head_stride + 8 * q;
    if (p.directory) {  // last changed by the fetch of the step before
      const int place = p.directory[entry * p.heads + head];
      if (place > 0) block = p.hot_offset + (place - 1) * p.key_head_stride + 8 * q;
    }
    tokens = length - page * kPageTokens;
#pragma unroll
    for (int h = 0; h < 2; ++h) row[h] = block + (token + (g + 8 * h < tokens ? g + 8 * h : 0)) * p.key_token_stride;
  };
  const uint16_t* query = heads.query(p, request, first_member + g) + 8 * q;
  const uint16_t* rest = LONG ? heads.rest(p, request, first_member + g) + 8 * q : nullptr;
  if (start < first + last) locate(start);
  keep_here(row[0]), keep_here(row[1]), keep_here(query);
  // From the L2 cache loads are short, also those of rows that are longer than one load. It may hold what is written still.
  if (!p.float8 && !p.directory && start < first + last)
    for (int h = 0; h < 2; ++h) prefetch_row(reinterpret_cast<const uint16_t*>(p.key_cache) + (row[h] - 8 * q), p.dim, 0, q);
  // Scores of the mean key, a warp each, the last warps first: with few pages they have nothing else to do.
  auto score_mean = [&]() {
    const int dots = min(p.forced_requests, p.requests - first_request) << p.column_shift;
    // Of long rows pages take as long as three scores: behind the wait these are left to the warps without pages, if there are enough.
    const int idle = kPrepareWarps - min(p.sink_pages + p.window_pages, stride) * teams;
    const int workers = LONG && !p.early && 3 * idle >= dots ? idle : kPrepareWarps, worker = kPrepareWarps - 1 - warp;
    for (int i = worker < workers ? worker : dots; i < dots; i += workers) {
      const int r = first_request + (i >> p.column_shift), member = i & (columns - 1);
      const uint16_t* from = heads.query(p, r, member);
      float sum = 0.f;
      if constexpr (!LONG) {
        for (int d = 4 * lane; d < p.dim; d += 128) {
          const float4 m = *reinterpret_cast<const float4*>(mean + d);
          const uint2 x = __ldcg(reinterpret_cast<const uint2*>(from + d));
          const float2 low = pair_of<HALF>(x.x), high = pair_of<HALF>(x.y);
          sum = fmaf(low.x, m.x, fmaf(low.y, m.y, fmaf(high.x, m.z, fmaf(high.y, m.w, sum))));
        }
      } else {
        const uint16_t* other = heads.rest(p, r, member);
        constexpr int kTogether = 5;  // loads of a lane that are under way at once
        for (int first = 4 * lane; first < p.dim; first += 128 * kTogether) {
          uint4 m[kTogether];
          uint2 x[kTogether];
#pragma unroll
          for (int k = 0; k < kTogether; ++k) {
            const int d = first + 128 * k;
            m[k] = load16_here(mean + d, d < p.dim);
            x[k] = load8_fresh((d >= p.split ? other : from) + d, d < p.dim);
          }
#pragma unroll
          for (int k = 0; k < kTogether; ++k) {
            const float2 low = pair_of<HALF>(x[k].x), high = pair_of<HALF>(x[k].y);
            sum = fmaf(low.x, __uint_as_float(m[k].x), fmaf(low.y, __uint_as_float(m[k].y),
                       fmaf(high.x, __uint_as_float(m[k].z), fmaf(high.y, __uint_as_float(m[k].w), sum))));
          }
        }
      }
#pragma unroll
      for (int x = 16; x; x >>= 1) sum += __shfl_xor_sync(~0u, sum, x);
      if (lane == 0) mean_score[i >> p.column_shift][i & (columns - 1)] = sum * p.scale;
    }
  };
  if (p.early) score_mean();
  wait_previous_kernel();

  const float factor = p.scale * p.key_scale;
  float largest[2] = {-INFINITY, -INFINITY}, sums[2] = {};
  for (int i = start; i < first + last; i += stride) {
    const bool inside[2] = {g < tokens, g + 8 < tokens};
    float sum[4] = {};
    if (p.float8) page_logits<HALF, true, LONG>(p, row, query, rest, sum);
    else page_logits<HALF, false, LONG>(p, row, query, rest, sum);
    if (i + stride < first + last) locate(i + stride);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float logit[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x = sum[2 * h + c] * factor;
        if (p.softcap > 0.f) x = p.softcap * tanhf(x / p.softcap);
        logit[h] = inside[h] ? x : -INFINITY;
      }
      float m = fmaxf(logit[0], logit[1]);
#pragma unroll
      for (int x = 4; x < 32; x <<= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, x));
      m = fmaxf(m, largest[c]);
      sums[c] = sums[c] * expf(largest[c] - m) + (expf(logit[0] - m) + expf(logit[1] - m));
      largest[c] = m;
    }
  }
  if (!p.early) score_mean();
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float total = sums[c];
#pragma unroll
    for (int x = 4; x < 32; x <<= 1) total += __shfl_xor_sync(~0u, total, x);
    if (g == 0) warp_max[warp][2 * q + c] = largest[c], warp_sum[warp][2 * q + c] = total;
  }
  if (lane == 0) team_warps[warp] = min(first + last, stride);
  __syncthreads();
  const int own = tid >> p.column_shift, member = tid & (columns - 1), from = own * tiles + member / 8;
  if (own < p.forced_requests && team_warps[from]) {
    const int end = from + team_warps[from] * teams;
    float m = -INFINITY, total = 0.f;
    for (int w = from; w < end; w += teams) m = fmaxf(m, warp_max[w][member & 7]);
    for (int w = from; w < end; w += teams) total += warp_sum[w][member & 7] * expf(warp_max[w][member & 7] - m);
    const int64_t to = (heads.place(p, first_request + own) << p.column_shift) + member;
    const float base = mean_score[own][member];
    p.base[to] = base;
    p.forced[to] = member < heads.count(p) ? m + logf(total) - base : 0.f;
  }
}

}  // namespace kvskim
