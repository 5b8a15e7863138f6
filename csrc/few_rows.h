// Few rows of queries over a block of keys and values, both multiplied where they lie: packing would take longer than
// the products. What is left is reading, so that memory is read in order: a page's keys of all heads, those of the next
// page, then the values likewise.
//
// A core starts to read what lies a few hundred instructions ahead. With one row of float32 that is far enough; else
// each line is fetched a piece ahead. A store that waits for memory makes loads behind it wait if they look alike
// (equal low address bits) or read more than it wrote; so sums stay in registers and arguments are passed in them.
#pragma once

#include "fold.h"
#include "softmax.h"

namespace specmemo {
namespace {

constexpr int kPieceKeys = 16;  // a page's, mostly
constexpr bool kManyRegisters = kTileRows == 6;
constexpr int kScoredRows = kManyRegisters ? 4 : 2, kAddedRows = 2;  // at once
constexpr int kWideVecs = kManyRegisters ? 8 : 4;
static_assert(kFewRowsShort <= kGroupRows, "the scores of a head's rows have room");

// The rows of one head's piece.
struct Piece {
  const char* rows[kPieceKeys];

  void move(int64_t bytes) {
    for (const char*& row : rows) row += bytes;
  }

  bool followed_by(const Piece& next, int64_t row_bytes) const {
    return next.rows[0] == rows[kPieceKeys - 1] + row_bytes;
  }
};

// All heads of a task, each with so many rows; states and lane_sums as attention.h keeps them.
template <class Word>
struct HeadsOfRows {
  int64_t heads, rows;
  const Word* query;  // [heads][rows][k_words]
  const States& states;
  float* lane_sums;         // [heads][rows][kLanes]
  const uint64_t* visible;  // [nodes]
  float* scores;            // [kGroupRows][kBlockKeys]
};

template <class T, class Dot>
class FewRows {
  typedef typename T::Raw Raw;
  typedef typename Dot::Word Word;
  typedef const char* const* Rows;

 public:
  FewRows(const AttentionArgs& args, int64_t k_words, int64_t columns)
      : args_(args), k_words_(k_words), columns_(columns), group_(args.num_qo_heads / args.num_kv_heads) {}

  // The first `keys` of a block; those behind are hidden. `next` is what is read afterwards.
  void run_block(const Block& block, const Block& next, int64_t keys, const HeadsOfRows<Word>& all) const {
    const int64_t turn = kGroupRows / all.rows;
    for (int64_t head = 0; head < all.heads; head += turn) {
      const int64_t end = head + turn < all.heads ? head + turn : all.heads;
      Turn part{head, end, keys, &block, end < all.heads ? &block : &next, end < all.heads ? end : 0};
      if (k_words_ == 8 * kLanes) {
        run_heads<8>(part, all);
      } else if (k_words_ == 4 * kLanes) {
        run_heads<4>(part, all);
      } else {
        run_heads<0>(part, all);
      }
    }
  }

 private:
  // Heads of a block whose scores are kept at a time, and what is read after them.
  struct Turn {
    int64_t first, end, keys;
    const Block *block, *next;
    int64_t next_head;
  };

  // Walks over the pieces of some heads in the order of memory.
  class Walk {
   public:
    Walk(Rows rows, const int64_t* steps, int64_t first, int64_t end, int64_t keys)
        : head(first), rows_(rows), steps_(steps), first_(first), end_(end), keys_(keys) {}

    int64_t key = 0, head;

    void begin(Piece& piece) const {
      for (int i = 0; i < kPieceKeys; ++i) piece.rows[i] = rows_[key + i] + steps_[key + i] * head;
    }

    // The piece after `now`; false behind the last one.
    bool next(const Piece& now, Piece& piece) {
      if (++head < end_) {
        const int64_t* steps = steps_ + key;
#pragma GCC ivdep
        for (int i = 0; i < kPieceKeys; ++i) piece.rows[i] = now.rows[i] + steps[i];
        return true;
      }
      head = first_, key += kPieceKeys;
      if (key < keys_) begin(piece);
      return key < keys_;
    }

   private:
    Rows rows_;
    const int64_t* steps_;
    int64_t first_, end_, keys_;
  };

