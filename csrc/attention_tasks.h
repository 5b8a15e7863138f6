// Tasks and splits of tree attention. The splits of a sequence depend on that sequence only, and partial results are
// merged in token order, so its result is bit-identical in any batch, on any number of threads.
#pragma once

#include "kernels.h"

namespace specmemo {

// Some nodes and some KV heads of a sequence. All heads process a block of keys before the next block, so that a page
// is read to its end before the next one.
struct AttentionTask {
  int32_t sequence;
  int32_t first_head, heads;  // KV heads
  int32_t first_node, nodes;  // inside the sequence
  int32_t splits;             // number of pieces of kSplitTokens keys
  int32_t first_split;        // index among the splits of all tasks
};

constexpr int64_t kSplitTokens = 512;   // a multiple of the kernels' block of 64 keys
constexpr int64_t kTaskRows = 128;      // maximum rows (nodes x group) of a task; a node's group is never divided
constexpr int64_t kTasksPerThread = 1;  // minimum, by dividing heads, so that threads end together

constexpr int64_t kTaskStates = 512;  // maximum softmax states (rows x heads) of a thread

// Maximum rows of a sequence whose keys and values are read in place (few_rows.h): packing takes longer than their
// products.
constexpr int64_t kFewRows = 8;

// Depends on the sequence only, because the two code paths differ in their last bits.
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

// Maximum nodes of a task.
inline int64_t max_nodes_per_task(const AttentionArgs& args) {
  const int64_t group = args.num_qo_heads / args.num_kv_heads;
  return group >= kTaskRows ? 1 : kTaskRows / group;
}

// Maximum heads of a task with this many nodes. Tasks with few rows read in memory order, so more heads are faster; the
// states of other tasks must fit the caches.
inline int64_t max_heads_per_task(const AttentionArgs& args, int64_t nodes) {
  const int64_t group = args.num_qo_heads / args.num_kv_heads, full = max_nodes_per_task(args) * group;
  int64_t heads = full >= kTaskStates ? 1 : kTaskStates / full;
  if (nodes * group <= kFewRows) heads = heads * max_nodes_per_task(args) / nodes;
  return heads < args.num_kv_heads ? heads : args.num_kv_heads;
}

struct AttentionPlan {
  int64_t nodes_per_task;  // maximum
  int64_t heads_per_task;  // maximum
  int64_t tasks;
  int64_t splits;  // of all tasks
};

AttentionPlan plan_tasks(const AttentionArgs& args, int threads);
void make_tasks(const AttentionArgs& args, const AttentionPlan& plan, AttentionTask* tasks);

}  // namespace specmemo
