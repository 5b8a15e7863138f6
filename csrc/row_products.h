// Sums of input rows with weight rows, for few rows of input.
//
// Weight rows are read once and in place: kWeightTile of them with up to kRowTile rows of input, and one vector of
// partial sums for each pair. Both operands are contiguous along the reduced dimension, so weights aren't packed. The
// order of the sums of a pair depends on neither the other rows nor the other weights.
#pragma once

#include "kernels.h"
#include "pack.h"

namespace specmemo {
namespace {

constexpr int kWeightTile = 3;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRowTile = 8;  // 3 x 8 accumulators of 32 registers
#else
constexpr int kRowTile = 4;  // 3 x 4 accumulators of 16 registers
#endif
constexpr int64_t kGroup = kWeightTile * kLanes;  // outputs whose sums are kept at once
constexpr int64_t kLongChunk = 4096;              // elements of a row that are multiplied at once

// sum + a * b. With 16 registers the compiler would read an operand from memory for every use, and spill sums.
inline VecF fused_multiply_add(VecF sum, VecF a, VecF b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
  return sum;
#else
  return sum + a * b;
#endif
}

inline VecF high_halves(VecU words) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  alignas(32) static constexpr uint32_t mask[8] = {0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                   0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};
  asm("vpand %1, %0, %0" : "+x"(words) : "m"(mask));
  return bits_as<VecF>(words);
#else
  return bits_as<VecF>(words & 0xffff0000u);
#endif
}

// Products with weights of one type. A step multiplies kStep weights, one cache line in kVecs vectors, with as many
// input Elements in the same order. `kInPlace`: the input itself is in this order. `kChunk`: elements of a
// row that are multiplied at once if there are several tiles of input rows. In float32 512 take 0.90 to 0.99 of the
// time of 4096 for 8 to 32 rows, in bfloat16 1.02 to 1.06 (EPYC with AVX2).
template <class T, class Dot>
struct RowDot {
  typedef float Element;
  static constexpr int kStep = 64 / static_cast<int>(sizeof(typename T::Raw)), kVecs = kStep / kLanes;
  static constexpr bool kInPlace = T::kBits == 32;
  static constexpr int64_t kChunk = 512;
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
  static constexpr int64_t kChunk = kLongChunk;
  template <int J>
  static VecF weights(const uint16_t* p) {
    const VecU words = load<VecU>(p + J / 2 * 2 * kLanes);
    return J % 2 == 0 ? bits_as<VecF>(words << 16) : high_halves(words);
  }
  static void prepare(const uint16_t* x, Element* out) {
    for (int i = 0; i < kStep; i += 2 * kLanes) {
      store(out + i, weights<0>(x + i));
      store(out + i + kLanes, weights<1>(x + i));
    }
  }
  static VecF multiply_add(VecF sum, VecF a, VecF b) { return fused_multiply_add(sum, a, b); }
};

#if defined(__AVX512BF16__)
template <>
struct RowDot<BFloat16, BFloat16Dot> {
  typedef uint16_t Element;
  static constexpr int kStep = 32, kVecs = 1;
  static constexpr bool kInPlace = true;
  static constexpr int64_t kChunk = kLongChunk;
  template <int J>
  static VecF weights(const uint16_t* p) {
    return load<VecF>(p);
  }
  static void prepare(const uint16_t*, Element*) {}
  static VecF multiply_add(VecF sum, VecF a, VecF b) { return BFloat16Dot::multiply_add(sum, b, a); }
};
#endif

// Multiplies vector J of a step, then the following ones. One vector of each weight row is in a register at a time.
template <class Row, int ROWS, int J, class Raw>
inline void dot_step(const typename Row::Element* x, int64_t x_stride, const Raw* const* weight, int64_t at,
                     VecF (*sum)[kWeightTile]) {
  if constexpr (J < Row::kVecs) {
    VecF w[kWeightTile];
#pragma GCC unroll 8
    for (int v = 0; v < kWeightTile; ++v) w[v] = Row::template weights<J>(weight[v] + at);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const VecF elements = load<VecF>(x + r * x_stride + at + J * (Row::kStep / Row::kVecs));
#pragma GCC unroll 8
      for (int v = 0; v < kWeightTile; ++v) sum[r][v] = Row::multiply_add(sum[r][v], elements, w[v]);
    }
    asm volatile("");  // keeps the compiler from loading the next vectors here, which would take too many registers
    dot_step<Row, ROWS, J + 1>(x, x_stride, weight, at, sum);
  }
}

// A part of the next weight rows to prefetch, spread over the steps of a tile.
struct FetchAhead {
  int64_t distance, step;  // in elements
};

