// encode_sketch for launches of few slots, as in decode steps: little of an SM, and little time.
//
// The encoder that keeps encode_matrix on the SM (encode_sketch_resident.cuh) needs a whole SM, and so in a decode step waits until the
// kernels beside it have left one, to find in 15 steps of 16 that no page is complete. Here a CTA has 128 threads and a few KB of shared
// memory, fits beside them, and leaves as soon as it has seen its slots.
//
// A CTA makes one 32-bit word of the record of a page and kv head in each of the four lanes of a quad (sketch_format.cuh): 16 bytes, whose
// digits belong to four units, one at each bit position, and so to four modes. Larger head dims share the 16 bytes among CTAs. It takes
//   - the modes of the page: a thread makes one to four of them for two channels, in float32, into shared memory;
//   - the coefficients: 8, 16 or 32 lanes make one byte, that is, multiply the four rows of encode_matrix whose digits it holds by the
//     vectors of their modes. The rows come straight from global memory into registers, ahead of the keys, and stay there if more pages
//     are complete. A row whose digits lie in several bytes is multiplied for each of them, by the same instructions in the same order, so
//     that all of its digits are of one code.
// A slot holds a digit of a coefficient of its own mode; the scores rest on that too.
//
// A launch serves several layers whose caches have one form, as many as its parameters have room for: a decode step makes the records of all layers at once.
#pragma once
#include "encode_sketch_resident.cuh"

namespace kvskim {
namespace {

constexpr int kFewThreads = 128;
constexpr int kFewWindow = 32;  // most slots of a CTA: a lane looks at one
constexpr int kFewLayers = 48;   // most layers of a launch

// What a layer has of its own.
struct EncodeLayer {
  const uint8_t* keys;
  const int64_t* slot_mapping;
  const float* mean;
  const __nv_bfloat16* encode_matrix;
  const uint8_t* coefficient_bits;
  const int16_t* slot_coefficient;
  const uint8_t* slot_digit;
  uint8_t* records;
  float key_scale;
};

struct EncodeLayers {
  EncodeSketch shared;  // but for what is in EncodeLayer
  int windows;          // of the slots of a layer: CTAs along z
  EncodeLayer layer[kFewLayers];

