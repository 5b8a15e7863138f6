// Few rows of queries over a block of keys and values, both read in place: packing would take longer than the products.
// Bandwidth-bound: prefetches the next head's rows. Computes several heads together, first all keys, then all values,
// with one softmax pass.
//
// Sums and arguments stay in registers: a load waits for an earlier store with equal low address bits (4K aliasing).
#pragma once

#include "fold.h"
#include "softmax.h"

namespace specmemo {
namespace {

constexpr int kPieceKeys = 16;  // keys per score computation
constexpr bool kManyRegisters = kTileRows == 6;
constexpr int kRowsAtOnce = kManyRegisters ? 4 : 2;
#if defined(__aarch64__)
constexpr int kMaxUnrolled = 4;  // vectors of a row of keys; the compiler would spill the queries of longer ones
#else
constexpr int kMaxUnrolled = 8;
#endif
static_assert(kFewRows <= kGroupRows, "the scores of a head's rows have room");

template <class T, class Dot>
class FewRows {
  typedef typename T::Raw Raw;
  typedef typename Dot::Word Word;
  typedef const char* const* Rows;

 public:
  FewRows(const AttentionArgs& args, int64_t k_words, int64_t columns)
      : args_(args), k_words_(k_words), columns_(columns), group_(args.num_qo_heads / args.num_kv_heads) {}

  // Prefetches the first rows of run_block, for a task's first block.
  void begin(const Block& block) const {
    const BlockRows keys = block.keys(0);
    for (const char* row : keys.at) prefetch_lines(row, args_.k_dim * static_cast<int64_t>(sizeof(Raw)));
  }

  // The first `keys` keys of a block; the others are masked. `next` is the block after it.
  void run_block(const Block& block, const Block& next, int64_t keys, const HeadsOfRows<Word>& all) const {
    const Parts turns = Parts::at_most(all.heads, kGroupRows / all.rows);
    for (int64_t i = 0; i < turns.count; ++i) {
      const int64_t first = turns.begin(i), end = turns.begin(i + 1);
      const Turn turn{first, end, keys, block, end < all.heads ? block.keys(end) : next.keys(0)};
      if (kMaxUnrolled == 8 && k_words_ == 8 * kLanes) {
        run_heads<8>(turn, all);
      } else if (k_words_ == 4 * kLanes) {
        run_heads<4>(turn, all);
      } else {
        run_heads<0>(turn, all);
      }
    }
  }

 private:
  // As many heads of a block as fit in `scores`, and the keys read after them.
  struct Turn {
    int64_t first, end, keys;
    const Block& block;
    BlockRows next;
  };

  // VECTORS: vectors of a row of keys, or 0 if not a compile-time constant.
  template <int VECTORS>
  void run_heads(const Turn& turn, const HeadsOfRows<Word>& all) const {
    const int64_t rows = all.rows;
    for (int64_t head = turn.first; head < turn.end; ++head) {
      const BlockRows keys = turn.block.keys(head);
      const BlockRows ahead = head + 1 < turn.end ? turn.block.keys(head + 1) : turn.block.values(turn.first);
      for (int64_t key = 0; key < turn.keys; key += kPieceKeys)
        score<VECTORS>(all.query + head * rows * k_words_, rows, keys.at + key, ahead.at + key,
                       all.scores + (head - turn.first) * rows * kBlockKeys + key);
    }
    alignas(64) float factors[kGroupRoom];
    const Word* weights = weigh(turn, all, factors);
    for (int64_t head = turn.first; head < turn.end; ++head) {
      const int64_t row = (head - turn.first) * rows;
      const BlockRows values = turn.block.values(head);
      const BlockRows ahead = head + 1 < turn.end ? turn.block.values(head + 1) : turn.next;
      add({weights + row * kBlockKeys, factors + row, values.at, ahead.at, turn.keys}, rows,
          all.states.of(head).output);
    }
  }

  // The softmax of all heads' rows at once.
  const Word* weigh(const Turn& turn, const HeadsOfRows<Word>& all, float* factors) const {
    uint64_t visible[kGroupRows], every = ~uint64_t{0};
    const int64_t nodes = all.rows / group_, heads = turn.end - turn.first;
    for (int64_t i = 0; i < heads * nodes; ++i) every &= visible[i] = all.visible[i % nodes];
    const int count = static_cast<int>(heads * all.rows);
    const Scores scores{all.scores, 0, count, visible, group_, every == ~uint64_t{0}};
    return Weights<T, Dot>(args_).weigh(scores, all.states.of(turn.first),
                                        all.lane_sums + turn.first * all.rows * kLanes, factors);
  }

  template <int VECTORS>
  void score(const Word* query, int64_t rows, Rows keys, Rows ahead, float* scores) const {
    int64_t r = 0;
    for (; r + kRowsAtOnce <= rows; r += kRowsAtOnce, ahead = nullptr)
      score_rows<kRowsAtOnce, VECTORS>(query + r * k_words_, k_words_, keys, ahead, scores + r * kBlockKeys);
    for (; r + 2 <= rows; r += 2, ahead = nullptr)
      score_rows<2, VECTORS>(query + r * k_words_, k_words_, keys, ahead, scores + r * kBlockKeys);
    if (r < rows) score_rows<1, VECTORS>(query + r * k_words_, k_words_, keys, ahead, scores + r * kBlockKeys);
  }

