#include "tensors.h"

#include <string>

namespace py = pybind11;

namespace specmemo {
namespace {

struct ExchangeApi {  // DLPackExchangeAPI
  uint32_t major, minor;
  ExchangeApi* previous;
  void *allocate, *export_managed, *import_managed;
  int (*view)(void* py_object, TensorView* out);
  void* current_stream;
};

constexpr uint32_t kMajor = 1;

struct Torch {
  const ExchangeApi* exchange;
  const void *tensor, *parameter;  // types, which live as long as the interpreter
};

// Found when the first tensor comes, by when somebody has imported torch.
const Torch& torch() {
  static const Torch found = [] {
    const py::object module = py::module_::import("torch"), tensor = module.attr("Tensor");
    const py::capsule capsule = tensor.attr("__dlpack_c_exchange_api__");
    const auto* api = capsule.get_pointer<const ExchangeApi>();
    while (api != nullptr && api->major != kMajor) api = api->previous;
    if (api == nullptr) throw py::import_error("this torch exchanges tensors by another version of DLPack than 1");
    return Torch{api, tensor.ptr(), module.attr("nn").attr("Parameter").ptr()};
  }();
  return found;
}

bool is_plain(const PyObject* value) {
  const void* type = Py_TYPE(value);
  return type == torch().tensor || type == torch().parameter;
}

template <class T>
void add(std::string& out, const T* values, size_t count) {
  out.append(reinterpret_cast<const char*>(values), count * sizeof(T));
}

// False: the value has no layout.
bool add_layout(std::string& out, PyObject* value) {
  if (value == Py_None) {
    out.push_back('n');
  } else if (is_plain(value)) {
    TensorView tensor;
    if (torch().exchange->view(value, &tensor) != 0) {
      PyErr_Clear();
      return false;
    }
    const int32_t head[] = {tensor.ndim, tensor.code, tensor.bits, tensor.device_type, tensor.device_id};
    out.push_back('t');
    add(out, head, 5);
    add(out, tensor.shape, static_cast<size_t>(tensor.ndim));
    add(out, tensor.strides, static_cast<size_t>(tensor.ndim));
  } else if (PyTuple_Check(value)) {
    out.push_back('(');
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i)
      if (!add_layout(out, PyTuple_GET_ITEM(value, i))) return false;
    out.push_back(')');
  } else if (PyLong_CheckExact(value)) {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow != 0) return false;
    out.push_back('i');
    add(out, &number, 1);
  } else {
    return false;
  }
  return true;
}

}  // namespace

TensorView view(py::handle tensor) {
  TensorView result{};
  if (!tensor.is_none() && torch().exchange->view(tensor.ptr(), &result) != 0) throw py::error_already_set();
  return result;
}

py::object layouts(const py::args& values) {
  std::string out;
  out.reserve(1024);
  for (const py::handle value : values)
    if (!add_layout(out, value.ptr())) return py::none();
  return py::bytes(out);
}

}  // namespace specmemo
