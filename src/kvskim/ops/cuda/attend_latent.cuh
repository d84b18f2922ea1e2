// Sparse paged decode attention over latent rows (MLA): 512 channels that are both key and value, then 64 rotary channels of the key alone.
// Up to 16 query heads of one request and kv head share every row; a block of so many is what a CTA attends for.
//
// Products have the query heads as the 16 rows of the tensor core product: S[16, tokens] = q K^T, then O[16, 512] += P V. The warps of a CTA have
// three roles and meet at signals of their own for each page of a ring, so that the loads, the two products and the softmax of different pages overlap:
//   copies   one warp asks the copy engine for the rows of page after page, into the ring of RING pages.
//   logits   four warps take a page each in turn: all 36 steps of 16 channels, so nothing is left to be added up among warps. A warp keeps a running
//            maximum m of its own pages for each head, rounded up to a whole number, and leaves the weights exp2(x - m), as operands of the second
//            product, with m. Bringing the weights of several warps to one maximum is then exact.
//   values   four warps add 128 channels of all 16 heads each (64 registers), in the order of the pages, and give the page's place back.
// The query is the left operand of the logits: where a CTA has a multiprocessor to itself 24 of 36 steps of it are in registers, 96 of them; what is left is
// read from shared memory.
//
// The CTAs of a thread-block cluster share a (request, kv head, block of heads). Each sends every other one its sums of 512 / cluster channels (rounded
// up to four) by bulk copies between shared memories: no barrier of the cluster orders memory, and each waits for the bytes that it is to get; its own part
// stays where it is. Where the pages are many, several clusters share them, and put their parts together through global memory.
//
// Every place of the ring belongs to one warp of logits (RING is a multiple of their number): a signal tells a phase only from the one
// ahead of it, so who waits for a phase must have seen the one before.
//
// Shared memory: a row is stored with 16 bytes of padding, so the 8 rows of an ldmatrix phase lie in 8 different bank groups. RING = 4: 94 KiB, two CTAs
// on a multiprocessor, up to 72 KiB under way each, no clusters; RING = 8: 210 KiB, one CTA, 144 KiB under way.
#pragma once
#include "attend_latent_merge.cuh"

