// Writes the new rows of keys and values into their pages, so that the kernels behind may begin while it runs.
//
// A write by another kernel is a wall: programmatic dependent launches behind it begin when it has ended. This one lets them in as soon as the kernels
// ahead have ended, so the query preparation makes its weights while the keys are written. It reads and writes a few KB and is bound by its launch.
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

struct WriteArguments {
  RowCopy part[2];
  const int64_t* slots;  // of each token: block * block_size + token in block; negative: write nothing
  unsigned block_size;
};

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
    *reinterpret_cast<uint4*>(copy.to + block * copy.to_block + at * copy.to_token + head * copy.to_head + within) =
        load16(copy.from + token * copy.from_token + head * copy.from_head + within);
  }
}

}  // namespace
}  // namespace kvskim

// keys and values [tokens, heads, key_bytes or value_bytes] to key_cache and value_cache [blocks, block_size, heads, the same]. Strides and row
// lengths in bytes; all of them, and the addresses, multiples of 16. slots [tokens]; those of all tokens are below 2^32, and none occurs twice.
// With kOverlapPrevious the slots were complete before the kernel ahead began.
extern "C" int kvskim_write_cache(const void* keys, int64_t keys_token, int64_t keys_head, const void* values, int64_t values_token,
                                  int64_t values_head, void* key_cache, int64_t key_block, int64_t key_token, int64_t key_head, void* value_cache,
                                  int64_t value_block, int64_t value_token, int64_t value_head, const int64_t* slots, int tokens, int heads,
                                  int key_bytes, int value_bytes, int block_size, int flags, cudaStream_t stream) {
  using namespace kvskim;
  if (tokens < 0 || heads < 1 || key_bytes < 16 || value_bytes < 16 || key_bytes % 16 || value_bytes % 16 || block_size < 1) return cudaErrorInvalidValue;
  if (tokens == 0) return cudaSuccess;
  const WriteArguments p{{{static_cast<const uint8_t*>(keys), keys_token, keys_head, static_cast<uint8_t*>(key_cache), key_block, key_token, key_head,
                           key_bytes / 16, heads * (key_bytes / 16)},
                          {static_cast<const uint8_t*>(values), values_token, values_head, static_cast<uint8_t*>(value_cache), value_block,
                           value_token, value_head, value_bytes / 16, heads * (value_bytes / 16)}},
                         slots, static_cast<unsigned>(block_size)};
  return launch(write_cache_kernel, dim3(static_cast<unsigned>(tokens)), kWriteThreads, 0, stream, flags, p);
}
