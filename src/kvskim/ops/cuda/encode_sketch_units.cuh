// The two products of encode_sketch_resident.cuh, and where encode_matrix is held. The design stands there.
#pragma once
#include "encode_sketch_products.cuh"

namespace kvskim {
namespace {

constexpr int kUnitRows = 16;
constexpr int kRegisterUnits = 2;  // of a warp
constexpr int kScan = 4 * kThreads;  // slots looked at together
constexpr int kListed = kScan + 256;  // completed pages listed before they are coded
constexpr uint32_t kNoUnit = 255;

template <ElementType Element, int D>
struct Resident {
  static constexpr bool half = Element != kBFloat16;  // fp8 widens to fp16 exactly
  static constexpr int element_bytes = Element == kFloat8E4M3 ? 1 : 2;
  static constexpr int row_pieces = D * element_bytes / 16;               // 16-byte pieces of a key
  static constexpr int key_pitch = row_pieces <= 8 ? 8 : 16;              // a power of two: pieces are swizzled by exclusive or
  static constexpr int pitch = D <= 64 ? 8 : 16;                          // of a mode, and of a row of encode_matrix
  static constexpr int groups = D / 32, steps = D / 16;

  static constexpr int list_at = 0;
  static constexpr int entries_at = list_at + kListed * 4;
  static constexpr int rows_at = entries_at + slots * 4;
  static constexpr int mean_at = rows_at + slots * 4;
  static constexpr int transform_at = mean_at + D * 4;
  static constexpr int modes_at = transform_at + 2 * 32 * 16;
  static constexpr int codes_at = modes_at + modes * kBatch * pitch * 16;
  static constexpr int keys_at = codes_at + (slots + 1) * kBatch + 112;  // one more row of zeros for slots that are not used
  static constexpr int matrix_at = keys_at + kBatch * kPageTokens * key_pitch * 16;
  static constexpr int shared_bytes = matrix_at + kWarps * kUnitRows * pitch * 16;
  static_assert(D % 32 == 0 && D <= 128 && shared_bytes + 16 <= 227 * 1024 && mean_at % 16 == 0 && modes_at % 16 == 0, "");
};

// Piece of a key, and of a row of encode_matrix: ldmatrix reads one piece of eight rows.
template <int Pitch>
__device__ __forceinline__ int row_piece(int row, int piece) { return row * Pitch + (piece ^ (row & 7)); }
// Piece of a mode: written by lanes of eight modes, read by lanes of eight pages, four neighbouring pieces each.
template <int Pitch>
__device__ __forceinline__ int mode_piece(int mode, int page, int piece) {
  return (mode * kBatch + page) * Pitch + (piece ^ ((mode ^ page) & 1) << 2);
}

// ---- encode_matrix ----

// Units of this warp, one byte each: mode | unit within the mode << 4, or kNoUnit.
__device__ __forceinline__ uint32_t units_of_warp(const int* coefficient_count, int warp, int lane) {
  const int own = lane < modes ? ceil_div(min(coefficient_count[lane], half_row * format_tables.half_rows[lane]), kUnitRows) : 0;
  int end = own;
#pragma unroll
  for (int distance = 1; distance < modes; distance *= 2) {
    const int below = __shfl_sync(kAllLanes, end, max(lane - distance, 0));
    if (lane >= distance) end += below;
  }
  uint32_t packed = 0;
  for (int level = 0; level < 4; ++level) {
    const int unit = level * kWarps + warp;
    const int mode = __popc(__ballot_sync(kAllLanes, lane < modes && end <= unit));
    const int start = __shfl_sync(kAllLanes, end - own, mode & 15);
    packed |= (mode < modes ? uint32_t(mode | (unit - start) << 4) : kNoUnit) << 8 * level;
  }
  return packed;
}

// Power of two that brings the largest number of a row to 2^14 .. 2^15, as the exponent bits of its inverse.
__device__ __forceinline__ uint32_t row_scale(float largest) {
  const uint32_t exponent = __float_as_uint(largest) & 0x7f800000u;
  return exponent > (20u << 23) && exponent < (250u << 23) ? exponent - (14u << 23) : 127u << 23;
}

__device__ __forceinline__ uint32_t scale_pair(uint32_t pair, float scale) {
  const float2 v = unpack(pair, false);
  return pack<true>(v.x * scale, v.y * scale);
}

// Sixteen rows into shared memory as scaled fp16, and into `info` of each row what turns its sums into codes: the inverse of the scale, with
// half the range of the code in the low byte. Channels of fp8 keys come out of the first product in another order within every 16.
template <ElementType Element, int D>
__device__ __forceinline__ void stage_unit(uint4* matrix, uint32_t* info, const __nv_bfloat16* rows, const uint8_t* bits, int lane) {
  using P = Resident<Element, D>;
#pragma unroll 1
  for (int first = 0; first < kUnitRows; first += 4) {
    const int row = first + lane / 8;
    uint4 piece[2];
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = lane % 8 + 8 * i;
      piece[i] = at < D / 8 ? __ldg(reinterpret_cast<const uint4*>(rows + row * D) + at) : make_uint4(0, 0, 0, 0);
      for (const uint32_t pair : {piece[i].x, piece[i].y, piece[i].z, piece[i].w}) {
        const float2 v = unpack(pair, false);
        largest = fmaxf(largest, fmaxf(fabsf(v.x), fabsf(v.y)));
      }
    }
#pragma unroll
    for (int distance = 4; distance; distance /= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    const uint32_t inverse = row_scale(largest);
    const float scale = __uint_as_float((254u << 23) - inverse);
    if (lane % 8 == 0) info[row] = inverse | (1u << bits[row] >> 1);
    if (matrix == nullptr) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = lane % 8 + 8 * i;
      if (at >= D / 8) continue;
      const uint32_t x = scale_pair(piece[i].x, scale), y = scale_pair(piece[i].y, scale);
      const uint32_t z = scale_pair(piece[i].z, scale), w = scale_pair(piece[i].w, scale);
      if constexpr (Element == kFloat8E4M3) {  // channels 4 q, 4 q + 1 of 16 serve as k = 2 q; 4 q + 2, 4 q + 3 as k = 2 q + 8
        reinterpret_cast<uint2*>(matrix + row_piece<P::pitch>(row, at & ~1))[at & 1] = make_uint2(x, z);
        reinterpret_cast<uint2*>(matrix + row_piece<P::pitch>(row, at | 1))[at & 1] = make_uint2(y, w);
      } else {
        matrix[row_piece<P::pitch>(row, at)] = make_uint4(x, y, z, w);
      }
    }
  }
  __syncwarp();
}

// A operand of one step of 16 channels from staged rows.
template <int Pitch>
__device__ __forceinline__ void staged_rows(uint32_t (&a)[4], const uint4* matrix, int step, int lane) {
  load_matrices(a, shared_address(matrix + row_piece<Pitch>(lane & 15, 2 * step + (lane >> 4))));
}

// Word i of lane q of a quad goes to word q of lane i.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int quad) {
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    const bool upper = quad & distance;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & distance) continue;
      const uint32_t received = __shfl_xor_sync(kAllLanes, upper ? w[i] : w[i + distance], distance);
      if (upper) w[i] = received;
      else w[i + distance] = received;
    }
  }
}

