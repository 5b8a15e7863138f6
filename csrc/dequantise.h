// Dequantises rows of 8-bit codes with one float scale each to the kernels' element type.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace specmemo {
namespace {

#if defined(__aarch64__)
inline uint8x8_t load_codes(const uint8_t* codes) { return vcreate_u8(load<uint32_t>(codes)); }
inline VecI signed_codes(const uint8_t* codes) {
  return (VecI)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_codes(codes)))));
}
inline VecU unsigned_codes(const uint8_t* codes) { return (VecU)vmovl_u16(vget_low_u16(vmovl_u8(load_codes(codes)))); }
#elif defined(__AVX512F__)  // GCC would convert code by code
inline VecI signed_codes(const uint8_t* codes) { return (VecI)_mm512_cvtepi8_epi32(load<__m128i>(codes)); }
inline VecU unsigned_codes(const uint8_t* codes) { return (VecU)_mm512_cvtepu8_epi32(load<__m128i>(codes)); }
#elif defined(__AVX2__)
inline VecI signed_codes(const uint8_t* codes) {
  return (VecI)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
}
inline VecU unsigned_codes(const uint8_t* codes) {
  return (VecU)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
}
#else
typedef int8_t VecCode __attribute__((vector_size(kLanes)));
typedef uint8_t VecUCode __attribute__((vector_size(kLanes)));
inline VecI signed_codes(const uint8_t* codes) { return __builtin_convertvector(load<VecCode>(codes), VecI); }
inline VecU unsigned_codes(const uint8_t* codes) { return __builtin_convertvector(load<VecUCode>(codes), VecU); }
#endif

inline VecF int8_values(const uint8_t* codes) { return __builtin_convertvector(signed_codes(codes), VecF); }

// e4m3: exponent bias 7, no infinities. Integers and selects only, so that flush-to-zero doesn't affect small codes.
inline VecF fp8_values(const uint8_t* codes) {
  const VecU code = unsigned_codes(codes), magnitude = code & 0x7fu;
  const VecF normal = bits_as<VecF>((magnitude << 20) + (120u << 23));
  const VecF subnormal = __builtin_convertvector(bits_as<VecI>(magnitude), VecF) * splat(0x1p-9f);
  const VecF value = magnitude < 8u ? subnormal : normal;
  return bits_as<VecF>(bits_as<VecU>(value) | ((code & 0x80u) << 24));
}

inline VecF code_values(KVType type, const uint8_t* codes) {
  return type == KVType::kInt8 ? int8_values(codes) : fp8_values(codes);
}

// out[i] = codes[i] * scale for a row of `dim` elements.
template <class T>
inline void dequantise_row(KVType type, const uint8_t* codes, float scale, int64_t dim, typename T::Raw* out) {
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) T::store_vec(out + i, code_values(type, codes + i) * splat(scale));
  if (i == dim) return;
  uint8_t rest[kLanes] = {};
  std::memcpy(rest, codes + i, static_cast<size_t>(dim - i));
  store_lanes<T>(out + i, code_values(type, rest) * splat(scale), dim - i);
}

}  // namespace
}  // namespace specmemo
