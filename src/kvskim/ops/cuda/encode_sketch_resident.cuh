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
#include "encode_sketch_units.cuh"

namespace kvskim {
namespace {

template <ElementType Element, int D>
__global__ void __launch_bounds__(kThreads, 1) encode_sketch_resident_kernel(const EncodeSketch parameters) {
  using P = Resident<Element, D>;
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ int completed;
  int* const list = reinterpret_cast<int*>(shared + P::list_at);
  uint32_t* const entries = reinterpret_cast<uint32_t*>(shared + P::entries_at);
  uint32_t* const info = reinterpret_cast<uint32_t*>(shared + P::rows_at);
  float* const mean = reinterpret_cast<float*>(shared + P::mean_at);
  uint4* const transform = reinterpret_cast<uint4*>(shared + P::transform_at);
  uint4* const vectors = reinterpret_cast<uint4*>(shared + P::modes_at);
  uint8_t* const codes = shared + P::codes_at;  // [coefficient row][page of the batch]

  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int head = blockIdx.x;
  uint4* const keys = reinterpret_cast<uint4*>(shared + P::keys_at) + warp * kPageTokens * P::key_pitch;
  uint4* const matrix = reinterpret_cast<uint4*>(shared + P::matrix_at) + warp * kUnitRows * P::pitch;
  auto matrix_rows = [&](int row) { return parameters.encode_matrix + int64_t(head * slots + row) * D; };
  wait_previous_kernel();
  allow_next_kernel();

  uint32_t units = 0;  // 0: the tables are not there yet; no warp has unit 0 at every level
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
        constexpr int apart = 32 / P::key_pitch;  // tokens that the lanes copy at once
        int token = lane / P::key_pitch, piece = lane % P::key_pitch;
        asm volatile("" : "+r"(token), "+r"(piece));  // addresses are made anew at every call: kept across the loop they would spill
        const uint32_t to = shared_address(keys + row_piece<P::key_pitch>(token, piece));
        from += token * parameters.token_stride + piece * 16;
        const bool present = piece < P::row_pieces;
#pragma unroll
        for (int i = 0; i < kPageTokens / apart; ++i) {
          if (present) copy16((to ^ (i * apart & 7) * 16) + i * apart * P::key_pitch * 16, from);
          from += apart * parameters.token_stride;
        }
      }
      commit_copies();
    };
    stage_page(warp);

    if (units == 0) {
      // For bit position k of byte b of a record: where the codes of its coefficient lie, and the shift of its digit.
      int first_entry = thread;
      asm volatile("" : "+r"(first_entry));  // as in stage_page
      for (int i = first_entry; i < slots; i += kThreads) {
        const int position = i / sketch::record_bytes, byte = i % sketch::record_bytes;
        const int slot = format_tables.unit_slot[position][sketch::byte_word(byte)] + 4 * sketch::byte_lane(byte) + sketch::byte_in_word(byte);
        const uint32_t row = uint16_t(parameters.slot_coefficient[head * slots + slot]), digit = parameters.slot_digit[head * slots + slot];
        entries[i] = digit > 3 ? slots * kBatch : (row & (slots - 1)) * kBatch | (2 * digit) << 16;
      }
      if (thread < kBatch) codes[slots * kBatch + thread] = 0;
      for (int i = thread; i < D; i += kThreads) mean[i] = -4.f * parameters.mean[head * D + i] / parameters.key_scale;
      if (warp == 0) make_transform<P::half>(transform, lane);
      units = units_of_warp(parameters.coefficient_count + head * modes, warp, lane);
#pragma unroll
      for (int level = 0; level < 4; ++level) {
        if (!has_unit(level)) continue;
        const int row = unit_row(level);
        stage_unit<Element, D>(level < 3 ? matrix : nullptr, info + row, matrix_rows(row),
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
      if (batch + warp < count) transform_staged<Element, D>(vectors, keys, transform, mean, parameters.key_scale, warp, lane);
      __syncwarp();
      stage_page(batch + kBatch + warp);
      __syncthreads();

      if (has_unit(3)) {  // first, so that others work while it waits for L2
        const int row = unit_row(3);
        uint32_t both[2][4];
        code_unit<P, 1>(codes, vectors, info, unit_mode(3), row, lane, [&](uint32_t(&a)[4], auto second, int group) {
          constexpr int step = decltype(second)::value;
          if (step == 0) global_rows<Element, D>(both, matrix_rows(row), info + row, group, lane);
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = both[step][i];
        });
      }
#pragma unroll
      for (int level = 0; level < kRegisterUnits; ++level) {
        if (has_unit(level)) {
          code_unit<P, P::groups>(codes, vectors, info, unit_mode(level), unit_row(level), lane, [&](uint32_t(&a)[4], auto second, int group) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = held[level][2 * group + decltype(second)::value][i];
          });
        }
      }
      if (has_unit(2)) {
        code_unit<P, 2>(codes, vectors, info, unit_mode(2), unit_row(2), lane,
                     [&](uint32_t(&a)[4], auto second, int group) { staged_rows<P::pitch>(a, matrix, 2 * group + decltype(second)::value, lane); });
      }
      __syncthreads();

      // Digits into bytes: a thread makes one byte of the records of eight pages.
      int byte = thread % sketch::record_bytes;
      asm volatile("" : "+r"(byte));  // as in stage_page
      const int first_page = thread / sketch::record_bytes * 8;
      uint32_t packed[2] = {0, 0};
#pragma unroll
      for (int position = 0; position < sketch::positions; ++position) {
        const uint32_t entry = entries[position * sketch::record_bytes + byte], shift = entry >> 16;
        const uint2 v = *reinterpret_cast<const uint2*>(codes + (entry & 0xffffu) + first_page);
        packed[0] |= (v.x >> shift & 0x03030303u) << 2 * position;
        packed[1] |= (v.y >> shift & 0x03030303u) << 2 * position;
      }
      const uint32_t record_pitch = parameters.heads * sketch::record_bytes;
      uint8_t* const to = parameters.records + head * sketch::record_bytes + byte;
      const int* const pages = list + batch + first_page;
      const int present = count - batch - first_page;
      if (present >= 8) {
#pragma unroll
        for (int i = 0; i < 8; ++i) to[uint64_t(uint32_t(pages[i])) * record_pitch] = uint8_t(packed[i / 4] >> 8 * (i % 4));
      } else {
#pragma unroll 1
        for (int i = 0; i < present; ++i) to[uint64_t(uint32_t(pages[i])) * record_pitch] = uint8_t((i < 4 ? packed[0] : packed[1]) >> 8 * (i % 4));
      }
    }
    wait_copies<0>();
    __syncthreads();
  }
}

}  // namespace
}  // namespace kvskim
