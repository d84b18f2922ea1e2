// encode_sketch for head dims up to 128: keys are read once, encode_matrix stays on the SM.
//
// A CTA serves one kv head and a range of slots, and works on three batches of pages at once, with one barrier per batch:
//   - the modes of batch i: each of its 8 warps transforms two slices of 64 channels of a page (16 modes x 16 tokens times 16 tokens x 64).
//     Keys come straight from global memory into registers, one batch ahead, having been asked into the L2 cache a few batches earlier;
//   - the codes of batch i - 1: units of 32 rows of encode_matrix times the modes of all pages of the batch. Only half rows of the record
//     that hold coefficients are multiplied, and every warp keeps its share of them in its own registers and a part of shared memory that
//     no other reads;
//   - the records of batch i - 2: digits into bytes.
// Half of the warps begin with the first of these, half end with it, so that the two warps of a scheduler want different units of the SM.
//
// T is split into two 16-bit parts. The mean enters mode 0 alone, because every other mode of a constant is zero: the rounded rows of T
// consist of pairs +-w. Modes are rounded to fp16. That moves a coefficient by 2^-13 of the root of the sum of squares of its terms, a
// hundredth of a step where that is 80 steps, and so changes the code of a few in a thousand by one, all of them next to a boundary. A power
// of two moves both factors into the range of fp16; larger modes are clamped.
#pragma once
#include "encode_sketch_units.cuh"

namespace kvskim {
namespace {

constexpr int kAhead = 4;  // batches that keys are asked into the L2 cache ahead

// Keys of one head in the block of a page, and the first token of the page in the block. Tokens lie less than 4 GB apart.
struct PageKeys {
  const uint8_t* block;
  uint32_t token_stride, first_token;
  __device__ __forceinline__ PageKeys(const EncodeSketch& parameters, int head, int page)
      : block(parameters.keys + head * parameters.head_stride +
              uint64_t(uint32_t(page) >> parameters.block_shift) * uint64_t(parameters.block_stride)),
        token_stride(uint32_t(parameters.token_stride)),
        first_token((page & ((1u << parameters.block_shift) - 1)) * kPageTokens) {}
  __device__ __forceinline__ const uint8_t* token(int token) const { return block + uint64_t(first_token + token) * token_stride; }
};

// Keys of both slices that this warp transforms, of one page or of two: eight channels of four tokens each.
template <class P, int D>
__device__ __forceinline__ void fetch_keys(uint32_t (&keys)[2][4][P::words], const EncodeSketch& parameters, const int* list, int count,
                                           int head, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < P::warp_pages; ++i) {
    if (warp + i * kCoders >= count) continue;
    const PageKeys from(parameters, head, list[warp + i * kCoders]);
#pragma unroll
    for (int slice = 0; slice < P::slices; ++slice) {
      const int channel = slice * kSliceChannels + 8 * (lane >> 2);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t(&words)[P::words] = keys[P::slices == 2 ? slice : i][j];
        if (D % kSliceChannels == 0 || channel < D)
          load_words<P>(words, from.token(2 * (lane & 3) + (j & 1) + 8 * (j >> 1)) + channel * P::element_bytes);
        else
          for (uint32_t& word : words) word = 0;
      }
    }
  }
}

// The same keys into the L2 cache, 32 bytes a lane.
template <class P, int D>
__device__ __forceinline__ void ask_keys(const EncodeSketch& parameters, const int* list, int count, int head, int warp, int lane) {
  constexpr int row_bytes = D * P::element_bytes, sectors = P::slices * kSliceChannels * P::element_bytes / 32, tokens = 32 / sectors;
  const int byte = lane % sectors * 32;
#pragma unroll
  for (int i = 0; i < P::warp_pages; ++i) {
    if (warp + i * kCoders >= count) continue;
    const PageKeys from(parameters, head, list[warp + i * kCoders]);
    if (D % kSliceChannels != 0 && byte >= row_bytes) continue;
#pragma unroll
    for (int j = 0; j < kPageTokens / tokens; ++j) prefetch_to_l2(from.token(lane / sectors + j * tokens) + byte);
  }
}

