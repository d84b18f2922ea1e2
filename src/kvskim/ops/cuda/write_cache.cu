// Writes the new rows of keys and values into their pages, so that the kernels behind may begin while it runs.
//
// A write by another kernel is a wall: programmatic dependent launches behind it begin when it has ended. This one lets them in as soon as the kernels
// ahead have ended, so the query preparation makes its weights while the keys are written. It reads and writes a few KB and is bound by its launch.
// What is in host memory it writes over the bus, and to the copy on the GPU where the page of the token is hot.
#include "common.cuh"

namespace kvskim {
namespace {

constexpr int kWriteThreads = 256;

// Rows of one tensor, and where they go. All distances are in bytes.
struct RowCopy {
  const uint8_t* from;
  int64_t from_token, from_head;
  uint8_t* to;
  int64_t to_block, to_token, to_head;
  int pieces_per_head, pieces;  // of 16 bytes: of a head, of a token
};

// A hot cache of (page, head) pairs of what is in host memory. Distances in bytes.
struct HotCache {
  const int* directory;  // [pages, heads]: slot + 1 where a pair is hot, else 0 or less
  uint8_t* slots;
  int64_t to_slot, to_token;
  int at[2];  // where in a slot the rows of each part begin; negative: they are not in host memory
};

struct WriteArguments {
  RowCopy part[2];
  const int64_t* slots;  // of each token: block * block_size + token in block; negative: write nothing
  unsigned block_size;
  int heads;
  HotCache hot;
};

// TIERED: the values are in host memory, in pages; or both parts are, and all blocks are pages.
template <bool TIERED>
__global__ void __launch_bounds__(kWriteThreads) write_cache_kernel(const __grid_constant__ WriteArguments p) {
  const int token = blockIdx.x;
  const int64_t slot = p.slots[token];
  // In this order: what the kernels ahead have written is complete when the kernel behind begins (kQueriesSettled).
  wait_previous_kernel();
  allow_next_kernel();
  if (slot < 0) return;
  const unsigned block = static_cast<unsigned>(slot) / p.block_size, at = static_cast<unsigned>(slot) - block * p.block_size;
  for (int i = threadIdx.x; i < p.part[0].pieces + p.part[1].pieces; i += kWriteThreads) {
    const bool second = i >= p.part[0].pieces;
    const RowCopy& copy = p.part[second];
    const int piece = second ? i - p.part[0].pieces : i, head = piece / copy.pieces_per_head, within = 16 * (piece - head * copy.pieces_per_head);
    const uint8_t* from = copy.from + token * copy.from_token + head * copy.from_head + within;
    if constexpr (TIERED) {
      const unsigned page = static_cast<unsigned>(slot) / kPageTokens, in_page = static_cast<unsigned>(slot) % kPageTokens;
      // Both loads ahead of the stores, so that they take one latency together.
      const int place = second || p.hot.at[0] >= 0 ? p.hot.directory[static_cast<int64_t>(page) * p.heads + head] : 0;
      const uint4 row = load16(from);
      *reinterpret_cast<uint4*>(copy.to + (second ? page : block) * copy.to_block + (second ? in_page : at) * copy.to_token + head * copy.to_head + within) = row;
      if (place > 0)
        *reinterpret_cast<uint4*>(p.hot.slots + (place - 1) * p.hot.to_slot + p.hot.at[second] + in_page * p.hot.to_token + within) = row;
    } else {
      *reinterpret_cast<uint4*>(copy.to + block * copy.to_block + at * copy.to_token + head * copy.to_head + within) = load16(from);
    }
  }
}

}  // namespace
}  // namespace kvskim

// keys and values [tokens, heads, key_bytes or value_bytes] to key_cache and value_cache [blocks, block_size, heads, the same]. Strides and row
// lengths in bytes; all of them, and the addresses, multiples of 16. slots [tokens]; those of all tokens are below 2^32, and none occurs twice.
// hot not null: value_cache is [pages, 16, heads, value_bytes] in host memory, at an address that the device writes, and hot [hot slots, parts, 16,
// value_bytes] has copies of some (page, head), slot directory[page, head] - 1 where that is positive. parts: 1 for values, 2 for keys, then values: then
// key_cache is in host memory too, its blocks are pages and its rows as long. Page = slot / 16.
// With kOverlapPrevious the slots were complete before the kernel ahead began.
extern "C" int kvskim_write_cache(const void* keys, int64_t keys_token, int64_t keys_head, const void* values, int64_t values_token,
                                  int64_t values_head, void* key_cache, int64_t key_block, int64_t key_token, int64_t key_head, void* value_cache,
                                  int64_t value_block, int64_t value_token, int64_t value_head, const int64_t* slots, int tokens, int heads,
                                  int key_bytes, int value_bytes, int block_size, void* hot, const int* directory, int parts, int flags,
                                  cudaStream_t stream) {
  using namespace kvskim;
  if (tokens < 0 || heads < 1 || key_bytes < 16 || value_bytes < 16 || key_bytes % 16 || value_bytes % 16 || block_size < 1) return cudaErrorInvalidValue;
  if (hot && (!directory || parts < 1 || parts > 2 || (parts == 2 && (key_bytes != value_bytes || block_size != kPageTokens)))) return cudaErrorInvalidValue;
  if (tokens == 0) return cudaSuccess;
  const int part_bytes = kPageTokens * value_bytes;
  const WriteArguments p{{{static_cast<const uint8_t*>(keys), keys_token, keys_head, static_cast<uint8_t*>(key_cache), key_block, key_token, key_head,
                           key_bytes / 16, heads * (key_bytes / 16)},
                          {static_cast<const uint8_t*>(values), values_token, values_head, static_cast<uint8_t*>(value_cache), value_block,
                           value_token, value_head, value_bytes / 16, heads * (value_bytes / 16)}},
                         slots, static_cast<unsigned>(block_size), heads,
                         {directory, static_cast<uint8_t*>(hot), int64_t{parts} * part_bytes, value_bytes,
                          {parts == 2 ? 0 : -1, (parts - 1) * part_bytes}}};
  return launch(hot ? write_cache_kernel<true> : write_cache_kernel<false>, dim3(static_cast<unsigned>(tokens)), kWriteThreads, 0, stream, flags, p);
}
