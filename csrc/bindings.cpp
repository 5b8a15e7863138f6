// The Python module specmemo_kernels.backends._cpu. specmemo_kernels.ops checks the tensors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "compressed.h"
#include "kernels.h"
#include "operators.h"
#include "program.h"
#include "tensors.h"
#include "threads.h"

namespace py = pybind11;
using namespace specmemo;

namespace {

int64_t attention_workspace(int dtype, int kv, int64_t num_qo_heads, int64_t num_kv_heads, int64_t k_dim,
                            int64_t v_dim) {
  AttentionArgs args{};
  args.dtype = static_cast<DType>(dtype), args.kv = static_cast<KVType>(kv);
  args.num_qo_heads = num_qo_heads, args.num_kv_heads = num_kv_heads, args.k_dim = k_dim, args.v_dim = v_dim;
  return kernels().attention_workspace(args);
}

void lm_head_topk(py::handle hidden, py::handle weight, py::handle scales, py::handle bias, int64_t k,
                  py::handle tokens, py::handle values, py::handle lse, int threads) {
  LmHeadArgs args{};
  args.product = product_args("hidden", hidden, weight, scales, bias), args.k = k;
  args.tokens = view(tokens).at<int64_t>(), args.values = view(values).at<float>();
  args.lse = lse.is_none() ? nullptr : view(lse).at<float>();
  const Kernels& kernel = kernels();
  py::gil_scoped_release unlocked;
  kernel.lm_head_topk(args, threads);
}

// bfloat16 [rows, inputs] to bytes [rows, compressed_bytes(inputs)], both contiguous.
bool compress(py::handle weight, py::handle out, int threads) {
  const TensorView from = view(weight);
  const auto* weights = from.at<uint16_t>();
  auto* bytes = view(out).at<uint8_t>();
  const int64_t rows = from.shape[0], inputs = from.shape[1];
  py::gil_scoped_release unlocked;
  return compress_rows(weights, rows, inputs, bytes, threads);
}

// The reverse.
void decompress(py::handle compressed, py::handle out, int threads) {
  const auto* bytes = view(compressed).at<uint8_t>();
  const TensorView to = view(out);
  auto* weights = to.at<uint16_t>();
  const int64_t rows = to.shape[0], inputs = to.shape[1];
  const Kernels& kernel = kernels();
  py::gil_scoped_release unlocked;
  kernel.decompress(bytes, rows, inputs, weights, threads);
}

std::vector<std::string> isas() {
  int count = 0;
  const char* const* names = available_isas(&count);
  return {names, names + count};
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "C++ kernels of the cpu backend; specmemo_kernels.ops is the interface.";
  add_operators(m);
  // module_local: a process may have several copies of this module (as a hub kernel beside the package).
  py::class_<Blocks, std::shared_ptr<Blocks>>(m, "Blocks", py::module_local(),
                                              "Memory of recordings that never run at once.")
      .def(py::init<int64_t>())
      .def_property_readonly("nbytes", &Blocks::bytes)
      .def_property_readonly("resident", &Blocks::resident)
      .def("trim", &Blocks::trim);
  py::class_<Program>(m, "Program", py::module_local()).def("__call__", &Program::run);
  m.def("record", &Program::record, "Record the operators of a function of tensors like `inputs`.");
  m.def("attention_workspace", &attention_workspace, "Bytes that each thread of tree_attention works in, at most.");
  m.def(
      "linear_workspace",
      [](int dtype, int64_t inputs, int64_t middle, bool by_input, int threads) {
        return kernels().linear_workspace(static_cast<DType>(dtype), inputs, middle, by_input, threads);
      },
      "Bytes that linear layers keep; of a gated MLP with `middle` activations per row, or of one product (0).");
  m.def("lm_head_topk", &lm_head_topk);
  m.def("compress", &compress, "Compress rows of bfloat16 without loss; False if a row has too many exceptions.");
  m.def("decompress", &decompress, "The rows that `compress` was given.");
  m.def("isas", &isas, "Instruction sets that were built and that this machine can run, best first.");
  m.def("zen", &zen,
        "The Zen generation of an AMD CPU with BF16 instructions: 4, or 5 for the fifth and newer ones; else 0.");
  m.def("isa", [] { return std::string(kernels().name); }, "The instruction set in use.");
  m.def(
      "use_isa",
      [](const std::string& name) {
        if (use_isa(name.c_str())) return;
        std::string known;
        for (const auto& isa : isas()) known += (known.empty() ? "" : ", ") + isa;
        throw py::value_error("instruction set '" + name + "' can't be used here; there are " + known);
      },
      "Use one of isas() from now on.");
  m.def("fill_new_tensors", &fill_new_tensors, "Fill new tensors with NaN from now on, or no longer (for tests).");
  m.def("arena_bytes", &arena_bytes, "Bytes that the kernels hold in all threads, between calls too.");
  m.def("release_threads", &release_threads, "End the OpenMP workers of the calling thread until its next loop.");
  m.def("thread_runtime", [] { return std::string(thread_runtime()); });
}
