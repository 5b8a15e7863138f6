#include "tensors.h"

#include <pybind11/gil_safe_call_once.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "program.h"

namespace py = pybind11;

namespace specmemo {
namespace {

struct ManagedTensor {  // DLManagedTensorVersioned
  uint32_t major, minor;
  void* context;
  void (*deleter)(ManagedTensor*);
  uint64_t flags;
  TensorView tensor;
};

struct ExchangeApi {  // DLPackExchangeAPI
  uint32_t major, minor;
  ExchangeApi* previous;
  void *allocate, *export_managed;
  int (*import_managed)(ManagedTensor* tensor, PyObject** out);  // takes the tensor over
  int (*view)(PyObject* tensor, TensorView* out);
  void* current_stream;
};

constexpr uint32_t kMajor = 1;
constexpr int32_t kCpu = 1;
constexpr int kMaxDims = 8;  // of tensors made here
constexpr int64_t kMaxBytes = int64_t{1} << 48;

struct Torch {
  const ExchangeApi* exchange;
  PyObject* num_threads;  // lives as long as the interpreter
};

std::atomic<bool> fill_new{false};

// Looked up with the first tensor: torch is imported by then. The import may pass the GIL to a thread that waits here,
// which a static variable's lock would not.
const Torch& torch() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Torch> found;
  return found
      .call_once_and_store_result([] {
        const py::object module = py::module_::import("torch"), tensor = module.attr("Tensor");
        const py::capsule capsule = tensor.attr("__dlpack_c_exchange_api__");
        const auto* api = capsule.get_pointer<const ExchangeApi>();
        while (api != nullptr && api->major != kMajor) api = api->previous;
        if (api == nullptr)
          throw py::import_error(
              "torch has no DLPack exchange API of version 1, which backend 'cpu' needs; use torch 2.11 to 2.13");
        return Torch{api, py::object(module.attr("get_num_threads")).release().ptr()};
      })
      .get_stored();
}

}  // namespace

TensorView view(py::handle tensor) {
  TensorView result{};
  if (tensor.is_none()) return result;
  if (torch().exchange->view(tensor.ptr(), &result) != 0) throw py::error_already_set();
  if (result.data == nullptr && std::find(result.shape, result.shape + result.ndim, 0) == result.shape + result.ndim)
    throw py::value_error("backend 'cpu' takes tensors with memory of their own, not a wrapped or fake " +
                          std::string(Py_TYPE(tensor.ptr())->tp_name));
  return result;
}

DType computed_dtype(const char* name, py::handle tensor) {
  const TensorView seen = view(tensor);
  if (seen.code == kFloat && seen.bits == 32) return DType::kFloat32;
  if (seen.code == kBfloat && seen.bits == 16) return DType::kBFloat16;
  if (seen.code == kFloat && seen.bits == 16) return DType::kFloat16;
  throw py::value_error(std::string(name) + " has dtype " + std::string(py::str(tensor.attr("dtype"))) +
                        "; backend 'cpu' computes float32, bfloat16 and float16");
}

int64_t rows_of(const TensorView& x) {
  int64_t rows = 1;
  for (int i = 0; i < x.ndim - 1; ++i) rows *= x.shape[i];
  return rows;
}

ProductArgs product_args(const char* name, py::handle x, py::handle weight, py::handle scales, py::handle bias) {
  const TensorView input = view(x), matrix = view(weight);
  const int outputs = matrix.ndim - 2;  // behind groups
  ProductArgs args{};
  args.dtype = computed_dtype(name, x);
  args.x = input.at<void>(), args.rows = rows_of(input), args.inputs = input.shape[input.ndim - 1];
  args.x_stride = input.ndim == 2 ? input.strides[0] : args.inputs, args.outputs = matrix.shape[outputs];
  args.by_input = matrix.strides[outputs] < matrix.strides[outputs + 1];
  args.compressed = matrix.code == kUnsigned && scales.is_none();
  args.weight = matrix.at<void>(), args.scales = view(scales).at<uint16_t>(), args.bias = view(bias).at<void>();
  return args;
}

// One allocation for tensor, sizes and elements. torch.empty goes through the dispatcher, whose code takes twice as
// long to fetch into the caches. If the import fails, the allocation leaks: torch may have freed it.
NewTensor empty(uint8_t code, uint8_t bits, std::initializer_list<int64_t> shape) {
  return empty(code, bits, shape.begin(), static_cast<int>(shape.size()));
}

NewTensor empty(uint8_t code, uint8_t bits, const int64_t* sizes, int ndim) {
  struct Owned {
    ManagedTensor managed;
    int64_t shape[kMaxDims], strides[kMaxDims], bytes;
    std::shared_ptr<Blocks> blocks;  // that the elements lie in; null: behind this
  };
  constexpr int64_t kAlign = 64, kHead = (sizeof(Owned) + kAlign - 1) / kAlign * kAlign;
  if (ndim > kMaxDims)
    throw py::value_error("the result has " + std::to_string(ndim) + " dimensions, at most " +
                          std::to_string(kMaxDims) + " are allowed; flatten x");
  int64_t total = bits / 8;  // bytes of the elements
  for (int i = 0; i < ndim; ++i)
    if (__builtin_mul_overflow(total, sizes[i], &total) || total > kMaxBytes) throw std::bad_alloc();
  const int64_t bytes = (total + kAlign - 1) / kAlign * kAlign;
  const std::shared_ptr<Blocks> blocks = recording() == nullptr || bytes == 0 ? nullptr : recording()->blocks();
  void* block = blocks == nullptr ? nullptr : blocks->take(bytes);
  void* memory = std::aligned_alloc(kAlign, kHead + (block == nullptr ? bytes : 0));
  if (memory == nullptr) throw std::bad_alloc();
  Owned* owned = new (memory) Owned{};
  owned->managed.major = kMajor;
  owned->managed.context = owned;
  owned->managed.deleter = [](ManagedTensor* managed) {
    auto* self = static_cast<Owned*>(managed->context);
    if (self->blocks != nullptr) self->blocks->give(managed->tensor.data, self->bytes);
    self->~Owned();
    std::free(self);
  };
  TensorView& tensor = owned->managed.tensor;
  owned->bytes = bytes, owned->blocks = blocks;
  tensor.data = block == nullptr ? static_cast<char*>(memory) + kHead : block;
  if (fill_new) std::memset(tensor.data, 0xff, bytes);
  tensor.device_type = kCpu, tensor.code = code, tensor.bits = bits, tensor.lanes = 1;
  tensor.shape = owned->shape, tensor.strides = owned->strides;
  for (; tensor.ndim < ndim; ++tensor.ndim) owned->shape[tensor.ndim] = sizes[tensor.ndim];
  int64_t stride = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    owned->strides[i] = stride;
    stride *= std::max<int64_t>(owned->shape[i], 1);
  }
  PyObject* made = nullptr;
  if (torch().exchange->import_managed(&owned->managed, &made) != 0) throw py::error_already_set();
  return {py::reinterpret_steal<py::object>(made), tensor.data};
}

void fill_new_tensors(bool fill) { fill_new = fill; }

int num_threads() {
  const auto result = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(torch().num_threads));
  if (!result) throw py::error_already_set();
  return static_cast<int>(PyLong_AsLong(result.ptr()));
}

}  // namespace specmemo
