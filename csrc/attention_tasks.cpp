#include "attention_tasks.h"

namespace specmemo {

int64_t count_tasks(const AttentionArgs& args) {
  const int64_t step = nodes_per_task(args);
  int64_t count = 0;
  for (int64_t s = 0; s < args.batch; ++s) {
    const int64_t nodes = args.qo_indptr[s + 1] - args.qo_indptr[s];
    count += (nodes + step - 1) / step * args.num_kv_heads;
  }
  return count;
}

int64_t make_tasks(const AttentionArgs& args, AttentionTask* tasks) {
  const int64_t step = nodes_per_task(args);
  int64_t splits = 0;
  for (int64_t s = 0; s < args.batch; ++s) {
    const int64_t nodes = args.qo_indptr[s + 1] - args.qo_indptr[s];
    for (int64_t first = 0; first < nodes; first += step) {
      const int64_t count = nodes - first < step ? nodes - first : step;
      const int64_t keys = args.seq_lens[s] + first + count;  // a node sees no node behind it
      for (int64_t head = 0; head < args.num_kv_heads; ++head) {
        AttentionTask& task = *tasks++;
        task.sequence = static_cast<int32_t>(s);
        task.head = static_cast<int32_t>(head);
        task.first_node = static_cast<int32_t>(first);
        task.nodes = static_cast<int32_t>(count);
        task.splits = static_cast<int32_t>((keys + kSplitTokens - 1) / kSplitTokens);
        task.first_split = static_cast<int32_t>(splits);
        splits += task.splits;
      }
    }
  }
  return splits;
}

}  // namespace specmemo
