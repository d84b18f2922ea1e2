// Byte order of the sketch record of 256 bytes (pattern c256), shared by the kernels that write it and that read it.
//
// A record is 1024 digits of two bits. Digits are counted by "slot" 0..1023, mode after mode (0..15), 32 slots a half row. Sixteen slots of
// one mode make a "unit": one bit position of one 32-bit word of each of the four lanes of a quad. Lane q reads the 16 bytes at 64 j + 16 q,
// j = 0..3, which are its words 4 j .. 4 j + 3; slot 4 q + i of a unit lies in byte i of lane q's word, bits [2 position, 2 position + 2).
// A mode owns consecutive words at ONE bit position, so a reader unpacks with one AND per register and folds 4^-position into a scale.
// Mode 0, which has the largest range, sits at the highest position; even modes come before odd ones, so that their half of the inverse
// transform is done first.
#pragma once
#include <stdint.h>

namespace kvskim {
namespace sketch {

constexpr int page_tokens = 16;
constexpr int modes = 16;
constexpr int slots = 1024;
constexpr int record_bytes = 256;
constexpr int half_row = 32;       // slots in a half row: one K of an int8 tensor-core multiply
constexpr int unit_slots = 16;     // slots in a unit
constexpr int units = slots / unit_slots;
constexpr int positions = 4;       // two-bit digits in a byte
constexpr int lane_words = 16;     // 32-bit words of a record held by one lane of a quad

// Consecutive words of one mode at one bit position; build_tables lists them in word order within each position.
struct Run {
  int position, mode, words;
};

struct Tables {
  short start[modes + 1];                  // first slot of a mode; start[16] = 1024
  uint8_t half_rows[modes];                // half rows of a mode
  uint8_t position[modes];                 // bit position of a mode
  uint8_t first_word[modes];               // first word of a mode at that position
  short unit_slot[positions][lane_words];  // first slot of the unit at (position, word)
  uint8_t unit_mode[positions][lane_words];
};

__host__ __device__ constexpr Tables build_tables() {
  constexpr Run runs[modes] = {{3, 0, 10}, {3, 1, 6},                           //
                               {2, 2, 6},  {2, 12, 2}, {2, 3, 4},  {2, 5, 4},   //
                               {1, 4, 4},  {1, 6, 4},  {1, 7, 4},  {1, 9, 4},   //
                               {0, 8, 4},  {0, 10, 4}, {0, 14, 2}, {0, 11, 2}, {0, 13, 2}, {0, 15, 2}};
  Tables table{};
  int next_word[positions] = {0, 0, 0, 0};
  for (int r = 0; r < modes; ++r) {
    const Run run = runs[r];
    table.half_rows[run.mode] = uint8_t(run.words / 2);
    table.position[run.mode] = uint8_t(run.position);
    table.first_word[run.mode] = uint8_t(next_word[run.position]);
    next_word[run.position] += run.words;
  }
  for (int mode = 0; mode < modes; ++mode) table.start[mode + 1] = short(table.start[mode] + half_row * table.half_rows[mode]);
  for (int mode = 0; mode < modes; ++mode) {
    for (int unit = 0; unit < 2 * table.half_rows[mode]; ++unit) {
      const int word = table.first_word[mode] + unit;
      table.unit_slot[table.position[mode]][word] = short(table.start[mode] + unit_slots * unit);
      table.unit_mode[table.position[mode]][word] = uint8_t(mode);
    }
  }
  return table;
}
constexpr Tables tables = build_tables();  // for compile-time use; copy it into a __constant__ object to index it at run time

// Compile-time lookups. For a slot known only at run time use the tables.
__host__ __device__ constexpr int slot_mode(int slot) {
  int mode = 0;
  while (slot >= build_tables().start[mode + 1]) ++mode;
  return mode;
}
__host__ __device__ constexpr int byte_address(int word, int lane, int byte) { return 64 * (word / 4) + 16 * lane + 4 * (word % 4) + byte; }
__host__ __device__ constexpr int slot_byte(int slot) {
  const Tables table = build_tables();
  const int mode = slot_mode(slot);
  const int within = slot - table.start[mode];
  return byte_address(table.first_word[mode] + within / unit_slots, (within % unit_slots) / 4, within % 4);
}
__host__ __device__ constexpr int slot_shift(int slot) { return 2 * build_tables().position[slot_mode(slot)]; }

// The other direction, for a record byte 0..255: its word (0..15), lane (0..3) and byte within the word (0..3).
__host__ __device__ constexpr int byte_word(int address) { return 4 * (address / 64) + (address / 4) % 4; }
__host__ __device__ constexpr int byte_lane(int address) { return (address / 16) % 4; }
__host__ __device__ constexpr int byte_in_word(int address) { return address % 4; }

static_assert(tables.start[modes] == slots, "the pattern fills the record");
static_assert(tables.half_rows[0] == 5 && tables.half_rows[1] == 3 && tables.half_rows[2] == 3 && tables.half_rows[10] == 2 && tables.half_rows[15] == 1,
              "pattern c256");
static_assert(slot_byte(0) == 0 && slot_shift(0) == 6, "mode 0 starts at byte 0, highest position");
static_assert(slot_byte(tables.start[12]) == 64 * 1 + 4 * 2 && slot_shift(tables.start[12]) == 4, "mode 12 starts at word 6");
static_assert(slot_byte(slots - 1) == 255 && slot_shift(slots - 1) == 0, "the last slot is the last byte");
static_assert(byte_address(byte_word(203), byte_lane(203), byte_in_word(203)) == 203, "byte addresses invert");

}  // namespace sketch
}  // namespace kvskim