namespace kvskim {

template <int RING>
struct LatentShape {
  static constexpr bool kAlone = RING > 4;  // on a multiprocessor
  // One warp copies. On a multiprocessor of its own a CTA has three more, which fetch the block table and help to put sums together.
  static constexpr int kThreads = 32 * (kLogitWarps + kValueWarps + (kAlone ? 4 : 1));
  // Steps of 16 channels of which a logit warp keeps the query in registers, two of three: with 12 warps on a multiprocessor there are 168, with 18 of
  // them 112.
  static constexpr int kSteps = kLatentRowBytes / 32, kResident = kAlone ? kSteps / 3 * 2 : 0;
  static constexpr int kRowStride = kLatentRowBytes + 16, kPage = kPageTokens * kRowStride;
  static constexpr int kQuery = RING * kPage;                            // [head] as the rows of a page
  static constexpr int kWeights = kQuery + kLatentHeads * kRowStride;    // [place in the ring][lane] of a left operand of four registers
  static constexpr int kScales = kWeights + RING * 512;                  // [place][head]: base 2 logarithm of the weights' scale
  static constexpr int kEnds = kScales + RING * kLatentHeads * 4;        // [logit warp][head]: its scale and sum of weights at the end
  static constexpr int kValid = kEnds + kLogitWarps * kLatentHeads * 8;  // [place]: tokens of the page
  static constexpr int kSignals = kValid + ceil_div(RING, 4) * 16;       // [place] loaded, [place] weighed, [place] free, sent
  static constexpr int kSent = ceil_div(kSignals + (3 * RING + 1) * 8, 16) * 16;  // [CTA of the cluster] of what it sends
  // Block table of a request, where it is known ahead of the pages and no longer than this.
  static constexpr int kTable = kSent + (kAlone ? largest_latent_parts() : 0), kTableEntries = kAlone ? 1024 : 0;
  static constexpr int kBytes = kTable + 4 * kTableEntries;
  // At the end the ring holds what is sent to each CTA, as it arrives there; the place of the query a flag.
  static constexpr int kLast = kQuery;
  static_assert(RING % kLogitWarps == 0);
  static_assert(largest_latent_parts() <= RING * kPage && kWeights % 16 == 0 && kSignals % 8 == 0);
};

// Where a page lies: block, and first token within it times 32 plus the number of tokens that count (0 to 16).
struct LatentPage {
  int block, where;
};

// The warps that multiply meet at barriers: 1 when the query has come, 2 when all pages are used; the others at 3 when the block table has. Barrier 0 is
// __syncthreads().
constexpr int kMultiplying = 32 * (kLogitWarps + kValueWarps);

// The query of a block of heads into shared memory, four heads a value warp. Rows of heads that there are not become zeros.
template <int RING>
__device__ __forceinline__ void copy_latent_query(const LatentParameters& a, uint32_t shared, int request, int first_head, int members, int warp,
                                                  int lane) {
  constexpr int kRows = kLatentHeads / kValueWarps, kStride = LatentShape<RING>::kRowStride;
  const uint16_t* const latent = a.query + request * a.query_request_stride;
  const uint16_t* const rotary = a.rest + request * a.rest_request_stride;
#pragma unroll 1
  for (int row = warp * kRows; row < (warp + 1) * kRows; ++row) {
    const bool present = row < members;
    const int64_t head = first_head + (present ? row : 0);
    const uint32_t to = shared + row * kStride;
    const uint16_t *from = latent + head * a.query_head_stride, *rest = rotary + head * a.rest_head_stride;
    if (a.query_unit == 16) {
      copy16_or_zero(to + lane * 16, from + lane * 8, present);
      copy16_or_zero(to + 512 + lane * 16, from + 256 + lane * 8, present);
      if (lane < 8) copy16_or_zero(to + 1024 + lane * 16, rest + lane * 8, present);
    } else {
#pragma unroll 1
      for (int c = 2 * lane; c < kLatentChannels; c += 64) copy4_or_zero(to + 2 * c, from + c, present);
      copy4_or_zero(to + 1024 + lane * 4, rest + 2 * lane, present);
    }
  }
  commit_copies();  // wait_copies() waits for nothing else
}

template <bool HALF, int RING>
__global__ void __launch_bounds__(LatentShape<RING>::kThreads, RING > 4 ? 1 : 2) attend_latent_kernel(const __grid_constant__ LatentParameters a) {
  using Shape = LatentShape<RING>;
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);  // so that the compiler knows it to be the same in all lanes
  const int lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  const bool of_logits = warp < kLogitWarps, of_values = !of_logits && warp < kLogitWarps + kValueWarps;
  const bool of_copies = warp == kLogitWarps + kValueWarps;
  const int value_warp = warp - kLogitWarps;
  const int head = blockIdx.x / a.blocks, block = blockIdx.x - head * a.blocks, request = blockIdx.y, split = blockIdx.z;
  const int cluster = Shape::kAlone ? a.cluster : 1, pair = request * a.heads + head;
  const int number = a.clusters == 1 ? 0 : split / cluster, rank = split - number * cluster;
  const int first_head = head * a.group + block * kLatentHeads, members = min(a.group - block * kLatentHeads, kLatentHeads);
  const uint32_t ring = shared_address(shared);
  const uint32_t loaded = ring + Shape::kSignals, weighed = loaded + 8 * RING, vacant = weighed + 8 * RING, sent = vacant + 8 * RING;

  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < RING; ++i) {
      prepare_signal(loaded + 8 * i, 1);  // and the bytes
      prepare_signal(weighed + 8 * i, 1);
      prepare_signal(vacant + 8 * i, kValueWarps);
    }
    prepare_signal(sent, 1);
    publish_signals();
    if (cluster > 1) arrive_expecting(sent, (cluster - 1) * a.part_bytes());
  }
  __syncthreads();
  if (cluster > 1) cluster_meet();  // nobody sends before all have their signals

  // The query and the length, and pages and counts, which are of the kernel ahead; of a request that is to be attended whole nothing is.
  if (!a.settled) wait_previous_kernel();  // all loads from here on are plain ones: the compiler may move __ldg ahead of the wait
  if (of_values) copy_latent_query<RING>(a, ring + Shape::kQuery, request, first_head, members, value_warp, lane);
  const int tokens = max(a.seq_lens[request], 0), total = ceil_div(tokens, kPageTokens);
  const auto entry_of = [&](int page) { return static_cast<int>(static_cast<uint64_t>(page) * a.block_multiplier >> a.block_shift); };
  // Behind select the block table comes while the pages are being selected: looking them up would else be a trip to memory more.
  const int* const blocks = a.block_table + request * a.block_table_stride;
  const int entries = total > 0 ? entry_of(total - 1) + 1 : 0;
  const bool table_here = Shape::kAlone && a.settled && entries <= Shape::kTableEntries;
  if (table_here && !of_logits && !of_values) {
    for (int i = threadIdx.x - kMultiplying; i < entries; i += Shape::kThreads - kMultiplying) copy4_or_zero(ring + Shape::kTable + 4 * i, blocks + i, true);
    commit_copies();
  }
  bool known = false;
  if (a.settled) {
    known = total <= a.full_pages;
    if (!known) wait_previous_kernel();
  }

  // This CTA has the entries split, split + step, ... of the list. The first 32 are fetched together with the count, on the guess that one cluster has
  // them all.
  const int* table = a.pages + static_cast<int64_t>(pair) * a.table_capacity;
  const int guess = split + cluster * lane;
  const int guessed_page = of_copies && !known && guess < a.table_capacity ? table[guess] : 0;
  int count = known ? total : min(max(a.counts[pair], 0), total);
  const bool identity = count == total;
  if (!identity) count = min(count, a.table_capacity);
  const int worth = cluster * a.pages_per_split;
  const int live = a.clusters == 1 ? 1 : max(1, min(a.clusters, (count + worth - 1) / worth)), step = live * cluster;
  if (split >= step || count == 0) {
    if (split == 0)
      for (int i = threadIdx.x; i < members * kLatentFours; i += Shape::kThreads)
        write_latent<HALF>(a, a.out + request * a.out_request_stride + (first_head + i / kLatentFours) * a.out_head_stride + i % kLatentFours * 4,
                           request, first_head + i / kLatentFours, i % kLatentFours * 4, make_float4(0.f, 0.f, 0.f, 0.f), 0.f, 0.f);
    wait_copies<0>();
    if (known) wait_previous_kernel();
    return;
  }

  if (of_copies) {
    // ---- copies ----
    const auto locate = [&](int first, bool guessed) {
      const int index = first + step * lane;
      const int page = index >= count ? -1 : identity ? index : guessed ? guessed_page : table[index];
      LatentPage at{0, 0};
      if (page >= 0 && page < total) {
        const int entry = entry_of(page);
        at.block = table_here ? reinterpret_cast<const int*>(shared + Shape::kTable)[entry] : blocks[entry];
        at.where = (page - entry * a.pages_per_block) * (kPageTokens * 32) + min(kPageTokens, tokens - page * kPageTokens);
      }
      return at;
    };
    const uint8_t* const rows = a.cache + head * a.head_bytes;
    int place = 0, turn = 0;
    uint32_t parity = 1;  // of the last use of a place
    bool used = false;    // whether there was one
    if (table_here) {
      wait_copies<0>();
      barrier_of<3, Shape::kThreads - kMultiplying>();
    }
    LatentPage current = locate(split, live == 1);
#pragma unroll 1
    for (int index = split; index < count; index += step) {
      if (turn == 32) current = locate(index, false), turn = 0;  // 32 at a time, one a lane: the ring lasts meanwhile
      const int at_block = __shfl_sync(kAllLanes, current.block, turn), where = __shfl_sync(kAllLanes, current.where, turn), valid = where & 31;
      const uint8_t* from = rows + at_block * a.block_bytes + (where >> 5) * a.token_bytes;
      const uint32_t to = ring + place * Shape::kPage, signal = loaded + 8 * place;
      if (used) wait_for(vacant + 8 * place, parity);
      if (valid < kPageTokens) {
        // Rows beyond the request hold anything, also NaN: they become zeros, and are masked below.
#pragma unroll 1
        for (int i = valid; i < kPageTokens; ++i)
          for (int c = lane * 16; c < kLatentRowBytes; c += 512)
            *reinterpret_cast<uint4*>(shared + place * Shape::kPage + i * Shape::kRowStride + c) = make_uint4(0, 0, 0, 0);
        make_stores_sendable();  // ahead of the copies that follow to this place
        __syncwarp();
      }
      if (elected()) {
        reinterpret_cast<int*>(shared + Shape::kValid)[place] = valid;
        arrive_expecting(signal, valid * kLatentRowBytes);
        if (valid == kPageTokens) {
#pragma unroll
          for (int i = 0; i < kPageTokens; ++i) {
            load_bulk<kLatentRowBytes>(to + i * Shape::kRowStride, from, signal);
            from += a.token_bytes;
          }
        } else {
#pragma unroll 1
          for (int i = 0; i < valid; ++i) {
            load_bulk<kLatentRowBytes>(to + i * Shape::kRowStride, from, signal);
            from += a.token_bytes;
          }
        }
      }
      __syncwarp();
      ++turn;
      if (++place == RING) place = 0, parity ^= 1, used = true;
    }
    if (cluster > 1) cluster_wait();
  } else if (!of_logits && !of_values) {
    if (table_here) {
      wait_copies<0>();
      arrive_at_barrier_of<3, Shape::kThreads - kMultiplying>();
    }
    if (cluster > 1) cluster_wait();
  } else if (of_logits) {
    // ---- logits ----
    const uint32_t key_matrix = ring + (lane % 8 + lane / 16 * 8) * Shape::kRowStride + lane / 8 % 2 * 16;
    const uint32_t query_matrix = ring + Shape::kQuery + lane % 16 * Shape::kRowStride + lane / 16 * 16;
    uint32_t query[Shape::kResident + 1][4];
    barrier_of<1, kMultiplying>();
#pragma unroll
    for (int k = 0; k < Shape::kResident; ++k) load_matrices(query[k], query_matrix + (k + k / 2 + 1) * 32);
    if (Shape::kAlone) load_matrices(query[Shape::kResident], query_matrix);
    if (cluster > 1) cluster_wait();  // long over: here nobody waits for it
    float scale[2] = {kLatentLowest, kLatentLowest}, sum[2] = {0.f, 0.f};  // of heads `row` and `row` + 8; the sum of this lane's tokens
    int place = warp;
    uint32_t parity = 0;
#pragma unroll 1
    for (int index = split + step * warp; index < count; index += step * kLogitWarps) {
      constexpr int kChains = Shape::kAlone ? 3 : 2;  // of dependent products, side by side
      float logits[2][kChains][4] = {};               // of 8 tokens each
      const uint32_t keys = key_matrix + place * Shape::kPage;
      wait_for(loaded + 8 * place, parity);
      // Three steps at a time, whose keys are loaded during the three before, as is the query of the first where the others' is in registers. The compiler
      // would take one chain after the other: it is kept from moving loads from one three to another.
      uint32_t m[2][3][4];
#pragma unroll
      for (int i = 0; i < 3; ++i) load_matrices(m[0][i], keys + i * 32);
#pragma unroll
      for (int k = 0; k < Shape::kSteps; ++k) {
        if (k % 3 == 0) {
#pragma unroll
          for (int i = k + 3; i < min(k + 6, Shape::kSteps); ++i) load_matrices(m[i / 3 % 2][i % 3], keys + i * 32);
          __syncwarp();
        }
        const uint32_t(&b)[4] = m[k / 3 % 2][k % 3];
        uint32_t(&q)[4] = query[Shape::kAlone && k % 3 != 0 ? k - k / 3 - 1 : Shape::kResident];
        if (!Shape::kAlone) load_matrices(q, query_matrix + k * 32);
        mma_16816<HALF>(logits[0][k % kChains], q[0], q[1], q[2], q[3], b[0], b[1]);
        mma_16816<HALF>(logits[1][k % kChains], q[0], q[1], q[2], q[3], b[2], b[3]);
        if (Shape::kAlone && k % 3 == 0) load_matrices(q, query_matrix + (k + 3) % Shape::kSteps * 32);
      }
      const int valid = reinterpret_cast<const int*>(shared + Shape::kValid)[place];
      float x[2][2][2];  // [of heads row and row + 8][of 8 tokens]
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int n = i / 4, c = i % 4;
        float& to = x[c / 2][n][c % 2];
        to = logits[n][0][c];
#pragma unroll
        for (int chain = 1; chain < kChains; ++chain) to += logits[n][chain][c];
        to *= a.logit_scale;
        if (a.softcap_2 > 0.f) to = latent_soft_cap(to, a.softcap_2, a.softcap_inverse);
        if (8 * n + 2 * quad + c % 2 >= valid) to = -INFINITY;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float largest = fmaxf(fmaxf(x[r][0][0], x[r][0][1]), fmaxf(x[r][1][0], x[r][1][1]));
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
        const float raised = fmaxf(scale[r], ceilf(largest));
        sum[r] *= exp2_fast(scale[r] - raised);
        scale[r] = raised;
#pragma unroll
        for (int i = 0; i < 4; ++i) x[r][i / 2][i % 2] = exp2_fast(x[r][i / 2][i % 2] - raised);
        sum[r] += (x[r][0][0] + x[r][0][1]) + (x[r][1][0] + x[r][1][1]);
      }
      reinterpret_cast<uint4*>(shared + Shape::kWeights)[place * 32 + lane] = make_uint4(
          pack<HALF>(x[0][0][0], x[0][0][1]), pack<HALF>(x[1][0][0], x[1][0][1]), pack<HALF>(x[0][1][0], x[0][1][1]), pack<HALF>(x[1][1][0], x[1][1][1]));
      if (quad == 0) {
        float* const of_page = reinterpret_cast<float*>(shared + Shape::kScales) + place * kLatentHeads + row;
        of_page[0] = scale[0], of_page[8] = scale[1];
      }
      __syncwarp();
      if (lane == 0) arrive_at(weighed + 8 * place);
      place += kLogitWarps;
      if (place >= RING) place -= RING, parity ^= 1;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(kAllLanes, sum[r], 1);
      sum[r] += __shfl_xor_sync(kAllLanes, sum[r], 2);
      if (quad == 0) reinterpret_cast<float2*>(shared + Shape::kEnds)[warp * kLatentHeads + row + 8 * r] = make_float2(scale[r], sum[r]);
    }
    barrier_of<2, kMultiplying>();  // all of the ring is used, and the sums of all weights are there

    // (maximum, sum) of a head for all CTAs, while the warps of values store theirs.
    const int head_of_pair = threadIdx.x % kLatentHeads;
    const float2* const ends = reinterpret_cast<const float2*>(shared + Shape::kEnds) + head_of_pair;
    float most = kLatentLowest, all = 0.f;
