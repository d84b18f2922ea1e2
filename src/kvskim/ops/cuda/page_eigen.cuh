// Eigen-decomposition of the 16 keys of a page by one warp, and the 4- and 8-bit codes of the records made of it.
// Twin of src/kvskim/selectors/page_eigen.py.
//
// The Gram matrix of the centred keys, G = C C^T (16 x 16), is diagonalised by one-sided Jacobi rotations (Hestenes 1958): columns of G are
// rotated in pairs until all are orthogonal; a column is then lambda u. Lane (half h, column i) holds rows 8 h .. 8 h + 7 of column i, so the
// eight disjoint rotations of a round are one exchange with lane ^ round, and rounds 1..15 meet every pair once.
#pragma once
#include "attend_instructions.cuh"
#include "common.cuh"

namespace kvskim {
namespace {

constexpr float kSmallestEigenvalue = 1e-10f;
constexpr float kSmallestScale = 1e-30f;
constexpr uint32_t kBFloat16NaN = 0x7fc0u;
constexpr int kSweeps = 12;  // at most; pages converge in five to seven
// Of the trace, squared: a column below it is rounding noise, neither rotated nor kept.
constexpr float kNoise = 1e-14f;
// Squared cosine of two columns that count as orthogonal. A sweep squares what is left, so one sweep after this is exact.
constexpr float kOrthogonal = 1e-10f;

// Floats from a row to the next: 16 rows start in different banks.
__host__ __device__ constexpr int row_stride(int head_dim) { return head_dim + 4; }

__device__ __forceinline__ float warp_maximum(float x) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, distance));
  return x;
}

__device__ __forceinline__ void store16(uint8_t* to, uint32_t value) { *reinterpret_cast<uint16_t*>(to) = uint16_t(value); }
__device__ __forceinline__ uint32_t bfloat16_bits(float x) { return pack<false>(x, 0.f) & 0xffffu; }

// ---- codes: value ~ code * scale, the scale as it is stored ----

__device__ __forceinline__ uint32_t scale_bits(float largest_value, int bits) {
  const uint32_t scale = bfloat16_bits(__fdiv_rn(largest_value, bits == 8 ? 127.f : 7.f));
  return __uint_as_float(scale << 16) < kSmallestScale ? 0u : scale;
}
__device__ __forceinline__ int code_of(float value, uint32_t scale, int bits) {
  if (scale == 0) return 0;
  const int largest = bits == 8 ? 127 : 7;
  return min(max(__float2int_rn(__fdiv_rn(value, __uint_as_float(scale << 16))), -largest), largest);
}

// Codes of a vector in shared memory, by a whole warp; returns the bits of the scale. Four-bit codes: the even one in the low nibble.
__device__ uint32_t code_vector(uint8_t* codes, const float* values, int length, int bits, int lane) {
  float largest = 0.f;
  for (int i = lane; i < length; i += 32) largest = fmaxf(largest, fabsf(values[i]));
  const uint32_t scale = scale_bits(warp_maximum(largest), bits);
  if (bits == 8) {
    for (int i = lane; i < length; i += 32) codes[i] = uint8_t(code_of(values[i], scale, 8));
  } else {
    for (int i = lane; i < length / 2; i += 32)
      codes[i] = uint8_t((code_of(values[2 * i], scale, 4) & 15) | (code_of(values[2 * i + 1], scale, 4) & 15) << 4);
  }
  return scale;
}

// ---- decomposition ----

// This lane's half column of the Gram matrix of 16 rows; returns the trace, in every lane.
__device__ float gram_column(float (&column)[8], const float* rows, int head_dim, int lane) {
  const int stride = row_stride(head_dim);
  const float* const own = rows + (lane & 15) * stride;
  const float* const others = rows + (lane >> 4) * 8 * stride;
  float square = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) column[i] = 0.f;
  for (int channel = 0; channel < head_dim; channel += 4) {
    const float4 x = *reinterpret_cast<const float4*>(own + channel);
    square += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 y = *reinterpret_cast<const float4*>(others + i * stride + channel);
      column[i] += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
    }
  }
#pragma unroll
  for (int distance = 8; distance; distance /= 2) square += __shfl_xor_sync(kAllLanes, square, distance);
  return square;
}

// Sum over both halves of a column; the same bits in both lanes.
__device__ __forceinline__ float both_halves(float x) { return x + __shfl_xor_sync(kAllLanes, x, 16); }

__device__ __forceinline__ float half_dot(const float (&x)[8], const float (&y)[8]) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += x[i] * y[i];
  return sum;
}

// Largest `rank` eigenpairs of the matrix: unit vectors into vectors[k][token], energies[k] in descending order, at least
// kSmallestEigenvalue. A direction that is only rounding noise becomes a zero vector.
__device__ void decompose_gram(float (&column)[8], float trace, int rank, float* vectors, float* energies, int lane) {
  const float inverse_trace = trace > 1e-30f ? 1.f / trace : 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) column[i] = inverse_trace == 0.f ? 0.f : column[i] * inverse_trace;
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    bool orthogonal = true;
#pragma unroll 1
    for (int round = 1; round < kPageTokens; ++round) {
      float other[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) other[i] = __shfl_xor_sync(kAllLanes, column[i], round);
      const float own_square = both_halves(half_dot(column, column)), product = both_halves(half_dot(column, other));
      const float other_square = __shfl_xor_sync(kAllLanes, own_square, round);
      if (own_square > kNoise && other_square > kNoise && product != 0.f) {
        orthogonal &= product * product <= kOrthogonal * own_square * other_square;
        const bool lower = (lane & 15) < ((lane ^ round) & 15);
        const float zeta = (lower ? other_square - own_square : own_square - other_square) / (2.f * product);
        const float tangent = copysignf(1.f, zeta) / (fabsf(zeta) + sqrtf(1.f + zeta * zeta));
        const float cosine = 1.f / sqrtf(1.f + tangent * tangent), sine = (lower ? -tangent : tangent) * cosine;
#pragma unroll
        for (int i = 0; i < 8; ++i) column[i] = cosine * column[i] + sine * other[i];
      }
    }
    if (__all_sync(kAllLanes, orthogonal)) break;
  }
  const float square = both_halves(half_dot(column, column));
  int larger = 0;  // columns ahead of this one: its place in descending order
#pragma unroll
  for (int i = 0; i < kPageTokens; ++i) {
    const float against = __shfl_sync(kAllLanes, square, i);
    larger += against > square || (against == square && i < (lane & 15));
  }
  if (larger < rank) {
    const float inverse = square > kNoise ? 1.f / sqrtf(square) : 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) vectors[larger * kPageTokens + (lane >> 4) * 8 + i] = column[i] * inverse;
    if (lane < kPageTokens) energies[larger] = fmaxf(sqrtf(square) * trace, kSmallestEigenvalue);
  }
}

}  // namespace
}  // namespace kvskim
