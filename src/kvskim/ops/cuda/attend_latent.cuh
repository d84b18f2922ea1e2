// Sparse paged decode attention over latent rows (MLA): 512 channels that are both key and value, then 64 rotary channels of the key alone.
// Up to 16 query heads of one request and kv head share every row; a block of so many is what a CTA attends for.
//
// Products have the query heads as the 16 rows of the tensor core product: S[16, tokens] = q K^T, then O[16, 512] += P V. Eight warps work on a
// tile of two pages (32 tokens), in two halves of four: a half owns the even or the odd pages of the CTA.
//   copies   a warp copies a quarter of a page of its half, 16 bytes a lane, into a ring of RING pages; a page that a tile has left is
//            replaced at once, so that all but the tile in work is under way.
//   logits   a warp multiplies the 16 tokens of its half's page by a quarter of the channels (9 steps of 16, 36 registers of the query).
//            The quarters are added up through shared memory, each warp for 8 tokens and 8 heads.
//   weights  exp2(x - m) with an m of these 8 tokens, rounded up to a whole number: bringing the weights of several such groups to one
//            maximum is then exact. Only this scale is exchanged, so no barrier is needed for a maximum of the tile.
//   output   a warp adds 64 channels of all 16 heads (32 registers): nothing is left to be put together among warps.
// The CTAs of a thread-block cluster share a (request, kv head, block of heads). Each leaves its sums in its shared memory and reads 512 / cluster
// channels (rounded up to four) from all the others. Where the pages are many, several clusters share them, and put their parts together through global memory.
//
// Shared memory: a row is stored with 16 bytes of padding, so the 8 rows of an ldmatrix phase lie in 8 different bank groups. RING = 5: 93440 +
// 10112 bytes, two CTAs on a multiprocessor, 56 to 93 KB under way each; RING = 8: 149504 + 10112, one CTA.
#pragma once
#include "attend_latent_merge.cuh"

namespace kvskim {

template <int RING>
struct LatentShape {
  static constexpr int kRowBytes = 2 * (kLatentChannels + kRotaryChannels), kRowStride = kRowBytes + 16;
  static constexpr int kPage = kPageTokens * kRowStride;
  static constexpr int kParts = RING * kPage;               // [quarter][8 tokens][8 heads][lane] two logits
  static constexpr int kWeights = kParts + 4 * 4 * 2 * 32 * 8;  // [head] of kWeightStride bytes: weights of 32 tokens
  static constexpr int kWeightStride = 80;
  static constexpr int kScales = kWeights + kLatentHeads * kWeightStride;  // [head][8 tokens]: base 2 logarithm of the weights' scale
  static constexpr int kSums = kScales + kLatentHeads * 4 * 4;             // the same: sums of weights, at the end
  static constexpr int kPairs = kSums + kLatentHeads * 4 * 4;              // [head]: maximum and sum, at the end
  static constexpr int kBytes = kPairs + kLatentHeads * 8;
  // At the end the ring holds the sums of values: [head] of kOutputStride floats.
  static constexpr int kOutputStride = kLatentChannels + 8;
  static_assert(kLatentHeads * kOutputStride * 4 <= RING * kPage && kParts % 16 == 0 && kWeights % 16 == 0 && kScales % 16 == 0);
};

// Where a warp finds a page: block, and first token within it times 32 plus the number of tokens that count (0 to 16).
struct LatentPage {
  int block, where;
};

// Among the four warps of a half. Barrier 0 is __syncthreads().
__device__ __forceinline__ void barrier_of_half(int half) {
  if (half == 0) barrier_of<1, kLatentThreads / 2>();
  else barrier_of<2, kLatentThreads / 2>();
}

template <bool HALF, int RING>
__global__ void __launch_bounds__(kLatentThreads, RING > 5 ? 1 : 2) attend_latent_kernel(const __grid_constant__ LatentParameters a) {
  using Shape = LatentShape<RING>;
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);  // so that the compiler knows it to be the same in all lanes
  const int lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  const int half = warp / 4, quarter = warp % 4;
  const int head = blockIdx.x / a.blocks, block = blockIdx.x - head * a.blocks, request = blockIdx.y, split = blockIdx.z;
  const int cluster = a.cluster, pair = request * a.heads + head;
  const int first_head = head * a.group + block * kLatentHeads, members = min(a.group - block * kLatentHeads, kLatentHeads);

