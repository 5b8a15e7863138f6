// Calls and results as bytes of standard input and output; python_tests/arm_kernels.py has the other side.
//
//   call:    name, values
//   answer:  text of the error (empty: none), values of the result, then the changed tensors of the call
//   values:  their number, then for each one a kind and its content
//   tensor:  type code, bits, changed, dimensions; shape; strides; bytes
//   text:    number of bytes, bytes
//
// Numbers are little-endian, 8 bytes each.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace specmemo {

enum Kind : int64_t { kNone = 0, kInteger = 1, kNumber = 2, kText = 3, kTensor = 4 };
enum TypeCode : int64_t { kSigned = 0, kUnsigned = 1, kFloating = 2, kBrain = 4, kFloat8 = 10 };  // DLDataTypeCode

// Bytes with an inaccessible page behind the last one.
class Memory {
 public:
  explicit Memory(int64_t bytes) : bytes_(bytes), page_(sysconf(_SC_PAGESIZE)) {
    room_ = (bytes + page_ - 1) / page_ * page_;
    void* all = mmap(nullptr, room_ + page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) throw std::bad_alloc();
    first_ = static_cast<char*>(all);
    mprotect(first_ + room_, page_, PROT_NONE);
  }
  ~Memory() { munmap(first_, room_ + page_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return first_ + room_ - bytes_; }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_, page_, room_;
  char* first_;
};

struct Tensor {
  int64_t code = 0, bits = 0;
  bool changed = false;  // by the call
  std::vector<int64_t> shape, strides;
  std::shared_ptr<Memory> memory;

  int ndim() const { return static_cast<int>(shape.size()); }
};

struct Value {
  Kind kind = kNone;
  int64_t integer = 0;
  double number = 0;
  std::string text;
  Tensor tensor;

  template <class T>
  T* at() const {  // null for None
    return kind == kNone ? nullptr : reinterpret_cast<T*>(tensor.memory->data());
  }
};

typedef std::vector<Value> Values;

inline Value integer_value(int64_t integer) {
  Value value;
  value.kind = kInteger, value.integer = integer;
  return value;
}

inline Value text_value(const std::string& text) {
  Value value;
  value.kind = kText, value.text = text;
  return value;
}

// A contiguous tensor whose elements are NaN, or -1.
inline Value new_tensor(int64_t code, int64_t bits, const std::vector<int64_t>& shape) {
  Value value;
  value.kind = kTensor;
  Tensor& tensor = value.tensor;
  tensor.code = code, tensor.bits = bits, tensor.shape = tensor.strides = shape;
  int64_t count = 1;
  for (int i = tensor.ndim() - 1; i >= 0; count *= shape[i--]) tensor.strides[i] = count;
  tensor.memory = std::make_shared<Memory>(count * bits / 8);
  std::memset(tensor.memory->data(), 0xff, count * bits / 8);
  return value;
}

// --- reading and writing ---------------------------------------------------------------------------------------------

inline bool read_bytes(void* to, size_t bytes) { return std::fread(to, 1, bytes, stdin) == bytes; }

inline int64_t read_integer() {
  int64_t value = 0;
  if (!read_bytes(&value, sizeof value)) throw std::runtime_error("the call ends early");
  return value;
}

inline std::string read_text() {
  std::string text(read_integer(), '\0');
  if (!read_bytes(&text[0], text.size())) throw std::runtime_error("the text ends early");
  return text;
}

inline Tensor read_tensor() {
  Tensor tensor;
  tensor.code = read_integer(), tensor.bits = read_integer(), tensor.changed = read_integer() != 0;
  tensor.shape.resize(read_integer());
  tensor.strides.resize(tensor.shape.size());
  for (int64_t& size : tensor.shape) size = read_integer();
  for (int64_t& stride : tensor.strides) stride = read_integer();
  tensor.memory = std::make_shared<Memory>(read_integer());
  if (!read_bytes(tensor.memory->data(), tensor.memory->bytes())) throw std::runtime_error("the tensor ends early");
  return tensor;
}

inline Values read_values() {
  Values values(read_integer());
  for (Value& value : values) {
    value.kind = static_cast<Kind>(read_integer());
    if (value.kind == kInteger) value.integer = read_integer();
    if (value.kind == kNumber && !read_bytes(&value.number, 8)) throw std::runtime_error("the number ends early");
    if (value.kind == kText) value.text = read_text();
    if (value.kind == kTensor) value.tensor = read_tensor();
  }
  return values;
}

inline void write_integer(int64_t value) { std::fwrite(&value, sizeof value, 1, stdout); }

inline void write_text(const std::string& text) {
  write_integer(static_cast<int64_t>(text.size()));
  std::fwrite(text.data(), 1, text.size(), stdout);
}

inline void write_value(const Value& value) {
  write_integer(value.kind);
  if (value.kind == kInteger) return write_integer(value.integer);
  if (value.kind == kText) return write_text(value.text);
  const Tensor& tensor = value.tensor;
  for (int64_t each : {tensor.code, tensor.bits, int64_t{tensor.changed}, int64_t{tensor.ndim()}}) write_integer(each);
  for (int64_t size : tensor.shape) write_integer(size);
  for (int64_t stride : tensor.strides) write_integer(stride);
  write_integer(tensor.memory->bytes());
  std::fwrite(tensor.memory->data(), 1, tensor.memory->bytes(), stdout);
}

}  // namespace specmemo
