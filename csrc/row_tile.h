// Tiles of products: up to kRowTile input rows with kWeightTile weight rows.
//
// One vector of partial sums for each pair. Both operands are contiguous along the reduced dimension, so weights aren't
// packed. Input rows are interleaved, because rows 4 KiB apart evict each other from L1. The order of the sums of a
// pair depends on neither the other rows nor the other weights.
#pragma once

#include <algorithm>

#include "compressed_tile.h"
#include "fold.h"
#include "weight_prefetch.h"

namespace specmemo {
namespace {

constexpr int kWeightTile = 3;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRowTile = 8;  // 3 x 8 accumulators of 32 registers
#else
constexpr int kRowTile = 4;  // 3 x 4 accumulators of 16 registers
#endif
constexpr int64_t kGroup = 12;  // outputs whose sums are kept at once
static_assert(kGroup % kWeightTile == 0 && kGroup % 2 == 0, "whole tiles in a group");

// Weight rows of a tile with `rows` rows of input. Of compressed ones in registers two fit beside the sums of three and
// four rows: with three rows of each, four rows of input take 1.3 to 1.6 times as long.
template <class Weights>
constexpr int weight_tile(int64_t rows) {
  return kInRegisters && Weights::kCompressed && rows > 2 ? 2 : kWeightTile;
}

// A chunk of the products of a group: `elements` elements of ROWS input rows, and `count` weight rows from `first` on.
template <class Row, class Weights>
struct Chunk {
  const typename Row::Element* x;  // [steps, kVecs, ROWS, kPart]
  const Weights& weights;
  int64_t first, count, begin, elements;  // begin: of the weight rows
  bool is_first, is_last;                 // of the chunks of these rows
  VecF* sums;                             // [ROWS][kGroup], kept from one chunk to the next
  float* values;                          // [ROWS][kGroup], written by the last chunk
};

// sum += the products of ROWS input rows with WEIGHTS weight rows over `elements` elements.
template <class Row, int ROWS, int WEIGHTS, class Raw, class Prefetches>
inline void dot_parts(const typename Row::Element* x, const Raw* const* rows, int64_t elements, VecF (*sum)[WEIGHTS],
                      Prefetches& prefetches) {
  const Raw* weight[WEIGHTS];
#pragma GCC unroll 8
  for (int v = 0; v < WEIGHTS; ++v) weight[v] = rows[v];
  for (int64_t i = 0; i < elements; i += Row::kStep, x += ROWS * Row::kStep)
    dot_step<Row, ROWS, WEIGHTS, 0>(x, weight, i, sum, prefetches);
}

// The products with WEIGHTS weight rows, those of outputs `at` and after it. Of a single one only `sums` are written.
template <class Row, int ROWS, int WEIGHTS, class Weights, class Prefetches>
__attribute__((noinline)) void dot_tile(const Chunk<Row, Weights>& chunk, const typename Weights::Row* rows, int64_t at,
                                        const Prefetches& start) {
  VecF sum[ROWS][WEIGHTS], *sums = chunk.sums + at;
  if (chunk.is_first) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < WEIGHTS; ++v) sum[r][v] = VecF{};
  } else {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < WEIGHTS; ++v) sum[r][v] = sums[r * kGroup + v];
  }
  Prefetches prefetches = start;
  dot_parts<Row, ROWS, WEIGHTS>(chunk.x, rows, chunk.elements, sum, prefetches);
  if (chunk.is_last && WEIGHTS > 1) {
    fold_tile<ROWS, WEIGHTS>(sum, chunk.values + at, kGroup);
  } else {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < WEIGHTS; ++v) sums[r * kGroup + v] = sum[r][v];
  }
}

template <PrefetchPattern PATTERN, class Row, int ROWS, class Weights>
void dot_chunk(const Chunk<Row, Weights>& chunk, Ahead& ahead, int64_t next_tile) {
  constexpr int kTile = weight_tile<Weights>(ROWS);
  for (int64_t v = 0; v < chunk.count; v += kTile, ahead.at += next_tile) {
    typename Weights::Row rows[kTile];
    for (int64_t i = 0; i < kTile; ++i)  // outputs past the end repeat the last one; their sums aren't used
      rows[i] = chunk.weights.row(chunk.first + std::min(v + i, chunk.count - 1), chunk.begin);
    dot_tile<Row, ROWS, kTile>(chunk, rows, v, WeightPrefetches<kTile, PATTERN>(ahead));
  }
}

template <PrefetchPattern PATTERN, class Row, int ROWS, class Weights>
void dot_rows(int64_t rows, const Chunk<Row, Weights>& chunk, Ahead& ahead, int64_t next_tile) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) return dot_chunk<PATTERN, Row, ROWS>(chunk, ahead, next_tile);
    dot_rows<PATTERN, Row, ROWS - 1>(rows, chunk, ahead, next_tile);
  }
}

}  // namespace
}  // namespace specmemo