  wait_previous_kernel();  // all loads from here on are plain ones: the compiler may move __ldg ahead of the wait

  // Page number j of this CTA is entry split + step * j of the list, page j of a half its page 2 j + half. The first 32 of a half are fetched
  // together with the count, on the guess that one cluster has them all.
  const int* table = a.pages + static_cast<int64_t>(pair) * a.table_capacity;
  const int guess = split + cluster * (2 * lane + half);
  const int guessed_page = guess < a.table_capacity ? table[guess] : 0;
  const int tokens = max(a.seq_lens[request], 0), total = (tokens + kPageTokens - 1) / kPageTokens;
  int count = min(max(a.counts[pair], 0), total);
  const bool identity = count == total;
  if (!identity) count = min(count, a.table_capacity);
  const int worth = cluster * a.pages_per_split;
  const int live = a.clusters == 1 ? 1 : max(1, min(a.clusters, (count + worth - 1) / worth)), step = live * cluster;
  if (split >= step) return;
  if (count == 0) {
    if (split == 0)
      for (int i = threadIdx.x; i < members * (kLatentChannels / 4); i += kLatentThreads)
        write_latent<HALF>(a, request, first_head + i / (kLatentChannels / 4), i % (kLatentChannels / 4) * 4, make_float4(0.f, 0.f, 0.f, 0.f), 0.f, 0.f);
    return;
  }
  const int mine = count > split ? (count - split - 1) / step + 1 : 0;

  const auto read_page = [&](int j) {  // of the half
    const int index = split + step * (2 * j + half);
    return 2 * j + half < mine ? (identity ? index : table[index]) : -1;
  };
  const auto locate = [&](int page) {
    LatentPage at{0, 0};
    if (page >= 0 && page < total) {
      const int entry = static_cast<int>(static_cast<uint64_t>(page) * a.block_multiplier >> a.block_shift);
      at.block = a.block_table[request * a.block_table_stride + entry];
      at.where = (page - entry * a.pages_per_block) * (kPageTokens * 32) + min(kPageTokens, tokens - page * kPageTokens);
    }
    return at;
  };
  LatentPage current = locate(!identity && live == 1 ? (2 * lane + half < mine ? guessed_page : -1) : read_page(lane));

  // ---- the ring ----
  const uint32_t ring = shared_address(shared);
  const uint8_t* const rows = a.cache + head * a.head_bytes + lane * 16;
  const uint32_t copy_to = ring + 4 * quarter * Shape::kRowStride + lane * 16;
  // Rotary channels: eight lanes a row.
  const uint32_t rotary_to = ring + (4 * quarter + lane / 8) * Shape::kRowStride + 2 * kLatentChannels + lane % 8 * 16;
  // A quarter of a page: four rows.
  const auto copy_page = [&](int slot, LatentPage at) {
    const int valid = at.where & 31;
    const uint8_t* from = rows + at.block * a.block_bytes + ((at.where >> 5) + 4 * quarter) * a.token_bytes;
    const uint8_t* rotary = from + lane / 8 * a.token_bytes + 2 * kLatentChannels + (lane % 8 - lane) * 16;
    const uint32_t to = slot * Shape::kPage;
    if (valid == kPageTokens) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        copy16_at<0>(copy_to + to + i * Shape::kRowStride, from);
        copy16_at<512>(copy_to + to + i * Shape::kRowStride, from);
        from += a.token_bytes;
      }
      copy16(rotary_to + to, rotary);
    } else {  // rows beyond the request hold anything, also NaN: they become zeros and are masked below
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        copy16_or_zero(copy_to + to + i * Shape::kRowStride, from, 4 * quarter + i < valid);
        copy16_or_zero(copy_to + to + i * Shape::kRowStride + 512, from + 512, 4 * quarter + i < valid);
        from += a.token_bytes;
      }
      copy16_or_zero(rotary_to + to, rotary, 4 * quarter + lane / 8 < valid);
    }
  };
  const auto broadcast = [&](int j) {
    return LatentPage{__shfl_sync(kAllLanes, current.block, j & 31), __shfl_sync(kAllLanes, current.where, j & 31)};
  };
  constexpr int kEvenDepth = (RING + 1) / 2, kOddDepth = RING / 2;  // pages of a half that are in the ring
  const int depth = half == 0 ? kEvenDepth : kOddDepth;
  uint32_t valid_ring = 0;  // valid tokens of the half's pages in the ring, five bits each, the latest lowest
