// A range that is divided into consecutive parts of nearly equal sizes.
#pragma once

#include <cstdint>

namespace specmemo {
namespace {

struct Parts {
  Parts(int64_t total, int64_t count) : count(count), size_(total / count), longer_(total % count) {}

  // The fewest parts, at least one, of at most `max_size` each.
  static Parts at_most(int64_t total, int64_t max_size) {
    const int64_t count = (total + max_size - 1) / max_size;
    return Parts(total, count > 1 ? count : 1);
  }

  // Where a part begins: the first ones are one longer.
  int64_t begin(int64_t part) const { return part * size_ + (part < longer_ ? part : longer_); }
  int64_t size(int64_t part) const { return size_ + (part < longer_ ? 1 : 0); }

  int64_t count;

 private:
  int64_t size_, longer_;
};

}  // namespace
}  // namespace specmemo
