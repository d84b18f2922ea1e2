// Sketch records of the pages that a step completes, from slot_mapping alone. See docs/how-it-works.md, section "The sketch record".
//
//     Y = T^T (K - m)                 16 token modes x D, T the 16-point DCT-II
//     x = encode_matrix[row] . Y_mode, code = clamp(floor(x), -2^(b-1), 2^(b-1) - 1) + 2^(b-1), digits of two bits into the record
//
// Launches of few slots have a kernel of their own in encode_sketch_few.cuh. In the others both products run on tensor cores; the mean enters
// mode 0 alone, because every other mode of a constant is exactly zero. Head dims up to 128 have the kernel in encode_sketch_resident.cuh.
// The one here serves larger head dims: a CTA takes a window of slots of one kv head, lists the pages that end in it, and codes them in
// batches of 16, M of a tensor-core multiply. T and Y are split into two 16-bit parts, so that codes are those of float32 arithmetic except
// next to a boundary. The 16 modes are processed in parts that need equally many half rows of the record, one warp or two to a half row
// (32 coefficient rows); the keys are read once per part and encode_matrix once per batch, from L2.
#include <type_traits>

#include "encode_sketch_few.cuh"
#include "encode_sketch_resident.cuh"

namespace kvskim {
namespace {

using sketch::record_bytes;

template <ElementType Element, int D>
__global__ void __launch_bounds__(kThreads, 1) encode_sketch_kernel(const EncodeSketch parameters) {
  using P = Plan<Element, D>;
  constexpr bool half = Element != kBFloat16;  // fp8 widens to fp16 exactly
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ int completed;
  int* const list = reinterpret_cast<int*>(shared + P::list_at);
  uint32_t* const slot_entries = reinterpret_cast<uint32_t*>(shared + P::slots_at);
  float* const mean = reinterpret_cast<float*>(shared + P::mean_at);
  uint4* const vectors = reinterpret_cast<uint4*>(shared + P::modes_at);
  uint8_t* const codes = shared + P::codes_at;  // [batch of the chunk][coefficient row][page of the batch]

  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int head = blockIdx.x;
  wait_previous_kernel();
  allow_next_kernel();

  if (thread == 0) completed = 0;
  __syncthreads();
  for (int i = warp * 32; i < parameters.window; i += kThreads) {
    const int token = blockIdx.y * parameters.window + i + lane;
    const int64_t slot = i + lane < parameters.window && token < parameters.tokens ? parameters.slot_mapping[token] : -1;
    const bool complete = slot >= 0 && (slot & 15) == 15 && (slot >> 4) < parameters.pages;
    const uint32_t votes = __ballot_sync(kAllLanes, complete);
    int at = 0;
    if (lane == 0 && votes) at = atomicAdd(&completed, __popc(votes));
    at = __shfl_sync(kAllLanes, at, 0) + __popc(votes & ((1u << lane) - 1));
    if (complete) list[at] = int(slot >> 4);
  }
  __syncthreads();
  const int count = completed;
  if (count == 0) return;

  auto page_keys = [&](int page) {
    const int block = page >> parameters.block_shift, first_token = (page & ((1 << parameters.block_shift) - 1)) * kPageTokens;
    return parameters.keys + block * parameters.block_stride + first_token * parameters.token_stride + head * parameters.head_stride;
  };

  // Tables of the record's bytes: for bit position k of byte b, the coefficient row and the digit of it.
  for (int i = thread; i < slots; i += kThreads) {
    const int position = i / record_bytes, byte = i % record_bytes;
    const int slot = format_tables.unit_slot[position][sketch::byte_word(byte)] + 4 * sketch::byte_lane(byte) + sketch::byte_in_word(byte);
    const uint32_t row = uint16_t(parameters.slot_coefficient[head * slots + slot]), digit = parameters.slot_digit[head * slots + slot];
    slot_entries[i] = digit > 3 ? kUnusedSlot : (row & (slots - 1)) | (2 * digit) << 16;
  }
  for (int i = thread; i < D; i += kThreads) mean[i] = 4.f * parameters.mean[head * D + i];
  __syncthreads();

  const int unit = warp % P::units, tile_start = warp / P::units * P::tiles;
  for (int chunk = 0; chunk < count; chunk += kChunk) {
    const int chunk_pages = min(kChunk, count - chunk);
#pragma unroll 1
    for (int part = 0; part < P::parts; ++part) {
      uint32_t weights[4];
      load_token_weights<P, half>(weights, part, lane);
      const PartTables<P::parts>& table = part_tables<P::parts>();
      const int mode_index = table.unit_mode[part][unit], mode = table.mode[part][mode_index];
      const int first = half_row * table.unit_half[part][unit] + 8 * tile_start;  // coefficient of the mode
      const int active_tiles = min(max(ceil_div(parameters.coefficient_count[head * modes + mode] - first, 8), 0), P::tiles);
      const int first_row = format_tables.start[mode] + first;
      const __nv_bfloat16* const rows = parameters.encode_matrix + int64_t(head * slots + first_row) * D;
      uint32_t widths = 0;  // bits of this lane's two coefficients of each tile, four bits each
#pragma unroll
      for (int tile = 0; tile < P::tiles; ++tile) {
        if (tile < active_tiles) {
          const uint8_t* bits = parameters.coefficient_bits + head * slots + first_row + tile * 8 + (lane & 3) * 2;
          widths |= uint32_t(bits[0] | bits[1] << 4) << 8 * tile;
        }
      }
#pragma unroll 1
      for (int batch = 0; batch < chunk_pages; batch += kBatch) {
        const int index = chunk + batch + warp;
        if (index < count) {
          const uint8_t* from = page_keys(list[index]);
          transform_page<P, half>(vectors, weights, mean, parameters.key_scale, part == 0, warp, lane,
                                  [&](int token, int byte) { return from + token * parameters.token_stride + byte; });
        }
        __syncthreads();
        float sum[P::tiles][4] = {};
        multiply_modes<P>(sum, vectors, mode_index, active_tiles, lane,
                          [&](int tile, int step) { return matrix_piece<P, D>(rows, tile, step, lane); });
        uint8_t* const to = codes + batch * slots + (first_row + (lane & 3) * 2) * kBatch + (lane >> 2);
#pragma unroll
        for (int tile = 0; tile < P::tiles; ++tile) {
          if (tile < active_tiles) {
            const int even = 1 << (widths >> 8 * tile & 15) >> 1, odd = 1 << (widths >> (8 * tile + 4) & 15) >> 1;
            uint8_t* const at = to + tile * 8 * kBatch;
            at[0] = coefficient_code(sum[tile][0], even);
            at[kBatch] = coefficient_code(sum[tile][1], odd);
            at[8] = coefficient_code(sum[tile][2], even);
            at[kBatch + 8] = coefficient_code(sum[tile][3], odd);
          }
        }
        __syncthreads();
      }
    }

    // Digits into bytes, 16 pages at once: a thread makes one byte of each of their records.
    const int byte = thread % record_bytes;
    for (int batch = thread / record_bytes * kBatch; batch < chunk_pages; batch += kThreads / record_bytes * kBatch) {
      uint32_t packed[4] = {0, 0, 0, 0};
#pragma unroll
      for (int position = 0; position < sketch::positions; ++position) {
        const uint32_t entry = slot_entries[position * record_bytes + byte];
        const uint32_t mask = entry & kUnusedSlot ? 0u : 0x03030303u;
        const int shift = entry >> 16 & 255;
        const uint4 v = *reinterpret_cast<const uint4*>(codes + batch * slots + (entry & (slots - 1)) * kBatch);
        packed[0] |= (v.x >> shift & mask) << 2 * position;
        packed[1] |= (v.y >> shift & mask) << 2 * position;
        packed[2] |= (v.z >> shift & mask) << 2 * position;
        packed[3] |= (v.w >> shift & mask) << 2 * position;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (batch + i < chunk_pages) {
          const int64_t page = list[chunk + batch + i];
          parameters.records[(page * parameters.heads + head) * record_bytes + byte] = uint8_t(packed[i / 4] >> 8 * (i % 4));
        }
      }
    }
  }
}

// Slots a CTA looks at: as many as leave enough CTAs, because a CTA reads encode_matrix once per 64 pages.
int window_slots(int tokens, int heads, int processors) {
  int window = kLargestWindow;
  while (window > 16 && ceil_div(tokens, window) * heads < processors * 3 / 4) window /= 2;
  return window;
}

// Which kernel makes the records. Codes next to a boundary may differ between both.
enum Encoder { kByTokens = 0, kFew = 1, kMany = 2 };

// Most slots that the kernel for few of them gets by default. It reads encode_matrix of a kv head, 256 KB at head dim 128, from the L2 cache
// for each page, or for two that end within 32 slots. Of 256 slots, a chunk of a prompt or a decode step of so many rows, 16 complete a page
// as a rule: at 8 kv heads 16 to 32 MB, 3 to 6 us at the 5.5 TB/s of an H200. The other kernel reads it once per SM, but takes 17 us for one page
// and 31 us for 512.
constexpr int kFewTokens = 256;

template <ElementType Element, int D>
cudaError_t launch_encode(EncodeSketch parameters, int encoder, int processors, int flags, cudaStream_t stream) {
  if (encoder == kFew || (encoder == kByTokens && parameters.tokens <= kFewTokens))
    return launch_encode_few<Element, D>(parameters, processors, flags, stream);
  if constexpr (D <= 128) {
    // One CTA per SM for the whole launch, as each reads encode_matrix once. Few slots, as in a decode step: 16 of them each.
    const int most = max(processors / parameters.heads, 1);
    parameters.window = max(ceil_div(ceil_div(parameters.tokens, most), kPageTokens) * kPageTokens, kPageTokens);
    const dim3 grid(parameters.heads, ceil_div(parameters.tokens, parameters.window));
    return launch(encode_sketch_resident_kernel<Element, D>, grid, kCoderThreads, Resident<Element, D>::shared_bytes, stream, flags, parameters);
  } else {
    parameters.window = window_slots(parameters.tokens, parameters.heads, processors);
    const dim3 grid(parameters.heads, ceil_div(parameters.tokens, parameters.window));
    return launch(encode_sketch_kernel<Element, D>, grid, kThreads, Plan<Element, D>::shared_bytes, stream, flags, parameters);
  }
}

// launch<Element, D>() for the element type and the head dim.
template <ElementType Element, class Launch>
cudaError_t for_head_dim(int head_dim, const Launch& launch) {
  const auto of = [&](auto dim) { return launch(std::integral_constant<ElementType, Element>{}, dim); };
  switch (head_dim) {
    case 64: return of(std::integral_constant<int, 64>{});
    case 96: return of(std::integral_constant<int, 96>{});
    case 128: return of(std::integral_constant<int, 128>{});
    case 256: return of(std::integral_constant<int, 256>{});
    case 576: return of(std::integral_constant<int, 576>{});
    default: return cudaErrorInvalidValue;
  }
}

template <class Launch>
cudaError_t for_form(int element, int head_dim, const Launch& launch) {
  switch (element) {
    case kBFloat16: return for_head_dim<kBFloat16>(head_dim, launch);
    case kFloat16: return for_head_dim<kFloat16>(head_dim, launch);
    case kFloat8E4M3: return for_head_dim<kFloat8E4M3>(head_dim, launch);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t multiprocessors(int& count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error == cudaSuccess ? cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) : error;
}

// The form of a cache, of which layers may have many; strides count elements. False: not a form that the kernels take.
bool describe(EncodeSketch& parameters, int element, int64_t block_stride, int64_t token_stride, int64_t head_stride, int block_size) {
  while (kPageTokens << parameters.block_shift < block_size) ++parameters.block_shift;
  const int64_t bytes = element == kFloat8E4M3 ? 1 : 2;
  parameters.block_stride = block_stride * bytes, parameters.token_stride = token_stride * bytes, parameters.head_stride = head_stride * bytes;
  return kPageTokens << parameters.block_shift == block_size && parameters.token_stride >> 32 == 0;
}

}  // namespace
}  // namespace kvskim

// Strides in elements; key_cache and all its strides, mean and encode_matrix aligned to 16 bytes, tokens less than 4 GB apart. slot_mapping
// int64 [tokens]; tables as in kvskim.selectors.sketch; records uint8 [pages, heads, 256]; encoder: Encoder. Returns a CUDA error code.
extern "C" int kvskim_encode_sketch(const void* key_cache, int element, int64_t block_stride, int64_t token_stride, int64_t head_stride,
                                    int block_size, const int64_t* slot_mapping, int tokens, const float* mean, const void* encode_matrix,
                                    const uint8_t* coefficient_bits, const int* coefficient_count, const int16_t* slot_coefficient,
                                    const uint8_t* slot_digit, uint8_t* records, int64_t pages, int heads, int head_dim, float key_scale,
                                    int encoder, int flags, cudaStream_t stream) {
  using namespace kvskim;
  if (encoder < kByTokens || encoder > kMany) return cudaErrorInvalidValue;
  if (tokens == 0 || heads == 0) return cudaSuccess;
  int processors = 0;
  const cudaError_t error = multiprocessors(processors);
  if (error != cudaSuccess) return error;
  EncodeSketch p{};
  if (!describe(p, element, block_stride, token_stride, head_stride, block_size)) return cudaErrorInvalidValue;
  p.keys = static_cast<const uint8_t*>(key_cache), p.slot_mapping = slot_mapping, p.tokens = tokens, p.mean = mean;
  p.encode_matrix = static_cast<const __nv_bfloat16*>(encode_matrix), p.coefficient_bits = coefficient_bits;
  p.coefficient_count = coefficient_count, p.slot_coefficient = slot_coefficient, p.slot_digit = slot_digit;
  p.records = records, p.pages = pages, p.heads = heads, p.key_scale = key_scale;
  return for_form(element, head_dim, [&](auto type, auto dim) {
    return launch_encode<decltype(type)::value, decltype(dim)::value>(p, encoder, processors, flags, stream);
  });
}

// The same for several layers, whose caches and records have one form, with the kernel for few slots: by so many launches as it takes. layers: EncodeLayer.
extern "C" int kvskim_encode_sketch_layers(const void* layers, int count, int element, int64_t block_stride, int64_t token_stride, int64_t head_stride,
                                           int block_size, int tokens, int64_t pages, int heads, int head_dim, int flags, cudaStream_t stream) {
  using namespace kvskim;
  if (count < 0) return cudaErrorInvalidValue;
  if (tokens == 0 || heads == 0) return cudaSuccess;
  int processors = 0;
  cudaError_t error = multiprocessors(processors);
  if (error != cudaSuccess) return error;
  EncodeLayers all{};
  if (!describe(all.shared, element, block_stride, token_stride, head_stride, block_size)) return cudaErrorInvalidValue;
  all.shared.tokens = tokens, all.shared.pages = pages, all.shared.heads = heads;
  const EncodeLayer* from = static_cast<const EncodeLayer*>(layers);
  for (; count > 0 && error == cudaSuccess; from += kFewLayers, count -= kFewLayers) {
    const int now = count < kFewLayers ? count : kFewLayers;
    for (int i = 0; i < now; ++i) all.layer[i] = from[i];
    error = for_form(element, head_dim, [&](auto type, auto dim) {
      return launch_encode_layers<decltype(type)::value, decltype(dim)::value>(all, now, processors, flags, stream);
    });
    flags |= kOverlapPrevious;  // the launches behind the first wait for nothing but that one
  }
  return error;
}