#pragma unroll
  for (int j = 0; j < kEvenDepth; ++j) {
    if (j < depth) {
      const LatentPage at = broadcast(j);
      valid_ring = valid_ring << 5 | (at.where & 31);
      if (2 * j + half < mine) copy_page(2 * j + half, at);
      commit_copies();
    }
  }

  // ---- the query, as the left operand of the logits: this warp's quarter of the channels ----
  uint32_t query[kLatentQuarterSteps][4];
  {
    constexpr int kLatentSteps = kLatentChannels / 16 - 3 * kLatentQuarterSteps;  // of the last quarter: the others are rotary
    const bool low = row < members, high = row + 8 < members;
    const int first = 16 * kLatentQuarterSteps * quarter + 2 * quad;
    const int64_t heads[2] = {first_head + (low ? row : 0), first_head + (high ? row + 8 : 0)};
    const uint16_t *early[2], *late[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      early[c] = a.query + request * a.query_request_stride + heads[c] * a.query_head_stride + first;
      late[c] = quarter == 3 ? a.rest + request * a.rest_request_stride + heads[c] * a.rest_head_stride + first - kLatentChannels : early[c];
    }
#pragma unroll
    for (int k = 0; k < kLatentQuarterSteps; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        query[k][i] = (i % 2 ? high : low) ? *reinterpret_cast<const uint32_t*>((k < kLatentSteps ? early : late)[i % 2] + 16 * k + i / 2 * 8) : 0u;
    }
  }

  // ---- the stream ----
  const uint32_t key_matrix = ring + (lane % 8 + lane / 16 * 8) * Shape::kRowStride + lane / 8 % 2 * 16 + quarter * (kLatentQuarterSteps * 32);
  const uint32_t value_matrix = ring + lane % 16 * Shape::kRowStride + lane / 16 * 16 + warp * 128;
  const uint32_t weight_matrix = ring + Shape::kWeights + lane % 16 * Shape::kWeightStride + lane / 16 * 16;
  float2* const parts = reinterpret_cast<float2*>(shared + Shape::kParts) + lane;
  // The eight tokens and eight heads whose logits this warp adds up. Group of tokens 2 half + token_group of the tile.
  const int token_group = quarter & 1, head_group = quarter >> 1, own_head = 8 * head_group + row;
  float* const own_scale = reinterpret_cast<float*>(shared + Shape::kScales) + own_head * 4 + 2 * half + token_group;
  const float4* const scales = reinterpret_cast<const float4*>(shared + Shape::kScales);
  uint32_t* const own_weights = reinterpret_cast<uint32_t*>(shared + Shape::kWeights + own_head * Shape::kWeightStride + (2 * half + token_group) * 16 + quad * 4);

  float output[8][4] = {};                                      // of heads `row` and `row` + 8, two neighbouring channels each
  float maximum[2] = {kLatentLowest, kLatentLowest};            // of these heads: what `output` is scaled by
  float group_scale = kLatentLowest, group_sum = 0.f;           // of own_head and the own group of tokens; the sum of this lane's tokens
  int slot = 0, fill = (2 * depth + half) % RING;               // of the tile's first page; of the page that the half copies next

  for (int t = 0; 2 * t < mine; ++t) {
    const int own_slot = slot + half >= RING ? slot + half - RING : slot + half;
    const bool present = 2 * t + half < mine;
    const int valid = valid_ring >> (5 * (depth - 1)) & 31;

    if (half == 0) wait_copies<kEvenDepth - 1>();
    else wait_copies<kOddDepth - 1>();
    barrier_of_half(half);
    if (present) {
      constexpr int kChains = RING > 5 ? 2 : 1;  // shorter chains of dependent products, where there are registers for them
      float logits[2][kChains][4] = {};          // of 8 tokens each
      const uint32_t keys = key_matrix + own_slot * Shape::kPage;
#pragma unroll
      for (int k = 0; k < kLatentQuarterSteps; ++k) {
        uint32_t m[4];
        load_matrices(m, keys + k * 32);
        mma_16816<HALF>(logits[0][k % kChains], query[k][0], query[k][1], query[k][2], query[k][3], m[0], m[1]);
        mma_16816<HALF>(logits[1][k % kChains], query[k][0], query[k][1], query[k][2], query[k][3], m[2], m[3]);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        auto& x = logits[n];
        if constexpr (kChains == 2)
#pragma unroll
          for (int c = 0; c < 4; ++c) x[0][c] += x[1][c];
        float2* to = parts + ((quarter * 4 + 2 * half + n) * 2) * 32;
        to[0] = make_float2(x[0][0], x[0][1]);
        to[32] = make_float2(x[0][2], x[0][3]);
      }
    }
    barrier_of_half(half);

    {
      float x[2] = {0.f, 0.f};
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const float2 one = parts[((part * 4 + 2 * half + token_group) * 2 + head_group) * 32];
        x[0] += one.x, x[1] += one.y;
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        x[c] *= a.logit_scale;
        if (a.softcap_2 > 0.f) x[c] = latent_soft_cap(x[c], a.softcap_2, a.softcap_inverse);
        if (!present || 8 * token_group + 2 * quad + c >= valid) x[c] = -INFINITY;
      }
      float largest = fmaxf(x[0], x[1]);
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
      const float raised = fmaxf(group_scale, ceilf(largest));
      group_sum *= exp2_fast(group_scale - raised);
      group_scale = raised;
      x[0] = exp2_fast(x[0] - raised), x[1] = exp2_fast(x[1] - raised);
      group_sum += x[0] + x[1];
      *own_weights = pack<HALF>(x[0], x[1]);
      if (quad == 0) *own_scale = raised;
    }
    __syncthreads();

    {
      const float4 low = scales[row], high = scales[row + 8];
      const float raised[2] = {fmaxf(fmaxf(low.x, low.y), fmaxf(low.z, low.w)), fmaxf(fmaxf(high.x, high.y), fmaxf(high.z, high.w))};
      if (__any_sync(kAllLanes, raised[0] != maximum[0] || raised[1] != maximum[1])) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float shrink = exp2_fast(maximum[c] - raised[c]);
          maximum[c] = raised[c];
#pragma unroll
          for (int n = 0; n < 8; ++n) output[n][2 * c] *= shrink, output[n][2 * c + 1] *= shrink;
        }
      }
