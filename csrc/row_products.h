// Sums of input rows with weight rows, for few rows of input.
//
// Weight rows are read once and in place, or decompressed in parts (stored_weights.h): a group of outputs at a time, a
// tile of products (row_tile.h) at a time.
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "parts.h"
#include "row_tile.h"

namespace specmemo {
namespace {

// With at most so many products for each vector of weights, weight rows are read one after the other, a single stream.
// On an EPYC with BF16 instructions one row of input takes 0.70 to 0.97 of the time that it takes with kWeightTile
// streams, two 0.93 to 1.0, three to five 0.80 to 0.98 (768 x 768 to 2048 x 2048 in huge pages; less the faster the
// memory). In 4 KiB pages one row takes 0.78 to 1.0, with 768 x 768 weights 0.94 to 1.10. Six rows, and three rows of
// float16, take longer. On a Zen 3 (AVX2) one to four rows of float32 take 1.08 to 1.15 of the time, one and two of
// bfloat16 1.06 and 0.99. Other CPUs weren't measured.
#if defined(__AVX512BF16__)
constexpr int kSequentialProducts = 5;
#else
constexpr int kSequentialProducts = 0;
#endif

// Chunks of input rows, each of which stays in L1 while a group's weights are multiplied with it. On Emerald Rapids
// (48 KiB) 32 KiB are faster in one chunk than in two, 64 KiB in three or four.
inline int64_t chunk_count(int64_t bytes) {
  const int64_t chunk = l1_bytes() * 11 / 24, chunks = (bytes + chunk / 2) / chunk;
  return chunks > 1 ? chunks : 1;
}

// Whether a tile's input of `bytes` stays in L1 while `streams` rows of weights of `row_bytes` pass by, on a Zen 4.
// There such tiles in one chunk take 0.66 to 1.0 of the time of two chunks, which read input and sums from L2 again
// while the next weights arrive there (bfloat16: 3 to 16 rows of 1536 to 4096 inputs; float32: 3 to 16 rows of 768 to
// 2048). With three streams 33.75 KiB of input and weights stay in 32 KiB, because weights are read once, and 34.9 KiB
// don't. With one stream 34.5 KiB take 1.25 times as long as two chunks.
inline bool stay_beside_weights(int64_t bytes, int64_t row_bytes, int streams) {
  const int64_t room = streams == 1 ? l1_bytes() : l1_bytes() * 17 / 16;
  return zen() == 4 && bytes + streams * row_bytes <= room;
}

// Whether an input of `bytes` stays in L1 beside weights prefetched into L1, on a Zen 5. There
// PrefetchPattern::kNextTile takes 0.83 to 0.96 of the time with 6 to 8 rows of bfloat16 and float32: the prefetchers
// follow one stream in address order at full bandwidth, and three streams at 0.8 of it. With more bytes it takes 1.1
// times as long, and in float16, where conversion is the limit, up to 1.27 times.
inline bool stay_in_l1(int64_t bytes) { return zen() >= 5 && bytes <= l1_bytes() * 7 / 12; }

// Whether so many tiles of rows use PrefetchPattern::kTwice, on a Zen 4. There one and two tiles take 0.80 to 0.97 of
// the time (6 to 16 rows of bfloat16, 2048 to 5632 inputs, two cores), four tiles 1.01 of it.
inline bool prefetched_twice(int64_t tiles) { return zen() == 4 && tiles <= 2; }

// Inputs of a group's weights that are decompressed at once, for all tiles of rows; 0: every tile decompresses its own.
// With 16 registers, where a tile has four rows, 8 rows take 0.84 of the time on a Zen 3, 16 and 32 rows 0.65 to 0.70.
// A single tile takes 0.92 to 1.04 of it; half as many inputs 0.98 to 1.08 times the time.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int64_t kDecompressedInputs = 0;
#else
constexpr int64_t kDecompressedInputs = 1024;
#endif

// Those inputs, from one on.
struct DecompressedWeights {
  typedef const uint16_t* Row;
  static constexpr bool kCompressed = false;

  Row row(int64_t output, int64_t input) const {
    return weights + (output - first) * kDecompressedInputs + input - begin;
  }

