// Tree attention over pages: per task and split, an online softmax over blocks of 64 keys.
// In invariant mode, blocks with new rows are computed per run (visibility.h), whose own ancestors follow the committed
// tokens: a key is at its position in the block, before and after its commit, so that its node sums in the same order.
//
// A hidden key has weight 0, which times a value that isn't finite is NaN. Nodes are therefore computed again, each
// alone with zeros instead of the keys that it doesn't see, if a result of their task is NaN.
//
// For each block: pack keys, then for each group of tiles of rows: scores = q k (registers), mask, running maximum,
// weights, output = output * factor + weights * v (registers), with values packed where more than one tile reads them.
// Keys and values are read once per KV head. Tasks with few rows don't pack (few_rows.h).
#pragma once

#include "blocks.h"
#include "few_rows.h"
#include "packed_rows.h"
#include "threads.h"
#include "visibility.h"

namespace specmemo {
namespace {

template <class T, class Dot>
class Attention {
  typedef typename T::Raw Raw;
  typedef typename Dot::Word Word;

 public:
  // `nodes`, `heads`: maxima of a task.
  Attention(const AttentionArgs& args, int64_t nodes, int64_t heads) : args_(args), heads_(heads) {
    group_ = args.num_qo_heads / args.num_kv_heads;
    rows_ = nodes * group_;
    k_words_ = round_up(args.k_dim, Dot::kPerWord) / Dot::kPerWord;
    columns_ = round_up(args.v_dim, kLanes);
    max_nodes_ = args.window == 0 && !args.invariant ? 0 : most_nodes(args);
  }

  int64_t state_floats() const { return round_up(States{nullptr, heads_, rows_, columns_}.floats(), 16); }

  int64_t workspace_bytes() const { return Workspace(*this, nullptr).bytes; }

  // Computes all splits of a task, merges them in order and writes the result.
  void run(const AttentionTask& task) const {
    if (run_splits(task, false)) run_nodes(task);
  }

  // Computes one split; its state stays in `memory` for finish_splits.
  void run_one_split(const AttentionTask& task, int split, float* memory) const {
    Workspace w(*this);
    load_queries(task, w);
    const Visibility visibility(args_, task.sequence, w.depths);
    run_split(task, split, visibility, w, states_of(task, memory), false);
  }

  void finish_splits(const AttentionTask& task, float* memory) const {
    for (int split = 1; split < task.splits; ++split)
      merge_heads(task, states_of(task, memory), states_of(task, memory + split * state_floats()));
    if (finish(task, states_of(task, memory))) run_nodes(task);
  }

 private:
  // Returns whether a result is NaN. `alone`: with zeros instead of the keys that the task's only node doesn't see.
  bool run_splits(const AttentionTask& task, bool alone) const {
    Workspace w(*this);
    load_queries(task, w);
    const Visibility visibility(args_, task.sequence, w.depths);
    run_split(task, 0, visibility, w, states_of(task, w.total), alone);
    for (int split = 1; split < task.splits; ++split) {
      run_split(task, split, visibility, w, states_of(task, w.part), alone);
      merge_heads(task, states_of(task, w.total), states_of(task, w.part));
    }
    return finish(task, states_of(task, w.total));
  }

  void run_nodes(const AttentionTask& task) const {
    AttentionTask node = task;
    node.nodes = 1;
    for (int32_t i = 0; i < task.nodes; ++i) {
      node.first_node = task.first_node + i;
      run_splits(node, true);
    }
  }

  // One thread's workspace. Constructed twice: without memory to compute its size, then in the thread's arena.
  struct Workspace {
    explicit Workspace(const Attention& a) : Workspace(a, nullptr) {
      *this = Workspace(a, static_cast<char*>(arena(0, bytes)));
      std::memset(zero_row, 0, static_cast<size_t>(a.widest_row()) * sizeof(Raw));
    }

    Workspace(const Attention& a, char* memory) {
      const int64_t rows = a.heads_ * a.rows_;
      const int64_t v_words = a.columns_ / Dot::kPerWord;
      take(memory, packing.keys, (a.k_words_ > v_words ? a.k_words_ : v_words) * kBlockKeys);  // values too
      take(memory, packing.values, v_words * kBlockKeys);
      take(memory, query, rows * a.k_words_);
      take(memory, zero_row, a.widest_row());
      take(memory, packing.staged_keys, is_quantised(a.args_) ? kBlockKeys * a.args_.k_dim : 0);
      take(memory, packing.staged_values, values_are_staged(a.args_) ? kBlockKeys * a.columns_ : 0);
      take(memory, scores, kGroupRows * kBlockKeys);
      take(memory, depths, a.max_nodes_);
      take(memory, path, a.max_nodes_);
      take(memory, lane_sums, rows * kLanes);
      take(memory, visible, a.rows_);
      take(memory, total, a.state_floats());
      take(memory, part, a.state_floats());
    }

