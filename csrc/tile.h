// The two products of attention, C[rows, columns] += A[rows, steps] * B[steps, columns], in registers.
//
// All operands are 32-bit words. With Float32Dot a word is one float; with BFloat16Dot it is a pair of neighbours along
// the reduced dimension, and one instruction multiplies and adds both. B is packed (pack.h): one step's words for
// `ldb` columns lie together. Every element of C is summed in the order of the steps, whatever the tile's shape.
#pragma once

#include "fetch.h"
#include "vec.h"

namespace specmemo {
namespace {

struct Float32Dot {
  static constexpr int kPerWord = 1;
  typedef float Word;
  static VecF multiply_add(VecF sum, VecF b, Word a) { return sum + splat(a) * b; }
};

#if defined(__AVX512BF16__)
struct BFloat16Dot {
  static constexpr int kPerWord = 2;
  typedef uint32_t Word;
  static VecF multiply_add(VecF sum, VecF b, Word a) {
    return (VecF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)b, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)));
  }
};
#endif

// C tile of ROWS x VECS vectors. `scale` null: C starts at zero; else C is multiplied by scale[row] first.
// Never inlined: alone, the accumulators stay in registers.
template <class Dot, int ROWS, int VECS, bool FETCH>
__attribute__((noinline)) void tile(const typename Dot::Word* a, int64_t lda, const float* b, int64_t ldb,
                                    int64_t steps, float* c, int64_t ldc, const float* scale, Fetch& fetch) {
  VecF sum[ROWS][VECS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v)
      sum[r][v] = scale == nullptr ? VecF{} : load<VecF>(c + r * ldc + v * kLanes) * splat(scale[r]);
  for (int64_t s = 0; s < steps; ++s) {
    if (FETCH) fetch.step();
    VecF column[VECS];
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v) column[v] = load<VecF>(b + s * ldb + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < VECS; ++v) sum[r][v] = Dot::multiply_add(sum[r][v], column[v], a[r * lda + s]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v) store(c + r * ldc + v * kLanes, sum[r][v]);
}

// The same for a whole strip of `vecs` vectors of columns.
template <class Dot, int ROWS, bool FETCH>
inline void strip(const typename Dot::Word* a, int64_t lda, const float* b, int64_t ldb, int64_t steps, float* c,
                  int64_t ldc, const float* scale, int64_t vecs, Fetch& fetch) {
  int64_t v = 0;
  for (; v + kTileVecs <= vecs; v += kTileVecs)
    tile<Dot, ROWS, kTileVecs, FETCH>(a, lda, b + v * kLanes, ldb, steps, c + v * kLanes, ldc, scale, fetch);
  for (; v < vecs; ++v)
    tile<Dot, ROWS, 1, FETCH>(a, lda, b + v * kLanes, ldb, steps, c + v * kLanes, ldc, scale, fetch);
}

template <class Dot, bool FETCH>
inline void multiply_rows(int rows, const typename Dot::Word* a, int64_t lda, const float* b, int64_t ldb,
                          int64_t steps, float* c, int64_t ldc, const float* scale, int64_t vecs, Fetch& fetch) {
  static_assert(kTileRows <= 6, "one case per tile height");
  switch (rows) {
    case 1:
      return strip<Dot, 1, FETCH>(a, lda, b, ldb, steps, c, ldc, scale, vecs, fetch);
    case 2:
      return strip<Dot, 2, FETCH>(a, lda, b, ldb, steps, c, ldc, scale, vecs, fetch);
    case 3:
      return strip<Dot, 3, FETCH>(a, lda, b, ldb, steps, c, ldc, scale, vecs, fetch);
#if defined(__AVX512F__) || defined(__aarch64__)
    case 4:
      return strip<Dot, 4, FETCH>(a, lda, b, ldb, steps, c, ldc, scale, vecs, fetch);
    case 5:
      return strip<Dot, 5, FETCH>(a, lda, b, ldb, steps, c, ldc, scale, vecs, fetch);
    case 6:
      return strip<Dot, 6, FETCH>(a, lda, b, ldb, steps, c, ldc, scale, vecs, fetch);
#endif
  }
}

template <class Dot>
inline void multiply(int rows, const typename Dot::Word* a, int64_t lda, const float* b, int64_t ldb, int64_t steps,
                     float* c, int64_t ldc, const float* scale, int64_t vecs, Fetch& fetch) {
  if (fetch.done()) {
    multiply_rows<Dot, false>(rows, a, lda, b, ldb, steps, c, ldc, scale, vecs, fetch);
  } else {
    multiply_rows<Dot, true>(rows, a, lda, b, ldb, steps, c, ldc, scale, vecs, fetch);
  }
}

}  // namespace
}  // namespace specmemo
