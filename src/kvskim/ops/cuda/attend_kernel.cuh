// Sparse paged decode attention: one CTA streams a share (a split) of the selected pages of one (request, kv head).
//
// Products are taken transposed, so that the tokens of a page are the 16 rows of the tensor core product and query heads are columns, eight
// to a tile: S^T[16 tokens, heads] = K[16, D] q^T, then O^T[D, heads] += V^T[D, 16] P^T. A group of up to 8 heads wastes nothing on
// padding of the row dimension, and the accumulators of a warp take D / 2 registers a tile.
//
// Each of the 4 warps owns whole pages and a ring of kStages pages of its own in shared memory, filled by cp.async. K and V of a page are
// separate copy groups: the K half of a slot is refilled right after the logits are taken, the V half right after the output is added, so
// 2 kStages - 1 half pages of every warp are under way at any time. No barrier among warps until the end.
//
// Shared memory. Rows of whole lines of 128 bytes are stored one behind the other, and in each line of row r piece c of 16 bytes has the place
// c ^ (r % 8): the 8 rows that one ldmatrix phase reads lie in 8 different bank groups, and every address is a lane constant with the bits of an
// immediate flipped. With padding, as shorter rows have it (16 bytes, their length in pieces becomes odd), a line of global memory would lie across
// two lines of shared memory and be asked for twice, in parts: from host memory that takes nearly twice the time. Bytes of a page, K and V:
//   16-bit, D = 128: 8192, 2 stages x 4 warps = 65536 a CTA, 3 CTAs = 192 KB of the 228 KB of an SM; under way: 3/4 of it, 144 KB.
//   16-bit, D =  64 and 8-bit, D = 128: 4096, 4 stages = 65536, 3 CTAs, 7/8 under way: 168 KB.
//   16-bit, D =  96: 6656, 2 stages = 53248, 3 CTAs, 117 KB under way.   8-bit, D = 96: 3584, 5 stages = 71680, 3 CTAs.
//   8-bit,  D =  64: 2560, 6 stages = 61440, 3 CTAs.
//   16-bit, D = 256: 16384, 3 stages = 196608, 1 CTA, 5/6 under way: 160 KB.
//   8-bit,  D = 256: 8192, 2 stages, 3 CTAs; with two tiles of heads (twice the registers) 3 stages, 2 CTAs.
// At 4.3 TB/s over 132 SMs a latency of one microsecond needs 33 KB under way on an SM.
// A grid of at most one CTA for each SM takes the deep variant: up to 36 KB a warp, 16-bit, D = 128: 4 stages = 131072, 112 KB under way.
//
// TIERED: V, or K and V, are in host memory (HostTier). Only the address that a page is copied from differs, so the result has the same bits.
//
// Splits are put together by the CTAs of a cluster through shared memory (attend_cluster.cuh), or through global memory (attend_tickets.cuh).
#pragma once
#include "attend_cluster.cuh"
#include "attend_tickets.cuh"

