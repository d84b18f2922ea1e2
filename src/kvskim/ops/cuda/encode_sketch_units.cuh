// The two products of encode_sketch_resident.cuh, where encode_matrix is held, and the packing of digits. The design stands there.
#pragma once
#include "encode_sketch_instructions.cuh"
#include "encode_sketch_products.cuh"

namespace kvskim {
namespace {

constexpr int kCoders = 8;  // warps
constexpr int kCoderThreads = 32 * kCoders;
constexpr int kWarpUnits = slots / half_row / kCoders;  // most units a warp can have
constexpr uint32_t kNoUnit = 255;
constexpr int kUnitTiles = half_row / 16;
constexpr int kGroupPieces = 16;
constexpr int kScan = 8 * kCoderThreads;  // slots looked at together
constexpr int kListed = kScan + 512;      // completed pages listed before they are coded
constexpr int kSliceChannels = 64;
constexpr int kMeanPitch = 18;  // floats of the means of 16 channels, which go to one lane; with this pitch four lanes read other banks

template <ElementType Element, int D>
struct Resident {
  static constexpr bool half = Element != kBFloat16;  // fp8 widens to fp16 exactly
  static constexpr int element_bytes = Element == kFloat8E4M3 ? 1 : 2;
  static constexpr int words = 2 * element_bytes;             // of a lane's eight channels of a token
  static constexpr int slices = ceil_div(D, kSliceChannels);  // of the channels; at head dim 96 the last is half empty
  static constexpr int batch = 2 * kCoders / slices;          // pages: every warp transforms two slices
  static constexpr int warp_pages = 2 / slices;
  static constexpr int page_tiles = batch / 8;
  static constexpr int unit_pieces = kUnitTiles * 4 * slices;  // 16-byte pieces of a unit that one lane holds
  static constexpr int groups = kWarpUnits * unit_pieces / kGroupPieces;  // two of them in registers
  static constexpr int mode_pieces = batch * slices * kSliceChannels / 8 + 4;  // neighbouring modes begin in other banks
  static constexpr int code_bytes = (slots + 1) * batch;  // [coefficient row][page], and a row of zeros

