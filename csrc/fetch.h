// Prefetching the next block of keys and values while this one is computed.
//
// A core waits for about two dozen lines at a time and drops prefetches beyond those, so they are spread over the work;
// and it reads ahead by itself where lines follow each other, so they come in the order of their addresses.
#pragma once

#include "blocks.h"

namespace specmemo {
namespace {

inline void prefetch(const void* p) { __builtin_prefetch(p); }

// Walks over a head's rows of keys, then of values, line by line. The division that finds a line is no loss: without
// it, prefetches come so fast while keys are packed that many are dropped.
class Fetch {
 public:
  // The work at hand: keys are packed from so many vectors, and products take so many steps.
  Fetch(const HeadRows& rows, int64_t row_bytes, int64_t vectors, int64_t steps)
      : rows_(rows.keys), row_lines_(static_cast<uint32_t>((row_bytes + 63) / 64)), end_(2 * kBlockKeys * row_lines_) {
    static_assert(sizeof(HeadRows) == 2 * sizeof(rows.keys), "values follow keys");
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
    prefetch(rows_[next_ / row_lines_] + next_ % row_lines_ * 64);
    ++next_;
  }

  const char* const* rows_;
  uint32_t row_lines_, next_ = 0, end_, packing_end_;
  bool twice_;
};

}  // namespace
}  // namespace specmemo
