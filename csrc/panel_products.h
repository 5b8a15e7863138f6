// Sums of many input rows with weight rows: lanes are input rows.
//
// Panels of input rows are transposed once. A block of their inputs stays in the caches while the weights of a group
// pass by, kTileRows outputs at a time. Words that memory has as the products need them are read in place; others, and
// those of a last tile or block, are copied next to each other. The order of a sum's products isn't that of
// RowProducts: invariant products never use panels.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels.h"
#include "pack.h"
#include "stored_weights.h"
#include "threads.h"

namespace specmemo {
namespace {

// Panels pay with 32 registers and wide vectors. With two threads and 64 rows they are 1.1 times as fast as RowProducts
// in bfloat16 and 1.15 in float32 on an Emerald Rapids without BF16 instructions, 1.05 to 1.15 times on an EPYC with
// them; with AVX2 no gain.
constexpr bool kPanelsPay = kLanes == 16;
constexpr int64_t kPanelRows = kBlockKeys;
// Panels of one pass over the weights. Two instead of one, on an EPYC with two threads and 256 rows: 0.95 to 0.98 of
// the time with weights in dtype, 0.92 to 0.95 with compressed ones. Four: 0.02 to 0.05 less, for 4 MiB at 2048 x 5632.
constexpr int64_t kPassPanels = 2;
// Whether `rows` rows, at most a panel, are faster than with RowProducts. Panels multiply whole vectors of rows: on an
// EPYC with two threads 40 rows take 1.05 to 1.15 times as long, 44 rows 0.96 to 1.02 times, 48 rows 0.87 to 0.94
// times, 52 rows 1.1 to 1.15 times. 32 rows of bfloat16 take 0.87 to 0.96 times, with compressed weights 0.83 to 0.92,
// of float32 0.95 to 1.0, of float16 1.05; 28 rows of float32 1.05 to 1.14; 16 rows 1.03 to 1.14.
constexpr bool panel_pays(int64_t rows) {
  constexpr int64_t kLeastRows = 44, kMaxUnused = 4;  // lanes of the last vector
  const bool enough = rows >= kLeastRows && (kLanes - rows % kLanes) % kLanes <= kMaxUnused;
  return kPanelsPay && (enough || rows == 2 * kLanes);
}

// Rows of the next pass if `rows` are left: whole panels, and a smaller one if it pays. 0: no panel pays.
constexpr int64_t rows_in_panels(int64_t rows) {
  const int64_t most = std::min(rows, kPassPanels * kPanelRows), rest = most % kPanelRows;
  return kPanelsPay ? most - (panel_pays(rest) ? 0 : rest) : 0;
}

// Words of a block: 64 KiB of a panel, which leave L2 as fast as they are multiplied.
constexpr int64_t kBlockSteps = 256;

// Copies `whole` words, a multiple of kLanes * kRuns, as kRuns runs of equal sizes: run i has every kRuns-th, from the
// i-th on.
template <class T, class Dot>
struct PanelWords {
  static constexpr int64_t kRuns = 1;
  static void copy(const typename T::Raw* row, int64_t whole, typename Dot::Word* out) {
    for (int64_t s = 0; s < whole; s += kLanes) store(out + s, KeyWords<T, Dot>::load_words(row, s));
  }
};

// Two bfloat16 in a word are two floats after a shift and after a mask: first all even elements, then all odd ones.
template <>
struct PanelWords<BFloat16, Float32Dot> {
  static constexpr int64_t kRuns = 2;
  static void copy(const uint16_t* row, int64_t whole, float* out) {
    for (int64_t s = 0; s < whole; s += 2 * kLanes) {
      const VecU words = load<VecU>(row + s);
      store(out + s / 2, low_halves(words));
      store(out + (whole + s) / 2, high_halves(words));
    }
  }
};

template <class T, class Dot, class Weights = PlainWeights<T>>
class PanelProducts {
  typedef typename T::Raw Raw;
  typedef typename Dot::Word Word;
  typedef PanelWords<T, Dot> Words;
  static constexpr int kMaxVecs = kPanelRows / kLanes;
  static constexpr bool kRawWords = sizeof(Raw) * Dot::kPerWord == sizeof(Word);  // a word is its weights' bytes
  static constexpr bool kInPlace = std::is_same_v<Weights, PlainWeights<T>> && kRawWords;

 public:
  static constexpr int64_t kTile = kTileRows;
  static constexpr int64_t kGroupSize = 48;  // outputs whose sums are kept at once
  static_assert(kGroupSize % kTileRows == 0 && kGroupSize % kLanes == 0, "whole tiles and vectors in a group");