  static constexpr int list_at = 0;
  static constexpr int entries_at = list_at + kListed * 4;
  static constexpr int mean_at = entries_at + slots * 4;
  static constexpr int transform_at = mean_at + slices * kMeanPitch * 4 * 4;
  static constexpr int vectors_at = transform_at + 2 * 32 * 16;
  static constexpr int matrix_at = vectors_at + 2 * modes * mode_pieces * 16;
  static constexpr int codes_at = matrix_at + (groups - 2) * kGroupPieces * kCoderThreads * 16;
  static constexpr int shared_bytes = codes_at + 2 * code_bytes;
  static_assert(kGroupPieces * kCoderThreads <= 2 * modes * mode_pieces && kGroupPieces % unit_pieces == 0, "");
  static_assert(D % 32 == 0 && slices <= 2 && shared_bytes + 16 <= 227 * 1024, "");
  static_assert(mean_at % 16 == 0 && transform_at % 16 == 0 && vectors_at % 16 == 0 && code_bytes % batch == 0, "");
};

// ---- encode_matrix ----

// Units of a warp: which half row of the record, or kNoUnit, one byte each; their modes, four bits each; and of each unit half the ranges of
// the codes of this lane's four rows, one byte each.
struct Units {
  uint32_t half_rows, modes, ranges[kWarpUnits];
  __device__ __forceinline__ bool has(int i) const { return (half_rows >> 8 * i & 255) != kNoUnit; }
  __device__ __forceinline__ int first_row(int i) const { return half_row * int(half_rows >> 8 * i & 255); }
  __device__ __forceinline__ int mode(int i) const { return int(modes >> 4 * i & 15); }
};

// Half rows that hold coefficients, spread over the warps, each of which gets equally many or one less.
__device__ __forceinline__ Units units_of_warp(const int* coefficient_count, const uint8_t* coefficient_bits, int warp, int lane) {
  const int half_rows = lane < modes ? format_tables.half_rows[lane] : 0;
  const int own = lane < modes ? min(ceil_div(coefficient_count[lane], half_row), half_rows) : 0;
  int end = own;
#pragma unroll
  for (int distance = 1; distance < modes; distance *= 2) {
    const int below = __shfl_sync(kAllLanes, end, max(lane - distance, 0));
    if (lane >= distance) end += below;
  }
  const int total = __shfl_sync(kAllLanes, end, modes - 1);
  const int first_unit = warp * total / kCoders, last_unit = (warp + 1) * total / kCoders;
  Units units{};
#pragma unroll
  for (int i = 0; i < kWarpUnits; ++i) {
    const int unit = first_unit + i;
    const int mode = __popc(__ballot_sync(kAllLanes, lane < modes && end <= unit)) & (modes - 1);
    const int within = unit - __shfl_sync(kAllLanes, end - own, mode);
    if (unit >= last_unit) {
      units.half_rows |= kNoUnit << 8 * i;
      continue;
    }
    units.half_rows |= uint32_t(format_tables.start[mode] / half_row + within) << 8 * i;
    units.modes |= uint32_t(mode) << 4 * i;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int bits = coefficient_bits[format_tables.start[mode] + half_row * within + 8 * j + (lane >> 2)];
      units.ranges[i] |= uint32_t(1 << bits >> 1) << 8 * j;
    }
  }
  return units;
}

// A lane's share of the units of its warp comes in groups of 16 pieces of 16 bytes: one unit at two slices, else two. Piece i of a unit is
// the A operand of [tile of 16 rows][slice][step of 16 channels]: lane (row, quad) has channels 16 q .. 16 q + 15 of every slice of rows
// `row` and `row + 8`; of step s channels 4 s .. 4 s + 3 of them serve as k = 2 q, 2 q + 1, 2 q + 8, 2 q + 9, in both operands.
//
// Where the matrix holds what pieces i and i ^ 1 are made of: i even: eight channels of row `row` of a tile, odd: of row `row + 8`. Null if
// the unit or these channels do not exist.
template <class P, int D>
__device__ __forceinline__ const __nv_bfloat16* piece_source(const __nv_bfloat16* matrix, const Units& units, int group, int i, int lane) {
  const int unit = group * (kGroupPieces / P::unit_pieces) + i / P::unit_pieces, step = i % 4, slice = i / 4 % P::slices;
  const int tile = i / (4 * P::slices) % kUnitTiles, channel = kSliceChannels * slice + 16 * (lane & 3) + 8 * (step / 2);
  if (!units.has(unit) || (D % kSliceChannels != 0 && channel >= D)) return nullptr;
  return matrix + (units.first_row(unit) + 16 * tile + 8 * (step % 2) + (lane >> 2)) * D + channel;
}

// Largest magnitudes of both halves, as bits of bf16.
__device__ __forceinline__ uint32_t largest_of(uint32_t largest, const uint4& piece) {
  for (const uint32_t pair : {piece.x, piece.y, piece.z, piece.w}) largest = __vmaxu2(largest, pair & 0x7fff7fffu);
  return largest;
}

// Exponent of the power of two that modes are scaled by, and rows of encode_matrix by its inverse, for fp16 to hold both: a mode that
// moves the most sensitive coefficient of the head by one step comes to 2^-9 .. 2^-8. `largest`: bits of bf16.
__device__ __forceinline__ int mode_exponent(uint32_t largest) {
  return largest == 0 ? 0 : min(max(int(largest >> 7) - 127 - 8, -100), 100);
}
__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(uint32_t(127 + exponent) << 23); }

__device__ __forceinline__ uint32_t scale_pair(uint32_t pair, float scale) {
  const float2 v = unpack(pair, false);
  return pack<true>(v.x * scale, v.y * scale);
}
// A group of a lane, kCoderThreads apart, from eight channels of one row each to scaled fp16 pieces.
__device__ __forceinline__ void scale_group(uint4* group, float scale) {
#pragma unroll 2
  for (int i = 0; i < kGroupPieces; i += 2) {
    uint4& first = group[i * kCoderThreads];
    uint4& second = group[(i + 1) * kCoderThreads];
    const uint4 upper = first, lower = second;
    first = make_uint4(scale_pair(upper.x, scale), scale_pair(lower.x, scale), scale_pair(upper.y, scale), scale_pair(lower.y, scale));
    second = make_uint4(scale_pair(upper.z, scale), scale_pair(lower.z, scale), scale_pair(upper.w, scale), scale_pair(lower.w, scale));
  }
}

// ---- first product ----

