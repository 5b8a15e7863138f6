// Exponentials and tanh of vectors of floats.
#pragma once

#include "vec.h"

namespace specmemo {
namespace {

// 2^x for x <= 0 (softmax); 0 below -126, NaN for NaN. x = n + f with |f| <= 1/2, then the Taylor series of 2^f to
// degree 6: relative error under 3e-7. Smaller results are masked: a single one in a vector, as of a masked key, slows
// vscalefps from 0.5 to 70 ns (Emerald Rapids).
inline VecF exp2_nonpositive(VecF x) {
#if defined(__AVX512F__)
  const __m512 least = _mm512_set1_ps(-126.0f);
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, least, _CMP_NLT_UQ);  // or NaN
  const __m512 clamped = _mm512_max_ps(least, (__m512)x);                      // NaN of the second operand is kept
  const __m512 n = _mm512_roundscale_ps(clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const VecF f = (VecF)(clamped - n);
#else
  const VecF magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  const VecF clamped = (x < splat(-127.0f)) ? splat(-127.0f) : x;
  const VecF shifted = clamped + magic;
  const VecF f = clamped - (shifted - magic);
#endif
  VecF p = splat(1.5403530393381608e-4f);
  p = p * f + 1.3333558146428443e-3f;
  p = p * f + 9.6181291076284772e-3f;
  p = p * f + 5.5504108664821580e-2f;
  p = p * f + 2.4022650695910072e-1f;
  p = p * f + 6.9314718055994531e-1f;
  p = p * f + 1.0f;
#if defined(__AVX512F__)
  return (VecF)_mm512_maskz_scalef_ps(normal, (__m512)p, n);
#else
  const VecF scaled = bits_as<VecF>(bits_as<VecI>(p) + (bits_as<VecI>(shifted) << 23));
  const VecF flushed = (x >= splat(-126.0f)) ? scaled : VecF{};
  return (x == x) ? flushed : x;
#endif
}

// tanh(x): rational approximation, odd degree 13 over even degree 6, on |x| <= 7.9053; error under 4 units in the last
// place (the minimax coefficients that Eigen and XLA use). NaN for NaN, which the clamp keeps as a second operand.
inline VecF tanh(VecF x) {
  x = vmax(splat(-7.90531110763549805f), vmin(splat(7.90531110763549805f), x));
  const VecF y = x * x;
  VecF p = splat(-2.76076847742355e-16f);
  p = p * y + 2.00018790482477e-13f;
  p = p * y + -8.60467152213735e-11f;
  p = p * y + 5.12229709037114e-08f;
  p = p * y + 1.48572235717979e-05f;
  p = p * y + 6.37261928875436e-04f;
  p = p * y + 4.89352455891786e-03f;
  VecF q = splat(1.19825839466702e-06f);
  q = q * y + 1.18534705686654e-04f;
  q = q * y + 2.26843463243900e-03f;
  q = q * y + 4.89352518554385e-03f;
  return x * p / q;
}

}  // namespace
}  // namespace specmemo
