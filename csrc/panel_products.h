// Sums of many input rows with weight rows, at the tiles of tile.h: lanes are input rows.
//
// A panel of input rows is transposed once. A block of its inputs stays in the caches while the weights of a group pass
// by, kTileRows outputs at a time, whose words are copied next to each other. A sum adds its products in their order,
// which isn't that of RowProducts: invariant products never use panels.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "pack.h"

namespace specmemo {
namespace {

// Panels pay with 32 registers and wide vectors. On an Emerald Rapids without BF16 instructions, with two threads and
// 64 rows: 1.1 times as fast as RowProducts in bfloat16, 1.0 to 1.15 in float32; with AVX2 0.9 to 1.05 times. Not
// measured on an EPYC with AVX512.
constexpr bool kPanelsPay = kLanes == 16;
constexpr int64_t kPanelRows = kBlockKeys;
constexpr int64_t kLeastPanelRows = kPanelRows * 7 / 8;  // 48 rows took 1.15 to 1.25 times as long as RowProducts
constexpr int64_t kBlockSteps = 128;                     // words of a block: 32 KiB of a panel

template <class T, class Dot>
class PanelProducts {
  typedef typename T::Raw Raw;
  typedef typename Dot::Word Word;
  typedef KeyWords<T, Dot> Words;

 public:
  static constexpr int64_t kGroupSize = 96;  // outputs whose sums are kept at once
  static_assert(kGroupSize % kTileRows == 0 && kGroupSize % kLanes == 0, "whole tiles and vectors in a group");

  explicit PanelProducts(const ProductArgs& args)
      : args_(args), words_(round_up(args.inputs, Dot::kPerWord) / Dot::kPerWord) {}

  // Memory for prepare(), of the caller.
  int64_t memory_bytes() const { return words_ * kPanelRows * 4; }

  // [words][kPanelRows]; the lanes behind the last row repeat it.
  void prepare(char* memory) {
    auto* panel = reinterpret_cast<float*>(memory);
    x_ = panel;
    const char* rows[kPanelRows];
    for (int64_t i = 0; i < kPanelRows; ++i)
      rows[i] = reinterpret_cast<const char*>(static_cast<const Raw*>(args_.x) +
                                              (i < args_.rows ? i : args_.rows - 1) * args_.x_stride);
    Fetch nothing(rows, 0, 0, 0, 0);
    pack_keys<T, Dot>(rows, kPanelRows, args_.inputs, panel, nothing);
  }

  // The prepared input of products with the same rows.
  void prepare_as(const PanelProducts& other) { x_ = other.x_; }

  // Rows of `values` in multiply().
  int64_t value_rows() const { return kPanelRows; }

  // Memory for multiply(), of each thread.
  int64_t sums_bytes() const { return (kGroupSize * kPanelRows + kTileRows * kBlockSteps) * 4; }

  // values[row * kGroupSize + v] = the product of the row with the weights of output first + v, for v < count.
  void multiply(int64_t first, int64_t count, VecF* memory, float* values) const {
    static constexpr float kOnes[6] = {1, 1, 1, 1, 1, 1};  // of the tallest tile
    auto* sums = reinterpret_cast<float*>(memory);         // [kGroupSize][kPanelRows]
    auto* words = reinterpret_cast<Word*>(sums + kGroupSize * kPanelRows);
    for (int64_t begin = 0; begin == 0 || begin < words_; begin += kBlockSteps) {
      const int64_t steps = words_ - begin < kBlockSteps ? words_ - begin : kBlockSteps;
      for (int64_t v = 0; v < count; v += kTileRows) {
        const int64_t height = count - v < kTileRows ? count - v : kTileRows;
        for (int64_t r = 0; r < height; ++r) copy_words(first + v + r, begin, steps, words + r * kBlockSteps);
        // Those multiplied next: of the next tile, of the next block, or of the next group.
        const bool more = v + kTileRows < count, last = begin + kBlockSteps >= words_;
        const int64_t output = first + (more ? v + kTileRows : last ? count : 0);
        const int64_t word = more ? begin : last ? 0 : begin + kBlockSteps;
        const char* next[kTileRows];
        for (int r = 0; r < kTileRows; ++r)
          next[r] = reinterpret_cast<const char*>(weight(output + r) + word * Dot::kPerWord);
        Fetch fetch(next, kTileRows, steps * Dot::kPerWord * static_cast<int64_t>(sizeof(Raw)), 0, steps);
        specmemo::multiply<Dot>(height, words, kBlockSteps, PackedColumns{x_ + begin * kPanelRows, kPanelRows}, steps,
                                sums + v * kPanelRows, kPanelRows, begin == 0 ? nullptr : kOnes, kPanelRows / kLanes,
                                fetch);
      }
    }
    for (int64_t v = 0; v < count; v += kLanes)
      for (int64_t row = 0; row < args_.rows; row += kLanes) {
        VecF block[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) block[i] = load<VecF>(sums + (v + i) * kPanelRows + row);
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(values + (row + i) * kGroupSize + v, block[i]);
      }
  }

 private:
  const Raw* weight(int64_t output) const { return static_cast<const Raw*>(args_.weight) + output * args_.inputs; }

  void copy_words(int64_t output, int64_t begin, int64_t steps, Word* out) const {
    const Raw* row = weight(output);
    const int64_t whole = std::min(steps, args_.inputs / Dot::kPerWord - begin);
    int64_t s = 0;
    for (; s + kLanes <= whole; s += kLanes) store(out + s, Words::load_words(row, begin + s));
    for (; s < steps; ++s) out[s] = bits_as<Word>(Words::word(row, begin + s, args_.inputs));
  }

  const ProductArgs& args_;
  int64_t words_;  // of a row
  const float* x_ = nullptr;
};

}  // namespace
}  // namespace specmemo
