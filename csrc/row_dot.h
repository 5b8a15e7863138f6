// Steps of products: a cache line of each weight row, with input rows.
#pragma once

#include "tile.h"

namespace specmemo {
namespace {

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
// input Elements in the same order, kPart for each vector. `kInPlace`: a row of the input itself is in this order.
template <class T, class Dot>
struct RowDot {
  typedef float Element;
  static constexpr int kStep = 64 / static_cast<int>(sizeof(typename T::Raw)), kPart = kLanes, kVecs = kStep / kPart;
  static constexpr bool kInPlace = T::kBits == 32;
  template <int J>
  static VecF weights(const typename T::Raw* p) {
    return T::load_vec(p + J * kLanes);
  }
  static void prepare(const typename T::Raw* x, int64_t rows, Element* out) {
    for (int i = 0; i < kStep; i += kLanes) store(out + i * rows, T::load_vec(x + i));
  }
  static VecF multiply_add(VecF sum, VecF a, VecF b) { return fused_multiply_add(sum, a, b); }
};

// Two bfloat16 in a word are two floats after a shift and after a mask: of each vector of words first all even
// elements, then all odd ones.
template <>
struct RowDot<BFloat16, Float32Dot> {
  typedef float Element;
  static constexpr int kStep = 32, kPart = kLanes, kVecs = kStep / kPart;
  static constexpr bool kInPlace = false;
  template <int J>
  static VecF weights(const uint16_t* p) {
    const VecU words = load<VecU>(p + J / 2 * 2 * kLanes);
    return J % 2 == 0 ? low_halves(words) : high_halves(words);
  }
  static void prepare(const uint16_t* x, int64_t rows, Element* out) {
    for (int i = 0; i < kStep; i += 2 * kLanes) {
      store(out + i * rows, weights<0>(x + i));
      store(out + (i + kLanes) * rows, weights<1>(x + i));
    }
  }
  static VecF multiply_add(VecF sum, VecF a, VecF b) { return fused_multiply_add(sum, a, b); }
};

#if defined(SPECMEMO_BF16_DOT)
template <>
struct RowDot<BFloat16, BFloat16Dot> {
  typedef uint16_t Element;
  static constexpr int kStep = 32, kPart = 2 * kLanes, kVecs = kStep / kPart;
  static constexpr bool kInPlace = true;
  template <int J>
  static VecF weights(const uint16_t* p) {
    return load<VecF>(p + J * 2 * kLanes);
  }
  static void prepare(const uint16_t* x, int64_t rows, Element* out) {
    for (int i = 0; i < kStep; i += kPart) store(out + i * rows, load<VecU>(x + i));
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
      const VecF elements = load<VecF>(x + (J * ROWS + r) * Row::kPart);
#pragma GCC unroll 8
      for (int v = 0; v < WEIGHTS; ++v) sum[r][v] = Row::multiply_add(sum[r][v], elements, w[v]);
      prefetches.issue(J * ROWS + r, Row::kVecs * ROWS, weight, at);
    }
    asm volatile("");  // keeps the compiler from loading the next vectors here, which would take too many registers
    dot_step<Row, ROWS, WEIGHTS, J + 1>(x, weight, at, sum, prefetches);
  }
}

}  // namespace
}  // namespace specmemo
