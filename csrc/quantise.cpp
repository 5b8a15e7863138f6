#include "quantise.h"

#include "vec.h"

namespace specmemo {
namespace {

constexpr float kLargestInt8 = 127.0f, kLargestFp8 = 448.0f;
constexpr float kSmallestScale = 0x1p-126f;
constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer

float element(DType dtype, const char* row, int64_t i) {
  if (dtype == DType::kFloat32) return reinterpret_cast<const float*>(row)[i];
  const uint16_t half = reinterpret_cast<const uint16_t*>(row)[i];
  return dtype == DType::kBFloat16 ? bf16_to_float(half) : fp16_to_float(half);
}

uint8_t int8_code(float x) {
  return static_cast<uint8_t>(static_cast<int8_t>((x + kRoundToInteger) - kRoundToInteger));
}

// |x| <= 448
uint8_t fp8_code(float x) {
  const uint32_t bits = bits_as<uint32_t>(x), magnitude = bits & 0x7fffffffu, sign = (bits >> 24) & 0x80u;
  const float size = bits_as<float>(magnitude);
  if (size < 0x1p-6f)  // subnormal: multiples of 2^-9, of which 8 is the smallest normal number
    return static_cast<uint8_t>(sign | static_cast<uint32_t>((size * 512.0f + kRoundToInteger) - kRoundToInteger));
  const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return static_cast<uint8_t>(sign | ((rounded >> 20) - (120u << 3)));
}

}  // namespace

float quantise_row(DType dtype, KVType type, const char* row, int64_t dim, uint8_t* codes) {
  uint32_t largest = 0;  // compared as bits: NaN is above infinity
  for (int64_t i = 0; i < dim; ++i) {
    const uint32_t magnitude = bits_as<uint32_t>(element(dtype, row, i)) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  const float limit = type == KVType::kInt8 ? kLargestInt8 : kLargestFp8;
  const float inverse_limit = type == KVType::kInt8 ? static_cast<float>(1.0 / 127.0) : static_cast<float>(1.0 / 448.0);
  float scale = bits_as<float>(largest) * inverse_limit;
  if (scale < kSmallestScale) scale = 0.0f;
  const bool usable = scale > 0.0f && largest < 0x7f800000u;
  const float inverse = usable ? 1.0f / scale : 0.0f;
  for (int64_t i = 0; i < dim; ++i) {
    float x = usable ? element(dtype, row, i) * inverse : 0.0f;
    x = x > limit ? limit : x < -limit ? -limit : x;
    codes[i] = type == KVType::kInt8 ? int8_code(x) : fp8_code(x);
  }
  return scale;
}

}  // namespace specmemo
