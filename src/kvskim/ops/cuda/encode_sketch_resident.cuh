// encode_sketch for head dims up to 128: keys are read once, encode_matrix stays on the SM.
//
// A CTA serves one kv head and a range of slots. Each of its 16 warps transforms one page of a batch of 16 (first product: 16 modes x 16
// tokens times 16 tokens x D, keys straight from ldmatrix), then multiplies its share of the rows of encode_matrix with the modes of all 16
// pages (second product: 16 rows x D times D x 8 pages, twice). Only rows that hold coefficients are multiplied, in units of 16: unit u
// belongs to warp u % 16; units 0..31 live in registers, 32..47 in shared memory, 48..63, if so many are used, are read from L2.
//
// Modes are rounded to fp16. That moves a coefficient by about 2^-13 of its own size, at most a hundredth of a step, which changes the code
// of few in a thousand by one. Rows of encode_matrix are scaled by a power of two, so that fp16 holds their bf16 values.
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
  static constexpr int modes_at = mean_at + D * 4;
  static constexpr int codes_at = modes_at + modes * kBatch * pitch * 16;
  static constexpr int keys_at = codes_at + slots * kBatch;
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

// The same straight from global memory.
template <ElementType Element, int D>
__device__ __forceinline__ void global_rows(uint32_t (&a)[4], const __nv_bfloat16* rows, const uint32_t* info, int step, int lane) {
  const int row = lane >> 2, quad = lane & 3;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int channel = 16 * step + (Element == kFloat8E4M3 ? 4 * quad + 2 * (i >> 1) : 2 * quad + 8 * (i >> 1));
    const float scale = __uint_as_float((254u << 23) - (info[row + 8 * (i & 1)] & 0x7f800000u));
    a[i] = scale_pair(__ldg(reinterpret_cast<const uint32_t*>(rows + (row + 8 * (i & 1)) * D + channel)), scale);
  }
}

// ---- first product ----

// A operand, 16 modes x 16 tokens: what 16 bits hold of T, and of the rest.
template <bool HALF>
__device__ __forceinline__ void load_transform(uint32_t (&high)[4], uint32_t (&low)[4], int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int mode = (lane >> 2) + 8 * (i & 1), token = 2 * (lane & 3) + 8 * (i >> 1);
    const float w0 = token_weight(token, mode), w1 = token_weight(token + 1, mode);
    high[i] = pack<HALF>(w0, w1);
    const float2 rounded = unpack(high[i], HALF);
    low[i] = pack<HALF>(w0 - rounded.x, w1 - rounded.y);
  }
}

// Modes of a staged page. `mean` is what mode 0 starts from. A lane makes the 16-byte pieces of modes `row` and `row + 8`: of every 32
// channels two consecutive pairs for each of the two steps of the second product.
template <ElementType Element, int D>
__device__ __forceinline__ void transform_staged(uint4* vectors, const uint4* keys, const float* mean, float key_scale,
                                                 const uint32_t (&high)[4], const uint32_t (&low)[4], int page, int lane) {
  using P = Resident<Element, D>;
  const int row = lane >> 2, quad = lane & 3;
#pragma unroll 1
  for (int group = 0; group < P::groups; ++group) {
    uint32_t b[4][2];  // B operands of four tiles of eight channels
    int channel[4], apart;  // of the first column of a lane's pair in each tile; from it to the second
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
      apart = 2;
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t pairs[4];
        load_matrices_transposed(pairs, shared_address(keys + row_piece<P::key_pitch>(lane & 15, 4 * group + 2 * i + (lane >> 4))));
        b[2 * i][0] = pairs[0], b[2 * i][1] = pairs[1], b[2 * i + 1][0] = pairs[2], b[2 * i + 1][1] = pairs[3];
        channel[2 * i] = 32 * group + 16 * i + 2 * quad, channel[2 * i + 1] = channel[2 * i] + 8;
      }
      apart = 1;
    }
    float y[4][4];
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      y[tile][0] = row == 0 ? mean[channel[tile]] : 0.f, y[tile][1] = row == 0 ? mean[channel[tile] + apart] : 0.f;
      y[tile][2] = y[tile][3] = 0.f;
      mma_16816<P::half>(y[tile], high[0], high[1], high[2], high[3], b[tile][0], b[tile][1]);
      mma_16816<P::half>(y[tile], low[0], low[1], low[2], low[3], b[tile][0], b[tile][1]);
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

