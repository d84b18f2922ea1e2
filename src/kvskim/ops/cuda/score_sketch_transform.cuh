// From the modes of a page to the sum over its tokens of 2^logit: inverse DCT, exponentials, and their sum.
#pragma once
#include <type_traits>
#include <utility>

#include "common.cuh"
#include "score_sketch.cuh"

namespace kvskim {

template <class Body, int... I>
__device__ __forceinline__ void unrolled_(Body body, std::integer_sequence<int, I...>) {
  (body(std::integral_constant<int, I>{}), ...);
}
// body(0), ..., body(N - 1) with compile-time arguments.
template <int N, class Body>
__device__ __forceinline__ void unrolled(Body body) {
  unrolled_(body, std::make_integer_sequence<int, N>{});
}

// Inverse DCT of 16 points with mode 0 left out, split into even and odd modes; the DCT-IV parts go through complex FFTs of half the length.
// A rotation is a + tan b; its cosine is folded into the inputs (sketch_fold) or into the next butterfly: 24 + 30 + 16 operations.
__device__ __forceinline__ void even_part(float (&even)[8], float z2, float z4, float z6, float z8, float z10, float z12, float z14) {
  constexpr float t8 = sketch_tangent(4), c8 = sketch_cosine(4);
  const float v0 = fmaf(t8, z12, z4), v1 = fmaf(t8, z4, -z12);
  const float e0 = fmaf(c8, v0, z8), e3 = fmaf(-c8, v0, z8), e1 = fmaf(c8, v1, -z8), e2 = fmaf(-c8, v1, -z8);
  const float ur = z10 + z6, ui = z6 - z10;
  const float r0 = z2 + ur, i0 = z14 + ui, r1 = z2 - ur, i1 = z14 - ui;
  constexpr float t0 = sketch_tangent(2), t1 = sketch_tangent(10), k0 = sketch_cosine(2), k1 = sketch_cosine(10);
  const float a0 = fmaf(t0, i0, r0), a3 = fmaf(t0, r0, -i0), a2 = fmaf(t1, i1, r1), a1 = fmaf(t1, r1, -i1);
  even[0] = fmaf(k0, a0, e0), even[7] = fmaf(-k0, a0, e0), even[3] = fmaf(k0, a3, e3), even[4] = fmaf(-k0, a3, e3);
  even[1] = fmaf(k1, a1, e1), even[6] = fmaf(-k1, a1, e1), even[2] = fmaf(k1, a2, e2), even[5] = fmaf(-k1, a2, e2);
}

// The odd modes up to their last rotation, which is left to the exponentials.
struct OddPart {
  float re[4], im[4];
};
__device__ __forceinline__ OddPart odd_part(float z1, float z3, float z5, float z7, float z9, float z11, float z13, float z15) {
  constexpr float t4 = sketch_tangent(4), t12 = sketch_tangent(12);
  const float ar = fmaf(t4, z11, z5), ai = fmaf(-t4, z5, z11), br = z9 + z7, bi = z7 - z9;
  const float cr = fmaf(t12, z3, z13), ci = fmaf(-t12, z13, z3);
  const float s0r = z1 + br, s0i = z15 + bi, d0r = z1 - br, d0i = z15 - bi;
  const float s1r = ar + cr, s1i = ai + ci, d1r = ar - cr, d1i = ai - ci;
  return {{s0r + s1r, d0r + d1i, s0r - s1r, d0r - d1i}, {s0i + s1i, d0i - d1r, s0i - s1i, d0i + d1r}};
}

// 2^logit of tokens i and 15 - i in some order of the tokens, i < 8.
template <int I>
__device__ __forceinline__ void exponentials(const float (&even)[8], const OddPart& odd, float& x, float& y) {
  constexpr int k = I / 2;
  constexpr float t = sketch_tangent(4 * k + 1), c = sketch_cosine(4 * k + 1);
  const float rotated = I % 2 ? fmaf(t, odd.re[k], -odd.im[k]) : fmaf(t, odd.im[k], odd.re[k]), middle = even[I % 2 ? 7 - 2 * k : 2 * k];
  x = exp2_fast(fmaf(c, rotated, middle)), y = exp2_fast(fmaf(-c, rotated, middle));
}

// Sum over the 16 tokens of 2^logit.
__device__ __forceinline__ float token_sum(const float (&even)[8], const OddPart& odd) {
  float s[8];
  unrolled<8>([&](auto index) {
    float x, y;
    exponentials<decltype(index)::value>(even, odd, x, y);
    s[decltype(index)::value] = x + y;
  });
  return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

}  // namespace kvskim
