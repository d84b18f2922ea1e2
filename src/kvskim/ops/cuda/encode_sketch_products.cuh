// What the two encode_sketch kernels share, and the tensor-core products of the one for large head dims, with the shared memory they work in.
#pragma once
#include <type_traits>

#include "attend_instructions.cuh"
#include "common.cuh"
#include "sketch_format.cuh"

namespace kvskim {
namespace {

using sketch::half_row;
using sketch::modes;
using sketch::slots;

constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kBatch = 16;           // pages coded together, one per warp
constexpr int kChunk = 64;           // pages whose codes are kept in shared memory until all modes are done
constexpr int kLargestWindow = 1024;  // slots; all of them may complete a page

constexpr uint32_t kUnusedSlot = 0x80000000u;

struct EncodeSketch {
  const uint8_t* keys;
  int64_t block_stride, token_stride, head_stride;  // bytes
  int block_shift;  // log2(pages per block)
  const int64_t* slot_mapping;
  int tokens, window;  // window: slots of a CTA
  const float* mean;
  const __nv_bfloat16* encode_matrix;
  const uint8_t* coefficient_bits;
  const int* coefficient_count;
  const int16_t* slot_coefficient;
  const uint8_t* slot_digit;
  uint8_t* records;
  int64_t pages;
  int heads;
  float key_scale;
};

// ---- which modes, and which half rows of them, make a part ----

template <int Parts>
struct PartTables {
  uint8_t mode[Parts][modes / Parts];
  uint8_t unit_mode[Parts][32 / Parts];  // index into mode[part] of each half row
  uint8_t unit_half[Parts][32 / Parts];  // which half row of that mode
};

// Half rows with few used coefficients (the last of their mode) come last, so that the four schedulers of the SM get equal work.
template <int Parts>
constexpr PartTables<Parts> build_parts() {
  constexpr int grouped[4][4] = {{0, 11, 12, 13}, {1, 2, 14, 15}, {3, 4, 5, 6}, {7, 8, 9, 10}};
  PartTables<Parts> table{};
  for (int part = 0; part < Parts; ++part) {
    for (int i = 0; i < modes / Parts; ++i) table.mode[part][i] = uint8_t(grouped[part * (4 / Parts) + i / 4][i % 4]);
    int unit = 0;
    for (int half = 0; half < 5; ++half) {
      for (int i = 0; i < modes / Parts; ++i) {
        if (half >= sketch::tables.half_rows[table.mode[part][i]]) continue;
        table.unit_mode[part][unit] = uint8_t(i);
        table.unit_half[part][unit] = uint8_t(half);
        ++unit;
      }
    }
  }
  return table;
}
template <int Parts>
constexpr bool parts_are_equal() {
  const PartTables<Parts> table = build_parts<Parts>();
  for (int part = 0; part < Parts; ++part) {
    int half_rows = 0;
    for (int i = 0; i < modes / Parts; ++i) half_rows += sketch::tables.half_rows[table.mode[part][i]];
    if (half_rows != 32 / Parts) return false;
  }
  return table.mode[0][0] == 0;
}
static_assert(parts_are_equal<2>() && parts_are_equal<4>(), "every part has the same number of half rows; mode 0 is the first of part 0");

__constant__ PartTables<2> two_parts = build_parts<2>();
__constant__ PartTables<4> four_parts = build_parts<4>();
__constant__ sketch::Tables format_tables = sketch::build_tables();

template <int Parts>
__device__ __forceinline__ const PartTables<Parts>& part_tables() {
  if constexpr (Parts == 2) return two_parts;
  else return four_parts;
}

// ---- shapes and shared memory ----

template <ElementType Element, int D>
struct Plan {
  static constexpr int element_bytes = Element == kFloat8E4M3 ? 1 : 2;
  static constexpr int parts = D <= 256 ? 2 : 4;
  static constexpr int part_modes = modes / parts;
  static constexpr int units = 32 / parts;
  static constexpr int warps_per_unit = kWarps / units;
  static constexpr int tiles = 4 / warps_per_unit;        // of 8 coefficient rows, per warp
  static constexpr int channels = 8;                      // consecutive channels of a token that a lane loads
  static constexpr int passes = D / (8 * channels);
  static constexpr int words = channels * element_bytes / 4;  // of a lane's load
  static constexpr int vector_pieces = D / 8;  // 16-byte pieces of a mode of a page, bf16
  static constexpr int part_pieces = part_modes * kBatch * vector_pieces;

