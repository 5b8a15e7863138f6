// The k best logits of each row, hidden @ weight^T + bias, and their log-sum-exp, without a [rows, vocab] array.
#pragma once

#include <cmath>

#include "linear.h"
#include "softmax.h"

namespace specmemo {
namespace {

// An lm_head's pieces of the vocabulary for each thread, and bytes of a piece's results: of the best logits of a pass,
// or of the ten best of eight rows. Of more of them it keeps more memory.
constexpr int64_t kPieces = 8, kPieceBytes = 1024;

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

// Whether one of `count` values is better than `limit`. Whole vectors are read.
inline bool any_better(const float* values, int64_t count, float limit) {
  VecI found{};
  for (int64_t i = 0; i < count; i += kLanes)
    found |= ~(load<VecF>(values + i) <= splat(limit)) & first_lanes(count - i);  // NaN is better
  return any(found);
}

// The sum of the exponentials of all added values, relative to the largest, in each lane.
struct ExpSums {
  VecF max, sum;

  static ExpSums none() { return {splat(-kLargest), VecF{}}; }

  // Whole vectors are read.
  void add(const float* values, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) {
      const VecF value = first_lanes(count - i) ? load<VecF>(values + i) : splat(kMinusInf);
      const VecF top = vmax(max, value);
      sum = sum * exp2_nonpositive((max - top) * splat(kLog2e)) + exp2_nonpositive((value - top) * splat(kLog2e));
      max = top;
    }
  }

  static constexpr float kLargest = __FLT_MAX__;  // finite: the difference of two infinities is NaN
};

// The same in one number.
struct ExpSum {
  float max, sum;

  static ExpSum of(const ExpSums& lanes) {
    ExpSum total{-ExpSums::kLargest, 0.0f};
    for (int i = 0; i < kLanes; ++i) total.add({lanes.max[i], lanes.sum[i]});
    return total;
  }

  void add(const ExpSum& other) {
    const float top = other.max > max ? other.max : max;
    sum = sum * std::exp(max - top) + other.sum * std::exp(other.max - top);
    max = top;
  }
};

template <class T, class Products>
class LmHead {
  static_assert(Products::kGroupSize == kGroup, "no panels");

 public:
  LmHead(const LmHeadArgs& args, const Parts& pieces) : args_(args), outputs_(args.product), pieces_(pieces) {}

  // Memory that the caller provides until all pieces are merged.
  int64_t shared_bytes() const { return outputs_.shared_bytes(); }
  void prepare(char* shared, int threads) { outputs_.prepare(shared, threads); }

  int64_t piece_bytes() const { return args_.product.rows * (args_.k * 12 + static_cast<int64_t>(sizeof(ExpSum))); }

  // Computes the k best of one piece of the vocabulary, for all rows.
  void run(int64_t piece, char* results) const {
    const int64_t begin = pieces_.begin(piece), end = pieces_.begin(piece + 1), rows = args_.product.rows;
    const int64_t values_bytes = outputs_.value_count() * 4, sums_bytes = outputs_.sums_bytes();
    const int64_t summed = args_.lse != nullptr ? rows : 0, exp_bytes = summed * sizeof(ExpSums);
    auto* memory = static_cast<char*>(arena(0, sums_bytes + values_bytes + exp_bytes));
    auto* values = reinterpret_cast<float*>(memory + sums_bytes);
    auto* sums = reinterpret_cast<ExpSums*>(memory + sums_bytes + values_bytes);
    for (int64_t r = 0; r < summed; ++r) sums[r] = ExpSums::none();
    int64_t counts_seen = 0;  // inserted so far, the same for every row
    for (int64_t token = begin; token < end; token += kGroup) {
      const int64_t count = end - token < kGroup ? end - token : kGroup;
      outputs_.compute(token, count, memory, values);  // rounded as the model's logits: that decides ties
      for (int64_t r = 0; r < rows; ++r) {
        const float* row = values + r * kGroup;
        if (summed != 0) sums[r].add(row, count);
        Best top = best(results, piece, r);
        top.count = counts_seen < args_.k ? counts_seen : args_.k;
        if (top.count == args_.k && !any_better(row, count, top.values[args_.k - 1])) continue;
        for (int64_t v = 0; v < count; ++v) top.offer(row[v], token + v);
      }
      counts_seen += count;
    }
    for (int64_t r = 0; r < summed; ++r) exp_sums(results, piece)[r] = ExpSum::of(sums[r]);
  }

