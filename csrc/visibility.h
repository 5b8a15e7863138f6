// The attention mask of a node and one block of keys, as 64 bits.
//
// A sequence's positions are its committed tokens, then the step's new rows. Block b is positions 64 b .. 64 b + 63,
// one bit each.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace specmemo {

class Visibility {
 public:
  // depths: one int32 per node of the sequence, used with a window.
  Visibility(const AttentionArgs& args, int64_t sequence, int32_t* depths);

  // The first position visible to any node from first_node on.
  int64_t first_position(int64_t first_node, int64_t nodes) const;

  // Bits of block `block` for one node.
  uint64_t word(int64_t node, int64_t block) const;

  // A run: nodes from `first` on, at most `count`, each the child of the one before. Returns their number.
  int64_t run(int64_t first, int64_t count) const;

  // Writes a node's ancestors and itself, the root first; returns their number.
  int64_t path(int64_t node, int32_t* nodes) const;

  // Bits of block `block` for the last of `depth` + 1 new rows, if only a node's path follows the committed tokens.
  uint64_t path_word(int64_t depth, int64_t block) const;

 private:
  bool causal(int64_t node) const;
  bool is_child(int64_t node) const;
  uint64_t mask_bits(int64_t node, int64_t offset) const;

  const int64_t* mask_;  // the sequence's rows, or null
  int64_t words_, length_, window_;
  const int32_t* depths_;
};

}  // namespace specmemo