namespace kvskim {

// DEEP: for one CTA on an SM. A longer ring replaces the neighbours; 80 KB are left for CTAs of the kernels ahead and behind.
template <int DIM, int TILES, int KIND, bool DEEP>
struct AttendShape {
  static constexpr int kElementBytes = KIND == kFloat8E4M3 ? 1 : 2;
  static constexpr int kChunks = DIM * kElementBytes / 16;  // pieces of 16 bytes of a row
  // Rows of whole lines of 128 bytes are kept without padding, piece c of row r in the place of piece c ^ (r % 8) of its line.
  static constexpr bool kPermuted = kChunks % 8 == 0;
  static constexpr int kRowStride = kChunks * 16 + (kPermuted ? 0 : 16);
  static constexpr int kHalfPage = kPageTokens * kRowStride;
  static constexpr int kPage = 2 * kHalfPage;
  static constexpr int rows_per_copy(int rows = 16) { return rows * kChunks <= 32 ? rows : rows_per_copy(rows / 2); }
  static constexpr int kRows = rows_per_copy();  // rows that one copy instruction of a warp covers
  static constexpr int kBlocks = DIM < 256 ? 3 : KIND != kFloat8E4M3 ? 1 : TILES == 1 ? 3 : 2;  // CTAs of an SM
  // Two tiles of heads of 256 dims leave no registers for the query: it is kept in shared memory, in the order of its fragments.
  static constexpr bool kQueryShared = DIM == 256 && TILES == 2;
  static constexpr int kQueryBytes = kQueryShared ? DIM / 16 * TILES * 32 * 8 : 0;
  // Bytes of a warp's ring.
  static constexpr int kBudget = DEEP && kBlocks > 1 ? 36 * 1024 : (228 * 1024 / kBlocks - 1024 - 512 - kQueryBytes) / kAttendWarps;
  static constexpr int kStages = kBudget / kPage < 6 ? kBudget / kPage : 6;
  static constexpr int kRing = kStages * kPage;
  static constexpr int kShared = kAttendWarps * kRing + kQueryBytes;
  static_assert(kChunks <= 32 && kChunks % 2 == 0 && kStages >= 2);
  static constexpr int kClusterShared = kShared + ClusterMerge<DIM, TILES>::kBytes;  // of a clustered launch
  static_assert(kClusterShared <= 226 * 1024 && kShared % 16 == 0 && kShared >= AttendMerge<DIM, TILES>::kSharedBytes);
};

// Where a lane finds one of the coming pages of its warp.
struct PageAddress {
  int block;
  int where;   // first token within the block, times 32, plus the number of tokens that count (0 to 16)
  int source;  // of a tier: slot + 1, or -1 - (page * heads + head) where the page is read from the host
};

template <int DIM, int TILES, int KIND, bool DEEP, bool TIERED>
__global__ void __launch_bounds__(kAttendThreads, DEEP ? 1 : AttendShape<DIM, TILES, KIND, DEEP>::kBlocks)
attend_kernel(const __grid_constant__ AttendParameters a) {
  using Shape = AttendShape<DIM, TILES, KIND, DEEP>;
  constexpr bool kEight = KIND == kFloat8E4M3;
  constexpr bool kHalf = KIND != kBFloat16;  // e4m3 converts exactly to fp16, so 8-bit caches use the fp16 product
  constexpr int kSteps = DIM / 16, kStages = Shape::kStages;
  extern __shared__ __align__(512) uint8_t shared[];  // permuted rows lie at multiples of their length

  const int head = blockIdx.x, request = blockIdx.y, split = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = lane / 4, quad = lane % 4;  // of fragments: row (or column) of a lane, and which pair it holds
  const int pair = request * a.heads + head;

  wait_previous_kernel();  // all loads from here on are plain ones: the compiler may move __ldg ahead of the wait

  // The page list is split into CTAs, warps and iterations so that all of them walk forward together: page number
  // split + splits * (warp + 4 j). The first 32 entries are fetched together with the count, on the guess that no split is idle.
  const int* table = a.pages + static_cast<int64_t>(pair) * a.table_capacity;
  const int guess = split + a.splits * (warp + kAttendWarps * lane);
  const int guessed_page = guess < a.table_capacity ? table[guess] : 0;
  const int tokens = max(a.seq_lens[request], 0);
  const int total = (tokens + kPageTokens - 1) / kPageTokens;
  int count = min(max(a.counts[pair], 0), total);
  const bool identity = count == total;
  if (!identity) count = min(count, a.table_capacity);
  const int splits = min(a.splits, (count + a.pages_per_split - 1) / a.pages_per_split);  // those that have work
  if (split >= max(splits, 1)) return;
  if (count == 0) {
    write_nothing<DIM>(a, request, head);
    return;
  }
  const bool clustered = a.clustered && splits > 1;
  if (clustered) cluster_arrive();  // tells the others that this CTA's memory may be written

  const int first = split + splits * warp, step = splits * kAttendWarps;
  const int mine = count > first ? (count - first - 1) / step + 1 : 0;  // pages of this warp

  const auto read_page = [&](int j) {
    const int index = first + step * j;
    return j < mine ? (identity ? index : table[index]) : -1;
  };
  const auto locate = [&](int page) {
    PageAddress address{0, 0, 0};
    if (page >= 0 && page < total) {
      const int block = static_cast<int>(static_cast<uint64_t>(page) * a.block_multiplier >> a.block_shift);
      address.block = a.block_table[request * a.block_table_stride + block];
      address.where = (page - block * a.pages_per_block) * (kPageTokens * 32) + min(kPageTokens, tokens - page * kPageTokens);
      if constexpr (TIERED) {
        const int key = (address.block * a.pages_per_block + page - block * a.pages_per_block) * a.heads + head;
        const int place = a.tier.directory[key];
        address.source = place > 0 ? place : -1 - key;
      }
    }
    return address;
  };

  PageAddress current = locate(!identity && splits == a.splits ? (lane < mine ? guessed_page : -1) : read_page(lane));

  // ---- the query, as the right operand of the logits: column = head, and per step of 16 dims two registers of two dims ----
  uint32_t query[kSteps][TILES][2];
  float factor[TILES][2];  // logits in base 2 = factor * product, for the two heads that a lane holds of an accumulator
  const bool query_half = kEight ? a.query_half != 0 : kHalf;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    const int member = tile * 8 + row;
    const bool real = member < a.group;
    const uint16_t* q = a.query + request * a.query_request_stride + (head * a.group + (real ? member : 0)) * a.query_head_stride;
    float own = a.logit_scale;
    if constexpr (!kEight) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        query[k][tile][0] = real ? *reinterpret_cast<const uint32_t*>(q + 16 * k + 2 * quad) : 0u;
        query[k][tile][1] = real ? *reinterpret_cast<const uint32_t*>(q + 16 * k + 8 + 2 * quad) : 0u;
      }
    } else {
      // The sum over dims may run in any order: a lane takes four neighbouring dims of each 16, as the byte layout of K gives them.
      // A power of two brings the largest element near the top of fp16's range, so that a bf16 query keeps all its bits.
      float largest = 0.f;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const uint2 two = real ? *reinterpret_cast<const uint2*>(q + 16 * k + 4 * quad) : make_uint2(0u, 0u);
        query[k][tile][0] = two.x;
        query[k][tile][1] = two.y;
        const float2 x = unpack(two.x, query_half), y = unpack(two.y, query_half);
        largest = fmaxf(largest, fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(y.x), fabsf(y.y))));
      }
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
      const int exponent = largest == 0.f ? 0 : min(14 - (static_cast<int>(__float_as_uint(largest) >> 23) - 127), 100);
      const float up = __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
      own *= __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 x = unpack(query[k][tile][i], query_half);
          query[k][tile][i] = pack<true>(x.x * up, x.y * up);
        }
      }
    }
    factor[tile][0] = kEight ? __shfl_sync(kAllLanes, own, 8 * quad) : own;
    factor[tile][1] = kEight ? __shfl_sync(kAllLanes, own, 8 * quad + 4) : own;
  }

  uint2* query_shared = reinterpret_cast<uint2*>(shared + kAttendWarps * Shape::kRing) + lane;
  if constexpr (Shape::kQueryShared) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile)
        if (k % kAttendWarps == warp) query_shared[(k * TILES + tile) * 32] = make_uint2(query[k][tile][0], query[k][tile][1]);
    }
    __syncthreads();
  }
  const auto query_fragment = [&](int k, int tile) {
    if constexpr (Shape::kQueryShared)
      return query_shared[(k * TILES + tile) * 32];
    else
      return make_uint2(query[k][tile][0], query[k][tile][1]);
  };

  // ---- the ring ----
  const uint32_t ring = shared_address(shared) + warp * Shape::kRing;
  const int copy_row = lane / Shape::kChunks, copy_chunk = lane % Shape::kChunks;
  const bool copies = copy_row < Shape::kRows;
  const uint32_t copy_to = copy_row * Shape::kRowStride + (Shape::kPermuted ? copy_chunk ^ copy_row % 8 : copy_chunk) * 16;
  // Where the i-th copy instruction of a page writes.
  const auto copy_place = [&](uint32_t to, int i) {
    return to + i * (Shape::kRows * Shape::kRowStride) + (Shape::kPermuted ? copy_to ^ i * Shape::kRows % 8 * 16 : copy_to);
  };
  const uint8_t* key_lane = a.key.data + head * a.key.head_bytes + copy_row * a.key.token_bytes + copy_chunk * 16;
  const uint8_t* value_lane = a.value.data + head * a.value.head_bytes + copy_row * a.value.token_bytes + copy_chunk * 16;

  const auto copy_rows = [&](uint32_t to, const uint8_t* from, int64_t token_bytes, int valid) {
    const int64_t advance = Shape::kRows * token_bytes;
    if (copies) {
      if (valid == kPageTokens) {
#pragma unroll
        for (int i = 0; i < kPageTokens / Shape::kRows; ++i) {
          copy16(copy_place(to, i), from);
          from += advance;
        }
      } else {  // rows beyond the request hold anything, also NaN: they become zeros and are masked below
#pragma unroll
        for (int i = 0; i < kPageTokens / Shape::kRows; ++i) {
          copy16_or_zero(copy_place(to, i), from, copy_row + i * Shape::kRows < valid);
          from += advance;
        }
      }
    }
  };
  // Rows of a tier: part 0 of a page, or the last one.
  const auto copy_part = [&](uint32_t to, PageAddress at, int part) {
    constexpr int kRowBytes = DIM * Shape::kElementBytes;
    const bool is_hot = at.source > 0;
    const int64_t index = static_cast<int64_t>(is_hot ? at.source - 1 : -1 - at.source) * a.tier.parts + part;
    const uint8_t* rows = (is_hot ? a.tier.hot : a.tier.host) + index * (kPageTokens * kRowBytes);
    copy_rows(to, rows + copy_row * kRowBytes + copy_chunk * 16, kRowBytes, at.where & 31);
  };
  const auto copy_keys = [&](uint32_t to, PageAddress at) {
    if constexpr (TIERED) {
      if (a.tier.parts == 2) {
        copy_part(to, at, 0);
        return;
      }
    }
    copy_rows(to, key_lane + at.block * a.key.block_bytes + (at.where >> 5) * a.key.token_bytes, a.key.token_bytes, at.where & 31);
  };
  const auto copy_values = [&](uint32_t to, PageAddress at) {
    if constexpr (TIERED) {
      copy_part(to, at, a.tier.parts - 1);
    } else {
      copy_rows(to, value_lane + at.block * a.value.block_bytes + (at.where >> 5) * a.value.token_bytes, a.value.token_bytes, at.where & 31);
    }
  };
  const auto broadcast = [&](int j) {
    PageAddress at{__shfl_sync(kAllLanes, current.block, j & 31), __shfl_sync(kAllLanes, current.where, j & 31), 0};
    if constexpr (TIERED) at.source = __shfl_sync(kAllLanes, current.source, j & 31);
    return at;
  };

  uint32_t valid_ring = 0;  // valid tokens of the pages in the ring, five bits each, the latest lowest