  static constexpr int list_at = 0;
  static constexpr int slots_at = list_at + kLargestWindow * 4;
  static constexpr int mean_at = slots_at + slots * 4;
  static constexpr int modes_at = mean_at + D * 4;
  static constexpr int codes_at = modes_at + 2 * part_pieces * 16;
  static constexpr int shared_bytes = codes_at + kChunk * slots;

  static_assert(D % (8 * channels) == 0 && mean_at % 16 == 0 && modes_at % 16 == 0 && codes_at % 16 == 0, "");
  static_assert(shared_bytes <= 227 * 1024, "");
};

// Bank swizzle, in 16-byte pieces: written by 8 modes at a time, read by 8 pages.
template <class P>
__device__ __forceinline__ int vector_piece(int mode_index, int page, int piece) {
  return (mode_index * kBatch + page) * P::vector_pieces + (piece ^ ((page & 1) << 2) ^ (mode_index & 1));
}

// ---- first product: modes of a page ----

__device__ __forceinline__ float token_weight(int token, int mode) {
  return mode == 0 ? 0.25f : 0.35355339059327373f * cospif(float((2 * token + 1) * mode) * 0.03125f);
}

// A operand, 16 x 16 (row x token): rows 0..7 the leading parts of T of the modes of this part, rows 8..15 what rounding left.
template <class P, bool HALF>
__device__ __forceinline__ void load_token_weights(uint32_t (&a)[4], int part, int lane) {
  const int row = lane >> 2, quad = lane & 3;
  const bool used = row < P::part_modes;
  const int mode = part_tables<P::parts>().mode[part][used ? row : 0];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float w0 = used ? token_weight(2 * quad + 8 * i, mode) : 0.f, w1 = used ? token_weight(2 * quad + 8 * i + 1, mode) : 0.f;
    a[2 * i] = pack<HALF>(w0, w1);
    const float2 rounded = unpack(a[2 * i], HALF);
    a[2 * i + 1] = pack<HALF>(w0 - rounded.x, w1 - rounded.y);
  }
}

// A lane's channels of four tokens: 2 q, 2 q + 1, 2 q + 8, 2 q + 9.
template <class P>
__device__ __forceinline__ void load_words(uint32_t (&words)[P::words], const uint8_t* from) {
  if constexpr (P::words == 4) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    words[0] = v.x, words[1] = v.y;
  }
}

// Channel i of two tokens, the first in the low half: a register of the B operand.
template <class P, int Channel>
__device__ __forceinline__ uint32_t token_pair(const uint32_t (&first)[P::words], const uint32_t (&second)[P::words]) {
  if constexpr (P::element_bytes == 2)
    return __byte_perm(first[Channel / 2], second[Channel / 2], Channel % 2 ? 0x7632 : 0x5410);
  else
    return widen(uint16_t(__byte_perm(first[Channel / 4], second[Channel / 4], (4 + Channel % 4) * 16 + Channel % 4)));
}

// Two values into leading and remaining bf16 parts.
__device__ __forceinline__ void split(uint32_t& high, uint32_t& low, float x, float y) {
  high = pack<false>(x, y);
  low = pack<false>(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xffff0000u));
}