  explicit PanelProducts(const ProductArgs& args)
      : args_(args),
        weights_(args),
        words_(round_up(args.inputs, Dot::kPerWord) / Dot::kPerWord),
        vecs_((args.rows + kLanes - 1) / kLanes) {}

  // Limited by products: tasks are as short as a group, so that threads end together.
  static int64_t task_count(int64_t outputs, int64_t, int threads) {
    return threads * std::max(outputs / (threads * kGroupSize), int64_t{1});
  }

  // Memory for prepare(), of the caller.
  int64_t memory_bytes() const { return panels() * words_ * kPanelRows * 4; }

  // [panels][words][kPanelRows], kLanes rows of input at a time; the lanes behind the last row repeat it.
  void prepare(char* memory, int threads) {
    x_ = reinterpret_cast<float*>(memory);
    auto part = [](void* self, int64_t i) { static_cast<PanelProducts*>(self)->prepare_rows(i * kLanes); };
    parallel_for(vecs_, threads, part, this);
  }

  // The prepared input of products with the same rows.
  void prepare_as(const PanelProducts& other) { x_ = other.x_; }

  // Rows of `values` in multiply().
  int64_t value_rows() const { return vecs_ * kLanes; }

  // Memory for multiply(), of each thread.
  int64_t sums_bytes() const { return (panels() * kGroupSize * kPanelRows + kTileRows * kBlockSteps) * 4; }

  // values[row * kGroupSize + v] = the product of the row with the weights of output first + v, for v < count.
  void multiply(int64_t first, int64_t count, VecF* memory, float* values) const {
    auto* sums = reinterpret_cast<float*>(memory);  // [panels][kGroupSize][kPanelRows]
    auto* words = reinterpret_cast<Word*>(sums + panels() * kGroupSize * kPanelRows);
    for (int64_t begin = 0; begin == 0 || begin < words_; begin += kBlockSteps) {
      const int64_t steps = std::min(words_ - begin, kBlockSteps);
      constexpr int64_t kWhole = kLanes * Words::kRuns;
      const int64_t whole = std::min(steps, args_.inputs / Dot::kPerWord - begin) / kWhole * kWhole;
      for (int64_t v = 0; v < count; v += kTileRows) {
        const Tile tile = tile_of(first + v, std::min(count - v, kTile), begin, steps, whole, words);
        // Those multiplied next: of the next tile, of the next block, or of the next group.
        const bool more = v + kTileRows < count, last = begin + kBlockSteps >= words_;
        const int64_t output = first + (more ? v + kTileRows : last ? count : 0);
        const int64_t word = more ? begin : last ? 0 : begin + kBlockSteps;
        const char* next = weights_.at(output, word * Dot::kPerWord);
        for (int64_t p = 0; p < panels(); ++p)
          multiply_vecs<kMaxVecs>(vecs_of(p), tile, x_ + (p * words_ + begin) * kPanelRows, steps, whole, begin == 0,
                                  sums + (p * kGroupSize + v) * kPanelRows, p == 0 ? next : nullptr);
      }
    }
    for (int64_t v = 0; v < count; v += kLanes)
      for (int64_t vec = 0; vec < vecs_; ++vec) {
        const float* columns = sums + (vec / kMaxVecs * kGroupSize + v) * kPanelRows + vec % kMaxVecs * kLanes;
        VecF block[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) block[i] = load<VecF>(columns + i * kPanelRows);
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(values + (vec * kLanes + i) * kGroupSize + v, block[i]);
      }
  }

 private:
  int64_t panels() const { return (vecs_ + kMaxVecs - 1) / kMaxVecs; }
  int64_t vecs_of(int64_t panel) const { return std::min(vecs_ - panel * kMaxVecs, int64_t{kMaxVecs}); }

  void prepare_rows(int64_t first) {
    const char* rows[kLanes];
    for (int64_t i = 0; i < kLanes; ++i)
      rows[i] = reinterpret_cast<const char*>(static_cast<const Raw*>(args_.x) +
                                              std::min(first + i, args_.rows - 1) * args_.x_stride);
    Fetch nothing;
    float* panel = x_ + first / kPanelRows * words_ * kPanelRows;
    pack_keys<T, Dot>(rows, kLanes, args_.inputs, panel + first % kPanelRows, nothing);
  }

  // Words of kTileRows outputs, `stride` bytes from one output to the next.
  struct Tile {
    const char* words;
    int64_t stride;
    Word word(int64_t output, int64_t step) const {
      return load<Word>(words + output * stride + step * static_cast<int64_t>(sizeof(Word)));
    }
  };

