#include "threads.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <new>
#include <thread>
#include <vector>

#ifdef __linux__
#include <link.h>
#endif

namespace specmemo {
namespace {

// No OpenMP runtime is linked, because a second one besides torch's would spin on the same cores. The loaded runtime is
// used: GNU's, LLVM's and Intel's all export GOMP_parallel.
using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using PauseResources = int (*)(int kind);

struct Runtime {
  GompParallel parallel = nullptr;
  PauseResources pause = nullptr;
  const char* name = "std::thread";
};

#ifdef __linux__
int look_into(dl_phdr_info* info, size_t, void* data) {
  auto* found = static_cast<Runtime*>(data);
  if (info->dlpi_name == nullptr || info->dlpi_name[0] == '\0') return 0;
  const char* path = info->dlpi_name;
  auto contains = [path](const char* part) {
    for (const char* start = path; *start != '\0'; ++start) {
      const char *a = start, *b = part;
      while (*b != '\0' && *a == *b) ++a, ++b;
      if (*b == '\0') return true;
    }
    return false;
  };
  if (!contains("omp")) return 0;
  void* library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return 0;
  void* symbol = dlsym(library, "GOMP_parallel");
  if (symbol == nullptr) {
    dlclose(library);
    return 0;
  }
  found->parallel = reinterpret_cast<GompParallel>(symbol);
  found->name = "libomp";
  if (contains("libgomp")) {
    found->name = "libgomp";
    found->pause = reinterpret_cast<PauseResources>(dlsym(library, "omp_pause_resource_all"));
  }
  return 1;  // the handle stays open, so the runtime stays loaded
}
#endif

const Runtime& runtime() {
  static const Runtime found = [] {
    Runtime result;
#ifdef __linux__
    dl_iterate_phdr(look_into, &result);
#endif
    return result;
  }();
  return found;
}

struct Loop {
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  int64_t count;
  Task task;
  void* context;
};

void work(void* data) {
  auto* loop = static_cast<Loop*>(data);
  for (;;) {
    const int64_t index = loop->next.fetch_add(1, std::memory_order_relaxed);
    if (index >= loop->count) return;
    try {
      loop->task(loop->context, index);
    } catch (...) {  // only an arena can throw; an exception must not cross the runtime's C frames
      loop->failed = true;
      loop->next = loop->count;
    }
  }
}

std::atomic<int64_t> all_arenas{0};

struct Arena {
  void* memory[kArenaSlots] = {};
  int64_t size[kArenaSlots] = {};
  ~Arena() {
    for (int slot = 0; slot < kArenaSlots; ++slot) release(slot);
  }
  void release(int slot) {
    std::free(memory[slot]);
    memory[slot] = nullptr;
    all_arenas -= size[slot];
    size[slot] = 0;
  }
};

}  // namespace

void release_threads() {
  constexpr int kSoft = 1;
  if (runtime().pause != nullptr) runtime().pause(kSoft);
}

void parallel_for(int64_t count, int threads, Task task, void* context) {
  if (threads > count) threads = static_cast<int>(count);
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) task(context, i);
    return;
  }
  Loop loop;
  loop.count = count;
  loop.task = task;
  loop.context = context;
  if (runtime().parallel != nullptr) {
    runtime().parallel(work, &loop, static_cast<unsigned>(threads), 0);
  } else {
    std::vector<std::thread> helpers;
    try {
      helpers.reserve(threads - 1);
      for (int i = 1; i < threads; ++i) helpers.emplace_back(work, &loop);
    } catch (const std::exception&) {  // out of threads or memory: the running threads do all the work
    }
    work(&loop);
    for (auto& helper : helpers) helper.join();
  }
  if (loop.failed) throw std::bad_alloc();
}

const char* thread_runtime() { return runtime().name; }

int64_t arena_bytes() { return all_arenas; }

void* arena(int slot, int64_t bytes) {
  thread_local Arena mine;
  if (mine.size[slot] < bytes) {
    mine.release(slot);
    const int64_t rounded = (bytes + 4095) / 4096 * 4096;
    mine.memory[slot] = std::aligned_alloc(4096, static_cast<size_t>(rounded));
    if (mine.memory[slot] == nullptr) throw std::bad_alloc();
    mine.size[slot] = rounded;
    all_arenas += rounded;
  }
  return mine.memory[slot];
}

}  // namespace specmemo