// Modes of one page into shared memory. `address` gives where (token, byte of its row) lies.
template <class P, bool HALF, class Address>
__device__ __forceinline__ void transform_page(uint4* vectors, const uint32_t (&weights)[4], const float* mean, float key_scale, bool has_mean,
                                               int page, int lane, Address address) {
  const int row = lane >> 2, quad = lane & 3;
#pragma unroll 1
  for (int pass = 0; pass < P::passes; ++pass) {
    uint32_t words[4][P::words];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      load_words<P>(words[i], address(2 * quad + (i & 1) + 8 * (i >> 1), (pass * 8 + row) * P::channels * P::element_bytes));
    // Column c of tile i is channel (8 pass + c) channels + i; this lane holds columns 2 q and 2 q + 1.
    float y[2][P::channels];
    auto column = [&](auto index) {
      constexpr int i = decltype(index)::value;
      float sum[4] = {0.f, 0.f, 0.f, 0.f};
      mma_16816<HALF>(sum, weights[0], weights[1], weights[2], weights[3], token_pair<P, i>(words[0], words[1]),
                      token_pair<P, i>(words[2], words[3]));
      y[0][i] = sum[0] + sum[2];
      y[1][i] = sum[1] + sum[3];
      if constexpr (P::element_bytes == 1) y[0][i] *= key_scale, y[1][i] *= key_scale;
    };
    column(std::integral_constant<int, 0>{}), column(std::integral_constant<int, 1>{});
    column(std::integral_constant<int, 2>{}), column(std::integral_constant<int, 3>{});
    column(std::integral_constant<int, 4>{}), column(std::integral_constant<int, 5>{});
    column(std::integral_constant<int, 6>{}), column(std::integral_constant<int, 7>{});
    if (has_mean && row == 0) {  // mode 0; the mean comes times 4, its own mode 0
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int i = 0; i < P::channels; ++i) y[c][i] -= mean[(8 * pass + 2 * quad + c) * P::channels + i];
    }
    if (row < P::part_modes) {
      uint32_t high[P::channels], low[P::channels];
#pragma unroll
      for (int i = 0; i < P::channels; ++i) {
        const int c = 2 * i / P::channels, j = 2 * i % P::channels;
        split(high[i], low[i], y[c][j], y[c][j + 1]);
      }
#pragma unroll
      for (int i = 0; i < P::channels / 4; ++i) {
        const int at = vector_piece<P>(row, page, (pass * 4 + quad) * (P::channels / 4) + i);
        vectors[at] = make_uint4(high[4 * i], high[4 * i + 1], high[4 * i + 2], high[4 * i + 3]);
        vectors[P::part_pieces + at] = make_uint4(low[4 * i], low[4 * i + 1], low[4 * i + 2], low[4 * i + 3]);
      }
    }
  }
}

// ---- second product: coefficients of 16 pages ----

// B operand: lane (row, quad) reads 8 channels of its coefficient row at once; channels 8 q + 4 s + {0, 1, 2, 3} of every 32 serve as
// k = 2 q, 2 q + 1, 2 q + 8, 2 q + 9 of step s, in both operands.
template <class P, int D>
__device__ __forceinline__ uint4 matrix_piece(const __nv_bfloat16* rows, int tile, int step, int lane) {
  return __ldg(reinterpret_cast<const uint4*>(rows + (tile * 8 + (lane >> 2)) * D + step * 32 + (lane & 3) * 8));
}

template <class P, class Matrix>
__device__ __forceinline__ void multiply_modes(float (&sum)[P::tiles][4], const uint4* vectors, int mode_index, int active_tiles, int lane,
                                               Matrix matrix) {
  const int row = lane >> 2, quad = lane & 3;
  constexpr int steps = P::vector_pieces / 4;
#pragma unroll 2
  for (int step = 0; step < steps; ++step) {
    const int first = vector_piece<P>(mode_index, row, step * 4 + quad), second = vector_piece<P>(mode_index, row + 8, step * 4 + quad);
    uint4 b[P::tiles];
#pragma unroll
    for (int tile = 0; tile < P::tiles; ++tile)
      if (tile < active_tiles) b[tile] = matrix(tile, step);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 a = vectors[half * P::part_pieces + first], c = vectors[half * P::part_pieces + second];
#pragma unroll
      for (int tile = 0; tile < P::tiles; ++tile) {
        if (tile < active_tiles) {
          mma_16816<false>(sum[tile], a.x, c.x, a.y, c.y, b[tile].x, b[tile].y);
          mma_16816<false>(sum[tile], a.z, c.z, a.w, c.w, b[tile].z, b[tile].w);
        }
      }
    }
  }
}

__device__ __forceinline__ uint8_t coefficient_code(float x, int half_range) {
  return uint8_t(min(max(__float2int_rd(x), -half_range), half_range - 1) + half_range);
}

}  // namespace
}  // namespace kvskim
