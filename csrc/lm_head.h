// The k best logits of each row, hidden @ weight^T + bias, without a [rows, vocab] array.
#pragma once

#include "lm_head_codes.h"
#include "lm_head_rows.h"
#include "pack.h"
#include "threads.h"

namespace specmemo {
namespace {

// The k best of all inserted values, best first; ties keep their insertion order. NaN is the largest value, as in
// torch.
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

// `Products` computes the sums: of weights in dtype (RowProducts) or in 4 bits (CodeProducts).
template <class T, class Products>
class LmHead {
  typedef typename T::Raw Raw;

 public:
  LmHead(const LmHeadArgs& args, int64_t pieces) : args_(args), products_(args), pieces_(pieces) {}

  // Memory that the caller provides until all pieces are merged.
  int64_t shared_bytes() const { return round_up(products_.memory_bytes(), 64); }
  void prepare(char* shared) { products_.prepare(shared); }

  int64_t piece_bytes() const { return args_.rows * args_.k * 12; }

  // Computes the k best of one piece of the vocabulary, for all rows.
  void run(int64_t piece, char* results) const {
    const int64_t begin = first_token(piece), end = first_token(piece + 1), rows = args_.rows;
    const int64_t padded = round_up(rows * kVocabTile, kLanes);
    auto* memory = static_cast<char*>(arena(0, padded * static_cast<int64_t>(sizeof(VecF) + sizeof(float))));
    auto* sums = reinterpret_cast<VecF(*)[kVocabTile]>(memory);
    auto* values = reinterpret_cast<float*>(memory + padded * static_cast<int64_t>(sizeof(VecF)));
    int64_t counts_seen = 0;  // inserted so far, the same for every row
    for (int64_t token = begin; token < end; token += kVocabTile) {
      const int64_t count = end - token < kVocabTile ? end - token : kVocabTile;
      start(token, count, sums);
      products_.add(token, count, sums);
      fold(reinterpret_cast<const VecF*>(sums), padded, values);
      for (int64_t r = 0; r < rows; ++r) {
        Best top = best(results, piece, r);
        top.count = counts_seen < args_.k ? counts_seen : args_.k;
        for (int64_t v = 0; v < count; ++v) top.offer(values[r * kVocabTile + v], token + v);
      }
      counts_seen += count;
    }
  }

  // Merges all pieces of one row in token order.
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

  void start(int64_t token, int64_t count, VecF (*sums)[kVocabTile]) const {
    for (int64_t v = 0; v < kVocabTile; ++v) {
      VecF bias{};
      if (args_.bias != nullptr)
        bias[0] = T::to_float(static_cast<const Raw*>(args_.bias)[token + (v < count ? v : count - 1)]);
      for (int64_t r = 0; r < args_.rows; ++r) sums[r][v] = bias;
    }
  }

  // Sums the lanes of each of `count` vectors (a multiple of kLanes) and rounds to the inputs' type, as the model's
  // linear layer does: that decides ties.
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
  Products products_;
  int64_t pieces_;
};

template <class T, class Products>
void run_pieces(const LmHeadArgs& args, int threads) {
  constexpr int64_t kPieceTokens = 16 * kVocabTile;
  int64_t pieces = (args.vocab + kPieceTokens - 1) / kPieceTokens;
  if (pieces > 8 * static_cast<int64_t>(threads)) pieces = 8 * static_cast<int64_t>(threads);
  struct Context {
    LmHead<T, Products> head;
    char* results;
  } context{LmHead<T, Products>(args, pieces), nullptr};
  const int64_t shared = context.head.shared_bytes();
  auto* memory = static_cast<char*>(arena(1, shared + pieces * context.head.piece_bytes()));
  context.head.prepare(memory);
  context.results = memory + shared;
  auto piece = [](void* data, int64_t i) {
    auto& c = *static_cast<Context*>(data);
    c.head.run(i, c.results);
  };
  parallel_for(pieces, threads, piece, &context);
  for (int64_t row = 0; row < args.rows; ++row) context.head.merge(row, context.results);
}

template <class T, class Dot>
void run_lm_head(const LmHeadArgs& args, int threads) {
  if (args.rows == 0) return;
  if (args.scales != nullptr) return run_pieces<T, CodeProducts<T, Dot>>(args, threads);
  run_pieces<T, RowProducts<T, Dot>>(args, threads);
}

}  // namespace
}  // namespace specmemo