#pragma unroll
  for (int j = 0; j < kStages; ++j) {
    const PageAddress at = broadcast(j);
    valid_ring = valid_ring << 5 | (at.where & 31);
    if (j < mine) copy_keys(ring + j * Shape::kPage, at);
    commit_copies();
    if (j < mine) copy_values(ring + j * Shape::kPage + Shape::kHalfPage, at);
    commit_copies();
  }

  // Addresses are looked up 32 pages at a time, one a lane, two groups ahead: page numbers first, then their blocks.
  PageAddress next = locate(read_page(32 + lane));
  int page_after_next = read_page(64 + lane);

  // ---- the stream ----
  // Rows of 16-byte pieces that a lane points at, and which of two neighbouring pieces. Permuted, the pair of a step is found by an exclusive or.
  const int swap = Shape::kPermuted ? lane % 8 : 0;
  const uint32_t key_matrix = ring + (lane % 16) * Shape::kRowStride + (lane / 16 ^ swap) * 16;
  const uint32_t value_matrix = ring + Shape::kHalfPage + (lane % 8 + lane / 16 * 8) * Shape::kRowStride + (lane / 8 % 2 ^ swap) * 16;
  const auto piece_pair = [&](uint32_t address, int bytes) { return Shape::kPermuted ? address ^ bytes : address + bytes; };
  AttendState<DIM, TILES> state;
  state.clear();
  uint32_t slot = 0;

  for (int i = 0; i < mine; ++i) {
    const int valid = valid_ring >> (5 * (kStages - 1)) & 31;

    wait_copies<2 * kStages - 1>();
    __syncwarp();
    constexpr int kChains = TILES == 1 ? 2 : 1;  // shorter chains of dependent products
    float logits[TILES][kChains][4] = {};
    if constexpr (!kEight) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        uint32_t m[4];
        load_matrices(m, piece_pair(key_matrix + slot, k * 32));
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          const uint2 q = query_fragment(k, tile);
          mma_16816<kHalf>(logits[tile][k % kChains], m[0], m[1], m[2], m[3], q.x, q.y);
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < kSteps; k += 2) {
        uint32_t m[4];
        load_matrices(m, piece_pair(key_matrix + slot, k * 16));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t low = m[2 * half], high = m[2 * half + 1];  // tokens 0 to 7, tokens 8 to 15
          const uint32_t a0 = widen(low), a1 = widen(high), a2 = widen(low >> 16), a3 = widen(high >> 16);
#pragma unroll
          for (int tile = 0; tile < TILES; ++tile) {
            const uint2 q = query_fragment(k + half, tile);
            mma_16816<kHalf>(logits[tile][half % kChains], a0, a1, a2, a3, q.x, q.y);
          }
        }
      }
    }
    __syncwarp();

    const int j = i + kStages;
    PageAddress at{0, 0, 0};
    if (j < mine) {
      if ((j & 31) == 0) {
        current = next;
        next = locate(page_after_next);
        page_after_next = read_page(j + 64 + lane);
      }
      at = broadcast(j);
      copy_keys(ring + slot, at);
    }
    commit_copies();
    valid_ring = valid_ring << 5 | (at.where & 31);

    uint32_t weights[TILES][2];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      float x[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        x[c] = logits[tile][0][c];
        if constexpr (kChains == 2) x[c] += logits[tile][1][c];
        x[c] *= factor[tile][c % 2];
      }
      if (a.softcap_2 > 0.f) {
#pragma unroll
        for (int c = 0; c < 4; ++c) x[c] = soft_cap(x[c], a.softcap_2, a.softcap_inverse);
      }
      if (valid < kPageTokens) {
        if (row >= valid) x[0] = x[1] = -INFINITY;
        if (row + 8 >= valid) x[2] = x[3] = -INFINITY;
      }
      state.add_logits(tile, x);  // x becomes the weights
      weights[tile][0] = transpose_matrix(pack<kHalf>(x[0], x[1]));
      weights[tile][1] = transpose_matrix(pack<kHalf>(x[2], x[3]));
    }

    wait_copies<2 * kStages - 1>();
    __syncwarp();
    if constexpr (!kEight) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        uint32_t m[4];
        load_matrices_transposed(m, piece_pair(value_matrix + slot, k * 32));
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
          mma_16816<kHalf>(state.output[k][tile], m[0], m[1], m[2], m[3], weights[tile][0], weights[tile][1]);
      }
    } else {
      // A transposed 16-bit matrix of bytes gives each lane two tokens of two neighbouring dims: rows r and r + 8 of the product are
      // the dims 2r and 2r + 1.
#pragma unroll
      for (int k = 0; k < kSteps; k += 2) {
        uint32_t m[4];
        load_matrices_transposed(m, piece_pair(value_matrix + slot, k * 16));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t early = __byte_perm(m[half], 0, 0x3120), late = __byte_perm(m[half + 2], 0, 0x3120);
          const uint32_t a0 = widen(early), a1 = widen(early >> 16), a2 = widen(late), a3 = widen(late >> 16);
#pragma unroll
          for (int tile = 0; tile < TILES; ++tile)
            mma_16816<kHalf>(state.output[k + half][tile], a0, a1, a2, a3, weights[tile][0], weights[tile][1]);
        }
      }
    }
    __syncwarp();

    if (j < mine) copy_values(ring + slot + Shape::kHalfPage, at);
    commit_copies();
    slot = slot + Shape::kPage == Shape::kRing ? 0 : slot + Shape::kPage;
  }

  allow_next_kernel();
  wait_copies<0>();
  state.finish();

  uint8_t* const received = shared + Shape::kShared;  // of a clustered launch
  const TicketMerge<DIM> tickets(a, pair);
  if (clustered) cluster_wait();
  merge_warps<DIM, TILES, kEight>(a, state, shared, [&](int c, const float4& output, float maximum, float sum) {
    if (splits == 1)
      write_result(a, request, head * a.group + c / (DIM / 4), c % (DIM / 4) * 4, output, maximum, sum, query_half);
    else if (clustered)
      send_column<DIM, TILES>(a, received, split, splits, c, output, maximum, sum);
    else
      tickets.leave(a, split, c, output, maximum, sum);
  });
  if (splits == 1) return;
  if (clustered) {
    cluster_arrive();
    cluster_wait();
    reduce_received<DIM, TILES>(a, received, request, head, split, splits, query_half);
  } else {
    tickets.finish(a, shared, request, head, splits, query_half);
  }
}

}  // namespace kvskim
