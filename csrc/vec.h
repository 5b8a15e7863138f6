// One vector of floats as wide as the instruction set, through the compilers' vector extensions; intrinsics only for
// instructions without an equivalent. Everything is in an anonymous namespace, because sources are compiled for
// several instruction sets.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// One instruction multiplies pairs of bfloat16 and adds both products to a float: vdpbf16ps, bfdot.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define SPECMEMO_BF16_DOT
#endif

namespace specmemo {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kTileRows = 6;  // 6 x 4 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kTileRows = 3;  // 3 x 4 accumulators of 16 registers
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kTileRows = 6;  // likewise
#else
constexpr int kLanes = 4;
constexpr int kTileRows = 3;
#endif
constexpr int kTileVecs = 4;

typedef float VecF __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecI __attribute__((vector_size(kLanes * 4)));
typedef uint32_t VecU __attribute__((vector_size(kLanes * 4)));
typedef uint16_t VecH __attribute__((vector_size(kLanes * 2)));

template <class V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
inline void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

template <class To, class From>
inline To bits_as(From v) {
  static_assert(sizeof(To) == sizeof(From), "a cast of bits keeps the size");
  To out;
  std::memcpy(&out, &v, sizeof v);
  return out;
}

inline VecF splat(float x) { return x - VecF{}; }  // the compiler removes - 0, but not + 0: -0 + 0 is 0
inline VecF vmax(VecF a, VecF b) { return a > b ? a : b; }
inline VecF vmin(VecF a, VecF b) { return a < b ? a : b; }

inline VecI lane_index() {
  VecI v;
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

// Lanes below `count`.
inline VecI first_lanes(int64_t count) { return lane_index() < static_cast<int32_t>(count); }

// Whether any lane of a comparison's result is true.
inline bool any(VecI found) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)found, (__m512i)found) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)found) != 0;
#elif defined(__SSE2__)
  return _mm_movemask_ps((__m128)found) != 0;
#elif defined(__aarch64__)
  return vmaxvq_u32((uint32x4_t)found) != 0;
#else
  return (found[0] | found[1] | found[2] | found[3]) != 0;
#endif
}

// Sums over lanes in a fixed order: folds halves together.
template <int N>
struct Fold {
  typedef float Wide __attribute__((vector_size(N * 4)));
  typedef float Half __attribute__((vector_size(N * 2)));
  static float sum(Wide v) {
    Half a, b;
    std::memcpy(&a, &v, sizeof a);
    std::memcpy(&b, reinterpret_cast<const char*>(&v) + sizeof a, sizeof b);
    return Fold<N / 2>::sum(a + b);
  }
};
template <>
struct Fold<2> {
  typedef float Wide __attribute__((vector_size(8)));
  static float sum(Wide v) { return v[0] + v[1]; }
};
inline float sum(VecF v) { return Fold<kLanes>::sum(v); }

// --- 16-bit floats ---------------------------------------------------------------------------------------------------

// GCC converts half a NEON register lane by lane and wide registers by halves; these intrinsics are one instruction
// each.
inline VecF bf16_to_float(VecH h) {
#if defined(__AVX512F__)
  return (VecF)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#elif defined(__AVX2__)
  return (VecF)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16);
#elif defined(__aarch64__)
  return (VecF)vshll_n_u16((uint16x4_t)h, 16);
#else
  return bits_as<VecF>(__builtin_convertvector(h, VecU) << 16);
#endif
}

// Rounded to nearest even in the upper halves of words, whose lower halves have no meaning; NaN stays NaN.
inline VecU round_to_bf16(VecF f) {
  const VecU u = bits_as<VecU>(f);
  return (f == f) ? u + 0x7fffu + ((u >> 16) & 1u) : u | 0x400000u;
}

inline VecH float_to_bf16(VecF f) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return (VecH)vcvt_bf16_f32((float32x4_t)f);
#elif defined(__AVX512F__)
  return (VecH)_mm512_cvtepi32_epi16((__m512i)(round_to_bf16(f) >> 16));
#elif defined(__aarch64__)
  return (VecH)vmovn_u32((uint32x4_t)(round_to_bf16(f) >> 16));
#else
  return __builtin_convertvector(round_to_bf16(f) >> 16, VecH);
#endif
}

// The even ones of bfloat16 pairs in words, as floats.
inline VecF low_halves(VecU words) { return bits_as<VecF>(words << 16); }

// The odd ones: words without their lower halves.
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

inline float bf16_to_float(uint16_t h) { return bits_as<float>(static_cast<uint32_t>(h) << 16); }

