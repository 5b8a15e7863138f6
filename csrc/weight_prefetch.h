// Prefetches the weights that RowProducts multiplies next.
#pragma once

#include "fetch.h"

namespace specmemo {
namespace {

// Far ahead, into L2, so that input rows stay in L1: three rows read at once alone are too slow for the hardware
// prefetcher (half the bandwidth of one stream on an EPYC with AVX512).
struct Ahead {
  const char* at;     // of the next tile
  int64_t next_row;   // bytes from the prefetches of one weight row to those of the next
  int64_t next_step;  // bytes from one prefetch to the next
};

// Groups of more bytes aren't prefetched in address order: on Emerald Rapids 48 KiB (2048 bfloat16 inputs) take 1.04 to
// 1.12 times as long in that order, 18 KiB (768 inputs) 0.9 to 1.0 times.
constexpr int64_t kOrderBytes = 32 << 10;

// With AVX2, tiles of three and four rows of 16 bits, compressed of two too, are prefetched in address order where they
// are the only one, or the group has at most these bytes. On a Zen 3 three and four rows take 0.84 to 0.95 of the time
// (matrices of 2048 to 5632 inputs; compressed 0.83 to 0.92), eight and sixteen rows 0.90 to 0.99 with 2048 inputs and
// 0.98 to 1.12 with 4096 and more. One and two rows take 1.0 to 1.09 times as long, of float32 1.0 to 1.18 times.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool kOrderOf16Bits = true;
#else
constexpr bool kOrderOf16Bits = false;
#endif
constexpr int64_t kOrderBytesOfTiles = 72 << 10;

// Lines from a prefetch into L1 to its use; 0: none. On Emerald Rapids 1 to 4 rows take 0.92 to 0.96 of the time, 8
// rows 0.99. On an EPYC with BF16 instructions, 2 to 8 rows take 0.91 to 1.04 of it (median 0.98), one row of bfloat16
// 1.0 to 1.1, one row of float32 1.0: there steps of a single product have none.
#if defined(__AVX512F__)
constexpr int64_t kNearLines = 8;
#else
constexpr int64_t kNearLines = 0;
#endif
#if defined(SPECMEMO_BF16_DOT)
constexpr int kNearSlots = 2;
#else
constexpr int kNearSlots = 1;
#endif

// Bytes from a prefetch to its use in a single stream of weights; on the same EPYC 5 KiB and 8 KiB take up to 1.1 times
// as long. A single row of input leaves it to the hardware: with prefetches it takes 0.90 to 1.2 times as long.
constexpr int64_t kSequentialBytes = 6 << 10;

enum class PrefetchPattern {
  kFar,         // weights far ahead, into L2
  kFarAndNear,  // and weights kNearLines ahead, into L1
  kTwice,       // likewise, every line far ahead in two steps: faster where memory is busy
  kNextTile,    // the next tile's weights in address order, into L1
};

// Prefetches of steps that each multiply a line of WEIGHTS weight rows.
template <int WEIGHTS, PrefetchPattern PATTERN>
class WeightPrefetches {
 public:
  explicit WeightPrefetches(const Ahead& ahead) : step_(ahead.next_step) {
#pragma GCC unroll 8
    for (int v = 0; v < WEIGHTS; ++v) next_[v] = ahead.at + v * ahead.next_row;
  }

  // Issues the next prefetch of weight row v.
  void next(int v) {
    if (PATTERN == PrefetchPattern::kNextTile)
      prefetch_near(next_[v]);
    else
      prefetch(next_[v]);
    if (PATTERN == PrefetchPattern::kTwice) prefetch(next_[v] + step_);
    next_[v] += step_;
  }

  // Issues the prefetches of one of a step's `slots`, over which they are spread: a burst would stall the products.
  // at: the first element of the step.
  template <class Raw>
  void issue(int slot, int slots, const Raw* const* weights, int64_t at) {
#pragma GCC unroll 8
    for (int v = 0; v < WEIGHTS; ++v) {
      if (slot != (2 * v + 1) * slots / (2 * WEIGHTS)) continue;
      next(v);
      constexpr bool kNear = PATTERN == PrefetchPattern::kFarAndNear || PATTERN == PrefetchPattern::kTwice;
      if (kNear && kNearLines > 0 && slots >= kNearSlots)
        prefetch_near(reinterpret_cast<const char*>(weights[v] + at) + kNearLines * kLine);
    }
  }

 private:
  const char* next_[WEIGHTS];
  int64_t step_;
};

struct NoPrefetches {
  void next(int) {}
  template <class Raw>
  void issue(int, int, const Raw* const*, int64_t) {}
};

}  // namespace
}  // namespace specmemo
