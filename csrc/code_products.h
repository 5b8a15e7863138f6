// Sums of input rows with weights in 4-bit codes (layout: specmemo_kernels/ops/weight_codes.py).
//
// A vector of words holds kVectors vectors of weights: vector j is half-byte j of every element's word. Codes are
// converted by a shift and a table lookup (or a shift back and a conversion), without shuffles. The input rows are
// reordered to match once, in float32, or in bfloat16 if the instruction set multiplies pairs of it.
#pragma once

#include "row_products.h"

namespace specmemo {
namespace {

constexpr int64_t kScaled = 64, kScaledBytes = kScaled / 2;  // codes of one scale
#if defined(__AVX512F__)
constexpr int kCodeRows = 4, kCodeWeights = 3;  // twice as many accumulators: of a step, and of all steps
#elif defined(__aarch64__)
constexpr int kCodeRows = 3, kCodeWeights = 3;  // codes are converted by shifts, which take registers too
#else
constexpr int kCodeRows = 2, kCodeWeights = 2;
#endif
#if defined(__aarch64__)
#define SPECMEMO_DOT_CODES __attribute__((noinline))  // so that the accumulators stay in registers
#else
#define SPECMEMO_DOT_CODES inline
#endif
static_assert(kGroup % kCodeWeights == 0, "whole tiles in a group");
constexpr int64_t kStepBytes = 4 * kLanes;      // one vector of codes
constexpr int64_t kStepCodes = 2 * kStepBytes;  // elements in it

// The scale of every lane's word in step `step`.
inline VecF step_scales(const uint16_t* scales, int64_t step) {
#if defined(__AVX512F__)
  const __m512 two = _mm512_castps128_ps512(_mm_cvtph_ps(_mm_loadu_si32(scales + 2 * step)));
  return (VecF)_mm512_permutexvar_ps(_mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0), two);
#elif defined(__AVX2__)
  return (VecF)_mm256_set1_ps(_cvtsh_ss(scales[step]));
#else
  return splat(fp16_to_float(scales[step * kStepBytes / kScaledBytes]));
#endif
}

template <class T, class Dot>
struct CodeRow {
  typedef float Element;  // type of the reordered input rows
  static constexpr int kVectors = 8;
  static Element element(typename T::Raw x) { return T::to_float(x); }

#if defined(__AVX512F__)
  typedef __m512i Words;
  static Words words(const void* codes) { return _mm512_loadu_si512(codes); }
  static VecF weights(Words w, int j) {
    const __m512 table = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
    return (VecF)_mm512_permutexvar_ps(_mm512_srli_epi32(w, 4 * j), table);  // reads the lowest four bits
  }
#else
  typedef VecI Words;
  // With its highest bit flipped a code is a signed 4-bit number.
  static Words words(const void* codes) { return bits_as<VecI>(load<VecU>(codes) ^ 0x88888888u); }
  static VecF weights(Words w, int j) { return __builtin_convertvector((w << (28 - 4 * j)) >> 28, VecF); }
#endif
  static VecF multiply_add(VecF sum, VecF a, VecF b) { return sum + a * b; }
};

#if defined(__AVX512BF16__)
template <>
struct CodeRow<BFloat16, BFloat16Dot> {
  typedef uint16_t Element;
  static constexpr int kVectors = 4;
  static Element element(uint16_t x) { return x; }
  typedef __m512i Words;
  static Words words(const void* codes) { return _mm512_loadu_si512(codes); }
  static VecF weights(Words w, int j) {
    alignas(64) static constexpr uint16_t table[32] = {// -8 to 7, twice: five bits are read
                                                       0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                                       0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                                       0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                                       0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    return (VecF)_mm512_permutexvar_epi16(_mm512_srli_epi16(w, 4 * j), _mm512_load_si512(table));
  }
  static VecF multiply_add(VecF sum, VecF a, VecF b) {
    return (VecF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
};
#endif

// sums[r][v] += the products of ROWS rows with kCodeWeights rows of codes over `steps` steps. Prefetches as many codes
// from `ahead` bytes behind the first row on, unless `ahead` is 0: in address order, which on Zen 5 takes 0.68 to 0.96
// of the time of three streams.
template <class Row, int ROWS>
SPECMEMO_DOT_CODES void dot_codes(const typename Row::Element* x, int64_t x_stride, const uint8_t* const* codes,
                                  const uint16_t* const* scales, int64_t steps, VecF (*sums)[kCodeWeights],
                                  int64_t ahead) {
  constexpr int kElements = sizeof(VecF) / sizeof(typename Row::Element);
  VecF sum[ROWS][kCodeWeights];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kCodeWeights; ++v) sum[r][v] = sums[r][v];
  for (int64_t s = 0; s < steps; ++s) {
    typename Row::Words words[kCodeWeights];
    VecF part[ROWS][kCodeWeights];
#pragma GCC unroll 4
    for (int v = 0; v < kCodeWeights; ++v) {
      if (ahead != 0) prefetch(codes[0] + (kCodeWeights * s + v) * kStepBytes + ahead);
      words[v] = Row::words(codes[v] + s * kStepBytes);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) part[r][v] = VecF{};
    }
#pragma GCC unroll 8
    for (int j = 0; j < Row::kVectors; ++j) {
      const typename Row::Element* h = x + (s * Row::kVectors + j) * kElements;
#pragma GCC unroll 4
      for (int v = 0; v < kCodeWeights; ++v) {
        const VecF w = Row::weights(words[v], j);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) part[r][v] = Row::multiply_add(part[r][v], load<VecF>(h + r * x_stride), w);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kCodeWeights; ++v) {
      const VecF scale = step_scales(scales[v], s);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) sum[r][v] = sum[r][v] + part[r][v] * scale;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kCodeWeights; ++v) sums[r][v] = sum[r][v];
}

template <class T, class Dot>
class CodeProducts {
  typedef typename T::Raw Raw;
  typedef CodeRow<T, Dot> Row;
  typedef typename Row::Element Element;

