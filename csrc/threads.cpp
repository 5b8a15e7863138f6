#include "threads.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "parts.h"

#ifdef __linux__
#include <link.h>
#endif

namespace specmemo {
namespace {

// No OpenMP runtime is linked, because a second one besides torch's would spin on the same cores. Torch's is used:
// GNU's, LLVM's and Intel's all export GOMP_parallel.
using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using PauseResources = int (*)(int kind);

struct Runtime {
  GompParallel parallel = nullptr;
  PauseResources pause = nullptr;
  const char* name = "std::thread";
};

#ifdef __linux__
const char* file_name(const char* path) {
  const char* slash = std::strrchr(path, '/');
  return slash == nullptr ? path : slash + 1;
}

int find_torch(dl_phdr_info* info, size_t, void* path) {
  constexpr char kName[] = "libtorch_cpu.so";
  if (info->dlpi_name == nullptr) return 0;
  if (std::strncmp(file_name(info->dlpi_name), kName, sizeof kName - 1) != 0) return 0;
  *static_cast<std::string*>(path) = info->dlpi_name;
  return 1;
}

// A process may have several runtimes: other packages bring their own. The symbols of a library's handle are its own
// and those of the libraries it needs.
Runtime torch_runtime() {
  std::string path;
  if (dl_iterate_phdr(find_torch, &path) == 0) return {};
  void* torch = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (torch == nullptr) return {};
  void* symbol = dlsym(torch, "GOMP_parallel");
  Dl_info found;
  if (symbol == nullptr || dladdr(symbol, &found) == 0) {
    dlclose(torch);
    return {};
  }
  Runtime result{reinterpret_cast<GompParallel>(symbol), nullptr, "libomp"};  // the handle stays open
  if (std::strstr(file_name(found.dli_fname), "gomp") != nullptr) {
    result.name = "libgomp";
    result.pause = reinterpret_cast<PauseResources>(dlsym(torch, "omp_pause_resource_all"));
  }
  return result;
}
#else
Runtime torch_runtime() { return {}; }
#endif

const Runtime& runtime() {
  static const Runtime found = torch_runtime();
  return found;
}

// The indices left of a part of a loop, on a cache line of their own.
class alignas(64) Part {
 public:
  void set(int64_t begin, int64_t end) { left_ = pack(begin, end); }

  // Takes the first or the last one; -1 if none is left.
  int64_t take(bool last) {
    uint64_t seen = left_.load(std::memory_order_relaxed);
    for (;;) {
      const auto begin = static_cast<int64_t>(seen >> 32), end = static_cast<int64_t>(seen & UINT32_MAX);
      if (begin >= end) return -1;
      if (left_.compare_exchange_weak(seen, last ? pack(begin, end - 1) : pack(begin + 1, end),
                                      std::memory_order_relaxed))
        return last ? end - 1 : begin;
    }
  }

 private:
  static uint64_t pack(int64_t begin, int64_t end) {
    return static_cast<uint64_t>(begin) << 32 | static_cast<uint64_t>(end);
  }

  std::atomic<uint64_t> left_{0};
};

constexpr int kMaxParts = 64;  // of a loop; more threads share the parts

struct Loop {
  Part parts[kMaxParts];
  std::atomic<int> entered{0};
  std::atomic<bool> failed{false};
  int part_count;
  Task task;
  void* context;
};

// A thread runs the indices of its own part in order, then the last ones of the other parts.
void work(void* data) {
  auto* loop = static_cast<Loop*>(data);
  const int own = loop->entered.fetch_add(1, std::memory_order_relaxed);
  for (int i = 0; i < loop->part_count; ++i) {
    Part& part = loop->parts[(own + i) % loop->part_count];
    for (int64_t index; !loop->failed.load(std::memory_order_relaxed) && (index = part.take(i > 0)) >= 0;) {
      try {
        loop->task(loop->context, index);
      } catch (...) {  // only an arena can throw; an exception must not cross the runtime's C frames
        loop->failed = true;
      }
    }
  }
}

void run_parts(const Parts& parts, int64_t count, int threads, Task task, void* context) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) task(context, i);
    return;
  }
  Loop loop;
  loop.part_count = static_cast<int>(parts.count);
  for (int i = 0; i < loop.part_count; ++i) loop.parts[i].set(parts.begin(i), parts.begin(i + 1));
  loop.task = task;
  loop.context = context;
  if (runtime().parallel != nullptr) {  // always as many: libgomp ends the threads that a smaller team doesn't have
    runtime().parallel(work, &loop, static_cast<unsigned>(threads), 0);
  } else {
    std::vector<std::thread> helpers;
    try {
      const int64_t helping = std::min<int64_t>(threads, count) - 1;
      helpers.reserve(static_cast<size_t>(helping));
      for (int64_t i = 0; i < helping; ++i) helpers.emplace_back(work, &loop);
    } catch (const std::exception&) {  // out of threads or memory: the running threads do all the work
    }
    work(&loop);
    for (auto& helper : helpers) helper.join();
  }
  if (loop.failed) throw std::bad_alloc();
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
  run_parts(Parts(count, 1), count, threads, task, context);
}

void parallel_parts(int64_t count, int threads, Task task, void* context) {
  run_parts(Parts(count, std::clamp<int64_t>(threads, 1, kMaxParts)), count, threads, task, context);
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