  const uint16_t* weights;
  int64_t first, begin;  // output and input of the first weight
};

// Number of tasks that prefetch weights: several for each thread, so that a slow core does fewer, but long ones,
// because the first weights of a task are prefetched only if the same thread ran the task before. While other processes
// take a part of a core, at most 16 tasks for each thread take 0.95 of the time of 4; on a quiet machine the same.
inline int64_t prefetched_tasks(int64_t outputs, int64_t row_bytes, int threads) {
  constexpr int64_t kTaskBytes = 256 << 10;
  const int64_t long_tasks = outputs * row_bytes / (threads * kTaskBytes), max_tasks = threads == 1 ? 1 : 16;
  return threads * (long_tasks < 1 ? 1 : (long_tasks < max_tasks ? long_tasks : max_tasks));
}

template <class T, class Dot, class Weights = PlainWeights<T>>
class RowProducts {
  typedef typename T::Raw Raw;
  typedef RowDot<T, Dot> Row;
  typedef typename Row::Element Element;

 public:
  static constexpr int64_t kTile = kGroup, kGroupSize = kGroup;

  explicit RowProducts(const ProductArgs& args)
      : args_(args),
        weights_(args),
        whole_(args.inputs / Row::kStep * Row::kStep),
        tiles_(Parts::at_most(args.rows, tile_rows())),
        in_l1_(whole_in_l1(tile_rows())),
        chunks_((whole_ + kUnit - 1) / kUnit, chunk_count_of((whole_ + kUnit - 1) / kUnit)),
        sequential_(one_tile_and_chunk() && args.rows * Row::kVecs <= most_sequential()),
        pattern_(pattern()) {
    if (in_place()) x_ = static_cast<const Element*>(args.x);
  }

  static constexpr auto task_count = prefetched_tasks;

  // Memory for prepare(), of the caller.
  int64_t memory_bytes() const { return in_place() ? 0 : x_bytes(args_.rows); }

  // Interleaves the rows of each tile: [tile][steps, kVecs, rows of the tile, kPart].
  void prepare(char* memory, int) {
    if (in_place()) return;
    auto* out = reinterpret_cast<Element*>(memory);
    x_ = out;
    for (int64_t t = 0; t < tiles_.count; ++t)
      for (int64_t i = 0; i < whole_; i += Row::kStep, out += tiles_.size(t) * Row::kStep)
        for (int64_t r = 0; r < tiles_.size(t); ++r)
          Row::prepare(static_cast<const Raw*>(args_.x) + (tiles_.begin(t) + r) * args_.x_stride + i, tiles_.size(t),
                       out + r * Row::kPart);
  }

  // The prepared input of products with the same rows.
  void prepare_as(const RowProducts& other) { x_ = other.x_; }

  // Rows of `values` in multiply().
  int64_t value_rows() const { return args_.rows; }

  // Memory for multiply(), of each thread.
  int64_t sums_bytes() const {
    const int64_t sums = args_.rows * kGroup * static_cast<int64_t>(sizeof(VecF));
    return sums + (decompresses_once() ? kGroup * kDecompressedInputs * static_cast<int64_t>(sizeof(Raw)) : 0);
  }

  // values[row * kGroup + v] = the product of the row with the weights of output first + v, for v < count.
  void multiply(int64_t first, int64_t count, VecF* sums, float* values) const {
    if (sequential_)
      multiply_sequence<kSequential / Row::kVecs>(first, count, sums, values);
    else
      multiply_tiles(first, count, sums, values);
    if (whole_ < args_.inputs) add_rest(first, count, values);
  }

 private:
  static constexpr int64_t kUnit = Weights::kCompressed ? kBlockWeights : Row::kStep;
  static constexpr bool kDecompressesOnce = Weights::kCompressed && kDecompressedInputs > 0;
  // Compressed rows on Zen 4 only with one row of input: two take 0.92 of the time of plain weights with 4096 inputs,
  // in tiles 0.74. On Zen 5 two and three rows take 0.78 to 1.0 of the time in tiles, four up to 1.2 times as long.
  static constexpr int kSequential = Weights::kCompressed ? std::min(kSequentialProducts, 3) : kSequentialProducts;
  static int most_sequential() { return Weights::kCompressed && zen() < 5 ? std::min(kSequential, 1) : kSequential; }

#if defined(__AVX512BF16__)
  // Products whose tiles and prefetches were measured on Zen 4 and 5.
  static constexpr bool kMeasured = Row::kVecs == 1 && !Weights::kCompressed;
#else
  static constexpr bool kMeasured = false;
#endif
  static constexpr PrefetchPattern kPattern =
      Weights::kCompressed ? PrefetchPattern::kFar : PrefetchPattern::kFarAndNear;

