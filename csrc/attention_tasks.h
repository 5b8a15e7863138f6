// How tree attention is cut into tasks and splits. The cut of one sequence depends on that sequence alone, and partial
// results are merged in the order of its tokens, so its result is the same bits in any batch, on any number of threads.
#pragma once

#include "kernels.h"

namespace specmemo {

// Some nodes of a sequence and some of its KV heads. The heads take turns on each block of keys, so that a page is read
// to its end before the next one.
struct AttentionTask {
  int32_t sequence;
  int32_t first_head, heads;  // KV heads
  int32_t first_node, nodes;  // inside the sequence
  int32_t splits;             // pieces of kSplitTokens that its keys fall into
  int32_t first_split;        // index among the splits of all tasks
};

constexpr int64_t kSplitTokens = 512;   // a multiple of the kernels' block of 64 keys
constexpr int64_t kTaskRows = 128;      // rows (nodes x group) of a task, at most; a node's group is never divided
constexpr int64_t kTasksPerThread = 1;  // wanted, by dividing heads, so that threads end together

constexpr int64_t kTaskStates = 512;  // rows times heads whose running softmax a thread keeps, at most

// Rows of a sequence for which keys and values are read where they lie (few_rows.h): packing takes longer than their
// products.
constexpr int64_t kFewRows = 8;

// Asks nothing but the sequence: the two ways differ in their last bits.
inline bool has_few_rows(const AttentionArgs& args, int64_t sequence) {
  const int64_t nodes = args.qo_indptr[sequence + 1] - args.qo_indptr[sequence];
  return !args.invariant && nodes * (args.num_qo_heads / args.num_kv_heads) <= kFewRows;
}

inline int64_t most_nodes(const AttentionArgs& args) {  // of any sequence
  int64_t most = 0;
  for (int64_t s = 0; s < args.batch; ++s) {
    const int64_t nodes = args.qo_indptr[s + 1] - args.qo_indptr[s];
    most = nodes > most ? nodes : most;
  }
  return most;
}

// Nodes that a task may have at most.
inline int64_t max_nodes_per_task(const AttentionArgs& args) {
  const int64_t group = args.num_qo_heads / args.num_kv_heads;
  return group >= kTaskRows ? 1 : kTaskRows / group;
}

// Heads that a task of so many nodes may have at most. Few rows are read in the order of memory, so that they gain by
// every head; more of them by states that stay in the caches.
inline int64_t max_heads_per_task(const AttentionArgs& args, int64_t nodes) {
  const int64_t group = args.num_qo_heads / args.num_kv_heads, full = max_nodes_per_task(args) * group;
  int64_t heads = full >= kTaskStates ? 1 : kTaskStates / full;
  if (nodes * group <= kFewRows) heads = heads * max_nodes_per_task(args) / nodes;
  return heads < args.num_kv_heads ? heads : args.num_kv_heads;
}

struct AttentionPlan {
  int64_t nodes_per_task;  // at most
  int64_t heads_per_task;  // at most
  int64_t tasks;
  int64_t splits;  // of all tasks
};

AttentionPlan plan_tasks(const AttentionArgs& args, int threads);
void make_tasks(const AttentionArgs& args, const AttentionPlan& plan, AttentionTask* tasks);

}  // namespace specmemo
