// Root mean square normalisation of rows, in one pass over each.
#pragma once

#include "kernels.h"
#include "threads.h"
#include "vec.h"

namespace specmemo {
namespace {

// Threads for work on that many elements; with fewer, starting a thread takes longer than its work.
inline int useful_threads(int64_t elements, int threads) {
  constexpr int64_t kElementsPerThread = 1 << 16;
  const int64_t useful = elements / kElementsPerThread + 1;
  return static_cast<int>(useful < threads ? useful : threads);
}

// Stores the sum of the row and its residual, rounded, and returns it.
template <class T>
const typename T::Raw* add_residual(const RmsNormArgs& args, int64_t row, const typename T::Raw* x) {
  typedef typename T::Raw Raw;
  const Raw* residual = static_cast<const Raw*>(args.residual) + row * args.size;
  Raw* sum = static_cast<Raw*>(args.sum) + row * args.size;
  for (int64_t i = 0; i < args.size; i += kLanes) {
    const int64_t count = args.size - i;
    store_lanes<T>(sum + i, load_lanes<T>(x + i, count) + load_lanes<T>(residual + i, count), count);
  }
  return sum;
}

template <class T>
void normalise_row(const RmsNormArgs& args, int64_t row) {
  typedef typename T::Raw Raw;
  const Raw* x = static_cast<const Raw*>(args.x) + row * args.x_stride;
  if (args.residual != nullptr) x = add_residual<T>(args, row, x);
  const auto* weight = static_cast<const Raw*>(args.weight);
  Raw* out = static_cast<Raw*>(args.out) + row * args.size;
  const int64_t whole = args.size / kLanes * kLanes;
  VecF squares[2] = {};  // two sums, because an addition takes several cycles
  for (int64_t i = 0; i < whole; i += kLanes) {
    const VecF v = T::load_vec(x + i);
    squares[i / kLanes % 2] += v * v;
  }
  float total = sum(squares[0] + squares[1]);
  for (int64_t i = whole; i < args.size; ++i) total += T::to_float(x[i]) * T::to_float(x[i]);
  const float factor = 1.0f / __builtin_sqrtf(total / static_cast<float>(args.size) + args.eps);
  const auto scaled = [&](VecF v, VecF w) {
    v = v * factor;
    return (args.round_first ? T::round(v) : v) * (w + args.offset);
  };
  for (int64_t i = 0; i < whole; i += kLanes)
    T::store_vec(out + i, scaled(T::load_vec(x + i), T::load_vec(weight + i)));
  for (int64_t i = whole; i < args.size; ++i)
    out[i] = T::from_float(scaled(splat(T::to_float(x[i])), splat(T::to_float(weight[i])))[0]);
}

template <class T>
void run_rms_norm(const RmsNormArgs& args, int threads) {
  auto row = [](void* data, int64_t i) { normalise_row<T>(*static_cast<const RmsNormArgs*>(data), i); };
  parallel_for(args.rows, useful_threads(args.rows * args.size, threads), row, const_cast<RmsNormArgs*>(&args));
}

}  // namespace
}  // namespace specmemo