// Lists the completed pages of slots `next` and following, up to `end` and as many as are sure to fit; returns how many.
__device__ __forceinline__ int list_pages(int* list, int* completed, const EncodeSketch& parameters, int& next, int end, int thread) {
  if (thread == 0) *completed = 0;
  __syncthreads();
  int count = 0;
  do {
    int64_t slot[kScan / kCoderThreads];
#pragma unroll
    for (int i = 0; i < kScan / kCoderThreads; ++i) {
      const int token = next + i * kCoderThreads + thread;
      slot[i] = token < end ? parameters.slot_mapping[token] : -1;
    }
#pragma unroll
    for (int i = 0; i < kScan / kCoderThreads; ++i) {
      if (next + i * kCoderThreads >= end) break;
      const bool complete = slot[i] >= 0 && (slot[i] & 15) == 15 && (slot[i] >> 4) < parameters.pages;
      const uint32_t votes = __ballot_sync(kAllLanes, complete);
      int at = 0;
      if ((thread & 31) == 0 && votes) at = atomicAdd(completed, __popc(votes));
      at = __shfl_sync(kAllLanes, at, 0) + __popc(votes & ((1u << (thread & 31)) - 1));
      if (complete) list[at] = int(slot[i] >> 4);
    }
    next += kScan;
    __syncthreads();
    count = *completed;
    __syncthreads();
  } while (next < end && count + kScan <= kListed);
  return count;
}

