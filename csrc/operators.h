// The operators as Python calls them: arguments as in ops/schema.py, without the backend.
#pragma once

#include <pybind11/pybind11.h>

namespace specmemo {

void add_operators(pybind11::module_& module);

}  // namespace specmemo
