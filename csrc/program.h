// Operators recorded with their addresses, which run again without Python in between.
//
// Between two matrix products Python's code has left the caches: fetching it takes longer than most operators. While a
// thread records, operators aren't run: their jobs are kept, and their results lie in blocks that the recording owns. A
// tensor that is freed gives its block to the next operator, as in memory that is allocated and freed.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "tensors.h"

namespace specmemo {

// Memory of recordings that never run at once: a block that is free after one is used by the next. At most `limit`
// bytes; std::bad_alloc beyond.
class Blocks {
 public:
  explicit Blocks(int64_t limit) : limit_(limit) {}
  ~Blocks();
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;

  void* take(int64_t bytes);
  void give(void* block, int64_t bytes);
  int64_t bytes() const { return total_; }

  // Returns the memory to the system, which maps it again, zeroed, where it is used. No recording is running.
  void trim();
  void used() { resident_ = true; }
  bool resident() const { return resident_; }

 private:
  std::map<char*, int64_t> free_;    // sizes by address
  std::map<char*, int64_t> chunks_;  // mapped, whole pages
  int64_t limit_, total_ = 0;
  bool resident_ = false;  // since the last trim
};

using Job = std::function<void(int threads)>;

class Program {
 public:
  explicit Program(std::shared_ptr<Blocks> blocks) : blocks_(std::move(blocks)) {}

  // Calls function(*inputs) while this thread records; it returns the results, contiguous tensors.
  // inputs: examples of the inputs' shapes and types. kept: lives as long as the program, which has the addresses of
  // its tensors.
  static Program record(std::shared_ptr<Blocks> blocks, const pybind11::sequence& inputs,
                        const pybind11::function& function, pybind11::object kept);

  // Copies the inputs, contiguous tensors like the examples, runs the operators, and returns copies of the results.
  pybind11::tuple run(const pybind11::args& inputs) const;

  void add(Job job) { jobs_.push_back(std::move(job)); }
  void keep(pybind11::handle object) { kept_.append(object); }
  const std::shared_ptr<Blocks>& blocks() const { return blocks_; }

 private:
  struct Rows {  // of an input or a result
    void* data;
    uint8_t code, bits;
    std::vector<int64_t> shape;
    size_t bytes() const;
  };
  static Rows rows_of(pybind11::handle tensor);

  std::shared_ptr<Blocks> blocks_;
  std::vector<Job> jobs_;
  std::vector<Rows> inputs_, results_;
  pybind11::list kept_;
};

// The program that this thread records, or null.
Program* recording();

}  // namespace specmemo