 public:
  static constexpr int64_t kTile = kGroup, kGroupSize = kGroup;

  explicit CodeProducts(const ProductArgs& args) : args_(args) {
    groups_ = (args.inputs + kScaled - 1) / kScaled;
    steps_ = (groups_ * kScaledBytes + kStepBytes - 1) / kStepBytes;
  }

  static constexpr auto task_count = prefetched_tasks;

  int64_t memory_bytes() const { return args_.rows * steps_ * kStepCodes * static_cast<int64_t>(sizeof(Element)); }

  // The input rows in the order of weights(), padded with zeros.
  void prepare(char* memory, int) {
    x_ = reinterpret_cast<Element*>(memory);
    constexpr int kLaneBytes = kLanes * 4 / kElements, kVectorsPerByte = 2;  // of a vector of Elements
    for (int64_t r = 0; r < args_.rows; ++r) {
      const Raw* row = static_cast<const Raw*>(args_.x) + r * args_.x_stride;
      Element* out = x_ + r * steps_ * kStepCodes;
      for (int64_t s = 0; s < steps_; ++s)
        for (int j = 0; j < Row::kVectors; ++j)
          for (int lane = 0; lane < kElements; ++lane) {
            const int64_t byte = s * kStepBytes + lane * kLaneBytes + j / kVectorsPerByte;
            const int64_t i = byte / kScaledBytes * kScaled + j % 2 * kScaledBytes + byte % kScaledBytes;
            *out++ = i < args_.inputs ? Row::element(row[i]) : Element{};
          }
    }
  }

  void prepare_as(const CodeProducts& other) { x_ = other.x_; }

  int64_t value_rows() const { return args_.rows; }
  int64_t sums_bytes() const { return 0; }

  // As RowProducts::multiply.
  void multiply(int64_t first, int64_t count, VecF*, float* values) const {
    const int64_t row_bytes = groups_ * kScaledBytes, whole = row_bytes / kStepBytes;
    const Parts tiles = Parts::at_most(args_.rows, kCodeRows);
    for (int64_t v = 0; v < count; v += kCodeWeights) {
      const uint8_t *codes[kCodeWeights], *last_codes[kCodeWeights];
      const uint16_t *scales[kCodeWeights], *last_scales[kCodeWeights];
      // A row's last vector may be partial, and the memory behind it unmapped.
      alignas(64) uint8_t rest_codes[kCodeWeights][kStepBytes] = {};
      uint16_t rest_scales[kCodeWeights][2] = {};
      for (int64_t i = 0; i < kCodeWeights; ++i) {  // outputs past the end repeat the last one; their sums aren't used
        const int64_t at = first + (v + i < count ? v + i : count - 1);
        codes[i] = static_cast<const uint8_t*>(args_.weight) + at * row_bytes;
        scales[i] = args_.scales + at * groups_;
        if (whole == steps_) continue;
        std::memcpy(rest_codes[i], codes[i] + whole * kStepBytes, static_cast<size_t>(row_bytes - whole * kStepBytes));
        rest_scales[i][0] = scales[i][groups_ - 1];
        last_codes[i] = rest_codes[i], last_scales[i] = rest_scales[i];
      }
      for (int64_t t = 0; t < tiles.count; ++t) {
        const int64_t top = tiles.begin(t), height = tiles.size(t);
        const Codes all{codes, scales, whole, t == 0 ? kCodeWeights * row_bytes : 0};
        const Codes rest{last_codes, last_scales, steps_ - whole, 0};
        dot_tile<kCodeRows>(height, x_ + top * steps_ * kStepCodes, all, rest, values + top * kGroup + v);
      }
    }
  }

 private:
  static constexpr int kElements = static_cast<int>(sizeof(VecF) / sizeof(Element));

  struct Codes {
    const uint8_t* const* codes;
    const uint16_t* const* scales;
    int64_t steps, ahead;
  };

  template <int ROWS>
  void dot_tile(int64_t height, const Element* x, const Codes& all, const Codes& rest, float* values) const {
    if constexpr (ROWS > 0) {
      if (height < ROWS) return dot_tile<ROWS - 1>(height, x, all, rest, values);
      const int64_t stride = steps_ * kStepCodes;
      VecF sums[ROWS][kCodeWeights] = {};
      dot_codes<Row, ROWS>(x, stride, all.codes, all.scales, all.steps, sums, all.ahead);
      x += all.steps * kStepCodes;
      if (rest.steps > 0) dot_codes<Row, ROWS>(x, stride, rest.codes, rest.scales, rest.steps, sums, 0);
      fold_tile<ROWS, kCodeWeights>(sums, values, kGroup);
    }
  }

  const ProductArgs& args_;
  int64_t groups_, steps_;
  Element* x_ = nullptr;
};

}  // namespace
}  // namespace specmemo
