#include "program.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <new>
#include <string>
#include <utility>

namespace py = pybind11;

namespace specmemo {
namespace {

constexpr int64_t kChunk = 64 << 10;  // bytes
thread_local Program* current = nullptr;

struct RecordingScope {
  explicit RecordingScope(Program* program) : before(current) { current = program; }
  ~RecordingScope() { current = before; }
  RecordingScope(const RecordingScope&) = delete;
  RecordingScope& operator=(const RecordingScope&) = delete;
  Program* before;
};

}  // namespace

Program* recording() { return current; }

Blocks::~Blocks() {
  for (const auto& [chunk, size] : chunks_) munmap(chunk, static_cast<size_t>(size));
}

void Blocks::trim() {
  if (!resident_) return;
  for (const auto& [chunk, size] : chunks_) madvise(chunk, static_cast<size_t>(size), MADV_DONTNEED);
  resident_ = false;
}

void* Blocks::take(int64_t bytes) {
  auto best = free_.end();
  for (auto block = free_.begin(); block != free_.end(); ++block)
    if (block->second >= bytes && (best == free_.end() || block->second < best->second)) best = block;
  if (best == free_.end()) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    const int64_t wanted = ((bytes > kChunk ? bytes : kChunk) + page - 1) / page * page;
    const int64_t left = (limit_ - total_) / page * page;
    const int64_t size = wanted < left ? wanted : left;
    if (size < bytes) throw std::bad_alloc();
    void* mapped = mmap(nullptr, static_cast<size_t>(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    char* chunk = static_cast<char*>(mapped);
    chunks_.emplace(chunk, size);
    total_ += size;
    best = free_.emplace(chunk, size).first;
  }
  resident_ = true;
  const auto [block, size] = *best;
  free_.erase(best);
  if (size > bytes) free_.emplace(block + bytes, size - bytes);
  return block;
}

void Blocks::give(void* block, int64_t bytes) {
  auto given = free_.emplace(static_cast<char*>(block), bytes).first;
  if (const auto next = std::next(given); next != free_.end() && given->first + given->second == next->first) {
    given->second += next->second;
    free_.erase(next);
  }
  if (given == free_.begin()) return;
  if (const auto before = std::prev(given); before->first + before->second == given->first) {
    before->second += given->second;
    free_.erase(given);
  }
}

size_t Program::Rows::bytes() const {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return static_cast<size_t>(count) * bits / 8;
}

Program::Rows Program::rows_of(py::handle tensor) {
  const TensorView seen = view(tensor);
  int64_t stride = 1;
  for (int i = seen.ndim - 1; i >= 0; stride *= seen.shape[i--])
    if (seen.shape[i] > 1 && seen.strides[i] != stride)
      throw py::value_error("dimension " + std::to_string(i) + " has stride " + std::to_string(seen.strides[i]) +
                            "; inputs and results of a recording are contiguous");
  return Rows{seen.at<void>(), seen.code, seen.bits, {seen.shape, seen.shape + seen.ndim}};
}

Program Program::record(std::shared_ptr<Blocks> blocks, const py::sequence& inputs, const py::function& function,
                        py::object kept) {
  Program program(std::move(blocks));
  program.keep(kept);
  const RecordingScope scope(&program);
  py::list arguments;
  for (const py::handle example : inputs) {
    Rows rows = rows_of(example);
    const NewTensor tensor = empty(rows.code, rows.bits, rows.shape.data(), static_cast<int>(rows.shape.size()));
    rows.data = tensor.data;
    program.inputs_.push_back(std::move(rows));
    arguments.append(tensor.tensor);
  }
  const py::object results = function(*arguments);
  for (const py::handle result : results) program.results_.push_back(rows_of(result));
  return program;
}

py::tuple Program::run(const py::args& inputs) const {
  if (inputs.size() != inputs_.size())
    throw py::value_error(std::to_string(inputs.size()) + " inputs given, expected " + std::to_string(inputs_.size()));
  blocks_->used();
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const Rows given = rows_of(inputs[i]);
    const Rows& input = inputs_[i];
    if (given.shape != input.shape || given.code != input.code || given.bits != input.bits)
      throw py::value_error("input " + std::to_string(i) + " differs in shape or type from the recorded one");
    if (input.bytes() > 0) std::memcpy(input.data, given.data, input.bytes());
  }
  const int threads = num_threads();
  {
    py::gil_scoped_release unlocked;
    for (const Job& job : jobs_) job(threads);
  }
  py::tuple results(results_.size());
  for (size_t i = 0; i < results_.size(); ++i) {
    const Rows& rows = results_[i];
    const NewTensor tensor = empty(rows.code, rows.bits, rows.shape.data(), static_cast<int>(rows.shape.size()));
    if (rows.bytes() > 0) std::memcpy(tensor.data, rows.data, rows.bytes());
    results[i] = tensor.tensor;
  }
  return results;
}

}  // namespace specmemo
