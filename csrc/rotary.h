// Rotary position embedding of heads, rounded after every operator as separate operators do.
#pragma once

#include "norm.h"

namespace specmemo {
namespace {

// A product that the compiler doesn't contract with a sum.
inline VecF rounded_product(VecF a, VecF b) {
  VecF product = a * b;
#if defined(__aarch64__)
  asm("" : "+w"(product));
#elif defined(__AVX512F__)
  asm("" : "+v"(product));
#elif defined(SPECMEMO_X86) || defined(__x86_64__)
  asm("" : "+x"(product));
#endif
  return product;
}

template <class T>
struct RotaryRow {
  typedef typename T::Raw Raw;
  const Raw *x, *cos, *sin;
  Raw* out;
  int64_t half;

  // Elements i, ..., i + count - 1 of both halves.
  void rotate(int64_t i, int64_t count) const {
    const VecF low = load_lanes<T>(x + i, count), high = load_lanes<T>(x + half + i, count);
    const VecF low_cos = load_lanes<T>(cos + i, count), high_cos = load_lanes<T>(cos + half + i, count);
    const VecF low_sin = load_lanes<T>(sin + i, count), high_sin = load_lanes<T>(sin + half + i, count);
    store_lanes<T>(out + i, T::round(rounded_product(low, low_cos)) - T::round(rounded_product(high, low_sin)), count);
    store_lanes<T>(out + half + i, T::round(rounded_product(high, high_cos)) + T::round(rounded_product(low, high_sin)),
                   count);
  }
};

template <class T>
void rotate_token(const RotaryArgs& args, int64_t token) {
  typedef typename T::Raw Raw;
  const Raw* x = static_cast<const Raw*>(args.x) + token * args.x_strides[0];
  Raw* out = static_cast<Raw*>(args.out) + token * args.heads * args.size;
  RotaryRow<T> row{x, static_cast<const Raw*>(args.cos) + token * args.angle_stride,
                   static_cast<const Raw*>(args.sin) + token * args.angle_stride, out, args.size / 2};
  for (int64_t head = 0; head < args.heads; ++head, row.x += args.x_strides[1], row.out += args.size)
    for (int64_t i = 0; i < row.half; i += kLanes) row.rotate(i, row.half - i < kLanes ? row.half - i : kLanes);
}

template <class T>
void run_rotary(const RotaryArgs& args, int threads) {
  auto token = [](void* data, int64_t i) { rotate_token<T>(*static_cast<const RotaryArgs*>(data), i); };
  parallel_for(args.tokens, useful_threads(args.tokens * args.heads * args.size, threads), token,
               const_cast<RotaryArgs*>(&args));
}

}  // namespace
}  // namespace specmemo