template <ElementType Element, int D>
__global__ void __launch_bounds__(kCoderThreads, 1) encode_sketch_resident_kernel(const EncodeSketch parameters) {
  using P = Resident<Element, D>;
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ int completed;
  __shared__ uint32_t largest;
  int* const list = reinterpret_cast<int*>(shared + P::list_at);
  uint32_t* const entries = reinterpret_cast<uint32_t*>(shared + P::entries_at);
  float* const mean = reinterpret_cast<float*>(shared + P::mean_at);
  uint4* const transform = reinterpret_cast<uint4*>(shared + P::transform_at);
  uint4* const vectors = reinterpret_cast<uint4*>(shared + P::vectors_at);  // [parity of the batch], then mode_piece
  uint4* const matrix = reinterpret_cast<uint4*>(shared + P::matrix_at);    // [piece of a unit][thread]: each thread reads what it wrote
  uint8_t* const codes = shared + P::codes_at;                              // [parity of the batch][coefficient row][page]
  int thread = threadIdx.x;
  const int head = blockIdx.x;
  wait_previous_kernel();
  allow_next_kernel();

  Units units{};
  bool has_tables = false;
  float mode_scale = 0.f;
  uint4 held[2][kGroupPieces];  // groups 0 and 1; the others are in `matrix`
  const int end = min(int(blockIdx.y + 1) * parameters.window, parameters.tokens);
  int next = blockIdx.y * parameters.window;
  while (next < end) {
    const int count = list_pages(list, &completed, parameters, next, end, thread);
    if (count == 0) continue;
    uint32_t keys[2][4][P::words];
    {
      const int warp = thread >> 5, lane = thread & 31;
#pragma unroll 1
      for (int batch = 1; batch <= kAhead; ++batch)
        ask_keys<P, D>(parameters, list + batch * P::batch, count - batch * P::batch, head, warp, lane);
      fetch_keys<P, D>(keys, parameters, list, count, head, warp, lane);
    }

    if (!has_tables) {
      has_tables = true;
      const int warp = thread >> 5, lane = thread & 31;
      if (thread == 0) largest = 0;
      units = units_of_warp(parameters.coefficient_count + head * modes, parameters.coefficient_bits + head * slots, warp, lane);
      // The rows of group 0 wait where modes will lie, those of group 1 in registers, the others where they stay.
      const __nv_bfloat16* const rows = parameters.encode_matrix + int64_t(head) * slots * D;
      auto group_at = [&](int group) { return (group == 0 ? vectors : matrix + (group - 2) * kGroupPieces * kCoderThreads) + thread; };
#pragma unroll 1
      for (int group = 0; group < P::groups; ++group) {
        if (group == 1) continue;
        const uint32_t to = shared_address(group_at(group));
#pragma unroll 4
        for (int i = 0; i < kGroupPieces; ++i) {
          const __nv_bfloat16* const from = piece_source<P, D>(rows, units, group, i, lane);
          copy16_or_zero(to + i * kCoderThreads * 16, from == nullptr ? rows : from, from != nullptr);
        }
      }
      commit_copies();
      uint4 waiting[kGroupPieces];
#pragma unroll
      for (int i = 0; i < kGroupPieces; ++i) {
        const __nv_bfloat16* const from = piece_source<P, D>(rows, units, 1, i, lane);
        waiting[i] = from == nullptr ? make_uint4(0, 0, 0, 0) : __ldg(reinterpret_cast<const uint4*>(from));
      }
      make_entries<P>(entries, parameters.slot_coefficient + head * slots, parameters.slot_digit + head * slots, thread);
      if (thread < 2 * P::batch)  // rows of zeros
        codes[thread / P::batch * P::code_bytes + slots * P::batch + thread % P::batch] = 0;
      uint32_t own_largest = 0;
#pragma unroll
      for (int i = 0; i < kGroupPieces; ++i) own_largest = largest_of(own_largest, waiting[i]);
      wait_copies<0>();
#pragma unroll 1
      for (int group = 0; group < P::groups; ++group) {
        if (group == 1) continue;
#pragma unroll 4
        for (int i = 0; i < kGroupPieces; ++i) own_largest = largest_of(own_largest, group_at(group)[i * kCoderThreads]);
      }
      own_largest = __reduce_max_sync(kAllLanes, max(own_largest & 0xffffu, own_largest >> 16));
      __syncthreads();
      if (lane == 0) atomicMax(&largest, own_largest);
      __syncthreads();
      const int exponent = mode_exponent(largest);
      // fp16 keys are transformed as they are and scaled afterwards: T times the scale could leave the range of fp16.
      mode_scale = power_of_two(exponent) * parameters.key_scale;
      const float mean_scale = P::half ? -4.f / parameters.key_scale : -4.f * mode_scale;
      if (thread < P::slices * kSliceChannels)
        mean[thread / 16 * kMeanPitch + thread % 8 * 2 + thread / 8 % 2] = thread < D ? mean_scale * parameters.mean[head * D + thread] : 0.f;
      make_transform<P::half>(reinterpret_cast<uint32_t*>(transform), P::half ? 1.f : mode_scale, thread);
      const float row_scale = power_of_two(-exponent);
#pragma unroll 1
      for (int group = 2; group < P::groups; ++group) scale_group(group_at(group), row_scale);
      // Registers are loaded from shared memory, so that the four words of a piece come to lie side by side, as an operand must.
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        if (group == 1) {
#pragma unroll
          for (int i = 0; i < kGroupPieces; ++i) group_at(0)[i * kCoderThreads] = waiting[i];
        }
        scale_group(group_at(0), row_scale);
        forget_memory();
#pragma unroll
        for (int i = 0; i < kGroupPieces; ++i) held[group][i] = group_at(0)[i * kCoderThreads];
      }
      __syncthreads();
    }

    const int batches = ceil_div(count, P::batch);
#pragma unroll 1
    for (int step = 0; step < batches + 2; ++step) {
      renew(thread), renew(units.half_rows), renew(units.modes);
      const int parity = step & 1, warp = thread >> 5, lane = thread & 31;
      auto make_modes = [&] {
        const uint4 high = transform[lane], low = transform[32 + lane];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int slice = P::slices == 2 ? i : 0, page = P::slices == 2 ? warp : warp + i * kCoders;
          if (step * P::batch + page < count)
            transform_slice<P>(vectors + parity * modes * P::mode_pieces, keys[i], high, low, mean, mode_scale, page, slice, lane);
        }
        const int following = (step + 1) * P::batch;
        fetch_keys<P, D>(keys, parameters, list + following, count - following, head, warp, lane);
        const int later = (step + 1 + kAhead) * P::batch;
        ask_keys<P, D>(parameters, list + later, count - later, head, warp, lane);
      };
      if (warp < kCoders / 2) make_modes();
      if (step >= 1 && step <= batches) {
#pragma unroll
        for (int unit = 0; unit < kWarpUnits; ++unit) {
          if (!units.has(unit)) break;
          renew(units.ranges[unit]);
          code_unit<P>(codes + (parity ^ 1) * P::code_bytes, vectors + (parity ^ 1) * modes * P::mode_pieces, units.ranges[unit],
                       units.mode(unit), units.first_row(unit), lane, [&](int i) {
                         const int at = unit * P::unit_pieces + i;
                         return at < 2 * kGroupPieces ? held[at / kGroupPieces % 2][at % kGroupPieces]
                                                      : matrix[(at - 2 * kGroupPieces) * kCoderThreads + thread];
                       });
        }
      }
      if (step >= 2) {
        const int first = (step - 2) * P::batch;
        write_records<P>(parameters.records + head * sketch::record_bytes, uint32_t(parameters.heads) * sketch::record_bytes,
                         codes + parity * P::code_bytes, reinterpret_cast<const uint4*>(entries), list + first, count - first, thread);
      }
      if (warp >= kCoders / 2) make_modes();
      __syncthreads();
    }
  }
}

}  // namespace
}  // namespace kvskim
