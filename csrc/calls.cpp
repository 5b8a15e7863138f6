#include "calls.h"

#include <structmember.h>

#include <cstddef>
#include <cstring>

#include "tensors.h"

namespace py = pybind11;

namespace specmemo {
namespace {

constexpr Py_ssize_t kMostArguments = 24;
constexpr size_t kMostWords = 512;

class Layout {
 public:
  // False: the value has no layout, or this one is full.
  bool add(PyObject* value) {
    if (value == Py_None) return put('n');
    if (is_plain(value)) return add_tensor(value);
    if (PyFloat_Check(value) || PyLong_Check(value)) return add_number(value);
    return PyUnicode_CheckExact(value) && add_text(value);
  }

  bool add_all(PyObject* const* values, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; ++i)
      if (!add(values[i])) {
        PyErr_Clear();
        return false;
      }
    return true;
  }

  size_t bytes() const { return count_ * sizeof(uint64_t); }
  const void* data() const { return words_; }

 private:
  bool room(size_t words) const { return count_ + words <= kMostWords; }

  bool put(uint64_t word) {
    if (!room(1)) return false;
    words_[count_++] = word;
    return true;
  }

  bool add_tensor(PyObject* value) {
    TensorView tensor;
    if (!try_view(value, &tensor)) return false;
    const auto ndim = static_cast<size_t>(tensor.ndim);
    if (!room(1 + 2 * ndim)) return false;
    words_[count_++] = 't' | uint64_t{tensor.code} << 8 | uint64_t{tensor.bits} << 16 | uint64_t{ndim} << 24 |
                       uint64_t{static_cast<uint16_t>(tensor.device_type)} << 32 |
                       uint64_t{static_cast<uint16_t>(tensor.device_id)} << 48;
    for (size_t i = 0; i < ndim; ++i) words_[count_++] = static_cast<uint64_t>(tensor.shape[i]);
    for (size_t i = 0; i < ndim; ++i) words_[count_++] = static_cast<uint64_t>(tensor.strides[i]);
    return true;
  }

  bool add_number(PyObject* value) {
    const double number = PyFloat_AsDouble(value);
    if (number == -1.0 && PyErr_Occurred() != nullptr) return false;
    return put(number > 0 ? '+' : number < 0 ? '-' : number == 0 ? '0' : '?');
  }

  bool add_text(PyObject* value) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(value, &size);
    const size_t words = (static_cast<size_t>(size) + 7) / 8;
    if (text == nullptr || !room(1 + words)) return false;
    words_[count_++] = 's' | static_cast<uint64_t>(size) << 8;
    if (words > 0) words_[count_ + words - 1] = 0;
    std::memcpy(words_ + count_, text, static_cast<size_t>(size));
    count_ += words;
    return true;
  }

  uint64_t words_[kMostWords];
  size_t count_ = 0;
};

// A Python function, and the kernel that the last arguments led to.
struct Shortened {
  PyObject base;
  vectorcallfunc vectorcall;
  PyObject *function, *names, *defaults, *listeners, *kernels, *dict;
  Py_ssize_t positional;
  PyObject* kernel;
  size_t bytes;
  char layout[kMostWords * sizeof(uint64_t)];
};

// Arguments in the order of the function's parameters; false where they don't fit them.
bool bind(const Shortened& op, PyObject* const* given, Py_ssize_t count, PyObject* keywords, PyObject** slots) {
  const Py_ssize_t all = PyTuple_GET_SIZE(op.names);
  if (count > op.positional) return false;
  for (Py_ssize_t i = 0; i < all; ++i) slots[i] = i < count ? given[i] : PyTuple_GET_ITEM(op.defaults, i);
  const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t k = 0; k < named; ++k) {
    Py_ssize_t i = count;  // names are interned, so the same ones are the same objects
    while (i < all && PyTuple_GET_ITEM(op.names, i) != PyTuple_GET_ITEM(keywords, k)) ++i;
    if (i == all) return false;
    slots[i] = given[count + k];
  }
  for (Py_ssize_t i = count; i < all; ++i)
    if (slots[i] == Py_Ellipsis) return false;
  return true;
}

// 1: somebody wants to hear of this call; -1: an error.
int heard(const Shortened& op) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(op.listeners); ++i) {
    PyObject* answer = PyObject_CallNoArgs(PyTuple_GET_ITEM(op.listeners, i));
    const int yes = answer == nullptr ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    if (yes != 0) return yes;
  }
  return 0;
}

