// Sums over the lanes of several vectors at once.
#pragma once

#include "pack.h"

namespace specmemo {
namespace {

// Folds four vectors into one: lane i of a quarter is the sum of rows[i]'s lanes of that quarter.
inline VecF fold_quad(const VecF rows[4]) {
#if defined(__AVX512F__)
  const auto pair = [](VecF a, VecF b) {
    return _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
  };
  const __m512d a = (__m512d)pair(rows[0], rows[1]), b = (__m512d)pair(rows[2], rows[3]);
  return (VecF)_mm512_add_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
#elif defined(__AVX2__)
  const auto pair = [](VecF a, VecF b) {
    return _mm256_add_ps(_mm256_unpacklo_ps((__m256)a, (__m256)b), _mm256_unpackhi_ps((__m256)a, (__m256)b));
  };
  const __m256d a = (__m256d)pair(rows[0], rows[1]), b = (__m256d)pair(rows[2], rows[3]);
  return (VecF)_mm256_add_ps((__m256)_mm256_unpacklo_pd(a, b), (__m256)_mm256_unpackhi_pd(a, b));
#elif defined(__aarch64__)
  const auto pair = [](VecF a, VecF b) { return vpaddq_f32((float32x4_t)a, (float32x4_t)b); };
  return (VecF)vpaddq_f32(pair(rows[0], rows[1]), pair(rows[2], rows[3]));
#else
  VecF lanes[4] = {rows[0], rows[1], rows[2], rows[3]};
  transpose(lanes);
  return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
#endif
}

// Folds quads to the sums of all their rows, in row order.
inline VecF join_quads(const VecF quads[kLanes / 4]) {
#if defined(__AVX512F__)
  const auto halve = [](VecF a, VecF b) {
    return (VecF)_mm512_add_ps(_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x88),
                               _mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xdd));
  };
  return halve(halve(quads[0], quads[1]), halve(quads[2], quads[3]));
#elif defined(__AVX2__)
  return (VecF)_mm256_add_ps(_mm256_permute2f128_ps((__m256)quads[0], (__m256)quads[1], 0x20),
                             _mm256_permute2f128_ps((__m256)quads[0], (__m256)quads[1], 0x31));
#else
  return quads[0];
#endif
}

// values[r * stride + v] = the sum of the lanes of sums[r][v]. Always inlined: with the address of its sums in a call,
// a caller's loop would store them in every round.
template <int ROWS, int COLUMNS>
__attribute__((always_inline)) inline void fold_tile(const VecF (*sums)[COLUMNS], float* values, int64_t stride) {
  constexpr int kCount = ROWS * COLUMNS, kVecs = (kCount + kLanes - 1) / kLanes;
  alignas(64) float folded[kVecs * kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < kVecs; ++i) {
    VecF quads[kLanes / 4];
#pragma GCC unroll 4
    for (int q = 0; q < kLanes / 4; ++q) {
      VecF rows[4] = {};
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k)
        if (const int at = i * kLanes + q * 4 + k; at < kCount) rows[k] = sums[at / COLUMNS][at % COLUMNS];
      quads[q] = fold_quad(rows);
    }
    store(folded + i * kLanes, join_quads(quads));
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < COLUMNS; ++v) values[r * stride + v] = folded[r * COLUMNS + v];
}

}  // namespace
}  // namespace specmemo
