// Reads and creates torch tensors without torch's headers.
//
// Since version 1.3 of DLPack (https://dmlc.github.io/dlpack) a framework's tensor type offers C functions under
// __dlpack_c_exchange_api__; torch has them since 2.10. The structures below are the used part of this interface. One
// call returns address, type, sizes and strides; as Python attributes each would be an object.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <initializer_list>

#include "kernels.h"

namespace specmemo {

enum TypeCode : uint8_t { kInt = 0, kUnsigned = 1, kFloat = 2, kBfloat = 4 };  // DLDataTypeCode

struct TensorView {  // DLTensor
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;

  template <class T>
  T* at() const {
    return reinterpret_cast<T*>(static_cast<char*>(data) + byte_offset);
  }
};

// Valid until the tensor changes; zeros for None. ValueError for tensors without memory of their own (wrapped, fake).
TensorView view(pybind11::handle tensor);

// The DType of a tensor; ValueError if the kernels don't support it.
DType computed_dtype(const char* name, pybind11::handle tensor);

// Number of rows [..., size].
int64_t rows_of(const TensorView& x);

// x @ weight^T + bias. x: [..., inputs], contiguous but for the rows' stride of two dimensions. weight: contiguous
// [..., outputs, inputs], or a transposed view of contiguous [..., inputs, outputs]; bytes are 4-bit codes or, without
// scales, compressed. scales, bias: or None.
ProductArgs product_args(const char* name, pybind11::handle x, pybind11::handle weight, pybind11::handle scales,
                         pybind11::handle bias);

struct NewTensor {
  pybind11::object tensor;
  void* data;
};

// A contiguous, uninitialised CPU tensor of up to four dimensions.
NewTensor empty(uint8_t code, uint8_t bits, std::initializer_list<int64_t> shape);
NewTensor empty(uint8_t code, uint8_t bits, const int64_t* sizes, int ndim);

// Whether new tensors are filled with NaN (integers: -1), for tests; torch.utils.deterministic doesn't apply to them.
void fill_new_tensors(bool fill);

// torch.get_num_threads().
int num_threads();

}  // namespace specmemo
