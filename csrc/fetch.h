// Prefetches rows while others are computed: a head's values and then the next head's keys. The first block isn't
// prefetched; the distance is one head. Prefetches are spread over the work, in address order, as the hardware
// prefetcher does.
#pragma once

#include "blocks.h"

namespace specmemo {
namespace {

constexpr int64_t kLine = 64;  // bytes

// Into L2. A core tracks only two dozen outstanding L1 misses; shuffled pages need more to reach full bandwidth.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

inline void prefetch_near(const void* p) { __builtin_prefetch(p, 0, 3); }  // into L1

inline void prefetch_lines(const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kLine) prefetch(from + i);
}

// The rows of a head's values and of a head's keys, in read order.
struct Upcoming {
  Upcoming(const HeadRows& values_of, const HeadRows& keys_of) {
    std::memcpy(rows, values_of.values.at, sizeof values_of.values);
    std::memcpy(rows + kBlockKeys, keys_of.keys.at, sizeof keys_of.keys);
  }
  const char* rows[2 * kBlockKeys];
};

// Walks over the rows, line by line.
class Fetch {
 public:
  Fetch() = default;  // nothing
  // The work of this block: vectors of keys to pack, and steps of the products.
  Fetch(const Upcoming& next, int64_t row_bytes, int64_t vectors, int64_t steps)
      : row_(next.rows), row_lines_(static_cast<uint32_t>((row_bytes + 63) / 64)), end_(2 * kBlockKeys * row_lines_) {
    packing_end_ = steps < end_ ? end_ : 0;
    twice_ = steps + vectors < end_;
  }

  bool done() const { return next_ >= end_; }

  void vector() {
    if (next_ < packing_end_) line();
  }

  void step() {
    if (!done()) line();
    if (twice_ && !done()) line();
  }

 private:
  void line() {
    prefetch(*row_ + line_ * kLine);
    if (++line_ == row_lines_) line_ = 0, ++row_;
    ++next_;
  }

  const char* const* row_ = nullptr;  // of the next line
  uint32_t row_lines_ = 0, line_ = 0, next_ = 0, end_ = 0, packing_end_ = 0;
  bool twice_ = false;
};

}  // namespace
}  // namespace specmemo
