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

// Nodes that a task may have at most.
inline int64_t max_nodes_per_task(const AttentionArgs& args) {
  const int64_t group = args.num_qo_heads / args.num_kv_heads;
  return group >= kTaskRows ? 1 : kTaskRows / group;
}

// Heads that a task may have at most.
inline int64_t max_heads_per_task(const AttentionArgs& args) {
  const int64_t rows = max_nodes_per_task(args) * (args.num_qo_heads / args.num_kv_heads);
  const int64_t heads = rows >= kTaskStates ? 1 : kTaskStates / rows;
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