  // A chunk of a tile's rows stays in L1 while the group's weights pass by; these stay in L2 for the next tile.
  void multiply_tiles(int64_t first, int64_t count, VecF* sums, float* values) const {
    // Every tile prefetches its share of the weights behind these.
    const int64_t line = line_of_tile();
    const bool in_order = prefetches_in_order();
    const int width = decompresses_once() ? kWeightTile : weight_tile<Weights>(tiles_.size(0));
    Ahead ahead{weights_.at(first + (pattern_ == PrefetchPattern::kNextTile ? kWeightTile : count), 0), line,
                width * line};
    if (!in_order) ahead.next_row = weights_.row_bytes(), ahead.next_step = line;
    for (int64_t c = 0; c < chunks_.count; ++c) {
      const int64_t begin = chunks_.begin(c) * kUnit, end = std::min(chunks_.begin(c + 1) * kUnit, whole_);
      const bool last = c + 1 == chunks_.count;
      const char* behind = in_order ? nullptr : last ? weights_.at(first + kGroup, 0) : weights_.at(first, end);
      const auto multiply = [&](const auto& weights) {
        multiply_chunk(weights, {first, count, begin, end, c == 0, last}, behind, ahead, sums, values);
      };
      if constexpr (kDecompressesOnce)
        if (decompresses_once()) {
          auto* room = reinterpret_cast<uint16_t*>(sums + args_.rows * kGroup);
          for (int64_t v = 0; v < count; ++v)
            for (int64_t i = 0; i < end - begin; i += kBlockWeights)
              weights_.row(first + v, begin).read(i, room + v * kDecompressedInputs + i);
          multiply(DecompressedWeights{room, first, begin});
          continue;
        }
      multiply(weights_);
    }
  }

  // Inputs begin to end of a group of `count` outputs.
  struct Part {
    int64_t first, count, begin, end;
    bool is_first, is_last;
  };

  // The products of all tiles of rows with a part of the group. behind: the weights behind these, or null: `ahead`
  // walks over them from one tile to the next.
  template <class Stored>
  void multiply_chunk(const Stored& weights, const Part& part, const char* behind, Ahead& ahead, VecF* sums,
                      float* values) const {
    const int64_t inputs = part.end - part.begin, bytes = inputs / Row::kStep * line_of_tile();
    for (int64_t t = 0; t < tiles_.count; ++t) {
      if (behind != nullptr) ahead.at = behind + bytes * t;
      const int64_t top = tiles_.begin(t), height = tiles_.size(t);
      const int64_t next_tile = weight_tile<Stored>(height) * (behind == nullptr ? bytes : weights_.row_bytes());
      const Chunk<Row, Stored> chunk{x_ + top * whole_ + part.begin * height,
                                     weights,
                                     part.first,
                                     part.count,
                                     part.begin,
                                     inputs,
                                     part.is_first,
                                     part.is_last,
                                     sums + top * kGroup,
                                     values + top * kGroup};
      if constexpr (kMeasured)
        if (pattern_ != kPattern) {
          if (pattern_ == PrefetchPattern::kNextTile)
            dot_rows<PrefetchPattern::kNextTile, Row, kRowTile>(height, chunk, ahead, next_tile);
          else
            dot_rows<PrefetchPattern::kTwice, Row, kRowTile>(height, chunk, ahead, next_tile);
          continue;
        }
      dot_rows<kPattern, Row, kRowTile>(height, chunk, ahead, next_tile);
    }
  }

  // One weight row at a time: whole rows, and a fold for all outputs of the group.
  template <int ROWS>
  void multiply_sequence(int64_t first, int64_t count, VecF* sums, float* values) const {
    if constexpr (ROWS > 0) {
      if (args_.rows < ROWS) return multiply_sequence<ROWS - 1>(first, count, sums, values);
      const Chunk<Row, Weights> chunk{x_, weights_, first, count, 0, whole_, true, true, sums, values};
      // With prefetches, one row of input takes 0.66 to 0.83 of the time on compressed weights (Zen 5).
      const bool prefetched = Weights::kCompressed ? zen() >= 5 : ROWS > 1;
      for (int64_t v = 0; v < count; ++v) {
        const auto row = weights_.row(first + v, 0);
        if (prefetched) {
          const Ahead ahead{weights_.at(first + v, 0) + kSequentialBytes, 0, Weights::bytes(Row::kStep)};
          dot_tile<Row, ROWS, 1>(chunk, &row, v, WeightPrefetches<1, PrefetchPattern::kFar>(ahead));
        } else {
          dot_tile<Row, ROWS, 1>(chunk, &row, v, NoPrefetches{});
        }
      }
      for (int r = 0; r < ROWS; ++r)
        fold_tile<1, kGroup>(reinterpret_cast<const VecF(*)[kGroup]>(sums + r * kGroup), values + r * kGroup, kGroup);
    }
  }