// A new reference to the kernel for arguments like these, or null.
PyObject* find(Shortened& op, PyObject* const* slots) {
  Layout layout;
  if (!layout.add_all(slots, PyTuple_GET_SIZE(op.names))) return nullptr;
  if (layout.bytes() == op.bytes && std::memcmp(layout.data(), op.layout, op.bytes) == 0) return Py_NewRef(op.kernel);
  PyObject* key = PyBytes_FromStringAndSize(static_cast<const char*>(layout.data()), Py_ssize_t(layout.bytes()));
  PyObject* kernel = key == nullptr ? nullptr : PyDict_GetItemWithError(op.kernels, key);
  Py_XDECREF(key);
  if (kernel == nullptr) return nullptr;
  Py_INCREF(kernel);
  Py_XSETREF(op.kernel, Py_NewRef(kernel));
  op.bytes = layout.bytes();
  std::memcpy(op.layout, layout.data(), op.bytes);
  return kernel;
}

// The kernel's result; null without an error where the function itself has to be called.
PyObject* call_kernel(Shortened& op, PyObject* const* given, Py_ssize_t count, PyObject* keywords) {
  PyObject* slots[kMostArguments];
  if (!bind(op, given, count, keywords, slots) || heard(op) != 0) return nullptr;
  PyObject* kernel = find(op, slots);
  if (kernel == nullptr) return nullptr;
  const auto backend = PyTuple_GET_SIZE(op.names) - 1;  // the last argument, which chose the kernel
  PyObject* result = PyObject_Vectorcall(kernel, slots, static_cast<size_t>(backend), nullptr);
  Py_DECREF(kernel);
  return result;
}

PyObject* call(PyObject* self, PyObject* const* given, size_t count, PyObject* keywords) {
  auto& op = *reinterpret_cast<Shortened*>(self);
  try {
    PyObject* result = call_kernel(op, given, PyVectorcall_NARGS(count), keywords);
    if (result != nullptr || PyErr_Occurred() != nullptr) return result;
  } catch (py::error_already_set& error) {  // from looking for torch
    error.restore();
    return nullptr;
  }
  return PyObject_Vectorcall(op.function, given, count, keywords);
}

PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  static const char* const names[] = {"function", "names", "defaults", "positional", "listeners", "kernels", nullptr};
  PyObject *function, *parameters, *defaults, *listeners, *kernels;
  Py_ssize_t positional;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO!O!nO!O!", const_cast<char**>(names), &function,
                                   &PyTuple_Type, &parameters, &PyTuple_Type, &defaults, &positional, &PyTuple_Type,
                                   &listeners, &PyDict_Type, &kernels))
    return nullptr;
  const Py_ssize_t count = PyTuple_GET_SIZE(parameters);
  if (count < 1 || count > kMostArguments || PyTuple_GET_SIZE(defaults) != count || positional > count)
    return PyErr_Format(PyExc_ValueError,
                        "%zd names, %zd defaults, %zd positional: 1 to %zd names and as many defaults", count,
                        PyTuple_GET_SIZE(defaults), positional, kMostArguments);
  auto* op = reinterpret_cast<Shortened*>(type->tp_alloc(type, 0));
  if (op == nullptr) return nullptr;
  op->vectorcall = call;
  op->function = Py_NewRef(function), op->names = Py_NewRef(parameters), op->defaults = Py_NewRef(defaults);
  op->listeners = Py_NewRef(listeners), op->kernels = Py_NewRef(kernels), op->positional = positional;
  return reinterpret_cast<PyObject*>(op);
}

void destroy(PyObject* self) {
  auto* op = reinterpret_cast<Shortened*>(self);
  PyTypeObject* type = Py_TYPE(self);
  for (PyObject* held : {op->function, op->names, op->defaults, op->listeners, op->kernels, op->dict, op->kernel})
    Py_XDECREF(held);
  type->tp_free(self);
  Py_DECREF(type);
}

// Copied and pickled as functions are: by name.
PyObject* reduce(PyObject* self, PyObject*) { return PyObject_GetAttrString(self, "__qualname__"); }

}  // namespace

py::object layouts(PyObject* const* values, Py_ssize_t count) {
  Layout layout;
  if (!layout.add_all(values, count)) return py::none();
  return py::bytes(static_cast<const char*>(layout.data()), layout.bytes());
}

void add_shortened_type(py::module_& module) {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Shortened, vectorcall), READONLY, nullptr},
      {"__dictoffset__", T_PYSSIZET, offsetof(Shortened, dict), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyGetSetDef attributes[] = {
      {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  static PyMethodDef methods[] = {
      {"__reduce__", reduce, METH_NOARGS, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(create)},
      {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
      {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
      {Py_tp_members, members},
      {Py_tp_getset, attributes},
      {Py_tp_methods, methods},
      {0, nullptr},
  };
  static PyType_Spec spec = {"specmemo_kernels.backends._cpu.Shortened", sizeof(Shortened), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};
  const auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
  if (!type) throw py::error_already_set();
  module.attr("Shortened") = type;
}

}  // namespace specmemo
