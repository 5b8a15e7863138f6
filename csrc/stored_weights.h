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

// Weights of one block, of which `low` are the low bytes and `codes` select the high bytes.
inline void decompress_block(const uint8_t* low, const uint8_t* codes, const uint8_t* high, uint16_t* out) {
#if defined(__AVX512BW__)
  const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(high)));
  const __m512i both = _mm512_loadu_si512(codes), mask = _mm512_set1_epi8(15);
  for (int half = 0; half < 2; ++half) {
    const __m512i index = _mm512_and_si512(half == 0 ? both : _mm512_srli_epi16(both, 4), mask);
    const __m512i highs = _mm512_shuffle_epi8(table, index), lows = _mm512_loadu_si512(low + 64 * half);
    _mm512_storeu_si512(out + 64 * half, _mm512_unpacklo_epi8(lows, highs));
    _mm512_storeu_si512(out + 64 * half + 32, _mm512_unpackhi_epi8(lows, highs));
  }
#elif defined(__AVX2__)
  const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(high)));
  const __m256i mask = _mm256_set1_epi8(15);
  for (int i = 0; i < 4; ++i) {  // 32 weights at a time
    const int half = i / 2, part = i % 2;
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 32 * part));
    const __m256i index = _mm256_and_si256(half == 0 ? both : _mm256_srli_epi16(both, 4), mask);
    const __m256i highs = _mm256_shuffle_epi8(table, index);
    const __m256i lows = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low + 64 * half + 32 * part));
    auto* to = reinterpret_cast<__m256i*>(out + 64 * half + 16 * part);
    _mm256_storeu_si256(to, _mm256_unpacklo_epi8(lows, highs));
    _mm256_storeu_si256(to + 2, _mm256_unpackhi_epi8(lows, highs));
  }
#elif defined(__aarch64__)
  const uint8x16_t table = vld1q_u8(high), mask = vdupq_n_u8(15);
  for (int i = 0; i < 8; ++i) {  // 16 weights at a time
    const int half = i / 4, part = i % 4;
    const uint8x16_t both = vld1q_u8(codes + 16 * part);
    const uint8x16_t highs = vqtbl1q_u8(table, half == 0 ? vandq_u8(both, mask) : vshrq_n_u8(both, 4));
    const uint8x16_t lows = vld1q_u8(low + 64 * half + 16 * part);
    vst1q_u8(reinterpret_cast<uint8_t*>(out + 64 * half + 8 * part), vzip1q_u8(lows, highs));
    vst1q_u8(reinterpret_cast<uint8_t*>(out + 64 * half + 32 + 8 * part), vzip2q_u8(lows, highs));
  }
#else
  for (int i = 0; i < kBlockWeights; ++i) {
    const int half = i / 64, part = i % 32 / 8, at = part * 16 + i % 64 / 32 * 8 + i % 8;
    out[i] = static_cast<uint16_t>(low[64 * half + at] | high[codes[at] >> (4 * half) & 15] << 8);
  }
#endif
}

// A part of a compressed row, from a block on.
struct CompressedRow {
  const RowHead* head;
  const uint8_t* blocks;
  int64_t first;  // column of its first weight

  // The weights of the block that has weight `i`, in order.
  void read(int64_t i, uint16_t* out) const {
    const uint8_t* block = blocks + i / kBlockWeights * kBlockBytes;
    decompress_block(block, block + kBlockWeights, head->high, out);
    if (head->exceptions == 0) return;
    const int exceptions = std::min<int>(head->exceptions, kMostExceptions);
    for (int e = 0; e < exceptions; ++e)
      if (const int64_t at = head->exception[e].column - first - i; at >= 0 && at < kBlockWeights)
        out[at] = head->exception[e].bits;
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