    template <class Item>
    void take(char* memory, Item*& place, int64_t count) {
      place = reinterpret_cast<Item*>(memory + bytes);
      bytes += round_up(count * static_cast<int64_t>(sizeof(Item)), 64);
    }

    int64_t bytes = 0;
    PackingBuffers<Raw> packing;
    Word* query;
    Raw* zero_row;
    float *scores, *lane_sums;
    int32_t *depths, *path;
    uint64_t* visible;  // [nodes], mask bits of the block
    float *total, *part;
  };

  int64_t widest_row() const { return args_.k_dim > columns_ ? args_.k_dim : columns_; }

  // Whether rows of keys are whole vectors of words.
  bool whole_key_vectors() const { return args_.k_dim % (kLanes * Dot::kPerWord) == 0; }

  static constexpr int64_t kRawBytes = sizeof(Raw);

  States states_of(const AttentionTask& task, float* memory) const {
    return States{memory, heads_, task.nodes * group_, columns_};
  }

  void merge_heads(const AttentionTask& task, const States& all, const States& part) const {
    for (int64_t h = 0; h < task.heads; ++h) merge(all.of(h), part.of(h), task.nodes * group_, columns_);
  }

  int64_t key_count(const AttentionTask& task) const {
    return args_.seq_lens[task.sequence] + task.first_node + task.nodes;
  }

  // [heads][nodes x group][k_words]
  void load_queries(const AttentionTask& task, const Workspace& w) const {
    const int64_t first = args_.qo_indptr[task.sequence] + task.first_node;
    Word* out = w.query;
    for (int64_t h = 0; h < task.heads; ++h)
      for (int64_t node = 0; node < task.nodes; ++node)
        for (int64_t g = 0; g < group_; ++g) {
          const Raw* q = static_cast<const Raw*>(args_.q) + (first + node) * args_.q_strides[0] +
                         ((task.first_head + h) * group_ + g) * args_.q_strides[1];
          const int64_t whole = args_.k_dim / (Dot::kPerWord * kLanes) * kLanes;
          for (int64_t i = 0; i < whole; i += kLanes) store(out + i, KeyWords<T, Dot>::load_words(q, i));
          for (int64_t i = whole; i < k_words_; ++i) {
            const float word = KeyWords<T, Dot>::word(q, i, args_.k_dim);
            std::memcpy(out + i, &word, 4);
          }
          out += k_words_;
        }
  }

  // Number of keys to multiply of a block with `left` keys: rounded up to whole vectors and words.
  static int64_t used_keys(int64_t left) {
    return left < kBlockKeys ? round_up(left, kLanes * Dot::kPerWord) : kBlockKeys;
  }

  void run_split(const AttentionTask& task, int split, const Visibility& visibility, const Workspace& w,
                 const States& states, bool alone) const {
    const int64_t rows = task.nodes * group_;
    const bool in_place = !values_are_staged(args_) && whole_key_vectors() && has_few_rows(args_, task.sequence);
    for (int64_t h = 0; h < task.heads; ++h) {
      const State state = states.of(h);
      std::memset(state.output, 0, static_cast<size_t>(rows * columns_) * 4);
      for (int64_t r = 0; r < rows; ++r) state.max[r] = kMinusInf;
    }
    std::memset(w.lane_sums, 0, static_cast<size_t>(task.heads * rows * kLanes) * 4);
    const int64_t first = visibility.first_position(task.first_node, task.nodes) / kBlockKeys;
    const int64_t keys = key_count(task), per_split = kSplitTokens / kBlockKeys;
    int64_t begin = split * per_split, end = begin + per_split;
    if (begin < first) begin = first;
    if (end > (keys + kBlockKeys - 1) / kBlockKeys) end = (keys + kBlockKeys - 1) / kBlockKeys;
    const Blocks blocks(args_, task, kRawBytes, w.zero_row, in_place);
    const auto locate = [&](int64_t b, Block& block) {
      blocks.locate(b, block);
      if (alone) blocks.hide_others(blocks.in_order(visibility.word(task.first_node, b), b), block);
    };
    Block one, other, *now = &one, *ahead = &other;
    locate(begin, *now);
    HeadRows read = now->head(0);
    const HeadsOfRows<Word> all{task.heads, rows, w.query, states, w.lane_sums, w.visible, w.scores};
    const FewRows<T, Dot> direct(args_, k_words_, columns_);
    const PackedRows<T, Dot> packed(args_, k_words_, columns_, w.packing);
    if (in_place) direct.begin(*now);
    const int64_t shared = args_.invariant ? args_.seq_lens[task.sequence] / kBlockKeys : end;  // without new rows
    for (int64_t b = begin; b < end && b < shared; ++b) {
      locate(b + 1, *ahead);  // also past the split's end, for the next split
      for (int64_t i = 0; i < task.nodes; ++i)
        w.visible[i] = blocks.in_order(visibility.word(task.first_node + i, b), b);
      const int64_t used = used_keys(keys - b * kBlockKeys);
      if (in_place) {
        direct.run_block(*now, *ahead, used, all);
      } else {
        packed.run_block(*now, *ahead, used, Run{0, task.nodes}, read, all);
      }
      Block* done = now;
      now = ahead, ahead = done;
    }
    for (int64_t b = begin < shared ? shared : begin; b < end; ++b)
      run_paths(task, b, blocks, visibility, w, packed, all, alone);
    for (int64_t h = 0; h < task.heads; ++h)
      for (int64_t r = 0; r < rows; ++r) states.of(h).sum[r] = sum(load<VecF>(w.lane_sums + (h * rows + r) * kLanes));
  }