// sums[r * kGroup + v] += the products of `steps` elements.
template <class Row, int ROWS, class Raw>
__attribute__((noinline)) void dot_tile(const typename Row::Element* x, int64_t x_stride, const Raw* const* weights,
                                        int64_t elements, FetchAhead ahead, VecF* sums) {
  VecF sum[ROWS][kWeightTile];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kWeightTile; ++v) sum[r][v] = sums[r * kGroup + v];
  const Raw* const weight[kWeightTile] = {weights[0], weights[1], weights[2]};
  int64_t fetched = ahead.distance;
  for (int64_t i = 0; i < elements; i += Row::kStep, fetched += ahead.step) {
#pragma GCC unroll 8
    for (int v = 0; v < kWeightTile; ++v) prefetch(weight[v] + fetched);
    dot_step<Row, ROWS, 0>(x, x_stride, weight, i, sum);
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kWeightTile; ++v) sums[r * kGroup + v] = sum[r][v];
}

template <class Row, int ROWS, class... Arguments>
inline void dot_rows(int rows, Arguments... arguments) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) return dot_tile<Row, ROWS>(arguments...);
    dot_rows<Row, ROWS - 1>(rows, arguments...);
  }
}

template <class T, class Dot>
class RowProducts {
  typedef typename T::Raw Raw;
  typedef RowDot<T, Dot> Row;
  typedef typename Row::Element Element;

 public:
  explicit RowProducts(const ProductArgs& args) : args_(args), whole_(args.inputs / Row::kStep * Row::kStep) {
    if (Row::kInPlace) x_ = static_cast<const Element*>(args.x), stride_ = args.x_stride;
  }

  // Memory for prepare(), of the caller.
  int64_t memory_bytes() const {
    return Row::kInPlace ? 0 : args_.rows * whole_ * static_cast<int64_t>(sizeof(Element));
  }

  void prepare(char* memory) {
    if (Row::kInPlace) return;
    auto* out = reinterpret_cast<Element*>(memory);
    x_ = out, stride_ = whole_;
    for (int64_t r = 0; r < args_.rows; ++r)
      for (int64_t i = 0; i < whole_; i += Row::kStep, out += Row::kStep)
        Row::prepare(static_cast<const Raw*>(args_.x) + r * args_.x_stride + i, out);
  }

  // The prepared input of products with the same rows.
  void prepare_as(const RowProducts& other) { x_ = other.x_, stride_ = other.stride_; }

  // sums[row][v] += the products of all rows with the weights of outputs first, ..., first + count - 1. A chunk of a
  // tile's rows stays in L1 while the group's weights pass by; these stay in L2 for the next tile.
  void add(int64_t first, int64_t count, VecF (*sums)[kGroup]) const {
    const int64_t tiles = (args_.rows + kRowTile - 1) / kRowTile;
    const int64_t chunk = tiles == 1 ? kLongChunk : Row::kChunk;
    for (int64_t begin = 0; begin < whole_; begin += chunk) {
      const int64_t elements = begin + chunk < whole_ ? chunk : whole_ - begin;
      // The next weights are prefetched by all tiles together: a burst would stall, then leave the memory idle.
      const int64_t distance = begin + chunk < whole_ ? chunk : count * args_.inputs - begin;
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t top = args_.rows * t / tiles, height = args_.rows * (t + 1) / tiles - top;
        const FetchAhead ahead{distance + elements * t / tiles, (Row::kStep + tiles - 1) / tiles};
        for (int64_t v = 0; v < count; v += kWeightTile) {
          const Raw* weights[kWeightTile];
          for (int64_t i = 0; i < kWeightTile; ++i)  // outputs past the end repeat the last one; their sums aren't used
            weights[i] = weight(first + (v + i < count ? v + i : count - 1)) + begin;
          dot_rows<Row, kRowTile>(static_cast<int>(height), x_ + top * stride_ + begin, stride_, weights, elements,
                                  ahead, &sums[top][v]);
        }
      }
    }
    for (int64_t i = whole_; i < args_.inputs; ++i)
      for (int64_t r = 0; r < args_.rows; ++r)
        for (int64_t v = 0; v < count; ++v)
          sums[r][v][0] +=
              T::to_float(static_cast<const Raw*>(args_.x)[r * args_.x_stride + i]) * T::to_float(weight(first + v)[i]);
  }

 private:
  const Raw* weight(int64_t output) const { return static_cast<const Raw*>(args_.weight) + output * args_.inputs; }

  const ProductArgs& args_;
  int64_t whole_;  // elements in whole steps
  const Element* x_ = nullptr;
  int64_t stride_ = 0;
};

}  // namespace
}  // namespace specmemo