#pragma unroll
      for (int page = 0; page < 2; ++page) {
        if (2 * t + page < mine) {
          const int page_slot = slot + page >= RING ? 0 : slot + page;
          uint32_t w[4];
          load_matrices(w, weight_matrix + page * 32);
          w[0] = scale_pair<HALF>(w[0], exp2_fast((page ? low.z : low.x) - raised[0]));
          w[1] = scale_pair<HALF>(w[1], exp2_fast((page ? high.z : high.x) - raised[1]));
          w[2] = scale_pair<HALF>(w[2], exp2_fast((page ? low.w : low.y) - raised[0]));
          w[3] = scale_pair<HALF>(w[3], exp2_fast((page ? high.w : high.y) - raised[1]));
          const uint32_t values = value_matrix + page_slot * Shape::kPage;
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            uint32_t m[4];
            load_matrices_transposed(m, values + n * 32);
            mma_16816<HALF>(output[2 * n], w[0], w[1], w[2], w[3], m[0], m[1]);
            mma_16816<HALF>(output[2 * n + 1], w[0], w[1], w[2], w[3], m[2], m[3]);
          }
        }
      }
    }
    __syncthreads();

    const int j = t + depth;
    LatentPage at{0, 0};
    if (2 * j + half < mine) {
      if ((j & 31) == 0) current = locate(read_page(j + lane));  // 32 at a time, one a lane
      at = broadcast(j);
      copy_page(fill, at);
    }
    commit_copies();
    valid_ring = valid_ring << 5 | (at.where & 31);
    fill = fill + 2 >= RING ? fill + 2 - RING : fill + 2;
    slot = slot + 2 >= RING ? slot + 2 - RING : slot + 2;
  }

  allow_next_kernel();
  wait_copies<0>();

  // ---- the sums of the CTA: values in the place of the ring, (maximum, sum) of each head ----
  group_sum += __shfl_xor_sync(kAllLanes, group_sum, 1);
  group_sum += __shfl_xor_sync(kAllLanes, group_sum, 2);
  if (quad == 0) *own_scale = group_scale, own_scale[(Shape::kSums - Shape::kScales) / 4] = group_sum;
  float* const outputs = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    float* to = outputs + row * Shape::kOutputStride + warp * 64 + n * 8 + 2 * quad;
    *reinterpret_cast<float2*>(to) = make_float2(output[n][0], output[n][1]);
    *reinterpret_cast<float2*>(to + 8 * Shape::kOutputStride) = make_float2(output[n][2], output[n][3]);
  }
  __syncthreads();
  if (threadIdx.x < kLatentHeads) {
    const float4 scale = scales[threadIdx.x], sum = scales[kLatentHeads + threadIdx.x];
    const float most = fmaxf(fmaxf(scale.x, scale.y), fmaxf(scale.z, scale.w));
    const float all = fmaf(sum.x, exp2_fast(scale.x - most), sum.y * exp2_fast(scale.y - most)) +
                      fmaf(sum.z, exp2_fast(scale.z - most), sum.w * exp2_fast(scale.w - most));
    reinterpret_cast<float2*>(shared + Shape::kPairs)[threadIdx.x] = make_float2(most, all);
  }
  if (cluster > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }

  // ---- the channels of this CTA, from all CTAs of the cluster ----
  constexpr int kFours = kLatentChannels / 4;
  const int number = split / cluster, rank = split - number * cluster;
  const int share = (kFours + cluster - 1) / cluster, first_four = rank * share, fours = min(share, kFours - first_four);
  const int64_t first_part = static_cast<int64_t>(pair) * a.clusters, all_parts = static_cast<int64_t>(a.requests) * a.heads * a.clusters;
  float4* const left = reinterpret_cast<float4*>(a.partials);
  float2* const left_pairs = reinterpret_cast<float2*>(a.partials + all_parts * a.group * kLatentChannels);
  const auto line_of = [&](int part, int member) { return (first_part + part) * a.group + block * kLatentHeads + member; };
  for (int i = threadIdx.x; i < members * fours; i += kLatentThreads) {
    const int member = i / fours, four = first_four + i - member * fours;
    const uint32_t value = ring + (member * Shape::kOutputStride + 4 * four) * 4, pairs = ring + Shape::kPairs + member * 8;
    float most, sum;
    const float4 v = merge_latent(
        cluster, most, sum, [&](int other) { return load_remote4(remote_address(value, other)); },
        [&](int other) { return load_remote2(remote_address(pairs, other)); });
    if (live == 1) {
      write_latent<HALF>(a, request, first_head + member, 4 * four, v, most, sum);
    } else {
      __stcg(left + line_of(number, member) * kFours + four, v);
      // Every rank has the same pair, and leaves it: it knows only of those that others of its rank have left.
      if (four == first_four) __stcg(left_pairs + line_of(number, member), make_float2(most, sum));
    }
  }
  if (cluster > 1) cluster_arrive();  // the memory of this CTA is waited for at the end
  if (live > 1) {
    // The channels of this rank in all clusters: the last CTA to come puts them together.
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    unsigned* ticket = a.tickets + (static_cast<int64_t>(pair) * a.blocks + block) * kLatentCluster + rank;
    if (threadIdx.x == 0) last = atomicInc(ticket, live - 1) == static_cast<unsigned>(live - 1);  // wraps to zero with the last arrival
    __syncthreads();
    if (last) {
      __threadfence();
      for (int i = threadIdx.x; i < members * fours; i += kLatentThreads) {
        const int member = i / fours, four = first_four + i - member * fours;
        float most, sum;
        const float4 v = merge_latent(
            live, most, sum, [&](int part) { return __ldcg(left + line_of(part, member) * kFours + four); },
            [&](int part) { return __ldcg(left_pairs + line_of(part, member)); });
        write_latent<HALF>(a, request, first_head + member, 4 * four, v, most, sum);
      }
    }
  }
  if (cluster > 1) cluster_wait();
}

}  // namespace kvskim