  // Block `b`, for each run of the task's nodes as if only the run's own path followed the committed tokens.
  void run_paths(const AttentionTask& task, int64_t b, const Blocks& blocks, const Visibility& visibility,
                 const Workspace& w, const PackedRows<T, Dot>& packed, const HeadsOfRows<Word>& all, bool alone) const {
    Block block;
    for (Run run{0, 0}; run.first < task.nodes; run.first += run.nodes) {
      run.nodes = visibility.run(task.first_node + run.first, task.nodes - run.first);
      const int64_t length = visibility.path(task.first_node + run.first + run.nodes - 1, w.path);
      const int64_t keys = args_.seq_lens[task.sequence] + length - b * kBlockKeys;
      if (keys <= 0) continue;
      blocks.locate(b, block, Path{w.path, length});
      for (int64_t i = 0; i < run.nodes; ++i)
        w.visible[run.first + i] = visibility.path_word(length - run.nodes + i, b);
      if (alone) blocks.hide_others(w.visible[0], block);
      HeadRows read = block.head(0);
      packed.run_block(block, block, used_keys(keys), run, read, all);
    }
  }

  // Writes the result; returns whether it has NaN.
  bool finish(const AttentionTask& task, const States& states) const {
    bool undefined = false;
    for (int64_t h = 0; h < task.heads; ++h) undefined |= finish_head(task, task.first_head + h, states.of(h));
    return undefined;
  }

  bool finish_head(const AttentionTask& task, int64_t kv_head, const State& state) const {
    const int64_t first = args_.qo_indptr[task.sequence] + task.first_node;
    VecI undefined{};
    for (int64_t r = 0; r < task.nodes * group_; ++r) {
      const int64_t node = first + r / group_, head = kv_head * group_ + r % group_;
      float top = state.max[r], total = state.sum[r], keep = 1.0f;
      if (args_.sinks != nullptr) {
        const float sink = kLog2e * (args_.float_sinks ? static_cast<const float*>(args_.sinks)[head]
                                                       : T::to_float(static_cast<const Raw*>(args_.sinks)[head]));
        const float with_sink = top > sink ? top : sink;
        keep = exp2_scalar(top - with_sink);
        total = total * keep + exp2_scalar(sink - with_sink);
        top = with_sink;
      }
      const float inverse = keep / total;
      Raw* out = static_cast<Raw*>(args_.out) + (node * args_.num_qo_heads + head) * args_.v_dim;
      for (int64_t c = 0; c < args_.v_dim; c += kLanes) {
        const VecF values = load<VecF>(state.output + r * columns_ + c) * splat(inverse);
        undefined |= (values != values) & first_lanes(args_.v_dim - c);
        store_lanes<T>(out + c, values, args_.v_dim - c);
      }
      args_.lse[node * args_.num_qo_heads + head] = (top + __builtin_log2f(total)) * kLn2;
    }
    return any(undefined);
  }

  const AttentionArgs& args_;
  int64_t heads_, group_, rows_, k_words_, columns_, max_nodes_;
};

}  // namespace
}  // namespace specmemo
