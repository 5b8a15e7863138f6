// Plain C functions instead of pybind11's. The matrix products between two calls evict a call's code from the caches,
// and fetching pybind11's code for twenty arguments takes longer than attention over a hundred tokens.
#include "operators.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "paged_rows.h"
#include "program.h"
#include "tensors.h"
#include "verify.h"

namespace py = pybind11;

namespace specmemo {
namespace {

using Arguments = PyObject* const*;

class Unlocked {  // releases the GIL
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() { PyEval_RestoreThread(state_); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

// Runs a job without the GIL, or adds it to the program that this thread records.
template <class Function>
void execute(Function job) {
  if (Program* program = recording()) return program->add(job);
  const int threads = num_threads();
  const Unlocked unlocked;
  job(threads);
}

double number(py::handle value) {  // 0 for None
  const double result = value.is_none() ? 0.0 : PyFloat_AsDouble(value.ptr());
  if (result == -1.0 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return result;
}

int64_t integer(py::handle value) {  // 0 for None
  const int64_t result = value.is_none() ? 0 : PyLong_AsLongLong(value.ptr());
  if (result == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return result;
}

KVType kv_type(py::handle scales, const TensorView& pages) {
  if (scales.is_none()) return KVType::kSame;
  return pages.code == kInt ? KVType::kInt8 : KVType::kFp8;
}

// Copied rows may have any type, so it isn't read.
DType copied_dtype(const char* name, py::handle rows, KVType kv) {
  return kv == KVType::kSame ? DType::kFloat32 : computed_dtype(name, rows);
}

// Of pages [..., page_size, num_kv_heads, dim]. Both orders are the same for one token or one head per page.
PageOrder page_order(const TensorView& pages) {
  const int heads = pages.ndim - 2;
  return PageOrder{pages.shape[heads - 1], pages.shape[heads], pages.strides[heads - 1] < pages.strides[heads]};
}

py::object tree_attention(Arguments a) {
  const DType dtype = computed_dtype("q", a[0]);
  const TensorView rows = view(a[0]), keys = view(a[1]), values = view(a[2]), k = view(a[3]), table = view(a[5]);
  const TensorView lengths = view(a[6]), mask = view(a[8]);
  py::object sinks = py::reinterpret_borrow<py::object>(a[12]);
  TensorView sink = view(sinks);
  auto is_float = [](const TensorView& tensor) { return tensor.code == kFloat && tensor.bits == 32; };
  if (sink.data != nullptr && (sink.code != rows.code || sink.bits != rows.bits) && !is_float(sink)) {
    sinks = sinks.attr("float")();
    if (recording() != nullptr) recording()->keep(sinks);
    sink = view(sinks);
  }
  AttentionArgs args{};
  args.dtype = dtype, args.kv = kv_type(a[16], k);
  args.q = rows.at<void>(), args.k_new = keys.at<void>(), args.v_new = values.at<void>();
  for (int i = 0; i < 2; ++i) {
    args.q_strides[i] = rows.strides[i];
    args.k_new_strides[i] = keys.strides[i];
    args.v_new_strides[i] = values.strides[i];
  }
  args.k_pages = k.at<void>(), args.v_pages = view(a[4]).at<void>();
  args.k_scales = view(a[16]).at<float>(), args.v_scales = view(a[17]).at<float>();
  args.block_table = table.at<int32_t>(), args.seq_lens = lengths.at<int32_t>();
  args.qo_indptr = view(a[7]).at<int32_t>(), args.tree_mask = mask.at<int64_t>(), args.sinks = sink.at<void>();
  args.float_sinks = is_float(sink);
  args.batch = lengths.shape[0], args.max_pages = table.shape[1], args.order = page_order(k);
  args.mask_words = mask.data == nullptr ? 0 : mask.shape[1];
  args.num_qo_heads = rows.shape[1], args.num_kv_heads = values.shape[1];
  args.k_dim = rows.shape[2], args.v_dim = values.shape[2];
  args.scale = static_cast<float>(number(a[9])), args.window = integer(a[10]);
  args.softcap = static_cast<float>(number(a[11])), args.invariant = integer(a[15]) != 0;
  const NewTensor out = empty(rows.code, rows.bits, {rows.shape[0], rows.shape[1], values.shape[2]});
  const NewTensor lse = empty(kFloat, 32, {rows.shape[0], rows.shape[1]});
  args.out = out.data, args.lse = static_cast<float*>(lse.data);
  execute([args](int threads) { kernels().tree_attention(args, threads); });
  return py::reinterpret_steal<py::object>(PyTuple_Pack(2, out.tensor.ptr(), lse.tensor.ptr()));
}

PagedRows paged_rows(Arguments a, const TensorView& pages) {  // block_table, seq_lens, qo_indptr
  const TensorView table = view(a[0]), lengths = view(a[1]);
  return PagedRows{table.at<int32_t>(), lengths.at<int32_t>(), view(a[2]).at<int32_t>(),
                   lengths.shape[0],    table.shape[1],        page_order(pages)};
}

// One side of a copy: rows [..., N, heads, dim] to pages [..., num_pages, page_size, heads, dim].
CopySide copy_side(DType dtype, KVType kv, const TensorView& from, const TensorView& to, py::handle scales) {
  const int last = from.ndim - 1, slot = to.ndim - 3;
  CopySide side{};
  side.element = from.bits / 8;
  side.from = from.at<char>(), side.to = to.at<char>(), side.scales = view(scales).at<float>();
  side.from_layer = last > 2 ? from.strides[0] * side.element : 0;
  side.from_row = from.strides[last - 2] * side.element, side.from_head = from.strides[last - 1] * side.element;
  side.rows = to.shape[slot - 1] * to.shape[slot] * to.shape[slot + 1], side.heads = from.shape[last - 1],
  side.dim = from.shape[last];
  side.dtype = dtype, side.type = kv;
  return side;
}

py::object append_paged_kv(Arguments a) {
  const TensorView pages = view(a[2]);
  const KVType kv = kv_type(a[7], pages);
  const DType dtype = copied_dtype("k_new", a[0], kv);
  const PagedRows rows = paged_rows(a + 4, pages);
  const CopySide keys = copy_side(dtype, kv, view(a[0]), pages, a[7]);
  const CopySide values = copy_side(dtype, kv, view(a[1]), view(a[3]), a[8]);
  execute([rows, keys, values](int) {
    kernels().append_rows(rows, keys);
    kernels().append_rows(rows, values);
  });
  return {};
}

py::object commit_paged_kv(Arguments a) {
  const TensorView pages = view(a[2]), index = view(a[7]);
  const KVType kv = kv_type(a[9], pages);
  const DType dtype = copied_dtype("k_scratch", a[0], kv);
  const PagedRows rows = paged_rows(a + 4, pages);
  const CopySide keys = copy_side(dtype, kv, view(a[0]), pages, a[9]);
  const CopySide values = copy_side(dtype, kv, view(a[1]), view(a[3]), a[10]);
  const AcceptedPaths paths{index.at<int32_t>(), view(a[8]).at<int32_t>(), index.shape[1]};
  const int64_t layers = pages.shape[0];
  execute([=](int threads) { kernels().commit_rows(rows, keys, values, layers, paths, threads); });
  return {};
}

py::object verify(Arguments a) {
  const TensorView bounds = view(a[3]);
  const int64_t batch = bounds.shape[0] - 1, max_depth = integer(a[4]);
  const NewTensor index = empty(kInt, 32, {batch, max_depth + 1}), length = empty(kInt, 32, {batch});
  const NewTensor bonus = empty(kInt, 64, {batch});
  verify_tree_greedy(view(a[0]).at<int64_t>(), view(a[1]).at<int64_t>(), view(a[2]).at<int32_t>(), bounds.at<int32_t>(),
                     batch, max_depth, static_cast<int32_t*>(index.data), static_cast<int32_t*>(length.data),
                     static_cast<int64_t*>(bonus.data));
  return py::reinterpret_steal<py::object>(
      PyTuple_Pack(3, index.tensor.ptr(), length.tensor.ptr(), bonus.tensor.ptr()));
}

// A new tensor [..., size] for rows of x [..., inputs].
NewTensor like_rows(const TensorView& x, int64_t size) {
  int64_t shape[8];
  if (x.ndim > 8) throw py::value_error("x has " + std::to_string(x.ndim) + " dimensions");
  for (int i = 0; i < x.ndim; ++i) shape[i] = x.shape[i];
  shape[x.ndim - 1] = size;
  return empty(x.code, x.bits, shape, x.ndim);
}

py::object linear(Arguments a) {  // x, weight, bias, scales, invariant
  LinearArgs args{};
  args.product = product_args("x", a[0], a[1], a[3], a[2]);
  args.product.invariant = integer(a[4]) != 0;
  const NewTensor out = like_rows(view(a[0]), args.product.outputs);
  args.out = out.data;
  execute([args](int threads) { kernels().linears(&args, 1, threads); });
  return out.tensor;
}

py::object linears(Arguments a) {  // x, contiguous weights, biases
  const py::sequence weights = py::reinterpret_borrow<py::sequence>(a[1]);
  const py::sequence biases = py::reinterpret_borrow<py::sequence>(a[2]);
  const TensorView x = view(a[0]);
  std::vector<LinearArgs> all(weights.size());
  py::list results;
  for (size_t i = 0; i < all.size(); ++i) {
    const py::object weight = weights[i], bias = biases[i];
    all[i].product = product_args("x", a[0], weight, py::none(), bias);
    all[i].product.by_input = false;  // also of a single output with another stride
    if (all[i].product.compressed != all[0].product.compressed)
      throw py::value_error("linears takes matrices that are all compressed or all not");
    const NewTensor out = like_rows(x, all[i].product.outputs);
    all[i].out = out.data;
    results.append(out.tensor);
  }
  execute([all](int threads) {
    const auto count = static_cast<int64_t>(all.size());
    for (int64_t i = 0; i < count; i += kMatrices)
      kernels().linears(all.data() + i, std::min(kMatrices, count - i), threads);
  });
  return results;
}

py::object grouped_linear(Arguments a) {  // x, weight, bias, ends
  GroupedLinearArgs args{};
  args.product = product_args("x", a[0], a[1], py::none(), a[2]);
  args.product.invariant = true;
  args.groups = view(a[1]).shape[0], args.ends = view(a[3]).at<int64_t>();
  const NewTensor out = like_rows(view(a[0]), args.product.outputs);
  args.out = out.data;
  execute([args](int threads) { kernels().grouped_linear(args, threads); });
  return out.tensor;
}

py::object gated_mlp(Arguments a) {  // x, weights of gate, up and down, their biases, activation, invariant
  const py::none none;
  GatedMlpArgs args{};
  args.gate = product_args("x", a[0], a[1], none, a[4]), args.up = product_args("x", a[0], a[2], none, a[5]);
  args.gate.invariant = args.up.invariant = integer(a[8]) != 0;
  const TensorView down = view(a[3]);
  args.down = args.gate;
  args.down.weight = down.at<void>(), args.down.bias = view(a[6]).at<void>();
  args.down.inputs = args.gate.outputs, args.down.outputs = down.shape[0];
  args.activation = static_cast<Activation>(integer(a[7]));
  const NewTensor out = like_rows(view(a[0]), args.down.outputs);
  args.out = out.data;
  execute([args](int threads) { kernels().gated_mlp(args, threads); });
  return out.tensor;
}

// x, and from `parameters` on weight, eps, offset, round_first
RmsNormArgs norm_args(const TensorView& x, Arguments a, Arguments parameters) {
  RmsNormArgs args{};
  args.dtype = computed_dtype("x", a[0]), args.x = x.at<void>(), args.rows = rows_of(x);
  args.weight = view(parameters[0]).at<void>(), args.size = x.shape[x.ndim - 1], args.x_stride = args.size;
  args.eps = static_cast<float>(number(parameters[1])), args.offset = static_cast<float>(number(parameters[2]));
  args.round_first = integer(parameters[3]) != 0;
  return args;
}

py::object rms_norm(Arguments a) {  // x, weight, eps, offset, round_first
  const TensorView x = view(a[0]);
  RmsNormArgs args = norm_args(x, a, a + 1);
  const NewTensor out = like_rows(x, args.size);
  args.out = out.data;
  execute([args](int threads) { kernels().rms_norm(args, threads); });
  return out.tensor;
}

py::object add_rms_norm(Arguments a) {  // x, residual, weight, eps, offset, round_first
  const TensorView x = view(a[0]);
  RmsNormArgs args = norm_args(x, a, a + 2);
  const NewTensor sum = like_rows(x, args.size), out = like_rows(x, args.size);
  args.residual = view(a[1]).at<void>(), args.sum = sum.data, args.out = out.data;
  execute([args](int threads) { kernels().rms_norm(args, threads); });
  return py::reinterpret_steal<py::object>(PyTuple_Pack(2, sum.tensor.ptr(), out.tensor.ptr()));
}

py::object rotary(Arguments a) {  // x, cos, sin
  const TensorView x = view(a[0]), cos = view(a[1]);
  RotaryArgs args{};
  args.dtype = computed_dtype("x", a[0]), args.x = x.at<void>();
  args.tokens = x.shape[0], args.heads = x.shape[1], args.size = x.shape[2];
  args.x_strides[0] = x.strides[0], args.x_strides[1] = x.strides[1];
  args.cos = cos.at<void>(), args.sin = view(a[2]).at<void>(), args.angle_stride = cos.strides[0];
  const NewTensor out = empty(x.code, x.bits, {args.tokens, args.heads, args.size});
  args.out = out.data;
  execute([args](int threads) { kernels().rotary(args, threads); });
  return out.tensor;
}

py::object copy_rows(Arguments a) {  // to, from: [rows, heads, size], alike; the rows of `to` are contiguous
  const TensorView to = view(a[0]), from = view(a[1]);
  char* out = to.at<char>();
  const char* in = from.at<char>();
  const int64_t element = from.bits / 8, rows = from.shape[0], heads = from.shape[1], size = from.shape[2] * element;
  const int64_t next_row = from.strides[0] * element, next_head = from.strides[1] * element;
  execute([=](int) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t h = 0; h < heads; ++h)
        std::memcpy(out + (r * heads + h) * size, in + r * next_row + h * next_head, static_cast<size_t>(size));
  });
  return {};
}

// Converts exceptions to Python errors, and an empty result to None.
template <class Function>
PyObject* guarded(Function function) {
  try {
    py::object result = function();
    if (!result && PyErr_Occurred() == nullptr) result = py::none();
    return result.release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  }
  return nullptr;
}

template <py::object (*function)(Arguments), int expected>
PyObject* fixed(PyObject*, Arguments arguments, Py_ssize_t count) {
  if (count == expected) return guarded([&] { return function(arguments); });
  return PyErr_Format(PyExc_TypeError, "%zd arguments given, expected %d", count, expected);
}

PyCFunction fast(PyObject* (*function)(PyObject*, Arguments, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace

void add_operators(py::module_& module) {
  static PyMethodDef methods[] = {
      {"tree_attention", fast(fixed<tree_attention, 19>), METH_FASTCALL, nullptr},
      {"append_paged_kv", fast(fixed<append_paged_kv, 9>), METH_FASTCALL, nullptr},
      {"commit_paged_kv", fast(fixed<commit_paged_kv, 11>), METH_FASTCALL, nullptr},
      {"verify_tree_greedy", fast(fixed<verify, 5>), METH_FASTCALL, nullptr},
      {"linear", fast(fixed<linear, 5>), METH_FASTCALL, nullptr},
      {"linears", fast(fixed<linears, 3>), METH_FASTCALL, nullptr},
      {"grouped_linear", fast(fixed<grouped_linear, 4>), METH_FASTCALL, nullptr},
      {"gated_mlp", fast(fixed<gated_mlp, 9>), METH_FASTCALL, nullptr},
      {"rms_norm", fast(fixed<rms_norm, 5>), METH_FASTCALL, nullptr},
      {"add_rms_norm", fast(fixed<add_rms_norm, 6>), METH_FASTCALL, nullptr},
      {"rotary", fast(fixed<rotary, 3>), METH_FASTCALL, nullptr},
      {"copy_rows", fast(fixed<copy_rows, 2>), METH_FASTCALL, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw py::error_already_set();
}

}  // namespace specmemo