  // A block of `count` outputs' weights from word `begin` on, `whole` of its `steps` words whole vectors; in `room`
  // where they can't be read in place. Outputs behind `count` repeat the last one: their sums aren't used.
  Tile tile_of(int64_t first, int64_t count, int64_t begin, int64_t steps, int64_t whole, Word* room) const {
    if (kInPlace && steps == whole && count == kTile)
      return {weights_.at(first, begin * Dot::kPerWord), weights_.row_bytes()};
    for (int64_t r = 0; r < kTile; ++r)
      copy_words(first + std::min(r, count - 1), begin, steps, whole, room + r * kBlockSteps);
    return {reinterpret_cast<const char*>(room), kBlockSteps * static_cast<int64_t>(sizeof(Word))};
  }

  // The words of a block of one output's weights, which starts at word `begin`.
  void copy_words(int64_t output, int64_t begin, int64_t steps, int64_t whole, Word* out) const {
    copy_words(weights_.row(output, begin * Dot::kPerWord), args_.inputs - begin * Dot::kPerWord, steps, whole, out);
  }

  void copy_words(const Raw* row, int64_t left, int64_t steps, int64_t whole, Word* out) const {
    Words::copy(row, whole, out);
    for (int64_t s = whole; s < steps; ++s) out[s] = bits_as<Word>(KeyWords<T, Dot>::word(row, s, left));
  }

  void copy_words(const CompressedRow& row, int64_t left, int64_t steps, int64_t whole, Word* out) const {
    constexpr int64_t kBlock = kBlockSteps * Dot::kPerWord;
    static_assert(kBlock % kBlockWeights == 0, "whole compressed blocks in a block");
    Raw weights[kBlock];
    const bool in_place = kRawWords && whole == steps;
    Raw* to = in_place ? reinterpret_cast<Raw*>(out) : weights;
    for (int64_t i = 0; i < std::min(left, kBlock); i += kBlockWeights) row.read(i, to + i);
    if (!in_place) copy_words(weights, left, steps, whole, out);
  }

  template <int VECS, class... Args>
  void multiply_vecs(int64_t vecs, Args... args) const {
    if constexpr (VECS > 0) {
      if (vecs == VECS) return multiply_tile<VECS>(args...);
      multiply_vecs<VECS - 1>(vecs, args...);
    }
  }

  // sums[kTileRows][kPanelRows] += tile[kTileRows][steps] * panel[steps][kPanelRows] in the first VECS vectors, without
  // the former sums in the first block: the `whole` words in their runs, then the others. Prefetches up to a block of
  // weights from `next`, if not null.
  template <int VECS>
  __attribute__((noinline)) void multiply_tile(Tile tile, const float* panel, int64_t steps, int64_t whole, bool first,
                                               float* sums, const char* next) const {
    constexpr int64_t kRowLines = Weights::bytes(kBlockSteps * Dot::kPerWord) / kLine;
    constexpr int64_t kEvery = kBlockSteps / (kTileRows * kRowLines);  // steps from one prefetch to the next
    static_assert(kEvery > 0, "no more lines than steps");
    const int64_t row_bytes = weights_.row_bytes();
    VecF sum[kTileRows][VECS];
#pragma GCC unroll 8
    for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < VECS; ++v) sum[r][v] = first ? VecF{} : load<VecF>(sums + r * kPanelRows + v * kLanes);
    const int64_t lines = next != nullptr ? kTileRows * kRowLines : 0;
    int64_t line = 0;
    for (int64_t run = 0; run <= Words::kRuns; ++run) {
      const bool rest = run == Words::kRuns;  // behind the whole words
      const int64_t begin = whole / Words::kRuns * run, end = rest ? steps : whole / Words::kRuns * (run + 1);
      const float* x = panel + (rest ? whole : run) * kPanelRows;
      for (int64_t s = begin; s < end; ++s, x += (rest ? 1 : Words::kRuns) * kPanelRows) {
        if (s % kEvery == 0 && line < lines) {
          prefetch(next + line / kRowLines * row_bytes + line % kRowLines * kLine);
          ++line;
        }
        VecF columns[VECS];
#pragma GCC unroll 8
        for (int v = 0; v < VECS; ++v) columns[v] = load<VecF>(x + v * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 8
          for (int v = 0; v < VECS; ++v) sum[r][v] = Dot::multiply_add(sum[r][v], columns[v], tile.word(r, s));
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < VECS; ++v) store(sums + r * kPanelRows + v * kLanes, sum[r][v]);
  }

  const ProductArgs& args_;
  Weights weights_;
  int64_t words_;  // of a row
  int64_t vecs_;   // of input rows
  float* x_ = nullptr;
};

}  // namespace
}  // namespace specmemo
