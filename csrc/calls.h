// Calling again what was called before: arguments that are laid out alike need neither checks nor a choice of backend.
#pragma once

#include <pybind11/pybind11.h>

namespace specmemo {

// Type, device, sizes and strides of all tensors, signs of all numbers and strings as they are, as bytes that are equal
// when those are. None if there is a tensor that isn't plain (fake, traced, wrapped), or something else than these and
// None.
pybind11::object layouts(PyObject* const* values, Py_ssize_t count);

// The type Shortened, see ops/layouts.py.
void add_shortened_type(pybind11::module_& module);

}  // namespace specmemo