#pragma unroll
    for (int i = 0; i < kLogitWarps; ++i) most = fmaxf(most, ends[i * kLatentHeads].x);
#pragma unroll
    for (int i = 0; i < kLogitWarps; ++i) all = fmaf(ends[i * kLatentHeads].y, exp2_fast(ends[i * kLatentHeads].x - most), all);
    for (int to = threadIdx.x / kLatentHeads; to < cluster; to += 32 * kLogitWarps / kLatentHeads)
      *reinterpret_cast<float2*>(shared + to * a.part_bytes() + a.pair_of(head_of_pair)) = make_float2(most, all);
    if (cluster > 1) make_stores_sendable();
  } else {
    // ---- values ----
    wait_copies<0>();
    arrive_at_barrier_of<1, kMultiplying>();
    if (cluster > 1) cluster_wait();
    const uint32_t value_matrix = ring + lane % 16 * Shape::kRowStride + lane / 16 * 16 + value_warp * 256;
    float output[16][4] = {};                           // of heads `row` and `row` + 8, two neighbouring channels each
    float maximum[2] = {kLatentLowest, kLatentLowest};  // of these heads: what `output` is scaled by
    int place = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int index = split; index < count; index += step) {
      constexpr int kEarly = Shape::kAlone ? 4 : 1;  // loads that do not wait for the weights
      const uint32_t values = value_matrix + place * Shape::kPage;
      uint32_t m[8][4];
      wait_for(loaded + 8 * place, parity);
#pragma unroll
      for (int n = 0; n < kEarly; ++n) load_matrices_transposed(m[n], values + n * 32);
      wait_for(weighed + 8 * place, parity);
      const uint4 weights = reinterpret_cast<const uint4*>(shared + Shape::kWeights)[place * 32 + lane];
      const float* const scales = reinterpret_cast<const float*>(shared + Shape::kScales) + place * kLatentHeads + row;
      const float scale[2] = {scales[0], scales[8]}, raised[2] = {fmaxf(maximum[0], scale[0]), fmaxf(maximum[1], scale[1])};
      if (__any_sync(kAllLanes, raised[0] != maximum[0] || raised[1] != maximum[1])) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float shrink = exp2_fast(maximum[r] - raised[r]);
          maximum[r] = raised[r];
#pragma unroll
          for (int n = 0; n < 16; ++n) output[n][2 * r] *= shrink, output[n][2 * r + 1] *= shrink;
        }
      }
      const float low = exp2_fast(scale[0] - raised[0]), high = exp2_fast(scale[1] - raised[1]);
      const uint32_t w[4] = {scale_pair<HALF>(weights.x, low), scale_pair<HALF>(weights.y, high), scale_pair<HALF>(weights.z, low),
                             scale_pair<HALF>(weights.w, high)};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        if (n >= kEarly) load_matrices_transposed(m[n], values + n * 32);
        mma_16816<HALF>(output[2 * n], w[0], w[1], w[2], w[3], m[n][0], m[n][1]);
        mma_16816<HALF>(output[2 * n + 1], w[0], w[1], w[2], w[3], m[n][2], m[n][3]);
      }
      __syncwarp();
      if (lane == 0) arrive_at(vacant + 8 * place);
      if (++place == RING) place = 0, parity ^= 1;
    }
    barrier_of<2, kMultiplying>();  // all of the ring is used

    // The sums of values in the place of the ring, as the CTAs that they are for will have them: LatentParameters::place_of(), with the terms that are the
    // same for all of these 64 numbers taken out. A swizzle stays within eight fours, which are then of one CTA.
    const int share = a.share, own_four = value_warp * 32 + quad / 2, to_next = a.part_bytes() - share * 16;
    uint32_t to[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) to[j] = ring + row * share * 16 + (own_four + ((2 * j) ^ a.swizzle(row))) * 16 + quad % 2 * 8;
    const uint32_t eight_rows = 8 * share * 16;
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      const uint32_t address = to[n % 4] + ((own_four + 2 * n) * a.share_inverse >> 16) * to_next;
      store_shared(address + n / 4 * 128, output[n][0], output[n][1]);
      store_shared(address + eight_rows + n / 4 * 128, output[n][2], output[n][3]);
    }
    if (cluster > 1) make_stores_sendable();
  }
  allow_next_kernel();
  __syncthreads();

  // ---- the channels of this CTA, from all CTAs of the cluster ----
  if (elected()) {
#pragma unroll 1
    for (int i = warp + 1; i < cluster; i += Shape::kThreads / 32) {
      const int other = rank + i < cluster ? rank + i : rank + i - cluster, bytes = a.part_bytes();
      send(remote_address(ring + Shape::kSent + rank * bytes, other), ring + other * bytes, bytes, remote_address(sent, other));
    }
  }
  __syncwarp();
  const LatentPlace place{request, pair, block, first_head, members, cluster, number, rank, live};
  put_latent_together<HALF, Shape::kThreads>(a, ring, ring + Shape::kSent, reinterpret_cast<bool*>(shared + Shape::kLast), place, [&] {
    if (cluster > 1) {
      wait_for(sent, 0);
      cluster_meet();  // the memory of this CTA is waited for at the end
    }
  });
  if (cluster > 1) cluster_wait();
  if (known) wait_previous_kernel();
}

}  // namespace kvskim
