// Prefetching the next block of keys and values while this one is computed.
//
// A core waits for about two dozen lines at a time and drops prefetches beyond those, so they are spread over the work:
// a key's line is fetched where the same line of the present block is packed, values during the products (Fetch).
#pragma once

#include <cstdint>

namespace specmemo {
namespace {

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Walks over `bytes` of each of the rows, two lines at every step.
class Fetch {
 public:
  Fetch(const char* const* rows, int64_t count, int64_t bytes)
      : rows_(rows), end_(rows + count), at_(*rows), bytes_(bytes) {}

  bool done() const { return rows_ == end_; }

  void step() {
    if (done()) return;
    prefetch(at_);
    prefetch(at_ + 64);
    at_ += 128;
    if (at_ - *rows_ >= bytes_ && ++rows_ != end_) at_ = *rows_;
  }

 private:
  const char *const *rows_, *const *end_;
  const char* at_;
  int64_t bytes_;
};

}  // namespace
}  // namespace specmemo