  // Adds the products of the inputs behind the whole steps.
  void add_rest(int64_t first, int64_t count, float* values) const {
    for (int64_t v = 0; v < count; ++v) {
      Raw rest[Row::kStep];
      read_rest(weights_.row(first + v, whole_ / kUnit * kUnit), rest);
      for (int64_t i = whole_; i < args_.inputs; ++i)
        for (int64_t r = 0; r < args_.rows; ++r)
          values[r * kGroup + v] +=
              T::to_float(static_cast<const Raw*>(args_.x)[r * args_.x_stride + i]) * T::to_float(rest[i - whole_]);
    }
  }

  void read_rest(const Raw* row, Raw* rest) const {
    std::memcpy(rest, row, static_cast<size_t>(args_.inputs - whole_) * sizeof(Raw));
  }

  void read_rest(const CompressedRow& row, Raw* rest) const {
    Raw block[kBlockWeights];
    row.read(0, block);
    std::memcpy(rest, block + whole_ % kBlockWeights, static_cast<size_t>(args_.inputs - whole_) * sizeof(Raw));
  }

  // Rows of a tile, at most: half of kRowTile where only so few stay in L1.
  int64_t tile_rows() const { return !whole_in_l1(kRowTile) && whole_in_l1(kRowTile / 2) ? kRowTile / 2 : kRowTile; }

  // Whether tiles of up to `most` rows stay in L1 in one chunk.
  bool whole_in_l1(int64_t most) const {
    const int64_t rows = Parts::at_most(args_.rows, most).size(0);
    const bool sequential = rows == args_.rows && rows * Row::kVecs <= most_sequential();
    return kMeasured && stay_beside_weights(x_bytes(rows), weights_.row_bytes(), sequential ? 1 : kWeightTile);
  }

  PrefetchPattern pattern() const {
    if (kMeasured && one_tile_and_chunk() && stay_in_l1(x_bytes(args_.rows))) return PrefetchPattern::kNextTile;
    return kMeasured && prefetched_twice(tiles_.count) ? PrefetchPattern::kTwice : kPattern;
  }

  // Whether prefetches walk over a group's weights in address order.
  bool prefetches_in_order() const {
    const int64_t bytes = kGroup * weights_.row_bytes();
    if (in_l1_ || pattern_ == PrefetchPattern::kNextTile || bytes <= kOrderBytes) return true;
    if (!kOrderOf16Bits || T::kBits != 16 || tiles_.size(0) < (Weights::kCompressed ? 2 : 3)) return false;
    return tiles_.count == 1 || bytes <= kOrderBytesOfTiles;
  }

  // Bytes that a tile prefetches for a step of each weight row.
  int64_t line_of_tile() const { return Weights::bytes(Row::kStep) / tiles_.count; }

  // Parts of the inputs, in units. Decompressed ones have room for a limited number.
  int64_t chunk_count_of(int64_t units) const {
    const int64_t chunks = in_l1_ ? 1 : chunk_count(x_bytes(tiles_.size(0)));
    return decompresses_once() ? std::max(chunks, Parts::at_most(units, kDecompressedInputs / kUnit).count) : chunks;
  }

  // Whether a group's weights are decompressed once for several tiles of rows.
  bool decompresses_once() const { return kDecompressesOnce && tiles_.count > 1; }

  bool one_tile_and_chunk() const { return tiles_.count == 1 && chunks_.count == 1; }
  int64_t x_bytes(int64_t rows) const { return rows * whole_ * static_cast<int64_t>(sizeof(Element)); }
  bool in_place() const { return Row::kInPlace && args_.rows == 1; }

  const ProductArgs& args_;
  Weights weights_;
  int64_t whole_;            // elements in whole steps
  Parts tiles_;              // of rows
  bool in_l1_;               // whole tiles: one chunk
  Parts chunks_;             // of units
  bool sequential_;          // one weight row at a time
  PrefetchPattern pattern_;  // of tiles; kPattern, or another one where kMeasured
  const Element* x_ = nullptr;
};

}  // namespace
}  // namespace specmemo
