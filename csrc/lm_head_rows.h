// Sums of hidden rows with weight rows.
//
// Weight rows are read once, a few at a time with a few hidden rows, and one vector of partial sums for each pair.
// Nothing is packed, because both operands are contiguous along the reduced dimension.
#pragma once

#include "kernels.h"
#include "tile.h"

namespace specmemo {
namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kHiddenTile = 4, kVocabTile = 6;
#else
constexpr int kHiddenTile = 2, kVocabTile = 4;
#endif
constexpr int64_t kHiddenChunk = 64 * kLanes;  // steps of the reduced dimension between two stores of the sums

template <class T, class Dot>
struct RowDot {
  static constexpr int kStep = kLanes;
  static VecF load(const typename T::Raw* p) { return T::load_vec(p); }
  static VecF multiply_add(VecF sum, VecF a, VecF b) { return sum + a * b; }
};

#if defined(__AVX512BF16__)
template <>
struct RowDot<BFloat16, BFloat16Dot> {
  static constexpr int kStep = 2 * kLanes;
  static VecF load(const uint16_t* p) { return specmemo::load<VecF>(p); }
  static VecF multiply_add(VecF sum, VecF a, VecF b) {
    return (VecF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
};
#endif

// sums[row][vocab] += products of [begin, end) for `HIDDEN` rows and all rows of the vocabulary tile. Prefetches the
// same part of the first PREFETCH rows of `ahead`.
template <class T, class Dot, int HIDDEN, int PREFETCH>
inline void dot_tile(const typename T::Raw* hidden, int64_t hidden_stride, const typename T::Raw* const* weight,
                     const typename T::Raw* const* ahead, int64_t begin, int64_t end, VecF (*sums)[kVocabTile]) {
  typedef RowDot<T, Dot> Row;
  VecF sum[HIDDEN][kVocabTile];
#pragma GCC unroll 8
  for (int r = 0; r < HIDDEN; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVocabTile; ++v) sum[r][v] = sums[r][v];
  for (int64_t i = begin; i < end; i += Row::kStep) {
    VecF h[HIDDEN];
#pragma GCC unroll 8
    for (int r = 0; r < HIDDEN; ++r) h[r] = Row::load(hidden + r * hidden_stride + i);
#pragma GCC unroll 8
    for (int v = 0; v < kVocabTile; ++v) {
      const VecF w = Row::load(weight[v] + i);
      if (v < PREFETCH) prefetch(ahead[v] + i);
#pragma GCC unroll 8
      for (int r = 0; r < HIDDEN; ++r) sum[r][v] = Row::multiply_add(sum[r][v], h[r], w);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < HIDDEN; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVocabTile; ++v) sums[r][v] = sum[r][v];
}

template <class T, class Dot, int HIDDEN>
inline void dot_rows(int fetched, const typename T::Raw* hidden, int64_t stride, const typename T::Raw* const* weight,
                     const typename T::Raw* const* ahead, int64_t begin, int64_t end, VecF (*sums)[kVocabTile]) {
  switch (fetched) {
    case 0:
      return dot_tile<T, Dot, HIDDEN, 0>(hidden, stride, weight, ahead, begin, end, sums);
    case 1:
      return dot_tile<T, Dot, HIDDEN, 1>(hidden, stride, weight, ahead, begin, end, sums);
    case 2:
      return dot_tile<T, Dot, HIDDEN, 2>(hidden, stride, weight, ahead, begin, end, sums);
    case 3:
      return dot_tile<T, Dot, HIDDEN, 3>(hidden, stride, weight, ahead, begin, end, sums);
    default:
      return dot_tile<T, Dot, HIDDEN, kVocabTile>(hidden, stride, weight, ahead, begin, end, sums);
  }
}

template <class T, class Dot>
inline void dot_panel(int rows, int fetched, const typename T::Raw* hidden, int64_t stride,
                      const typename T::Raw* const* weight, const typename T::Raw* const* ahead, int64_t begin,
                      int64_t end, VecF (*sums)[kVocabTile]) {
  switch (rows) {
    case 1:
      return dot_rows<T, Dot, 1>(fetched, hidden, stride, weight, ahead, begin, end, sums);
    case 2:
      return dot_rows<T, Dot, 2>(fetched, hidden, stride, weight, ahead, begin, end, sums);
#if defined(__AVX512F__) || defined(__aarch64__)
    case 3:
      return dot_rows<T, Dot, 3>(fetched, hidden, stride, weight, ahead, begin, end, sums);
    case 4:
      return dot_rows<T, Dot, 4>(fetched, hidden, stride, weight, ahead, begin, end, sums);
#endif
  }
}

template <class T, class Dot>
class RowProducts {
  typedef typename T::Raw Raw;

 public:
  explicit RowProducts(const LmHeadArgs& args) : args_(args) {}

  int64_t memory_bytes() const { return 0; }
  void prepare(char*) {}

  // sums[row][v] += the products of all rows with the weights of `count` tokens from `token` on.
  void add(int64_t token, int64_t count, VecF (*sums)[kVocabTile]) const {
    const auto* hidden = static_cast<const Raw*>(args_.hidden);
    const Raw *weight[kVocabTile], *next[kVocabTile];
    for (int64_t v = 0; v < kVocabTile; ++v) {  // rows past the end repeat the last one; their sums are not used
      weight[v] = static_cast<const Raw*>(args_.weight) + (token + (v < count ? v : count - 1)) * args_.hidden_size;
      next[v] = weight[v] + kVocabTile * args_.hidden_size;
    }
    const int64_t rows = args_.rows, tiles = (rows + kHiddenTile - 1) / kHiddenTile;
    const int64_t whole = args_.hidden_size / RowDot<T, Dot>::kStep * RowDot<T, Dot>::kStep;
    // The next panel's prefetches are spread over the tiles: a burst would stall, then leave the memory idle.
    const int64_t share = (kVocabTile + tiles - 1) / tiles, fetched = share > 3 ? kVocabTile : share;
    for (int64_t begin = 0; begin < whole; begin += kHiddenChunk) {
      const int64_t end = begin + kHiddenChunk < whole ? begin + kHiddenChunk : whole;
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t first = rows * t / tiles, left = kVocabTile - t * fetched;
        const int height = static_cast<int>(rows * (t + 1) / tiles - first);
        const int now = static_cast<int>(left <= 0 ? 0 : (left < fetched ? left : fetched));
        dot_panel<T, Dot>(height, now, hidden + first * args_.hidden_stride, args_.hidden_stride, weight,
                          next + (now == 0 ? 0 : t * fetched), begin, end, sums + first);
      }
    }
    for (int64_t i = whole; i < args_.hidden_size; ++i)
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t v = 0; v < count; ++v)
          sums[r][v][0] += T::to_float(hidden[r * args_.hidden_stride + i]) * T::to_float(weight[v][i]);
  }

 private:
  const LmHeadArgs& args_;
};

}  // namespace
}  // namespace specmemo