inline uint16_t float_to_bf16(float f) {
  const uint32_t u = bits_as<uint32_t>(f);
  if (f != f) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

inline float fp16_to_float(uint16_t h) {
#if defined(__AVX2__)
  return _cvtsh_ss(h);
#elif defined(__aarch64__)
  return static_cast<float>(bits_as<__fp16>(h));
#else
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, rest = h & 0x7fffu;
  if (rest >= 0x7c00u) return bits_as<float>(sign | 0x7f800000u | (rest << 13));
  // A half's exponent read as a float's is 112 too small; the product is exact, also for subnormal halves.
  return bits_as<float>(bits_as<uint32_t>(bits_as<float>(rest << 13) * 0x1p112f) | sign);
#endif
}

inline uint16_t float_to_fp16(float f) {  // to nearest even
#if defined(__AVX2__)
  return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT);
#else
  const uint32_t u = bits_as<uint32_t>(f), sign = (u >> 16) & 0x8000u;
  const float magnitude = bits_as<float>(u & 0x7fffffffu);
  if (f != f) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x1p-14f) {  // subnormal: the sum with 0.5 leaves the rounded mantissa in its low bits
    return static_cast<uint16_t>(sign | (bits_as<uint32_t>(magnitude + 0.5f) - 0x3f000000u));
  }
  const uint32_t m = u & 0x7fffffffu;
  return static_cast<uint16_t>(sign | ((m - 0x38000000u + 0xfffu + ((m >> 13) & 1u)) >> 13));
#endif
}

inline VecF fp16_to_float(VecH h) {
#if defined(__AVX512F__)
  return (VecF)_mm512_cvtph_ps((__m256i)h);
#elif defined(__AVX2__)
  return (VecF)_mm256_cvtph_ps((__m128i)h);
#elif defined(__aarch64__)
  return (VecF)vcvt_f32_f16((float16x4_t)h);
#else
  const VecU wide = __builtin_convertvector(h, VecU), rest = wide & 0x7fffu, sign = (wide & 0x8000u) << 16;
  const VecU finite = bits_as<VecU>(bits_as<VecF>(rest << 13) * 0x1p112f);
  return bits_as<VecF>(((rest >= 0x7c00u) ? ((rest << 13) | 0x7f800000u) : finite) | sign);
#endif
}

// --- element types of the kernels ------------------------------------------------------------------------------------

struct Float32 {
  typedef float Raw;
  static constexpr int kBits = 32;
  static VecF load_vec(const Raw* p) { return load<VecF>(p); }
  static float to_float(Raw x) { return x; }
  static Raw from_float(float x) { return x; }
  static void store_vec(Raw* p, VecF x) { store(p, x); }
  static VecF round(VecF x) { return x; }
};

struct BFloat16 {
  typedef uint16_t Raw;
  static constexpr int kBits = 16;
  static VecF load_vec(const Raw* p) { return bf16_to_float(load<VecH>(p)); }
  static float to_float(Raw x) { return bf16_to_float(x); }
  static Raw from_float(float x) { return float_to_bf16(x); }
  static void store_vec(Raw* p, VecF x) { store(p, float_to_bf16(x)); }
  static VecF round(VecF x) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return bf16_to_float(float_to_bf16(x));
#else
    return high_halves(round_to_bf16(x));
#endif
  }
};

struct Float16 {
  typedef uint16_t Raw;
  static constexpr int kBits = 16;
  static VecF load_vec(const Raw* p) { return fp16_to_float(load<VecH>(p)); }
  static float to_float(Raw x) { return fp16_to_float(x); }
  static Raw from_float(float x) { return float_to_fp16(x); }
  static void store_vec(Raw* p, VecF x) {
#if defined(__AVX512F__)
    store(p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__)
    store(p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    store(p, vcvt_f16_f32((float32x4_t)x));
#else
    for (int i = 0; i < kLanes; ++i) p[i] = float_to_fp16(x[i]);
#endif
  }
  static VecF round(VecF x) {
#if defined(__AVX2__)
    Raw values[kLanes];
    store_vec(values, x);
    return load_vec(values);
#elif defined(__aarch64__)
    return (VecF)vcvt_f32_f16(vcvt_f16_f32((float32x4_t)x));
#else
    for (int i = 0; i < kLanes; ++i) x[i] = fp16_to_float(float_to_fp16(x[i]));
    return x;
#endif
  }
};

// Loads `count` elements, at most a vector, and zeros behind them.
template <class T>
inline VecF load_lanes(const typename T::Raw* from, int64_t count) {
  if (count >= kLanes) return T::load_vec(from);
  typename T::Raw values[kLanes] = {};
  std::memcpy(values, from, static_cast<size_t>(count) * sizeof(typename T::Raw));
  return T::load_vec(values);
}

// Stores the first `count` lanes, at most all.
template <class T>
inline void store_lanes(typename T::Raw* to, VecF x, int64_t count) {
  if (count >= kLanes) return T::store_vec(to, x);
  typename T::Raw values[kLanes];
  T::store_vec(values, x);
  std::memcpy(to, values, static_cast<size_t>(count) * sizeof(typename T::Raw));
}

}  // namespace
}  // namespace specmemo
