// One call of tree attention on all threads.
#pragma once

#include "attention.h"

namespace specmemo {
namespace {

template <class T, class Dot>
void run_attention(const AttentionArgs& args, int threads) {
  const AttentionPlan plan = plan_tasks(args, threads);
  if (plan.tasks == 0) return;
  struct Context {
    Attention<T, Dot> attention;
    AttentionTask* tasks;
    float* states;
    int64_t count;
  } context{Attention<T, Dot>(args, plan.nodes_per_task, plan.heads_per_task), nullptr, nullptr, plan.tasks};
  // With few tasks the splits are distributed over the threads, then merged in the same order as in one thread.
  const bool spread = plan.splits > plan.tasks && plan.tasks < kTasksPerThread * threads && plan.tasks != threads;
  const int64_t task_bytes = round_up(plan.tasks * static_cast<int64_t>(sizeof(AttentionTask)), 64);
  const int64_t state_bytes = spread ? plan.splits * context.attention.state_floats() * 4 : 0;
  auto* memory = static_cast<char*>(arena(1, task_bytes + state_bytes));
  context.tasks = reinterpret_cast<AttentionTask*>(memory);
  context.states = reinterpret_cast<float*>(memory + task_bytes);
  make_tasks(args, plan, context.tasks);
  if (!spread) {
    auto body = [](void* data, int64_t i) {
      auto& c = *static_cast<Context*>(data);
      c.attention.run(c.tasks[i]);
    };
    parallel_for(plan.tasks, threads, body, &context);
    return;
  }
  auto one_split = [](void* data, int64_t i) {
    auto& c = *static_cast<Context*>(data);
    int64_t t = c.count - 1;
    while (c.tasks[t].first_split > i) --t;
    const AttentionTask& task = c.tasks[t];
    c.attention.run_one_split(task, static_cast<int>(i - task.first_split), c.states + i * c.attention.state_floats());
  };
  parallel_for(plan.splits, threads, one_split, &context);
  auto finish = [](void* data, int64_t t) {
    auto& c = *static_cast<Context*>(data);
    c.attention.finish_splits(c.tasks[t], c.states + c.tasks[t].first_split * c.attention.state_floats());
  };
  parallel_for(plan.tasks, threads, finish, &context);
}

}  // namespace
}  // namespace specmemo