// A operand, 16 modes x 16 tokens, of each lane: what 16 bits hold of T times a power of two, then of the rest. One word of each.
template <bool HALF>
__device__ __forceinline__ void make_transform(uint32_t* transform, float scale, int thread) {
  if (thread >= 4 * 32) return;
  const int lane = thread >> 2, i = thread & 3, mode = (lane >> 2) + 8 * (i & 1), token = 2 * (lane & 3) + 8 * (i >> 1);
  const float w0 = scale * token_weight(token, mode), w1 = scale * token_weight(token + 1, mode);
  const uint32_t high = pack<HALF>(w0, w1);
  const float2 rounded = unpack(high, HALF);
  transform[thread] = high;
  transform[4 * 32 + thread] = pack<HALF>(w0 - rounded.x, w1 - rounded.y);
}

// Where the modes lie: lane (row, quad) of a warp that multiplies reads, of page `row`, channels 16 q + 8 piece .. + 7 of a slice.
template <class P>
__device__ __forceinline__ int mode_piece(int mode, int slice, int piece, int page, int quad) {
  return mode * P::mode_pieces + ((slice * 2 + piece) * P::batch + page) * 4 + quad;
}

// Modes of one slice of a page, rounded to fp16. `keys`: B operands of eight tiles, in which column c of tile e is channel 8 c + e of the
// slice. `start`: what the sums of mode 0 start from, minus the means; channels 16 q + e and 16 q + 8 + e of the slice lie side by side.
template <class P>
__device__ __forceinline__ void transform_slice(uint4* vectors, const uint32_t (&keys)[4][P::words], const uint4& high, const uint4& low,
                                                const float* start, float scale, int page, int slice, int lane) {
  uint32_t packed[4][4];  // [piece + 2 (mode >= 8)][word]
  auto tile = [&](auto index, float (&sum)[4]) {
    constexpr int i = decltype(index)::value;
    const uint32_t b0 = token_pair<P, i>(keys[0], keys[1]), b1 = token_pair<P, i>(keys[2], keys[3]);
    mma_16816<P::half>(sum, high.x, high.y, high.z, high.w, b0, b1);
    mma_16816<P::half>(sum, low.x, low.y, low.z, low.w, b0, b1);
    if constexpr (P::half) {
#pragma unroll
      for (float& x : sum) x *= scale;
    }
  };
  float2 first[8] = {};
  if (lane < 4) {
#pragma unroll
    for (int i = 0; i < 8; ++i) first[i] = *reinterpret_cast<const float2*>(start + (slice * 4 + lane) * kMeanPitch + 2 * i);
  }
  auto two_tiles = [&](auto index) {
    constexpr int i = decltype(index)::value;
    float even[4] = {first[2 * i].x, first[2 * i].y, 0.f, 0.f}, odd[4] = {first[2 * i + 1].x, first[2 * i + 1].y, 0.f, 0.f};
    tile(std::integral_constant<int, 2 * i>{}, even);
    tile(std::integral_constant<int, 2 * i + 1>{}, odd);
#pragma unroll
    for (int j = 0; j < 4; ++j) packed[j][i] = pack_saturated(even[j], odd[j]);
  };
  two_tiles(std::integral_constant<int, 0>{}), two_tiles(std::integral_constant<int, 1>{});
  two_tiles(std::integral_constant<int, 2>{}), two_tiles(std::integral_constant<int, 3>{});
  const int row = lane >> 2, quad = lane & 3;
  uint4* const to = vectors + mode_piece<P>(row, slice, 0, page, quad);
#pragma unroll
  for (int j = 0; j < 4; ++j)
    to[j / 2 * 8 * P::mode_pieces + j % 2 * P::batch * 4] = make_uint4(packed[j][0], packed[j][1], packed[j][2], packed[j][3]);
}

// ---- second product ----

// Codes of the rows of a unit for all pages of a batch. `piece(i)` gives the lane's share of the unit. Four sums run side by side: two tiles
// of rows times two slices, which are added up at last, or times two tiles of pages.
template <class P, class Piece>
__device__ __forceinline__ void code_unit(uint8_t* codes, const uint4* vectors, uint32_t ranges, int mode, int first_row, int lane,
                                          Piece piece) {
  const int row = lane >> 2, quad = lane & 3;
  const uint4* const from = vectors + mode_piece<P>(mode, 0, 0, row, quad);
  uint4 b[2][2];  // [slice or tile of pages][piece]
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) b[i][j] = from[((P::slices == 2 ? i * 2 : 0) + j) * P::batch * 4 + (P::slices == 2 ? 0 : i * 8 * 4)];
  float sum[kUnitTiles][2][4] = {};
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4& v = b[i][step / 2];
#pragma unroll
      for (int tile = 0; tile < kUnitTiles; ++tile) {
        const uint4 a = piece((tile * P::slices + i % P::slices) * 4 + step);
        mma_16816<true>(sum[tile][i], a.x, a.y, a.z, a.w, step % 2 ? v.z : v.x, step % 2 ? v.w : v.y);
      }
    }
  }
  uint8_t* const to = codes + (first_row + row) * P::batch + 2 * quad;
