// The k best logits of each row, hidden @ weight^T + bias, without a [rows, vocab] array.
//
// Weight rows are read once, a few at a time beside a few hidden rows, with one vector of partial sums for each pair;
// no packing, as both operands are contiguous along the reduced dimension.
#pragma once

#include "pack.h"
#include "threads.h"

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

// sums[row][vocab] += products of [begin, end) for `HIDDEN` rows and all rows of the vocabulary tile. Meanwhile the
// same part of the first PREFETCH rows of `ahead` is fetched.
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

// The k best of what has been offered, best first; of equal values the one offered first stays ahead. NaN counts as
// the largest value, as in torch.
struct Best {
  int64_t k, count;
  int64_t* tokens;
  float* values;

  static bool better(float a, float b) { return a > b || (a != a && b == b); }

  void offer(float value, int64_t token) {
    if (count == k && !better(value, values[k - 1])) return;
    int64_t at = count < k ? count++ : k - 1;
    for (; at > 0 && better(value, values[at - 1]); --at) {
      values[at] = values[at - 1];
      tokens[at] = tokens[at - 1];
    }
    values[at] = value;
    tokens[at] = token;
  }
};

template <class T, class Dot>
class LmHead {
  typedef typename T::Raw Raw;

 public:
  LmHead(const LmHeadArgs& args, int64_t pieces) : args_(args), pieces_(pieces) {}

  int64_t piece_bytes() const { return args_.rows * args_.k * 12; }

  // The k best of one piece of the vocabulary, for all rows.
  void run(int64_t piece, char* results) const {
    const int64_t begin = first_token(piece), end = first_token(piece + 1), rows = args_.rows;
    const int64_t padded = round_up(rows * kVocabTile, kLanes);
    auto* memory = static_cast<char*>(arena(0, padded * static_cast<int64_t>(sizeof(VecF) + sizeof(float))));
    auto* sums = reinterpret_cast<VecF(*)[kVocabTile]>(memory);
    auto* values = reinterpret_cast<float*>(memory + padded * static_cast<int64_t>(sizeof(VecF)));
    int64_t counts_seen = 0;  // offered so far, the same for every row
    for (int64_t token = begin; token < end; token += kVocabTile) {
      const int64_t count = end - token < kVocabTile ? end - token : kVocabTile;
      logits(token, count, sums);
      fold(reinterpret_cast<const VecF*>(sums), padded, values);
      for (int64_t r = 0; r < rows; ++r) {
        Best top = best(results, piece, r);
        top.count = counts_seen < args_.k ? counts_seen : args_.k;
        for (int64_t v = 0; v < count; ++v) top.offer(values[r * kVocabTile + v], token + v);
      }
      counts_seen += count;
    }
  }

  // All pieces of one row, in the order of their tokens.
  void merge(int64_t row, char* results) const {
    Best total{args_.k, 0, args_.tokens + row * args_.k, args_.values + row * args_.k};
    for (int64_t piece = 0; piece < pieces_; ++piece) {
      const Best part = best(results, piece, row);
      const int64_t size = first_token(piece + 1) - first_token(piece);
      for (int64_t i = 0; i < (size < args_.k ? size : args_.k); ++i) total.offer(part.values[i], part.tokens[i]);
    }
  }

 private:
  int64_t first_token(int64_t piece) const { return args_.vocab * piece / pieces_; }

  Best best(char* results, int64_t piece, int64_t row) const {
    auto* tokens = reinterpret_cast<int64_t*>(results) + (piece * args_.rows + row) * args_.k;
    auto* values = reinterpret_cast<float*>(results + pieces_ * args_.rows * args_.k * 8);
    return Best{args_.k, 0, tokens, values + (piece * args_.rows + row) * args_.k};
  }

  void logits(int64_t token, int64_t count, VecF (*sums)[kVocabTile]) const {
    const auto* hidden = static_cast<const Raw*>(args_.hidden);
    const Raw *weight[kVocabTile], *next[kVocabTile];
    for (int64_t v = 0; v < kVocabTile; ++v) {  // rows past the end repeat the last one; their sums are not used
      weight[v] = static_cast<const Raw*>(args_.weight) + (token + (v < count ? v : count - 1)) * args_.hidden_size;
      next[v] = weight[v] + kVocabTile * args_.hidden_size;
    }
    const int64_t rows = args_.rows, tiles = (rows + kHiddenTile - 1) / kHiddenTile;
    const int64_t whole = args_.hidden_size / RowDot<T, Dot>::kStep * RowDot<T, Dot>::kStep;
    // The next panel is fetched evenly over the tiles: in one burst it would wait for the memory, then leave it idle.
    const int64_t share = (kVocabTile + tiles - 1) / tiles, fetched = share > 3 ? kVocabTile : share;
    for (int64_t v = 0; v < kVocabTile; ++v) {
      VecF start{};
      if (args_.bias != nullptr)
        start[0] = T::to_float(static_cast<const Raw*>(args_.bias)[token + (v < count ? v : count - 1)]);
      for (int64_t r = 0; r < rows; ++r) sums[r][v] = start;
    }
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

  // The sum over the lanes of each of `count` vectors (a multiple of kLanes), rounded to the inputs' type: the model's
  // own linear rounds too, and that decides ties.
  static void fold(const VecF* sums, int64_t count, float* values) {
    for (int64_t i = 0; i < count; i += kLanes) {
      VecF block[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) block[j] = sums[i + j];
      transpose(block);
#pragma GCC unroll 8
      for (int width = kLanes / 2; width > 0; width /= 2)
        for (int j = 0; j < width; ++j) block[j] = block[j] + block[j + width];
      store(values + i, T::round(block[0]));
    }
  }

  const LmHeadArgs& args_;
  int64_t pieces_;
};

template <class T, class Dot>
void run_lm_head(const LmHeadArgs& args, int threads) {
  if (args.rows == 0) return;
  constexpr int64_t kPieceTokens = 16 * kVocabTile;
  int64_t pieces = (args.vocab + kPieceTokens - 1) / kPieceTokens;
  if (pieces > 8 * static_cast<int64_t>(threads)) pieces = 8 * static_cast<int64_t>(threads);
  struct Context {
    LmHead<T, Dot> head;
    char* results;
  } context{LmHead<T, Dot>(args, pieces), nullptr};
  context.results = static_cast<char*>(arena(1, pieces * context.head.piece_bytes()));
  auto piece = [](void* data, int64_t i) {
    auto& c = *static_cast<Context*>(data);
    c.head.run(i, c.results);
  };
  parallel_for(pieces, threads, piece, &context);
  for (int64_t row = 0; row < args.rows; ++row) context.head.merge(row, context.results);
}

}  // namespace
}  // namespace specmemo
