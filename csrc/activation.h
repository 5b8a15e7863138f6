// Activations of gated MLPs.
#pragma once

#include "kernels.h"
#include "vec_math.h"

namespace specmemo {
namespace {

inline VecF sigmoid(VecF x) {  // e^-|x| doesn't overflow
  const VecF small = exp2_nonpositive(vmin(x, -x) * 1.44269504088896341f);
  const VecF numerator = x < VecF{} ? small : splat(1.0f);
  return numerator / (1.0f + small);
}

inline VecF activate(Activation activation, VecF x) {
  switch (activation) {
    case Activation::kSilu:
      return x * sigmoid(x);
    case Activation::kGeluTanh:
      return x * sigmoid(1.59576912160573071f * (x + 0.044715f * x * x * x));  // (1 + tanh(y)) / 2 is sigmoid(2 y)
    case Activation::kRelu:
      return x < VecF{} ? VecF{} : x;  // NaN stays NaN
  }
  return x;
}

}  // namespace
}  // namespace specmemo