  // VECTORS: those of a row of keys, or 0 if that isn't known beforehand.
  template <int VECTORS>
  void run_heads(const Turn& turn, const HeadsOfRows<Word>& all) const {
    const int64_t rows = all.rows;
    Piece one, other, *now = &one, *ahead = &other;
    Walk keys(turn.block->first.keys, turn.block->key_steps, turn.first, turn.end, turn.keys);
    Walk values(turn.block->first.values, turn.block->value_steps, turn.first, turn.end, turn.keys);
    const Walk after(turn.next->first.keys, turn.next->key_steps, turn.next_head, turn.next_head + 1, kPieceKeys);
    keys.begin(*now);
    for (bool more = true; more;) {
      const int64_t key = keys.key, head = keys.head;
      more = keys.next(*now, *ahead);
      if (!more) values.begin(*ahead);
      score<VECTORS>(all.query + head * rows * k_words_, rows, *now, *ahead,
                     all.scores + (head - turn.first) * rows * kBlockKeys + key);
      swap(now, ahead);
    }
    alignas(64) float factors[kGroupRoom];
    const Word* weights = weigh(turn, all, factors);
    for (bool more = true; more;) {
      const int64_t key = values.key, row = (values.head - turn.first) * rows;
      float* output = all.states.of(values.head).output;
      more = values.next(*now, *ahead);
      if (!more) after.begin(*ahead);
      add(weights + row * kBlockKeys + key / Dot::kPerWord, rows, *now, *ahead, output,
          key == 0 ? factors + row : nullptr);
      swap(now, ahead);
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

  static void swap(Piece*& a, Piece*& b) {
    Piece* was = a;
    a = b, b = was;
  }

  // The lines to fetch while `now` is worked on, or null where the core comes to them by itself.
  static Rows fetched(int64_t rows, const Piece& now, const Piece& ahead, int64_t row_bytes) {
    return rows == 1 && T::kBits == 32 && now.followed_by(ahead, row_bytes) ? nullptr : ahead.rows;
  }

  template <int VECTORS>
  void score(const Word* query, int64_t rows, const Piece& keys, const Piece& ahead, float* scores) const {
    Rows fetch = fetched(rows, keys, ahead, args_.k_dim * static_cast<int64_t>(sizeof(Raw)));
    int64_t r = 0;
    for (; r + kScoredRows <= rows; r += kScoredRows, fetch = nullptr)
      score_rows<kScoredRows, VECTORS>(query + r * k_words_, k_words_, keys.rows, fetch, scores + r * kBlockKeys);
    for (; r + 2 <= rows; r += 2, fetch = nullptr)
      score_rows<2, VECTORS>(query + r * k_words_, k_words_, keys.rows, fetch, scores + r * kBlockKeys);
    if (r < rows) score_rows<1, VECTORS>(query + r * k_words_, k_words_, keys.rows, fetch, scores + r * kBlockKeys);
  }

  void add(const Word* weights, int64_t rows, const Piece& values, const Piece& ahead, float* output,
           const float* factors) const {
    Rows fetch = fetched(rows, values, ahead, args_.v_dim * static_cast<int64_t>(sizeof(Raw)));
    int64_t vecs = columns_ / kLanes;
    if (vecs == kWideVecs) return add_columns<kWideVecs>(weights, rows, values.rows, fetch, output, factors);
    Piece from = values, next = ahead;
    fetch = fetch == nullptr ? nullptr : next.rows;
    while (vecs > 0) {
      const int64_t wide = vecs >= kWideVecs ? kWideVecs : vecs >= 2 ? 2 : 1;
      if (wide == kWideVecs) add_columns<kWideVecs>(weights, rows, from.rows, fetch, output, factors);
      if (wide == 2) add_columns<2>(weights, rows, from.rows, fetch, output, factors);
      if (wide == 1) add_columns<1>(weights, rows, from.rows, fetch, output, factors);
      const int64_t bytes = wide * kLanes * static_cast<int64_t>(sizeof(Raw));
      from.move(bytes), next.move(bytes);
      output += wide * kLanes, vecs -= wide;
    }
  }

  template <int VECS>
  void add_columns(const Word* weights, int64_t rows, Rows values, Rows ahead, float* output,
                   const float* factors) const {
    int64_t r = 0;
    for (; r + kAddedRows <= rows; r += kAddedRows, ahead = nullptr)
      add_rows<kAddedRows, VECS>(weights + r * kBlockKeys, values, ahead, output + r * columns_, columns_,
                                 factors == nullptr ? nullptr : factors + r);
    if (r < rows)
      add_rows<1, VECS>(weights + r * kBlockKeys, values, ahead, output + r * columns_, columns_,
                        factors == nullptr ? nullptr : factors + r);
  }

  // scores[row][key] = query . key, and the rows ahead are fetched unless they are null.
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

  // output[row] = output[row] * factors[row] + weights[row] * values, without factors 1; of the rows ahead the same
  // columns are fetched unless they are null.
  template <int ROWS, int VECS>
  __attribute__((noinline)) static void add_rows(const Word* weights, Rows values, Rows ahead, float* output,
                                                 int64_t columns, const float* factors) {
    constexpr int kBytes = VECS * kLanes * static_cast<int>(sizeof(Raw));
    const ValueRows<T, Dot> rows{values};
    VecF sum[ROWS][VECS];
#pragma GCC unroll 2
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < VECS; ++v) {
        sum[r][v] = load<VecF>(output + r * columns + v * kLanes);
        if (factors != nullptr) sum[r][v] = sum[r][v] * splat(factors[r]);
      }
#pragma GCC unroll 4
    for (int64_t step = 0; step < kPieceKeys / Dot::kPerWord; ++step) {
      if (ahead != nullptr) {
#pragma GCC unroll 2
        for (int i = 0; i < Dot::kPerWord; ++i)
#pragma GCC unroll 8
          for (int byte = 0; byte < kBytes; byte += 64) prefetch(ahead[step * Dot::kPerWord + i] + byte);
      }
      VecF value[VECS];
      rows.template load<VECS>(step, 0, value);
#pragma GCC unroll 2
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECS; ++v)
          sum[r][v] = Dot::multiply_add(sum[r][v], value[v], weights[r * kBlockKeys + step]);
    }
#pragma GCC unroll 2
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < VECS; ++v) store(output + r * columns + v * kLanes, sum[r][v]);
  }

  const AttentionArgs& args_;
  int64_t k_words_, columns_, group_;
};

}  // namespace
}  // namespace specmemo
