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
// What lies where in shared memory: attend_latent_memory.cuh.
#pragma once
#include "attend_latent_memory.cuh"
#include "attend_latent_merge.cuh"

namespace kvskim {

// Where a page lies: block, and first token within it times 32 plus the number of tokens that count (0 to 16).
struct LatentPage {
  int block, where;
};

// The warps that multiply meet at barriers: 1 when the query has come, 2 when all pages are used; the others at 3 when the block table has. Barrier 0 is
// __syncthreads().
constexpr int kMultiplying = 32 * (kLogitWarps + kValueWarps);

template <bool HALF, int RING>
__global__ void __launch_bounds__(LatentShape<RING>::kThreads, RING > 4 ? 1 : 2) attend_latent_kernel(const __grid_constant__ LatentParameters a) {
  using Shape = LatentShape<RING>;
  extern __shared__ __align__(1024) uint8_t shared[];
  // So that the compiler knows it to be the same in all lanes. Asked for again at the end: kept until then it takes a register more than there are.
  const auto own_warp = [] { return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0); };
  const int warp = own_warp();
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
    prefetch_map(&a.page_map);
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
      const uint32_t to = ring + place * Shape::kPage, signal = loaded + 8 * place;
      if (used) wait_for(vacant + 8 * place, parity);
      if (valid == kPageTokens) {
        if (elected()) {
          reinterpret_cast<int*>(shared + Shape::kValid)[place] = valid;
          arrive_expecting(signal, Shape::kPage);
          load_page(to, &a.page_map, where >> 5, head, at_block, signal);
        }
      } else {
        // Rows beyond the request hold anything, also NaN: they become zeros, and are masked below.
        copy_part_of_page(to, a.cache + head * a.head_bytes + at_block * a.block_bytes + (where >> 5) * a.token_bytes, a.token_bytes, valid, lane);
        make_stores_sendable();  // ahead of copies that may follow to this place
        if (lane == 0) reinterpret_cast<int*>(shared + Shape::kValid)[place] = valid;
        __syncwarp();
        if (lane == 0) arrive_at(signal);
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
      int own = lane;
      asm volatile("" : "+r"(own));  // for each page anew: the places of all lines are not to be kept in registers
      const auto load_keys = [&](uint32_t(&m)[4], int step) {
        load_matrices(m, LatentLine(ring + place * Shape::kPage, own % 8 + own / 16 * 8, step / 4, own / 8 % 2).at(step % 4));
      };
      wait_for(loaded + 8 * place, parity);
      // Three steps at a time, whose keys are loaded during the three before, as is the query of the first where the others' is in registers. The compiler
      // would take one chain after the other: it is kept from moving loads from one three to another.
      uint32_t m[2][3][4];
#pragma unroll
      for (int i = 0; i < 3; ++i) load_keys(m[0][i], i);
#pragma unroll
      for (int k = 0; k < Shape::kSteps; ++k) {
        if (k % 3 == 0) {
#pragma unroll
          for (int i = k + 3; i < min(k + 6, Shape::kSteps); ++i) load_keys(m[i / 3 % 2][i % 3], i);
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
      if (quad == 0) reinterpret_cast<float2*>(shared + Shape::kEnds)[threadIdx.x / 32 * kLatentHeads + row + 8 * r] = make_float2(scale[r], sum[r]);
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
    const LatentLine value_lines[2] = {{ring, lane % 16, 2 * value_warp, lane / 16}, {ring, lane % 16, 2 * value_warp + 1, lane / 16}};
    float output[16][4] = {};                           // of heads `row` and `row` + 8, two neighbouring channels each
    float maximum[2] = {kLatentLowest, kLatentLowest};  // of these heads: what `output` is scaled by
    int place = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int index = split; index < count; index += step) {
      constexpr int kEarly = Shape::kAlone ? 4 : 1;  // loads that do not wait for the weights
      const auto load_values = [&](uint32_t(&m)[4], int n) { load_matrices_transposed(m, value_lines[n / 4].at(n % 4) + place * Shape::kPage); };
      uint32_t m[8][4];
      wait_for(loaded + 8 * place, parity);
#pragma unroll
      for (int n = 0; n < kEarly; ++n) load_values(m[n], n);
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
        if (n >= kEarly) load_values(m[n], n);
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
  const int sender = own_warp();
  if (elected()) {
#pragma unroll 1
    for (int i = sender + 1; i < cluster; i += Shape::kThreads / 32) {
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
