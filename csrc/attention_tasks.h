// How tree attention is cut into tasks and splits. The cut of one sequence depends on that sequence alone, and partial
// results are merged in the order of its tokens, so its result is the same bits in any batch, on any number of threads.
#pragma once

#include "kernels.h"

namespace specmemo {

// Queries of one KV head that read its keys together: `nodes` nodes times the heads of the group.
struct AttentionTask {
  int32_t sequence, head;     // kv head
  int32_t first_node, nodes;  // inside the sequence
  int32_t splits;             // pieces of kSplitTokens that its keys fall into
  int32_t first_split;        // index among the splits of all tasks
};

constexpr int64_t kSplitTokens = 512;  // a multiple of the kernels' block of 64 keys
constexpr int64_t kTaskRows = 128;     // rows (nodes x group) of a task, at most; a node's group is never divided

inline int64_t nodes_per_task(const AttentionArgs& args) {
  const int64_t group = args.num_qo_heads / args.num_kv_heads;
  return group >= kTaskRows ? 1 : kTaskRows / group;
}

int64_t count_tasks(const AttentionArgs& args);
// Fills tasks[count_tasks(args)]; returns the number of splits of all of them.
int64_t make_tasks(const AttentionArgs& args, AttentionTask* tasks);

}  // namespace specmemo
