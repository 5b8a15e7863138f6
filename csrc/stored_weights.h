// How products read a matrix [outputs, inputs]: in place, or decompressed a block of a row at a time.
#pragma once

#include <algorithm>

#include "compressed.h"
#include "kernels.h"
#include "vec.h"

namespace specmemo {
namespace {

template <class T>
class PlainWeights {
 public:
  typedef typename T::Raw Raw;
  typedef const Raw* Row;  // a part of a row
  static constexpr bool kCompressed = false;
  static constexpr int64_t bytes(int64_t weights) { return weights * static_cast<int64_t>(sizeof(Raw)); }

  explicit PlainWeights(const ProductArgs& args) : rows_(static_cast<const Raw*>(args.weight)), inputs_(args.inputs) {}

  int64_t row_bytes() const { return bytes(inputs_); }
  Row row(int64_t output, int64_t input) const { return rows_ + output * inputs_ + input; }
  const char* at(int64_t output, int64_t input) const { return reinterpret_cast<const char*>(row(output, input)); }

 private:
  const Raw* rows_;
  int64_t inputs_;
};

constexpr int64_t kHalfBlock = kBlockWeights / 2;

#if defined(__AVX2__) && !defined(__AVX512F__)
// 16 weights of half HALF of a block, and the 16 that are 32 behind them, of 32 low bytes and their codes.
template <int HALF>
inline void decompress_vectors(const uint8_t* low, const uint8_t* codes, const uint8_t* high, __m256i& first,
                               __m256i& second) {
  const __m256i table = _mm256_broadcastsi128_si256(load<__m128i>(high));
  const __m256i both = load<__m256i>(codes), lows = load<__m256i>(low);
  const __m256i index = _mm256_and_si256(HALF == 0 ? both : _mm256_srli_epi16(both, 4), _mm256_set1_epi8(15));
  const __m256i highs = _mm256_shuffle_epi8(table, index);
  first = _mm256_unpacklo_epi8(lows, highs), second = _mm256_unpackhi_epi8(lows, highs);
}
#endif

// The weights of one half of a block.
template <int HALF>
inline void decompress_half(const uint8_t* block, const uint8_t* high, uint16_t* out) {
  const uint8_t *low = block + kHalfBlock * HALF, *codes = block + kBlockWeights;
#if defined(__AVX512BW__)
  const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(high)));
  const __m512i both = _mm512_loadu_si512(codes), lows = _mm512_loadu_si512(low);
  const __m512i index = _mm512_and_si512(HALF == 0 ? both : _mm512_srli_epi16(both, 4), _mm512_set1_epi8(15));
  const __m512i highs = _mm512_shuffle_epi8(table, index);
  _mm512_storeu_si512(out, _mm512_unpacklo_epi8(lows, highs));
  _mm512_storeu_si512(out + 32, _mm512_unpackhi_epi8(lows, highs));
#elif defined(__AVX2__)
  for (int i = 0; i < 2; ++i) {
    __m256i first, second;
    decompress_vectors<HALF>(low + 32 * i, codes + 32 * i, high, first, second);
    auto* to = reinterpret_cast<__m256i*>(out + 16 * i);
    _mm256_storeu_si256(to, first);
    _mm256_storeu_si256(to + 2, second);
  }
#elif defined(__aarch64__)
  const uint8x16_t table = vld1q_u8(high);
  for (int i = 0; i < 4; ++i) {  // 16 weights at a time
    const uint8x16_t both = vld1q_u8(codes + 16 * i), lows = vld1q_u8(low + 16 * i);
    const uint8x16_t highs = vqtbl1q_u8(table, HALF == 0 ? vandq_u8(both, vdupq_n_u8(15)) : vshrq_n_u8(both, 4));
    vst1q_u8(reinterpret_cast<uint8_t*>(out + 8 * i), vzip1q_u8(lows, highs));
    vst1q_u8(reinterpret_cast<uint8_t*>(out + 32 + 8 * i), vzip2q_u8(lows, highs));
  }
#else
  for (int i = 0; i < kHalfBlock; ++i) {
    const int at = i % 32 / 8 * 16 + i / 32 * 8 + i % 8;
    out[i] = static_cast<uint16_t>(low[at] | high[codes[at] >> (4 * HALF) & 15] << 8);
  }
#endif
}

// A part of a compressed row, from a block on.
struct CompressedRow {
  const RowHead* head;
  const uint8_t* blocks;
  int64_t first;  // column of its first weight

  // The weights of half HALF of the block that starts with weight `i`, in order.
  template <int HALF>
  void read_half(int64_t i, uint16_t* out) const {
    decompress_half<HALF>(blocks + i / kBlockWeights * kBlockBytes, head->high, out);
    if (__builtin_expect(head->exceptions != 0, 0)) set_exceptions(i + HALF * kHalfBlock, out);
  }

  // Both halves.
  void read(int64_t i, uint16_t* out) const {
    read_half<0>(i, out);
    read_half<1>(i, out + kHalfBlock);
  }

  // The first weight from `i` on that has no code; INT64_MAX: none.
  int64_t next_exception(int64_t i) const {
    for (int e = 0; e < exceptions(); ++e)  // in the order of their columns
      if (exception_at(e) >= i) return exception_at(e);
    return INT64_MAX;
  }

 private:
  int exceptions() const { return std::min<int>(head->exceptions, kMostExceptions); }
  int64_t exception_at(int e) const { return head->exception[e].column - first; }

  // Sets those of the half that starts with weight `i` that have no code.
  __attribute__((noinline, cold)) void set_exceptions(int64_t i, uint16_t* out) const {
    for (int e = 0; e < exceptions(); ++e)
      if (const int64_t at = exception_at(e) - i; at >= 0 && at < kHalfBlock) out[at] = head->exception[e].bits;
  }
};

class CompressedWeights {
 public:
  typedef uint16_t Raw;
  typedef CompressedRow Row;
  static constexpr bool kCompressed = true;
  static constexpr int64_t bytes(int64_t weights) { return weights * kBlockBytes / kBlockWeights; }

  explicit CompressedWeights(const ProductArgs& args)
      : rows_(static_cast<const uint8_t*>(args.weight)), row_bytes_(compressed_bytes(args.inputs)) {}

  int64_t row_bytes() const { return row_bytes_; }
  // input: a multiple of kBlockWeights.
  Row row(int64_t output, int64_t input) const {
    const auto* head = reinterpret_cast<const RowHead*>(rows_ + output * row_bytes_);
    return {head, reinterpret_cast<const uint8_t*>(head + 1) + bytes(input), input};
  }
  const char* at(int64_t output, int64_t input) const {
    return reinterpret_cast<const char*>(row(output, input).blocks);
  }

 private:
  const uint8_t* rows_;
  int64_t row_bytes_;
};

}  // namespace
}  // namespace specmemo