  // Adds a block's values to a head's outputs; prefetches the rows ahead unless they are null.
  struct Gain {
    const Word* weights;
    const float* factors;
    Rows values, ahead;
    int64_t keys;

    Gain from(int64_t row) const {
      return {weights + row * kBlockKeys, factors + row, values, row == 0 ? ahead : nullptr, keys};
    }
  };

  void add(const Gain& gain, int64_t rows, float* output) const {
    int64_t r = 0;
    for (; r + kRowsAtOnce <= rows; r += kRowsAtOnce) add_columns<kRowsAtOnce>(gain.from(r), output + r * columns_);
    for (; r + 2 <= rows; r += 2) add_columns<2>(gain.from(r), output + r * columns_);
    if (r < rows) add_columns<1>(gain.from(r), output + r * columns_);
  }

  // Reads whole rows if registers suffice: sequential reads have the highest bandwidth.
  template <int ROWS>
  void add_columns(const Gain& gain, float* output) const {
    constexpr int kWide = kManyRegisters && ROWS <= 2 ? 8 : 4;
    int64_t vecs = columns_ / kLanes, column = 0;
    for (; vecs >= kWide; vecs -= kWide, column += kWide * kLanes) add_rows<ROWS, kWide>(gain, column, output + column);
    for (; vecs >= 4; vecs -= 4, column += 4 * kLanes) add_rows<ROWS, 4>(gain, column, output + column);
    for (; vecs > 0; --vecs, column += kLanes) add_rows<ROWS, 1>(gain, column, output + column);
  }

  template <int ROWS, int VECS>
  void add_rows(const Gain& gain, int64_t column, float* output) const {
    add_tile<ROWS, VECS>(gain.weights, gain.values, gain.ahead, gain.keys, column, output, columns_, gain.factors);
  }

  // scores[row][key] = query . key; prefetches the rows ahead unless they are null.
  template <int ROWS, int VECTORS>
  __attribute__((noinline)) static void score_rows(const Word* query, int64_t k_words, Rows keys, Rows ahead,
                                                   float* scores) {
    constexpr int kBytes = kLanes * Dot::kPerWord * static_cast<int>(sizeof(Raw));  // of a vector
    const int64_t words = VECTORS > 0 ? VECTORS * kLanes : k_words;
    for (int first = 0; first < kPieceKeys; first += kLanes) {
      VecF quads[ROWS][kLanes / 4];
#pragma GCC unroll 1
      for (int quad = 0; quad < kLanes / 4; ++quad) {
        VecF sum[ROWS][4] = {};
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
          const int at = first + 4 * quad + k;
          const auto* key = reinterpret_cast<const Raw*>(keys[at]);
#pragma GCC unroll 8
          for (int64_t w = 0; w < words; w += kLanes) {
            const int64_t offset = w / kLanes * kBytes;
            if (ahead != nullptr && (kBytes >= 64 || offset % 64 == 0)) prefetch(ahead[at] + offset);
            const VecF own = KeyWords<T, Dot>::load_words(key, w);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r)
              sum[r][k] = Dot::multiply_add(sum[r][k], own, load<VecF>(query + r * words + w));
          }
        }
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) quads[r][quad] = fold_quad(sum[r]);
      }
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) store(scores + r * kBlockKeys + first, join_quads(quads[r]));
    }
  }

  // output[row] = output[row] * factors[row] + weights[row] * values from `column` on. Prefetches the same columns of
  // the rows ahead unless they are null, and the values' next columns into L1, so that each row leaves L2 at once.
  template <int ROWS, int VECS>
  __attribute__((noinline)) static void add_tile(const Word* weights, Rows values, Rows ahead, int64_t keys,
                                                 int64_t column, float* output, int64_t columns, const float* factors) {
    constexpr int kBytes = VECS * kLanes * static_cast<int>(sizeof(Raw));
    const int64_t offset = column * static_cast<int64_t>(sizeof(Raw));
    const bool more = column + VECS * kLanes < columns;
    const ValueRows<T, Dot> rows{values};
    VecF sum[ROWS][VECS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < VECS; ++v) sum[r][v] = load<VecF>(output + r * columns + v * kLanes) * splat(factors[r]);
#pragma GCC unroll 2
    for (int64_t step = 0; step < keys / Dot::kPerWord; ++step) {
      if (ahead != nullptr) {
#pragma GCC unroll 2
        for (int i = 0; i < Dot::kPerWord; ++i)
#pragma GCC unroll 8
          for (int byte = 0; byte < kBytes; byte += 64) {
            prefetch(ahead[step * Dot::kPerWord + i] + offset + byte);
            if (more) prefetch_near(values[step * Dot::kPerWord + i] + offset + kBytes + byte);
          }
      }
      VecF value[VECS];
      rows.template load<VECS>(step, column, value);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECS; ++v)
          sum[r][v] = Dot::multiply_add(sum[r][v], value[v], weights[r * kBlockKeys + step]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < VECS; ++v) store(output + r * columns + v * kLanes, sum[r][v]);
  }

  const AttentionArgs& args_;
  int64_t k_words_, columns_, group_;
};

}  // namespace
}  // namespace specmemo
