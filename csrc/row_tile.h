// Tiles of products: up to kRowTile input rows with kWeightTile weight rows.
//
// One vector of partial sums for each pair. Both operands are contiguous along the reduced dimension, so weights aren't
// packed. Input rows are interleaved, because rows 4 KiB apart evict each other from L1. The order of the sums of a
// pair depends on neither the other rows nor the other weights.
#pragma once

#include <algorithm>

#include "fold.h"
#include "stored_weights.h"
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
static_assert(kGroup % kWeightTile == 0, "whole tiles in a group");

// sum + a * b. The compiler would read an operand from memory for every use, and with 16 registers spill sums.
inline VecF fused_multiply_add(VecF sum, VecF a, VecF b) {
#if defined(__AVX2__)
  asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
#else
  return sum + a * b;
#endif
}

// Products with weights of one type. A step multiplies kStep weights, one cache line in kVecs vectors, with as many
// input Elements in the same order. `kInPlace`: a row of the input itself is in this order.
template <class T, class Dot>
struct RowDot {
  typedef float Element;
  static constexpr int kStep = 64 / static_cast<int>(sizeof(typename T::Raw)), kVecs = kStep / kLanes;
  static constexpr bool kInPlace = T::kBits == 32;
  template <int J>
  static VecF weights(const typename T::Raw* p) {
    return T::load_vec(p + J * kLanes);
  }
  static void prepare(const typename T::Raw* x, Element* out) {
    for (int i = 0; i < kStep; i += kLanes) store(out + i, T::load_vec(x + i));
  }
  static VecF multiply_add(VecF sum, VecF a, VecF b) { return fused_multiply_add(sum, a, b); }
};

// Two bfloat16 in a word are two floats after a shift and after a mask: of each vector of words first all even
// elements, then all odd ones.
template <>
struct RowDot<BFloat16, Float32Dot> {
  typedef float Element;
  static constexpr int kStep = 32, kVecs = kStep / kLanes;
  static constexpr bool kInPlace = false;
  template <int J>
  static VecF weights(const uint16_t* p) {
    const VecU words = load<VecU>(p + J / 2 * 2 * kLanes);
    return J % 2 == 0 ? low_halves(words) : high_halves(words);
  }
  static void prepare(const uint16_t* x, Element* out) {
    for (int i = 0; i < kStep; i += 2 * kLanes) {
      store(out + i, weights<0>(x + i));
      store(out + i + kLanes, weights<1>(x + i));
    }
  }
  static VecF multiply_add(VecF sum, VecF a, VecF b) { return fused_multiply_add(sum, a, b); }
};

#if defined(SPECMEMO_BF16_DOT)
template <>
struct RowDot<BFloat16, BFloat16Dot> {
  typedef uint16_t Element;
  static constexpr int kStep = 32, kVecs = kStep / (2 * kLanes);
  static constexpr bool kInPlace = true;
  template <int J>
  static VecF weights(const uint16_t* p) {
    return load<VecF>(p + J * 2 * kLanes);
  }
  static void prepare(const uint16_t* x, Element* out) {
    for (int i = 0; i < kStep; i += 2 * kLanes) store(out + i, load<VecU>(x + i));
  }
  static VecF multiply_add(VecF sum, VecF a, VecF b) { return BFloat16Dot::multiply_add(sum, b, a); }
};
#endif

// Multiplies vector J of a step, then the following ones. One vector of each weight row is in a register at a time.
template <class Row, int ROWS, int WEIGHTS, int J, class Raw, class Prefetches>
inline void dot_step(const typename Row::Element* x, const Raw* const* weight, int64_t at, VecF (*sum)[WEIGHTS],
                     Prefetches& prefetches) {
  if constexpr (J < Row::kVecs) {
    VecF w[WEIGHTS];
#pragma GCC unroll 8
    for (int v = 0; v < WEIGHTS; ++v) w[v] = Row::template weights<J>(weight[v] + at);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const VecF elements = load<VecF>(x + r * Row::kStep + J * (Row::kStep / Row::kVecs));
#pragma GCC unroll 8
      for (int v = 0; v < WEIGHTS; ++v) sum[r][v] = Row::multiply_add(sum[r][v], elements, w[v]);
      prefetches.issue(J * ROWS + r, Row::kVecs * ROWS, weight, at);
    }
    asm volatile("");  // keeps the compiler from loading the next vectors here, which would take too many registers
    dot_step<Row, ROWS, WEIGHTS, J + 1>(x, weight, at, sum, prefetches);
  }
}

// A chunk of the products of a group: `elements` elements of ROWS input rows, and `count` weight rows from `first` on.
template <class Row, class Weights>
struct Chunk {
  const typename Row::Element* x;  // [steps, ROWS, kStep]
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

// Decompresses half a block at a time, so that a core's reordering overlaps it with the products before: with whole
// blocks 8 rows take 1.1 times as long.
template <class Row, int ROWS, int WEIGHTS, class Prefetches>
inline void dot_parts(const typename Row::Element* x, const CompressedRow* rows, int64_t elements, VecF (*sum)[WEIGHTS],
                      Prefetches& prefetches) {
  alignas(64) uint16_t halves[2][WEIGHTS][kHalfBlock];
  const uint16_t* weight[WEIGHTS];
  for (int64_t i = 0; i < elements; i += kBlockWeights) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 8
      for (int v = 0; v < WEIGHTS; ++v) {
        weight[v] = halves[half][v];
        if (half == 0) rows[v].template read_half<0>(i, halves[0][v]);
        if (half == 1) rows[v].template read_half<1>(i, halves[1][v]);
      }
      const int64_t count = std::min(elements - i - half * kHalfBlock, kHalfBlock);
      for (int64_t s = 0; s < count; s += Row::kStep, x += ROWS * Row::kStep)
        dot_step<Row, ROWS, WEIGHTS, 0>(x, weight, s, sum, prefetches);
    }
  }
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
  for (int64_t v = 0; v < chunk.count; v += kWeightTile, ahead.at += next_tile) {
    typename Weights::Row rows[kWeightTile];
    for (int64_t i = 0; i < kWeightTile; ++i)  // outputs past the end repeat the last one; their sums aren't used
      rows[i] = chunk.weights.row(chunk.first + std::min(v + i, chunk.count - 1), chunk.begin);
    dot_tile<Row, ROWS, kWeightTile>(chunk, rows, v, WeightPrefetches<kWeightTile, PATTERN>(ahead));
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
