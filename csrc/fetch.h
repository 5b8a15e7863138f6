// Prefetching, paced.
#pragma once

#include <cstdint>

namespace specmemo {
namespace {

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

inline int64_t lines(int64_t bytes) { return (bytes + 63) / 64; }

// Brings the rows of the next block into the cache while this one is computed: in the order of their addresses, and
// evenly over the work, one line at a slot. A core waits for few lines at a time, and drops prefetches beyond those.
class Fetch {
 public:
  // rows[begin .. end) of both lists, k_bytes and v_bytes of each, spread over `slots` calls of slot().
  Fetch(const void* const* keys, const void* const* values, int64_t begin, int64_t end, int64_t k_bytes,
        int64_t v_bytes, int64_t slots)
      : rows_(keys), values_(values), row_(begin), begin_(begin), end_(end), bytes_(k_bytes), v_bytes_(v_bytes) {
    rate_ = (end - begin) * (lines(k_bytes) + lines(v_bytes)) * 256 / (slots > 0 ? slots : 1) + 1;
  }

  void slot() {
    due_ += rate_;
    if (due_ < 256 || row_ == end_) return;
    due_ -= 256;
    prefetch(static_cast<const char*>(rows_[row_]) + offset_);
    offset_ += 64;
    if (offset_ >= bytes_) next_row();
  }

 private:
  void next_row() {
    offset_ = 0;
    if (++row_ == end_ && rows_ != values_) {
      rows_ = values_;
      bytes_ = v_bytes_;
      row_ = begin_;
    }
  }

  const void *const *rows_, *const *values_;
  int64_t row_, begin_, end_, bytes_, v_bytes_, rate_, offset_ = 0, due_ = 0;
};

}  // namespace
}  // namespace specmemo
