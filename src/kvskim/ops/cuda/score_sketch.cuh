// Query weights of the sketch selector as prepare_sketch.cu writes them and score_sketch.cu reads them.
//
// A register of a record holds one bit position of four digits after one AND: digit x 4^position, which fits an unsigned byte; 4^-position
// goes into the scale of the mode. Two units (32 digits, a half row) make one m16n8k32 (u8 x s8). The products run word by word, even modes
// first, so that their half of the inverse transform is done before the accumulators of the odd modes exist.
#pragma once
#include "sketch_format.cuh"

namespace kvskim {

constexpr int kSlots = sketch::slots, kModes = sketch::modes, kProducts = kSlots / sketch::half_row;

// One int8 matrix product: a half row of a mode.
struct SketchProduct {
  int mode, position, word;
  bool first;  // the first of its mode: starts the accumulator
};
struct SketchProgram {
  SketchProduct product[kProducts];
  int even;                          // products of even modes, which come first
  int start[kModes], rows[kModes];   // of a mode: first slot, half rows
  int position[kModes];
  int index[kModes][8];              // product of each half row of a mode
};

constexpr SketchProgram make_sketch_program() {
  const sketch::Tables format = sketch::build_tables();
  SketchProgram p{};
  int n = 0;
  for (int parity = 0; parity < 2; ++parity) {
    for (int word = 0; word < sketch::lane_words; word += 2) {
      for (int position = sketch::positions - 1; position >= 0; --position) {
        const int mode = format.unit_mode[position][word], half_row = (word - format.first_word[mode]) / 2;
        if ((mode & 1) != parity) continue;
        p.index[mode][half_row] = n;
        p.product[n++] = {mode, position, word, half_row == 0};
      }
    }
    if (!parity) p.even = n;
  }
  for (int mode = 0; mode < kModes; ++mode) {
    p.start[mode] = format.start[mode];
    p.rows[mode] = format.half_rows[mode];
    p.position[mode] = format.position[mode];
  }
  return p;
}
constexpr SketchProgram kSketchProgram = make_sketch_program();
static_assert(kSketchProgram.start[15] + sketch::half_row * kSketchProgram.rows[15] == kSlots, "the modes fill the record");

// Bytes of weights and of scales per query head column. A request and kv head has one block of C = 4, 8 or 16 columns, or several of 16.
// Weights of 4 or 8 columns: [product / 2][column][q] of 16 bytes, which lane (column, q) of the tensor core reads: byte 8 (product % 2) + 4 h + i
// is the weight of slot 16 h + 4 q + i of the half row. Of 16 columns: [product][column / 2][q] of 16 bytes, byte 8 h + 4 (column % 2) + i.
// Scales: [mode][column / 2] of (scale, scale, offset, offset).
constexpr int kWeightBytes = kSlots, kScaleBytes = kModes * 8;

// cos(pi k / 32)
__host__ __device__ constexpr double sketch_cosine(int k) {
  constexpr double table[17] = {1.0, 0.99518472667219693, 0.98078528040323043, 0.95694033573220882, 0.92387953251128674,
                                0.88192126434835505, 0.83146961230254524, 0.77301045336273699, 0.70710678118654757, 0.63439328416364549,
                                0.55557023301960218, 0.47139673682599764, 0.38268343236508977, 0.29028467725446233, 0.19509032201612825,
                                0.098017140329560604, 0.0};
  return table[k];
}
__host__ __device__ constexpr double sketch_tangent(int k) { return sketch_cosine(16 - k) / sketch_cosine(k); }

// Factor of a mode's value before it enters the inverse transform of the score kernel: log2(e), the norm of the orthonormal DCT, and
// the cosines of the rotations that act on single inputs. Mode 0 does not enter it: its part of the score is left in nats.
__host__ __device__ constexpr double sketch_fold(int mode) {
  if (mode == 0) return 0.25;
  const double rotation = mode == 5 || mode == 11 ? sketch_cosine(4)
                          : mode == 6 || mode == 7 || mode == 8 || mode == 9 || mode == 10 ? sketch_cosine(8)
                          : mode == 3 || mode == 13 ? sketch_cosine(12) : 1.0;
  return 0.35355339059327376 * rotation * 1.4426950408889634;
}

// The accumulators start from these bits, 1.5 x 2^23: an int32 sum below 2^22 then IS a float32 after the bits, with no conversion.
constexpr int kMagicBits = 0x4B400000;
constexpr float kMagic = 12582912.f;

}  // namespace kvskim
