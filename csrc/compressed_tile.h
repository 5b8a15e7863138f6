// Products of a tile with compressed weight rows, which are decompressed to memory half a block at a time, or with AVX2
// in registers.
#pragma once

#include <algorithm>

#include "row_dot.h"
#include "stored_weights.h"

namespace specmemo {
namespace {

// sum += the products of ROWS input rows with up to `count` weights of the block that starts with weight `i`. Half a
// block at a time, so that a core's reordering overlaps it with the products before: with whole blocks 8 rows take 1.1
// times as long.
template <class Row, int ROWS, int WEIGHTS, class Prefetches>
inline void dot_block(const typename Row::Element* x, const CompressedRow* rows, int64_t i, int64_t count,
                      VecF (*sum)[WEIGHTS], Prefetches& prefetches) {
  alignas(64) uint16_t halves[2][WEIGHTS][kHalfBlock];
  const uint16_t* weight[WEIGHTS];
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 8
    for (int v = 0; v < WEIGHTS; ++v) {
      weight[v] = halves[half][v];
      if (half == 0) rows[v].template read_half<0>(i, halves[0][v]);
      if (half == 1) rows[v].template read_half<1>(i, halves[1][v]);
    }
    const int64_t end = std::min(count - half * kHalfBlock, kHalfBlock);
    for (int64_t s = 0; s < end; s += Row::kStep, x += ROWS * Row::kStep)
      dot_step<Row, ROWS, WEIGHTS, 0>(x, weight, s, sum, prefetches);
  }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// In registers, with fewer loads and stores: on a Zen 3 one to four rows take 0.78 to 0.87 of the time of dot_block()
// with weights in L1, 0.64 to 0.82 while the core's other thread is busy.
constexpr bool kInRegisters = true;

// sum += the products with a vector of words of each weight row: with its even elements, then with its odd ones, which
// are the words with the zeros of the even ones' lower halves.
template <class Row, int ROWS, int WEIGHTS>
inline void dot_words(const float* x, const __m256i* words, VecF (*sum)[WEIGHTS]) {
  VecF w[WEIGHTS];
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; ++odd) {
#pragma GCC unroll 8
    for (int v = 0; v < WEIGHTS; ++v)
      w[v] = odd == 0 ? low_halves((VecU)words[v]) : (VecF)_mm256_blend_epi16(words[v], (__m256i)w[v], 0x55);
    asm volatile("");  // as in dot_step()
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const VecF elements = load<VecF>(x + (odd * ROWS + r) * Row::kPart);
#pragma GCC unroll 8
      for (int v = 0; v < WEIGHTS; ++v) sum[r][v] = Row::multiply_add(sum[r][v], elements, w[v]);
    }
  }
}

// Half HALF of a block, `offset` bytes behind the first one of `rows`.
template <class Row, int ROWS, int WEIGHTS, int HALF, class Prefetches>
inline void dot_half(const float* x, const CompressedRow* rows, int64_t offset, VecF (*sum)[WEIGHTS],
                     Prefetches& prefetches) {
  __m256i first[WEIGHTS], second[2][WEIGHTS];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < WEIGHTS; ++v) {
      const uint8_t* low = rows[v].blocks + offset + kHalfBlock * HALF + 32 * i;
      const uint8_t* codes = rows[v].blocks + offset + kBlockWeights + 32 * i;
      decompress_vectors<HALF>(low, codes, rows[v].head->high, first[v], second[i][v]);
      prefetches.next(v);
    }
    dot_words<Row, ROWS>(x + i * ROWS * 2 * Row::kPart, first, sum);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) dot_words<Row, ROWS>(x + (2 + i) * ROWS * 2 * Row::kPart, second[i], sum);
}

// The first weight from `i` on that has no code in one of the rows.
__attribute__((noinline)) int64_t next_exception(const CompressedRow* rows, int count, int64_t i) {
  int64_t next = INT64_MAX;
  for (int v = 0; v < count; ++v) next = std::min(next, rows[v].next_exception(i));
  return next;
}

// dot_block() beside sums in registers.
template <class Row, int ROWS, int WEIGHTS, class Prefetches>
__attribute__((noinline, cold)) void dot_other_block(const float* x, const CompressedRow* rows, int64_t i,
                                                     int64_t count, VecF (*sum)[WEIGHTS], Prefetches& prefetches) {
  dot_block<Row, ROWS, WEIGHTS>(x, rows, i, count, sum, prefetches);
}

template <class Row, int ROWS, int WEIGHTS, class Prefetches>
inline void dot_parts(const float* x, const CompressedRow* rows, int64_t elements, VecF (*sum)[WEIGHTS],
                      Prefetches& prefetches) {
  for (int64_t i = 0; i < elements;) {
    const int64_t end = std::min(next_exception(rows, WEIGHTS, i), elements);
    for (; i + kBlockWeights <= end; i += kBlockWeights, x += ROWS * kBlockWeights) {
      const int64_t offset = i / kBlockWeights * kBlockBytes;
      dot_half<Row, ROWS, WEIGHTS, 0>(x, rows, offset, sum, prefetches);
      dot_half<Row, ROWS, WEIGHTS, 1>(x + ROWS * kHalfBlock, rows, offset, sum, prefetches);
    }
    if (i >= elements) break;
    VecF kept[ROWS][WEIGHTS];  // with their own address in a call, sums would be stored in every round
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < WEIGHTS; ++v) kept[r][v] = sum[r][v];
    Prefetches moved = prefetches;
    dot_other_block<Row, ROWS, WEIGHTS>(x, rows, i, elements - i, kept, moved);
    prefetches = moved;
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < WEIGHTS; ++v) sum[r][v] = kept[r][v];
    i += kBlockWeights, x += ROWS * kBlockWeights;
  }
}
#else
constexpr bool kInRegisters = false;

template <class Row, int ROWS, int WEIGHTS, class Prefetches>
inline void dot_parts(const typename Row::Element* x, const CompressedRow* rows, int64_t elements, VecF (*sum)[WEIGHTS],
                      Prefetches& prefetches) {
  for (int64_t i = 0; i < elements; i += kBlockWeights, x += ROWS * kBlockWeights)
    dot_block<Row, ROWS, WEIGHTS>(x, rows, i, elements - i, sum, prefetches);
}
#endif

}  // namespace
}  // namespace specmemo
