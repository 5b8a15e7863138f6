#include "visibility.h"

namespace specmemo {
namespace {

constexpr uint64_t kAll = ~uint64_t{0};

uint64_t lowest(int64_t count) {  // the `count` lowest bits
  if (count <= 0) return 0;
  return count >= 64 ? kAll : (uint64_t{1} << count) - 1;
}

}  // namespace

Visibility::Visibility(const AttentionArgs& args, int64_t sequence, int32_t* depths)
    : words_(args.mask_words), length_(args.seq_lens[sequence]), window_(args.window), depths_(depths) {
  const int64_t first = args.qo_indptr[sequence], nodes = args.qo_indptr[sequence + 1] - first;
  mask_ = args.tree_mask == nullptr ? nullptr : args.tree_mask + first * words_;
  if (window_ == 0) return;
  for (int64_t i = 0; i < nodes; ++i) {
    int depth = -1;
    if (causal(i)) {
      depth = static_cast<int>(i);
    } else {
      for (int64_t w = 0; w < words_; ++w) depth += __builtin_popcountll(static_cast<uint64_t>(mask_[i * words_ + w]));
    }
    depths[i] = depth;
  }
}

bool Visibility::causal(int64_t node) const {
  if (mask_ == nullptr) return true;
  for (int64_t w = 0; w < words_; ++w)
    if (mask_[node * words_ + w] != 0) return false;
  return true;
}

// 64 bits of a node's mask row from bit `offset` on, which may be before the row or past its end.
uint64_t Visibility::mask_bits(int64_t node, int64_t offset) const {
  const int64_t* row = mask_ + node * words_;
  auto word = [&](int64_t w) { return w >= 0 && w < words_ ? static_cast<uint64_t>(row[w]) : uint64_t{0}; };
  const int64_t w = offset >= 0 ? offset / 64 : -((63 - offset) / 64);
  const int64_t shift = offset - w * 64;
  return shift == 0 ? word(w) : (word(w) >> shift) | (word(w + 1) << (64 - shift));
}

int64_t Visibility::first_position(int64_t first_node, int64_t nodes) const {
  if (window_ == 0) return 0;
  int64_t lowest_depth = depths_[first_node];
  for (int64_t i = 1; i < nodes; ++i)
    if (depths_[first_node + i] < lowest_depth) lowest_depth = depths_[first_node + i];
  const int64_t first = length_ + lowest_depth - window_ + 1;
  return first < 0 ? 0 : (first < length_ ? first : length_);
}

uint64_t Visibility::word(int64_t node, int64_t block) const {
  const int64_t base = block * 64;
  uint64_t committed = lowest(length_ - base);
  // Bits of new rows: node j is bit length + j - base.
  uint64_t fresh =
      causal(node) ? lowest(length_ + node + 1 - base) & ~committed : mask_bits(node, base - length_) & ~committed;
  if (window_ == 0) return committed | fresh;
  committed &= ~lowest(length_ + depths_[node] - window_ + 1 - base);
  for (uint64_t rest = fresh; rest != 0; rest &= rest - 1) {
    const int bit = __builtin_ctzll(rest);
    if (depths_[node] - depths_[base + bit - length_] >= window_) fresh &= ~(uint64_t{1} << bit);
  }
  return committed | fresh;
}

int64_t Visibility::run(int64_t first, int64_t count) const {
  int64_t nodes = 1;
  while (nodes < count && is_child(first + nodes)) ++nodes;
  return nodes;
}

// Whether a node is the child of the node before it.
bool Visibility::is_child(int64_t node) const {
  if (causal(node) || causal(node - 1)) return causal(node) && causal(node - 1);
  for (int64_t w = 0; w < words_; ++w) {
    const uint64_t own = node / 64 == w ? uint64_t{1} << (node % 64) : 0;
    const auto *row = mask_ + node * words_ + w, *before = row - words_;
    if (static_cast<uint64_t>(*row) != (static_cast<uint64_t>(*before) | own)) return false;
  }
  return true;
}

int64_t Visibility::path(int64_t node, int32_t* nodes) const {
  int64_t count = 0;
  const bool all = causal(node);
  for (int64_t i = 0; i <= node; ++i)
    if (all || (mask_[node * words_ + i / 64] >> (i % 64) & 1) != 0) nodes[count++] = static_cast<int32_t>(i);
  return count;
}

uint64_t Visibility::path_word(int64_t depth, int64_t block) const {
  const int64_t end = length_ + depth + 1 - block * 64;
  return window_ == 0 ? lowest(end) : lowest(end) & ~lowest(end - window_);
}

}  // namespace specmemo