#pragma unroll
  for (int tile = 0; tile < kUnitTiles; ++tile) {
    if constexpr (P::slices == 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[tile][0][i] += sum[tile][1][i];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int half_range = __byte_perm(ranges, 0, 0x4440 + 2 * tile + i), largest = 2 * half_range - 1;
#pragma unroll
      for (int pages = 0; pages < P::page_tiles; ++pages) {
        const float* const x = sum[tile][pages] + 2 * i;
        // clamp(floor(x), -half_range, half_range - 1) + half_range
        const uint32_t first = __viaddmin_s32_relu(floor_to_byte(x[0]), half_range, largest);
        const uint32_t second = __viaddmin_s32_relu(floor_to_byte(x[1]), half_range, largest);
        *reinterpret_cast<uint16_t*>(to + (16 * tile + 8 * i) * P::batch + 8 * pages) = uint16_t(__byte_perm(first, second, 0x0040));
      }
    }
  }
}

// ---- records ----

// For bit position k of byte b of a record: where the codes of its coefficient lie, and the shift of its digit.
template <class P>
__device__ __forceinline__ void make_entries(uint32_t* entries, const int16_t* slot_coefficient, const uint8_t* slot_digit, int thread) {
#pragma unroll
  for (int i = 0; i < slots; i += kCoderThreads) {
    const int at = i + thread, byte = at / sketch::positions, position = at % sketch::positions;
    const int slot = format_tables.unit_slot[position][sketch::byte_word(byte)] + 4 * sketch::byte_lane(byte) + sketch::byte_in_word(byte);
    const uint32_t row = uint16_t(slot_coefficient[slot]), digit = slot_digit[slot];
    entries[at] = digit > 3 ? slots * P::batch : (row & (slots - 1)) * P::batch | (2 * digit) << 16;
  }
}

// Four bytes of each lane of a quad, byte i of lane q becoming byte q of lane i.
__device__ __forceinline__ uint32_t transpose_bytes(uint32_t word, int quad) {
  uint32_t other = __shfl_xor_sync(kAllLanes, word, 1);
  word = __byte_perm(word, other, quad & 1 ? 0x3715 : 0x6240);
  other = __shfl_xor_sync(kAllLanes, word, 2);
  return __byte_perm(word, other, quad & 2 ? 0x3276 : 0x5410);
}

// Digits into bytes: a thread makes one byte of the records of all pages of a batch, and stores four bytes of every fourth page. `list`,
// `count`: of the pages of the batch and those after it.
template <class P>
__device__ __forceinline__ void write_records(uint8_t* records, uint32_t record_pitch, const uint8_t* codes, const uint4* entries,
                                              const int* list, int count, int thread) {
  const uint4 own = entries[thread];
  uint32_t packed[P::batch / 4] = {};
  for (const uint32_t entry : {own.w, own.z, own.y, own.x}) {
    uint32_t words[P::batch / 4];
    const uint8_t* const from = codes + (entry & 0xffffu);
    if constexpr (P::batch == 8) {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      words[0] = v.x, words[1] = v.y;
    } else {
      const uint4 v = *reinterpret_cast<const uint4*>(from);
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    }
#pragma unroll
    for (int i = 0; i < P::batch / 4; ++i) packed[i] = packed[i] * 4 + (words[i] >> (entry >> 16) & 0x03030303u);
  }
#pragma unroll
  for (int i = 0; i < P::batch / 4; ++i) {
    const uint32_t word = transpose_bytes(packed[i], thread & 3);
    const int page = 4 * i + (thread & 3);
    if (page < count) *reinterpret_cast<uint32_t*>(records + uint64_t(uint32_t(list[page])) * record_pitch + (thread & ~3)) = word;
  }
}

}  // namespace
}  // namespace kvskim