// A operands of both steps of 32 channels straight from global memory.
template <ElementType Element, int D>
__device__ __forceinline__ void global_rows(uint32_t (&a)[2][4], const __nv_bfloat16* rows, const uint32_t* info, int group, int lane) {
  const int quad = lane & 3;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = (lane >> 2) + 8 * i;
    const float scale = __uint_as_float((254u << 23) - (info[row] & 0x7f800000u));
    const __nv_bfloat16* const from = rows + row * D + 32 * group;
    uint32_t w[4];  // steps 0 and 1, two words each
    if constexpr (Element == kFloat8E4M3) {
      const uint2 x = __ldg(reinterpret_cast<const uint2*>(from + 4 * quad)), y = __ldg(reinterpret_cast<const uint2*>(from + 16 + 4 * quad));
      w[0] = x.x, w[1] = x.y, w[2] = y.x, w[3] = y.y;
    } else {
      const uint4 x = __ldg(reinterpret_cast<const uint4*>(from + 8 * quad));
      w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
      transpose_quad(w, quad);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) a[j / 2][j % 2 * 2 + i] = scale_pair(w[j], scale);
  }
}

// ---- first product ----

// A operand, 16 modes x 16 tokens, of each lane: what 16 bits hold of T, then of the rest. In shared memory, for want of registers.
template <bool HALF>
__device__ __forceinline__ void make_transform(uint4* transform, int lane) {
  uint32_t high[4], low[4];
  asm volatile("" : "+r"(lane));  // as in stage_page
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int mode = (lane >> 2) + 8 * (i & 1), token = 2 * (lane & 3) + 8 * (i >> 1);
    const float w0 = token_weight(token, mode), w1 = token_weight(token + 1, mode);
    high[i] = pack<HALF>(w0, w1);
    const float2 rounded = unpack(high[i], HALF);
    low[i] = pack<HALF>(w0 - rounded.x, w1 - rounded.y);
  }
  transform[lane] = make_uint4(high[0], high[1], high[2], high[3]);
  transform[32 + lane] = make_uint4(low[0], low[1], low[2], low[3]);
}