// Codes of the 16 rows of a unit for 16 pages. `rows_of(a, step)` gives the A operand.
template <class P, class Rows>
__device__ __forceinline__ void code_unit(uint8_t* codes, const uint4* vectors, const uint32_t* info, int mode, int first_row, int lane,
                                          Rows rows_of) {
  const int row = lane >> 2, quad = lane & 3;
  float sum[2][4] = {};
#pragma unroll
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

// ---- the kernel ----

template <ElementType Element, int D>
__global__ void __launch_bounds__(kThreads, 1) encode_sketch_resident_kernel(const EncodeSketch parameters) {
  using P = Resident<Element, D>;
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ int completed;
  int* const list = reinterpret_cast<int*>(shared + P::list_at);
  uint32_t* const entries = reinterpret_cast<uint32_t*>(shared + P::entries_at);
  uint32_t* const info = reinterpret_cast<uint32_t*>(shared + P::rows_at);
  float* const mean = reinterpret_cast<float*>(shared + P::mean_at);
  uint4* const vectors = reinterpret_cast<uint4*>(shared + P::modes_at);
  uint8_t* const codes = shared + P::codes_at;  // [coefficient row][page of the batch]

  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int head = blockIdx.x;
  uint4* const keys = reinterpret_cast<uint4*>(shared + P::keys_at) + warp * kPageTokens * P::key_pitch;
  uint4* const matrix = reinterpret_cast<uint4*>(shared + P::matrix_at) + warp * kUnitRows * P::pitch;
  const __nv_bfloat16* const all_rows = parameters.encode_matrix + int64_t(head) * slots * D;
  wait_previous_kernel();
  allow_next_kernel();

  bool prepared = false;
  uint32_t high[4], low[4], units = 0;
  uint32_t held[kRegisterUnits][P::steps][4];
  auto unit_mode = [&](int level) { return int(units >> 8 * level & 15); };
  auto unit_row = [&](int level) { return format_tables.start[unit_mode(level)] + kUnitRows * int(units >> (8 * level + 4) & 15); };
  auto has_unit = [&](int level) { return (units >> 8 * level & 255) != kNoUnit; };

  const int end = min(int(blockIdx.y + 1) * parameters.window, parameters.tokens);
  int next = blockIdx.y * parameters.window;
  while (next < end) {
    if (thread == 0) completed = 0;
    __syncthreads();
    int count = 0;
    do {
      int64_t slot[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = next + i * kThreads + thread;
        slot[i] = token < end ? parameters.slot_mapping[token] : -1;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool complete = slot[i] >= 0 && (slot[i] & 15) == 15 && (slot[i] >> 4) < parameters.pages;
        const uint32_t votes = __ballot_sync(kAllLanes, complete);
        int at = 0;
        if (lane == 0 && votes) at = atomicAdd(&completed, __popc(votes));
        at = __shfl_sync(kAllLanes, at, 0) + __popc(votes & ((1u << lane) - 1));
        if (complete) list[at] = int(slot[i] >> 4);
      }
      next += kScan;
      __syncthreads();
      count = completed;
      __syncthreads();
    } while (next < end && count + kScan <= kListed);
    if (count == 0) continue;

    auto stage_page = [&](int index) {
      if (index < count) {
        const int page = list[index];
        const int block = page >> parameters.block_shift;
        const int first_token = (page & ((1 << parameters.block_shift) - 1)) * kPageTokens;
        const uint8_t* from =
            parameters.keys + block * parameters.block_stride + first_token * parameters.token_stride + head * parameters.head_stride;
        int first = lane;
        asm volatile("" : "+r"(first));  // addresses are made anew at every call: kept across the loop they would spill
#pragma unroll
        for (int i = 0; i < kPageTokens * P::row_pieces / 32; ++i) {
          const int token = (i * 32 + first) / P::row_pieces, piece = (i * 32 + first) % P::row_pieces;
          copy16(shared_address(keys + row_piece<P::key_pitch>(token, piece)), from + token * parameters.token_stride + piece * 16);
        }
      }
      commit_copies();
    };
    stage_page(warp);

    if (!prepared) {
      prepared = true;
      // For bit position k of byte b of a record: the coefficient row and the digit of it.
      for (int i = thread; i < slots; i += kThreads) {
        const int position = i / sketch::record_bytes, byte = i % sketch::record_bytes;
        const int slot = format_tables.unit_slot[position][sketch::byte_word(byte)] + 4 * sketch::byte_lane(byte) + sketch::byte_in_word(byte);
        const uint32_t row = uint16_t(parameters.slot_coefficient[head * slots + slot]), digit = parameters.slot_digit[head * slots + slot];
        entries[i] = digit > 3 ? kUnusedSlot : (row & (slots - 1)) | (2 * digit) << 16;
      }
      for (int i = thread; i < D; i += kThreads) mean[i] = -4.f * parameters.mean[head * D + i] / parameters.key_scale;
      load_transform<P::half>(high, low, lane);
      units = units_of_warp(parameters.coefficient_count + head * modes, warp, lane);
#pragma unroll
      for (int level = 0; level < 4; ++level) {
        if (!has_unit(level)) continue;
        const int row = unit_row(level);
        stage_unit<Element, D>(level < 3 ? matrix : nullptr, info + row, all_rows + int64_t(row) * D,
                               parameters.coefficient_bits + head * slots + row, lane);
        if (level < kRegisterUnits) {
#pragma unroll
          for (int step = 0; step < P::steps; ++step) staged_rows<P::pitch>(held[level < kRegisterUnits ? level : 0][step], matrix, step, lane);
          __syncwarp();
        }
      }
      __syncthreads();
    }

#pragma unroll 1
    for (int batch = 0; batch < count; batch += kBatch) {
      wait_copies<0>();
      __syncwarp();
      if (batch + warp < count) transform_staged<Element, D>(vectors, keys, mean, parameters.key_scale, high, low, warp, lane);
      __syncwarp();
      stage_page(batch + kBatch + warp);
      __syncthreads();

#pragma unroll
      for (int level = 0; level < kRegisterUnits; ++level) {
        if (has_unit(level)) {
          code_unit<P>(codes, vectors, info, unit_mode(level), unit_row(level), lane, [&](uint32_t(&a)[4], auto second, int group) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = held[level][2 * group + decltype(second)::value][i];
          });
        }
      }
      if (has_unit(2)) {
        code_unit<P>(codes, vectors, info, unit_mode(2), unit_row(2), lane,
                     [&](uint32_t(&a)[4], auto second, int group) { staged_rows<P::pitch>(a, matrix, 2 * group + decltype(second)::value, lane); });
      }
      if (has_unit(3)) {
        const int row = unit_row(3);
        code_unit<P>(codes, vectors, info, unit_mode(3), row, lane, [&](uint32_t(&a)[4], auto second, int group) {
          global_rows<Element, D>(a, all_rows + row * D, info + row, 2 * group + decltype(second)::value, lane);
        });
      }
      __syncthreads();

      // Digits into bytes: a thread makes one byte of the records of eight pages.
      const int byte = thread % sketch::record_bytes, first_page = thread / sketch::record_bytes * 8;
      uint32_t packed[2] = {0, 0};
#pragma unroll
      for (int position = 0; position < sketch::positions; ++position) {
        const uint32_t entry = entries[position * sketch::record_bytes + byte];
        const uint32_t mask = entry & kUnusedSlot ? 0u : 0x03030303u;
        const int shift = entry >> 16 & 255;
        const uint2 v = *reinterpret_cast<const uint2*>(codes + (entry & (slots - 1)) * kBatch + first_page);
        packed[0] |= (v.x >> shift & mask) << 2 * position;
        packed[1] |= (v.y >> shift & mask) << 2 * position;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (batch + first_page + i < count) {
          const int64_t page = list[batch + first_page + i];
          parameters.records[(page * parameters.heads + head) * sketch::record_bytes + byte] = uint8_t(packed[i / 4] >> 8 * (i % 4));
        }
      }
    }
    wait_copies<0>();
    __syncthreads();
  }
}

}  // namespace
}  // namespace kvskim
