#include "attention_tasks.h"

namespace specmemo {
namespace {

int64_t divide_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

int64_t splits_of(const AttentionArgs& args, int64_t sequence, int64_t last_node) {
  return divide_up(args.seq_lens[sequence] + last_node, kSplitTokens);  // a node doesn't attend to later nodes
}

// Computes tasks, splits and heads per task from a plan's nodes per task.
void count(const AttentionArgs& args, int threads, AttentionPlan& plan) {
  const int64_t step = plan.nodes_per_task;
  int64_t pieces = 0;
  for (int64_t s = 0; s < args.batch; ++s) pieces += divide_up(args.qo_indptr[s + 1] - args.qo_indptr[s], step);
  plan.tasks = plan.splits = 0;
  int64_t groups = divide_up(kTasksPerThread * threads, pieces);
  if (groups > args.num_kv_heads) groups = args.num_kv_heads;
  plan.heads_per_task = divide_up(args.num_kv_heads, groups);
  const int64_t max_heads = max_heads_per_task(args, step);
  if (plan.heads_per_task > max_heads) plan.heads_per_task = max_heads;
  groups = divide_up(args.num_kv_heads, plan.heads_per_task);
  plan.tasks = pieces * groups;
  for (int64_t s = 0; s < args.batch; ++s) {
    const int64_t nodes = args.qo_indptr[s + 1] - args.qo_indptr[s];
    for (int64_t first = 0; first < nodes; first += step)
      plan.splits += groups * splits_of(args, s, first + step < nodes ? first + step : nodes);
  }
}

}  // namespace

AttentionPlan plan_tasks(const AttentionArgs& args, int threads) {
  AttentionPlan plan{max_nodes_per_task(args), args.num_kv_heads, 0, 0};
  const int64_t max_nodes = most_nodes(args);
  if (max_nodes == 0) return plan;
  if (max_nodes < plan.nodes_per_task) plan.nodes_per_task = max_nodes;
  count(args, threads, plan);
  if (plan.tasks < threads && plan.splits == plan.tasks) {  // neither heads nor splits keep all threads busy
    const int64_t nodes = args.qo_indptr[args.batch] - args.qo_indptr[0];
    const int64_t share = nodes * args.num_kv_heads / threads;
    if (share < plan.nodes_per_task) plan.nodes_per_task = share > 1 ? share : 1;
    count(args, threads, plan);
  }
  return plan;
}

void make_tasks(const AttentionArgs& args, const AttentionPlan& plan, AttentionTask* tasks) {
  const int64_t step = plan.nodes_per_task;
  int64_t splits = 0;
  for (int64_t s = 0; s < args.batch; ++s) {
    const int64_t nodes = args.qo_indptr[s + 1] - args.qo_indptr[s];
    for (int64_t first = 0; first < nodes; first += step) {
      const int64_t count = nodes - first < step ? nodes - first : step;
      for (int64_t head = 0; head < args.num_kv_heads; head += plan.heads_per_task) {
        const int64_t left = args.num_kv_heads - head;
        AttentionTask& task = *tasks++;
        task.sequence = static_cast<int32_t>(s);
        task.first_head = static_cast<int32_t>(head);
        task.heads = static_cast<int32_t>(left < plan.heads_per_task ? left : plan.heads_per_task);
        task.first_node = static_cast<int32_t>(first);
        task.nodes = static_cast<int32_t>(count);
        task.splits = static_cast<int32_t>(splits_of(args, s, first + count));
        task.first_split = static_cast<int32_t>(splits);
        splits += task.splits;
      }
    }
  }
}

}  // namespace specmemo
