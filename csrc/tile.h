// Products C[rows, columns] += A[rows, steps] * B[steps, columns] in registers, for attention's two products.
//
// All operands are 32-bit words. With Float32Dot a word is one float; with BFloat16Dot it is a pair of neighbours along
// the reduced dimension, and one instruction multiplies and adds both. B returns whole vectors of columns, from packed
// words or in place (pack.h). Every element of C is summed in the order of the steps, for all shapes of tiles.
#pragma once

#include "fetch.h"
#include "parts.h"
#include "vec.h"

namespace specmemo {
namespace {

struct Float32Dot {
  static constexpr int kPerWord = 1;
  typedef float Word;
  static VecF multiply_add(VecF sum, VecF b, Word a) { return sum + splat(a) * b; }
  static VecF multiply_add(VecF sum, VecF b, VecF a) { return sum + a * b; }
  // An even number of vectors of floats as words.
  static void store_words(void* out, const VecF* floats, int vecs) {
    std::memcpy(out, floats, sizeof(VecF) * static_cast<size_t>(vecs));
  }
};

#if defined(SPECMEMO_BF16_DOT)
struct BFloat16Dot {
  static constexpr int kPerWord = 2;
  typedef uint32_t Word;
#if defined(__AVX512BF16__)
  static VecF multiply_add(VecF sum, VecF b, Word a) {
    return multiply_add(sum, b, (VecF)_mm512_set1_epi32(static_cast<int>(a)));
  }
  static VecF multiply_add(VecF sum, VecF b, VecF a) {
    return (VecF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)b, (__m512bh)a);
  }
  static void store_words(void* out, const VecF* floats, int vecs) {
    for (int v = 0; v < vecs; v += 2)
      store(static_cast<float*>(out) + v * kLanes / 2, _mm512_cvtne2ps_pbh((__m512)floats[v + 1], (__m512)floats[v]));
  }
#else
  static VecF multiply_add(VecF sum, VecF b, Word a) {  // without a broadcast
    const bfloat16x4_t pair = (bfloat16x4_t)uint32x2_t{a, 0};
    return (VecF)vbfdotq_lane_f32((float32x4_t)sum, (bfloat16x8_t)b, pair, 0);
  }
  static VecF multiply_add(VecF sum, VecF b, VecF a) {
    return (VecF)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)b, (bfloat16x8_t)a);
  }
  static void store_words(void* out, const VecF* floats, int vecs) {
    for (int v = 0; v < vecs; ++v) BFloat16::store_vec(static_cast<uint16_t*>(out) + v * kLanes, floats[v]);
  }
#endif
};
#endif

// Tiles of nearly equal height: a last tile of one row would leave most registers idle.
inline Parts tiles_of(int64_t rows) { return Parts::at_most(rows, kTileRows); }

// B packed: all columns' words of one step are contiguous.
struct PackedColumns {
  const float* at;
  int64_t stride;
  template <int VECS>
  void load(int64_t step, int64_t column, VecF* out) const {
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v) out[v] = specmemo::load<VecF>(at + step * stride + column + v * kLanes);
  }
};

// C tile of ROWS x VECS vectors. `scale` null: C starts at zero; else C is multiplied by scale[row] first.
// Never inlined, so that the accumulators stay in registers.
template <class Dot, int ROWS, int VECS, bool FETCH, class B>
__attribute__((noinline)) void tile(const typename Dot::Word* a, int64_t lda, B b, int64_t column, int64_t steps,
                                    float* c, int64_t ldc, const float* scale, Fetch& fetch) {
  VecF sum[ROWS][VECS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v)
      sum[r][v] = scale == nullptr ? VecF{} : load<VecF>(c + r * ldc + column + v * kLanes) * splat(scale[r]);
  Fetch walk = fetch;  // a copy stays in registers
  for (int64_t s = 0; s < steps; ++s) {
    if (FETCH) walk.step();
    VecF columns[VECS];
    b.template load<VECS>(s, column, columns);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < VECS; ++v) sum[r][v] = Dot::multiply_add(sum[r][v], columns[v], a[r * lda + s]);
  }
  if (FETCH) fetch = walk;
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v) store(c + r * ldc + column + v * kLanes, sum[r][v]);
}

// Number of passes of `tile` over its steps for this many columns.
inline int64_t strips(int64_t columns) { return columns / kLanes / kTileVecs + columns / kLanes % kTileVecs; }

// Runs `tile` over all `vecs` vectors of columns.
template <class Dot, int ROWS, bool FETCH, class B>
inline void strip(const typename Dot::Word* a, int64_t lda, const B& b, int64_t steps, float* c, int64_t ldc,
                  const float* scale, int64_t vecs, Fetch& fetch) {
  int64_t v = 0;
  for (; v + kTileVecs <= vecs; v += kTileVecs)
    tile<Dot, ROWS, kTileVecs, FETCH>(a, lda, b, v * kLanes, steps, c, ldc, scale, fetch);
  for (; v < vecs; ++v) tile<Dot, ROWS, 1, FETCH>(a, lda, b, v * kLanes, steps, c, ldc, scale, fetch);
}

template <class Dot, bool FETCH, class B>
inline void multiply_rows(int64_t rows, const typename Dot::Word* a, int64_t lda, const B& b, int64_t steps, float* c,
                          int64_t ldc, const float* scale, int64_t vecs, Fetch& fetch) {
  static_assert(kTileRows <= 6, "one case per tile height");
  switch (rows) {
    case 1:
      return strip<Dot, 1, FETCH>(a, lda, b, steps, c, ldc, scale, vecs, fetch);
    case 2:
      return strip<Dot, 2, FETCH>(a, lda, b, steps, c, ldc, scale, vecs, fetch);
    case 3:
      return strip<Dot, 3, FETCH>(a, lda, b, steps, c, ldc, scale, vecs, fetch);
#if defined(__AVX512F__) || defined(__aarch64__)
    case 4:
      return strip<Dot, 4, FETCH>(a, lda, b, steps, c, ldc, scale, vecs, fetch);
    case 5:
      return strip<Dot, 5, FETCH>(a, lda, b, steps, c, ldc, scale, vecs, fetch);
    case 6:
      return strip<Dot, 6, FETCH>(a, lda, b, steps, c, ldc, scale, vecs, fetch);
#endif
  }
}

template <class Dot, class B>
inline void multiply(int64_t rows, const typename Dot::Word* a, int64_t lda, const B& b, int64_t steps, float* c,
                     int64_t ldc, const float* scale, int64_t vecs, Fetch& fetch) {
  if (fetch.done()) {
    multiply_rows<Dot, false>(rows, a, lda, b, steps, c, ldc, scale, vecs, fetch);
  } else {
    multiply_rows<Dot, true>(rows, a, lda, b, steps, c, ldc, scale, vecs, fetch);
  }
}

}  // namespace
}  // namespace specmemo