// Modes of a staged page. `mean` is what mode 0 starts from. A lane makes the 16-byte pieces of modes `row` and `row + 8`: of every 32
// channels two consecutive pairs for each of the two steps of the second product.
template <ElementType Element, int D>
__device__ __forceinline__ void transform_staged(uint4* vectors, const uint4* keys, const uint4* transform, const float* mean,
                                                 float key_scale, int page, int lane) {
  using P = Resident<Element, D>;
  const uint4 high = transform[lane], low = transform[32 + lane];
  const int row = lane >> 2, quad = lane & 3;
#pragma unroll 1
  for (int group = 0; group < P::groups; ++group) {
    uint32_t b[4][2];  // B operands of four tiles of eight channels
    constexpr int apart = Element == kFloat8E4M3 ? 2 : 1;  // channels from the first column of a lane's pair to the second
    int channel[4];  // of the first, by tile
    if constexpr (Element == kFloat8E4M3) {
      uint32_t pairs[4];  // two channels of two tokens each
      load_matrices_transposed(pairs, shared_address(keys + row_piece<P::key_pitch>(lane & 15, 2 * group + (lane >> 4))));
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t pair = pairs[tile / 2 * 2 + i];
          b[tile][i] = widen(uint16_t(__byte_perm(pair, 0, tile % 2 ? 0x4431 : 0x4420)));
        }
        channel[tile] = 32 * group + 16 * (tile / 2) + 4 * quad + tile % 2;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t pairs[4];
        load_matrices_transposed(pairs, shared_address(keys + row_piece<P::key_pitch>(lane & 15, 4 * group + 2 * i + (lane >> 4))));
        b[2 * i][0] = pairs[0], b[2 * i][1] = pairs[1], b[2 * i + 1][0] = pairs[2], b[2 * i + 1][1] = pairs[3];
        channel[2 * i] = 32 * group + 16 * i + 2 * quad, channel[2 * i + 1] = channel[2 * i] + 8;
      }
    }
    float y[4][4];
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      float2 first = make_float2(0.f, 0.f);
      if (row == 0) {
        if constexpr (apart == 1) first = *reinterpret_cast<const float2*>(mean + channel[tile]);
        else first = make_float2(mean[channel[tile]], mean[channel[tile] + apart]);
      }
      y[tile][0] = first.x, y[tile][1] = first.y, y[tile][2] = y[tile][3] = 0.f;
      mma_16816<P::half>(y[tile], high.x, high.y, high.z, high.w, b[tile][0], b[tile][1]);
      mma_16816<P::half>(y[tile], low.x, low.y, low.z, low.w, b[tile][0], b[tile][1]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        if constexpr (Element == kFloat8E4M3) {
          const int even = tile & ~1, column = 2 * i + (tile & 1);
          words[tile] = pack<true>(y[even][column] * key_scale, y[even + 1][column] * key_scale);
        } else {
          words[tile] = pack<true>(y[tile][2 * i], y[tile][2 * i + 1]);
        }
      }
      vectors[mode_piece<P::pitch>(row + 8 * i, page, 4 * group + quad)] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// ---- second product ----

// Codes of the 16 rows of a unit for 16 pages. `rows_of(a, second, group)` gives the A operand of the first or second step of 32 channels;
// where it comes from registers, all groups must be unrolled.
template <class P, int Unrolled, class Rows>
__device__ __forceinline__ void code_unit(uint8_t* codes, const uint4* vectors, const uint32_t* info, int mode, int first_row, int lane,
                                          Rows rows_of) {
  const int row = lane >> 2, quad = lane & 3;
  float sum[2][4] = {};
#pragma unroll Unrolled
  for (int group = 0; group < P::groups; ++group) {
    const uint4 v = vectors[mode_piece<P::pitch>(mode, row, 4 * group + quad)];
    const uint4 w = vectors[mode_piece<P::pitch>(mode, row + 8, 4 * group + quad)];
    uint32_t a[4];
    rows_of(a, std::integral_constant<int, 0>{}, group);
    mma_16816<true>(sum[0], a[0], a[1], a[2], a[3], v.x, v.y);
    mma_16816<true>(sum[1], a[0], a[1], a[2], a[3], w.x, w.y);
    rows_of(a, std::integral_constant<int, 1>{}, group);
    mma_16816<true>(sum[0], a[0], a[1], a[2], a[3], v.z, v.w);
    mma_16816<true>(sum[1], a[0], a[1], a[2], a[3], w.z, w.w);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = first_row + row + 8 * i;
    const uint32_t own = info[at];
    const float inverse = __uint_as_float(own & 0xff800000u);
    const int half_range = own & 255;
#pragma unroll
    for (int pages = 0; pages < 2; ++pages) {
      const uint32_t first = coefficient_code(sum[pages][2 * i] * inverse, half_range);
      const uint32_t second = coefficient_code(sum[pages][2 * i + 1] * inverse, half_range);
      *reinterpret_cast<uint16_t*>(codes + at * kBatch + 8 * pages + 2 * quad) = uint16_t(first | second << 8);
    }
  }
}

}  // namespace
}  // namespace kvskim