  __device__ __forceinline__ EncodeSketch of(int index) const {
    const EncodeLayer& own = layer[index];
    EncodeSketch all = shared;
    all.keys = own.keys, all.slot_mapping = own.slot_mapping, all.mean = own.mean, all.encode_matrix = own.encode_matrix;
    all.coefficient_bits = own.coefficient_bits, all.slot_coefficient = own.slot_coefficient, all.slot_digit = own.slot_digit;
    all.records = own.records, all.key_scale = own.key_scale;
    return all;
  }
};
static_assert(sizeof(EncodeLayers) <= 4096, "larger parameters need a newer driver");

template <ElementType Element, int D>
struct Few {
  static constexpr int element_bytes = Element == kFloat8E4M3 ? 1 : 2;
  static constexpr int lanes = D <= 128 ? 8 : D <= 256 ? 16 : 32;                      // that make a byte together
  static constexpr int bytes = kFewThreads / lanes;                                    // of a CTA
  static constexpr int parts = sketch::lane_words * sketch::unit_slots / bytes;        // of a record: CTAs
  static constexpr int key_pieces = D * element_bytes / 16;                            // of a key, 16 bytes
  static constexpr int pieces = D / 8;                                                 // of a row, 16 bytes
  static constexpr int lane_pieces = ceil_div(pieces, lanes);
  static constexpr int pairs = D / 2;                                                  // of channels
  static constexpr int sharers = pairs <= 32 ? 4 : pairs <= 64 ? 2 : 1;                // threads that make the modes of a pair of channels
  static constexpr int thread_modes = sketch::positions / sharers;
  static constexpr int most_ctas = D <= 128 ? 6 : D <= 256 ? 5 : 4;                    // that registers allow on an SM
  static_assert(D % 32 == 0 && parts * bytes == sketch::record_bytes, "");
};

// Keys of a page and kv head into shared memory, [token][channel]. The copies are not waited for.
template <class P>
__device__ __forceinline__ void copy_keys(uint4* to, const PageKeys& from, int thread) {
  const uint32_t address = shared_address(to);
#pragma unroll 1
  for (int i = thread; i < kPageTokens * P::key_pieces; i += kFewThreads)
    copy16(address + 16 * i, from.token(i / P::key_pieces) + 16 * (i % P::key_pieces));
}

// Two neighbouring channels of a token.
template <ElementType Element>
__device__ __forceinline__ float2 key_pair(const uint8_t* keys, float key_scale) {
  if constexpr (Element == kFloat8E4M3) {
    const float2 v = unpack(widen(*reinterpret_cast<const uint16_t*>(keys)), true);
    return make_float2(v.x * key_scale, v.y * key_scale);
  } else {
    return unpack(*reinterpret_cast<const uint32_t*>(keys), Element == kFloat16);
  }
}

// The four modes of a page, one for each bit position. Channels 8 p + 4 h .. 8 p + 4 h + 3 of a mode lie at [h][p], so that neighbouring
// lanes, which read neighbouring p, read neighbouring 16 bytes.
template <class P, ElementType Element>
__device__ __forceinline__ void make_page_modes(float4 (&vectors)[sketch::positions][2][P::pieces], const float4 (&weights)[sketch::positions][4],
                                                const uint4* keys, const float2* mean, float key_scale, int thread) {
#pragma unroll 1
  for (int i = thread; i < P::pairs * P::sharers; i += kFewThreads) {
    const int pair = i % P::pairs, first = i / P::pairs * P::thread_modes;
    const uint8_t* const from = reinterpret_cast<const uint8_t*>(keys) + 2 * pair * P::element_bytes;
    const float2 center = mean[pair];
    float2 sum[P::thread_modes] = {};
#pragma unroll
    for (int group = 0; group < kPageTokens / 4; ++group) {
      float2 key[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        key[j] = key_pair<Element>(from + (4 * group + j) * 16 * P::key_pieces, key_scale);
        key[j].x -= center.x, key[j].y -= center.y;
      }
#pragma unroll
      for (int mode = 0; mode < P::thread_modes; ++mode) {
        const float4 w = weights[first + mode][group];
        sum[mode].x += w.x * key[0].x, sum[mode].y += w.x * key[0].y;
        sum[mode].x += w.y * key[1].x, sum[mode].y += w.y * key[1].y;
        sum[mode].x += w.z * key[2].x, sum[mode].y += w.z * key[2].y;
        sum[mode].x += w.w * key[3].x, sum[mode].y += w.w * key[3].y;
      }
    }
#pragma unroll
    for (int mode = 0; mode < P::thread_modes; ++mode)
      reinterpret_cast<float2*>(&vectors[first + mode][pair / 2 % 2][pair / 4])[pair % 2] = sum[mode];
  }
}

__device__ __forceinline__ float multiply_piece(float sum, const uint4& row, const float4& low, const float4& high) {
  const float2 a = unpack(row.x, false), b = unpack(row.y, false), c = unpack(row.z, false), d = unpack(row.w, false);
  sum += a.x * low.x, sum += a.y * low.y, sum += b.x * low.z, sum += b.y * low.w;
  sum += c.x * high.x, sum += c.y * high.y, sum += d.x * high.z, sum += d.y * high.w;
  return sum;
}

template <ElementType Element, int D>
__global__ void __launch_bounds__(kFewThreads, Few<Element, D>::most_ctas) encode_sketch_few_kernel(const __grid_constant__ EncodeLayers layers) {
  using P = Few<Element, D>;
  __shared__ uint4 keys[kPageTokens * P::key_pieces];
  __shared__ float4 mean[D / 4];
  __shared__ float4 vectors[sketch::positions][2][P::pieces];
  __shared__ float4 weights[sketch::positions][kPageTokens / 4];  // T of the four modes
  const int thread = threadIdx.x, lane = thread & 31, head = blockIdx.y;
  const int layer = blockIdx.z / layers.windows, slot_window = blockIdx.z - layer * layers.windows;
  const EncodeSketch parameters = layers.of(layer);
  wait_previous_kernel();
  allow_next_kernel();

  const int token = slot_window * parameters.window + lane;
  const int64_t slot = lane < parameters.window && token < parameters.tokens ? parameters.slot_mapping[token] : -1;
  const bool complete = slot >= 0 && (slot & 15) == 15 && (slot >> 4) < parameters.pages;
  const int own_page = complete ? int(slot >> 4) : 0;
  uint32_t left = __ballot_sync(kAllLanes, complete);
  if (left == 0) return;

  // Which byte, of the 16 that word `word` of the quad's lanes makes; and the share of this lane in it.
  constexpr int word_parts = P::parts / sketch::lane_words;
  const int word = blockIdx.x / word_parts, share = thread % P::lanes;
  const int unit_byte = blockIdx.x % word_parts * P::bytes + thread / P::lanes;
  int row[sketch::positions];
  uint32_t digit[sketch::positions];
#pragma unroll
  for (int position = 0; position < sketch::positions; ++position) {
    const int at = head * slots + format_tables.unit_slot[position][word] + unit_byte;
    row[position] = uint16_t(parameters.slot_coefficient[at]);
    digit[position] = parameters.slot_digit[at];
  }
  int page = __shfl_sync(kAllLanes, own_page, __ffs(left) - 1);
  copy_keys<P>(keys, PageKeys(parameters, head, page), thread);
#pragma unroll 1
  for (int i = thread; i < D / 4; i += kFewThreads) copy16(shared_address(mean + i), parameters.mean + head * D + 4 * i);
  commit_copies();

  uint32_t bits[sketch::positions];  // of the codes; 0, whose only code is 0, if the digit is of none
  uint4 rows[sketch::positions][P::lane_pieces];
#pragma unroll
  for (int position = 0; position < sketch::positions; ++position) {
    const int at = head * slots + (row[position] & (slots - 1));
    const bool used = digit[position] <= 3;
    bits[position] = used ? parameters.coefficient_bits[at] : 0;
#pragma unroll
    for (int i = 0; i < P::lane_pieces; ++i) {
      const int piece = share + i * P::lanes;
      rows[position][i] = used && piece < P::pieces ? load16(parameters.encode_matrix + int64_t(at) * D + piece * 8) : make_uint4(0, 0, 0, 0);
    }
  }
  if (thread < sketch::positions * kPageTokens) {
    const int position = thread / kPageTokens;
    reinterpret_cast<float*>(weights)[thread] = token_weight(thread % kPageTokens, format_tables.unit_mode[position][word]);
  }

#pragma unroll 1
  while (true) {
    wait_copies<0>();
    __syncthreads();
    make_page_modes<P, Element>(vectors, weights, keys, reinterpret_cast<const float2*>(mean), parameters.key_scale, thread);
    __syncthreads();
    uint8_t* const record = parameters.records + (int64_t(page) * parameters.heads + head) * sketch::record_bytes;
    left &= left - 1;
    if (left != 0) {
      page = __shfl_sync(kAllLanes, own_page, __ffs(left) - 1);
      copy_keys<P>(keys, PageKeys(parameters, head, page), thread);
      commit_copies();
    }
    float sum[sketch::positions] = {};
#pragma unroll
    for (int position = 0; position < sketch::positions; ++position) {
#pragma unroll
      for (int i = 0; i < P::lane_pieces; ++i) {
        const int piece = share + i * P::lanes;
        // Rows are unpacked anew for every page: unpacked they would take twice the registers.
        uint4& row = rows[position][i];
        renew(row.x), renew(row.y), renew(row.z), renew(row.w);
        if (piece < P::pieces) sum[position] = multiply_piece(sum[position], row, vectors[position][0][piece], vectors[position][1][piece]);
      }
    }
#pragma unroll
    for (int distance = P::lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (float& x : sum) x += __shfl_xor_sync(kAllLanes, x, distance);
    }
    uint32_t byte = 0;
#pragma unroll
    for (int position = 0; position < sketch::positions; ++position) {
      renew(bits[position]);  // else the loop would wait for them before it makes modes
      const int half_range = 1 << bits[position] >> 1;
      // clamp(floor(x), -half_range, half_range - 1) + half_range
      const uint32_t code = __viaddmin_s32_relu(floor_to_byte(sum[position]), half_range, 2 * half_range - 1);
      byte |= (code >> (2 * digit[position] & 6) & 3) << 2 * position;
    }
    if (share == 0) record[sketch::byte_address(word, unit_byte / 4, unit_byte % 4)] = uint8_t(byte);
    if (left == 0) return;
  }
}

// Slots of a CTA: as few as leave no more than four CTAs to an SM, so that pages which complete together are made side by side.
int few_window(int tokens, int slot_ctas, int processors) {
  int window = 1;
  while (window < kFewWindow && ceil_div(tokens, window) * slot_ctas > 4 * processors) window *= 2;
  return window;
}

template <ElementType Element, int D>
cudaError_t launch_encode_layers(EncodeLayers& layers, int count, int processors, int flags, cudaStream_t stream) {
  const auto kernel = encode_sketch_few_kernel<Element, D>;
  // It leaves most of the shared memory of an SM to the kernels beside it, so an SM that it comes to first should be set up for them.
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  constexpr int parts = Few<Element, D>::parts;
  layers.shared.window = few_window(layers.shared.tokens, layers.shared.heads * parts * count, processors);
  layers.windows = ceil_div(layers.shared.tokens, layers.shared.window);
  const dim3 grid(parts, layers.shared.heads, layers.windows * count);
  return launch(kernel, grid, kFewThreads, 0, stream, flags, layers);
}

template <ElementType Element, int D>
cudaError_t launch_encode_few(const EncodeSketch& all, int processors, int flags, cudaStream_t stream) {
  EncodeLayers layers{all};
  layers.layer[0] = {all.keys, all.slot_mapping, all.mean, all.encode_matrix, all.coefficient_bits, all.slot_coefficient, all.slot_digit, all.records,
                     all.key_scale};
  return launch_encode_layers<Element, D>(layers, 1, processors, flags, stream);
}

}  // namespace
}  // namespace kvskim
