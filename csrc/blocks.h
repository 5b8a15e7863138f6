// Addresses and read order of the keys and values of a block of 64 positions: in pages, among the step's new rows, or
// missing.
#pragma once

#include "attention_tasks.h"
#include "vec.h"

namespace specmemo {
namespace {

constexpr int kBlockKeys = 64;

// Tasks with few rows read a block's quarters interleaved, one row of each in turn: several streams have nearly the
// bandwidth of sequential reads, page after page has much less (bench/read_pages.cpp). The row of position `i` is read
// as number side_by_side(i).
constexpr int kStreams = 4;
constexpr int side_by_side(int i) { return i % (kBlockKeys / kStreams) * kStreams + i / (kBlockKeys / kStreams); }

struct BlockRows {
  const char* at[kBlockKeys];
};

// The rows of one KV head.
struct HeadRows {
  BlockRows keys, values;
};

// The rows of a task's first head, and the step from each row to the next head's.
struct Block {
  HeadRows first;
  int64_t key_steps[kBlockKeys], value_steps[kBlockKeys];  // bytes
  int64_t scales[kBlockKeys];                              // offset of the scales of a row of codes, or -1: no codes

  // The rows of the task's head `head`.
  BlockRows keys(int64_t head) const { return moved(first.keys, key_steps, head); }
  BlockRows values(int64_t head) const { return moved(first.values, value_steps, head); }
  HeadRows head(int64_t head) const { return {keys(head), values(head)}; }

 private:
  static BlockRows moved(const BlockRows& rows, const int64_t* steps, int64_t head) {
    BlockRows result;
    for (int i = 0; i < kBlockKeys; ++i) result.at[i] = rows.at[i] + head * steps[i];
    return result;
  }
};

// The new rows that follow the committed tokens: `nodes`, or all in order if null.
struct Path {
  const int32_t* nodes;
  int64_t count;

  int64_t node(int64_t i) const { return i >= count ? -1 : nodes == nullptr ? i : nodes[i]; }
};

// The blocks of a task's sequence. `zeros`: the row for missing keys.
class Blocks {
 public:
  Blocks(const AttentionArgs& args, const AttentionTask& task, int64_t element_bytes, const void* zeros, bool streams)
      : a_(args), task_(task), bytes_(element_bytes), zeros_(static_cast<const char*>(zeros)), streams_(streams) {}

  void locate(int64_t block, Block& rows) const {
    locate(block, rows, Path{nullptr, int64_t{task_.first_node} + task_.nodes});
  }

  void locate(int64_t block, Block& rows, const Path& path) const {
    const int64_t length = a_.seq_lens[task_.sequence];
    int64_t position = block * kBlockKeys;
    const bool streams = in_streams(block);
    for (int i = 0; i < kBlockKeys;) {
      if (position < length) {  // the rest of one page, or of the block, or of the sequence
        int64_t run = a_.order.page_size - position % a_.order.page_size;
        if (run > kBlockKeys - i) run = kBlockKeys - i;
        if (run > length - position) run = length - position;
        paged(position, i, static_cast<int>(run), streams, rows);
        i += static_cast<int>(run), position += run;
      } else {
        fresh(path.node(position - length), i, rows);
        ++i, ++position;
      }
    }
  }

  // Replaces the rows whose bit isn't set by zeros.
  void hide_others(uint64_t visible, Block& rows) const {
    for (int i = 0; i < kBlockKeys; ++i)
      if ((visible >> i & 1) == 0) missing(i, rows);
  }

  // Bits of a block's positions in the order of its rows.
  uint64_t in_order(uint64_t bits, int64_t block) const {
    if (!in_streams(block) || bits == ~uint64_t{0}) return bits;
    uint64_t result = 0;
    for (int i = 0; i < kBlockKeys; ++i) result |= (bits >> i & 1) << side_by_side(i);
    return result;
  }

 private:
  // Whether the whole block is in pages. Of other blocks only the first rows may be multiplied.
  bool in_streams(int64_t block) const { return streams_ && (block + 1) * kBlockKeys <= a_.seq_lens[task_.sequence]; }

  void paged(int64_t position, int first, int count, bool streams, Block& rows) const {
    const int64_t size = a_.kv == KVType::kSame ? bytes_ : 1;
    const int64_t k_row = a_.k_dim * size, v_row = a_.v_dim * size;
    const PageOrder& order = a_.order;
    const int32_t* table = a_.block_table + task_.sequence * a_.max_pages;
    int64_t row = order.row(table[position / order.page_size], position % order.page_size);
    row += task_.first_head * order.next_head();
    for (int i = first; i < first + count; ++i, row += order.next_token()) {
      const int at = streams ? side_by_side(i) : i;
      rows.first.keys.at[at] = static_cast<const char*>(a_.k_pages) + row * k_row;
      rows.first.values.at[at] = static_cast<const char*>(a_.v_pages) + row * v_row;
      rows.key_steps[at] = order.next_head() * k_row, rows.value_steps[at] = order.next_head() * v_row;
      rows.scales[at] = row;
    }
  }

  void missing(int at, Block& rows) const {
    rows.first.keys.at[at] = rows.first.values.at[at] = zeros_;
    rows.key_steps[at] = rows.value_steps[at] = 0;
    rows.scales[at] = -1;
  }

  // Row `node` of the step's new rows, or missing.
  void fresh(int64_t node, int at, Block& rows) const {
    missing(at, rows);
    if (node < 0) return;
    const int64_t row = a_.qo_indptr[task_.sequence] + node;
    const int64_t k_head = a_.k_new_strides[1] * bytes_, v_head = a_.v_new_strides[1] * bytes_;
    rows.first.keys.at[at] =
        static_cast<const char*>(a_.k_new) + row * a_.k_new_strides[0] * bytes_ + task_.first_head * k_head;
    rows.first.values.at[at] =
        static_cast<const char*>(a_.v_new) + row * a_.v_new_strides[0] * bytes_ + task_.first_head * v_head;
    rows.key_steps[at] = k_head, rows.value_steps[at] = v_head;
  }

  const AttentionArgs& a_;
  const AttentionTask& task_;
  int64_t bytes_;
  const char* zeros_;
  bool streams_;
};

}  // namespace
}  // namespace specmemo