  // Merges all pieces of one row in token order.
  void merge(int64_t row, char* results) const {
    Best total{args_.k, 0, args_.tokens + row * args_.k, args_.values + row * args_.k};
    for (int64_t piece = 0; piece < pieces_.count; ++piece) {
      const Best part = best(results, piece, row);
      const int64_t size = pieces_.size(piece);
      for (int64_t i = 0; i < (size < args_.k ? size : args_.k); ++i) total.offer(part.values[i], part.tokens[i]);
    }
    if (args_.lse == nullptr) return;
    ExpSum sum{-ExpSums::kLargest, 0.0f};
    for (int64_t piece = 0; piece < pieces_.count; ++piece) sum.add(exp_sums(results, piece)[row]);
    const float lse = args_.lse[row] = sum.max + std::log(sum.sum);
    for (int64_t i = 0; i < args_.k; ++i) {
      const float log_p = total.values[i] - lse;
      total.values[i] = log_p > 0.0f ? 0.0f : log_p;  // rounding; NaN stays
    }
  }

 private:
  Best best(char* results, int64_t piece, int64_t row) const {
    auto* tokens = reinterpret_cast<int64_t*>(results) + (piece * args_.product.rows + row) * args_.k;
    auto* values = reinterpret_cast<float*>(results + pieces_.count * args_.product.rows * args_.k * 8);
    return Best{args_.k, 0, tokens, values + (piece * args_.product.rows + row) * args_.k};
  }

  // Of all rows, for one piece.
  ExpSum* exp_sums(char* results, int64_t piece) const {
    auto* first = reinterpret_cast<ExpSum*>(results + pieces_.count * args_.product.rows * args_.k * 12);
    return first + piece * args_.product.rows;
  }

  const LmHeadArgs& args_;
  Outputs<T, Products> outputs_;
  Parts pieces_;  // of the vocabulary
};

template <class T, class Products>
void run_pieces(const LmHeadArgs& args, int threads) {
  const int64_t max_pieces = kPieces * threads;
  Parts pieces = Parts::at_most(args.product.outputs, 4 * kGroup);
  if (pieces.count > max_pieces) pieces = Parts(args.product.outputs, max_pieces);
  struct Context {
    LmHead<T, Products> head;
    char* results;
  } context{LmHead<T, Products>(args, pieces), nullptr};
  const int64_t shared = context.head.shared_bytes();
  auto* memory = static_cast<char*>(arena(1, shared + pieces.count * context.head.piece_bytes()));
  context.head.prepare(memory, threads);
  context.results = memory + shared;
  auto piece = [](void* data, int64_t i) {
    auto& c = *static_cast<Context*>(data);
    c.head.run(i, c.results);
  };
  parallel_parts(pieces.count, threads, piece, &context);
  for (int64_t row = 0; row < args.product.rows; ++row) context.head.merge(row, context.results);
}

template <class T, class Dot>
void run_lm_head(const LmHeadArgs& all, int threads) {
  LmHeadArgs args = all;
  for (int64_t row = 0; row < all.product.rows; row += args.product.rows) {
    args.product = pass_of<T>(all.product, row, 0);
    args.tokens = all.tokens + row * all.k, args.values = all.values + row * all.k;
    if (all.lse != nullptr) args.lse = all.lse + row;
    if (args.product.scales != nullptr)
      run_pieces<T, CodeProducts<T, Dot>>(args, threads);
    else
      by_storage<T>(args.product.compressed, [&](auto stored) {
        run_pieces<T, RowProducts<T, Dot, typename decltype(stored)::type>>(args, threads);
      });
  }
}

}  // namespace
}  // namespace specmemo
