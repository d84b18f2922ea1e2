// Shared memory of the kernel of latent attention, and how queries and rows come there.
//
// A row of the ring is nine lines of 128 bytes, as in the cache, so that one request to the copy engine brings a page. In the place of padding between rows
// the eight pieces of a line change places with its number (LatentLine), so the 8 rows of an ldmatrix phase lie in 8 different bank groups: the next row
// begins nine lines on. The query has 16 bytes of padding. RING = 4: 94 KiB, two CTAs on a multiprocessor, up to
// 72 KiB under way each, no clusters; RING = 8: 210 KiB, one CTA, 144 KiB under way.
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
  static constexpr int kRowStride = kLatentRowBytes + 16;                // of the query
  static constexpr int kPage = kPageTokens * kLatentRowBytes;
  static constexpr int kQuery = RING * kPage;                            // [head]
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
  static_assert(RING % kLogitWarps == 0 && kPage % 1024 == 0);
  static_assert(largest_latent_parts() <= RING * kPage && kWeights % 16 == 0 && kSignals % 8 == 0);
};

// Where 16 bytes lie in a page of the ring, whose address is a multiple of 1024: piece p of line l is at place p ^ (l % 8) of it, as the copy engine swaps
// them (CU_TENSOR_MAP_SWIZZLE_128B). Line c of a token's row is line 9 * token + c of the page. LatentLine is piece `first` (0 or 1) of that line; piece
// first + 2 * j has the address at(j).
struct LatentLine {
  uint32_t address;

  __device__ __forceinline__ LatentLine(uint32_t page, int token, int line, int first)
      : address(page + token * kLatentRowBytes + line * 128 + ((((token + line) & 7) ^ first) << 4)) {}
  __device__ __forceinline__ uint32_t at(int j) const { return address ^ (j << 5); }
};
static_assert(kLatentRowBytes == 9 * 128, "9 * token + line is token + line modulo 8");

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

// The first `valid` rows of a page, and zeros for the others, by one warp. Once for a request at most, for its newest page.
__device__ __forceinline__ void copy_part_of_page(uint32_t to, const uint8_t* from, int64_t token_bytes, int valid, int lane) {
  constexpr int kPieces = kLatentRowBytes / 16, kEach = kPageTokens * kPieces / 32, kBatch = 12;
  static_assert(kEach % kBatch == 0);
#pragma unroll 1
  for (int start = 0; start < kEach; start += kBatch) {
    uint4 piece[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int index = (start + i) * 32 + lane, token = index / kPieces;
      // Past the L1 cache, which may hold what was there before the newest row.
      piece[i] = token < valid ? __ldcg(reinterpret_cast<const uint4*>(from + token * token_bytes) + (index - token * kPieces)) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int index = (start + i) * 32 + lane, token = index / kPieces, within = index - token * kPieces;
      store_shared(LatentLine(to, token, within / 8, within % 2).at(within % 8 / 2), piece[i]);
    }
  }
}

}  // namespace kvskim
