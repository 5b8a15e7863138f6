// The Python module specmemo_kernels._cpu: tensors that ops checked and backends/cpu.py made.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "kernels.h"
#include "paged_copy.h"
#include "tensors.h"
#include "threads.h"

namespace py = pybind11;
using namespace specmemo;

namespace {

void tree_attention(int dtype, int kv, py::handle q, py::handle k_new, py::handle v_new, py::handle k_pages,
                    py::handle v_pages, py::handle k_scales, py::handle v_scales, py::handle block_table,
                    py::handle seq_lens, py::handle qo_indptr, py::handle tree_mask, py::handle sinks, py::handle out,
                    py::handle lse, float scale, float softcap, int64_t window, int threads) {
  const TensorView rows = view(q), keys = view(k_new), values = view(v_new), table = view(block_table);
  const TensorView k = view(k_pages), lengths = view(seq_lens), mask = view(tree_mask);
  AttentionArgs args{};
  args.dtype = static_cast<DType>(dtype), args.kv = static_cast<KVType>(kv);
  args.q = rows.at<void>(), args.k_new = keys.at<void>(), args.v_new = values.at<void>();
  for (int i = 0; i < 2; ++i) {
    args.q_strides[i] = rows.strides[i];
    args.k_new_strides[i] = keys.strides[i];
    args.v_new_strides[i] = values.strides[i];
  }
  args.k_pages = k.at<void>(), args.v_pages = view(v_pages).at<void>();
  args.k_scales = view(k_scales).at<float>(), args.v_scales = view(v_scales).at<float>();
  args.block_table = table.at<int32_t>(), args.seq_lens = lengths.at<int32_t>();
  args.qo_indptr = view(qo_indptr).at<int32_t>(), args.tree_mask = mask.at<int64_t>();
  args.sinks = view(sinks).at<void>(), args.out = view(out).at<void>(), args.lse = view(lse).at<float>();
  args.batch = lengths.shape[0], args.max_pages = table.shape[1], args.page_size = k.shape[1];
  args.mask_words = mask.data == nullptr ? 0 : mask.shape[1];
  args.num_qo_heads = rows.shape[1], args.num_kv_heads = values.shape[1];
  args.k_dim = rows.shape[2], args.v_dim = values.shape[2];
  args.scale = scale, args.softcap = softcap, args.window = window;
  const Kernels& kernel = kernels();
  py::gil_scoped_release unlocked;
  kernel.tree_attention(args, threads);
}

int64_t attention_workspace(int dtype, int kv, int64_t num_qo_heads, int64_t num_kv_heads, int64_t k_dim,
                            int64_t v_dim) {
  AttentionArgs args{};
  args.dtype = static_cast<DType>(dtype), args.kv = static_cast<KVType>(kv);
  args.num_qo_heads = num_qo_heads, args.num_kv_heads = num_kv_heads, args.k_dim = k_dim, args.v_dim = v_dim;
  return kernels().attention_workspace(args);
}

void lm_head_topk(int dtype, py::handle hidden, py::handle weight, py::handle scales, py::handle bias, int64_t k,
                  py::handle tokens, py::handle values, int threads) {
  const TensorView rows = view(hidden), vocab = view(weight);
  LmHeadArgs args{};
  args.dtype = static_cast<DType>(dtype);
  args.hidden = rows.at<void>(), args.hidden_stride = rows.strides[0];
  args.weight = vocab.at<void>(), args.scales = view(scales).at<uint16_t>(), args.bias = view(bias).at<void>();
  args.rows = rows.shape[0], args.vocab = vocab.shape[0], args.hidden_size = rows.shape[1], args.k = k;
  args.tokens = view(tokens).at<int64_t>(), args.values = view(values).at<float>();
  const Kernels& kernel = kernels();
  py::gil_scoped_release unlocked;
  kernel.lm_head_topk(args, threads);
}

PagedRows paged_rows(py::handle block_table, py::handle seq_lens, py::handle qo_indptr, int64_t page_size) {
  const TensorView table = view(block_table), lengths = view(seq_lens);
  return PagedRows{table.at<int32_t>(), lengths.at<int32_t>(), view(qo_indptr).at<int32_t>(),
                   lengths.shape[0],    table.shape[1],        page_size};
}

// One side of a copy: rows [..., N, heads, dim] to pages [..., num_pages, page_size, heads, dim].
CopySide copy_side(int dtype, int kv, const TensorView& from, const TensorView& to, py::handle scales) {
  const int last = from.ndim - 1, slot = to.ndim - 3;
  CopySide side{};
  side.element = from.bits / 8;
  side.from = from.at<char>(), side.to = to.at<char>(), side.scales = view(scales).at<float>();
  side.from_layer = last > 2 ? from.strides[0] * side.element : 0;
  side.from_row = from.strides[last - 2] * side.element, side.from_head = from.strides[last - 1] * side.element;
  side.slots = to.shape[slot - 1] * to.shape[slot], side.heads = from.shape[last - 1], side.dim = from.shape[last];
  side.dtype = static_cast<DType>(dtype), side.type = static_cast<KVType>(kv);
  return side;
}

void append_paged_kv(int dtype, int kv, py::handle k_new, py::handle v_new, py::handle k_pages, py::handle v_pages,
                     py::handle k_scales, py::handle v_scales, py::handle block_table, py::handle seq_lens,
                     py::handle qo_indptr) {
  const TensorView pages = view(k_pages);
  const PagedRows rows = paged_rows(block_table, seq_lens, qo_indptr, pages.shape[1]);
  const CopySide keys = copy_side(dtype, kv, view(k_new), pages, k_scales);
  const CopySide values = copy_side(dtype, kv, view(v_new), view(v_pages), v_scales);
  py::gil_scoped_release unlocked;
  append_rows(rows, keys);
  append_rows(rows, values);
}

void commit_paged_kv(int dtype, int kv, py::handle k_scratch, py::handle v_scratch, py::handle k_pages,
                     py::handle v_pages, py::handle k_scales, py::handle v_scales, py::handle block_table,
                     py::handle seq_lens, py::handle qo_indptr, py::handle accept_index, py::handle accept_length,
                     int threads) {
  const TensorView pages = view(k_pages), index = view(accept_index);
  const PagedRows rows = paged_rows(block_table, seq_lens, qo_indptr, pages.shape[2]);
  const CopySide keys = copy_side(dtype, kv, view(k_scratch), pages, k_scales);
  const CopySide values = copy_side(dtype, kv, view(v_scratch), view(v_pages), v_scales);
  const int32_t* length = view(accept_length).at<int32_t>();
  py::gil_scoped_release unlocked;
  commit_rows(rows, keys, values, pages.shape[0], index.at<int32_t>(), length, index.shape[1], threads);
}

void verify(py::handle draft, py::handle target, py::handle parents, py::handle qo_indptr, int64_t max_depth,
            py::handle accept_index, py::handle accept_length, py::handle bonus_token) {
  verify_tree_greedy(view(draft).at<int64_t>(), view(target).at<int64_t>(), view(parents).at<int32_t>(),
                     view(qo_indptr).at<int32_t>(), view(qo_indptr).shape[0] - 1, max_depth,
                     view(accept_index).at<int32_t>(), view(accept_length).at<int32_t>(),
                     view(bonus_token).at<int64_t>());
}

std::vector<std::string> isas() {
  int count = 0;
  const char* const* names = available_isas(&count);
  return {names, names + count};
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "C++ kernels of the cpu backend; specmemo_kernels.ops is the interface.";
  m.def("layouts", &layouts);
  m.def("tree_attention", &tree_attention);
  m.def("attention_workspace", &attention_workspace, "Bytes that each thread of tree_attention works in, at most.");
  m.def("lm_head_topk", &lm_head_topk);
  m.def("append_paged_kv", &append_paged_kv);
  m.def("commit_paged_kv", &commit_paged_kv);
  m.def("verify_tree_greedy", &verify);
  m.def("isas", &isas, "Instruction sets that were built and that this machine can run, best first.");
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
  m.def("arena_bytes", &arena_bytes, "Bytes that the kernels hold in all threads, between calls too.");
  m.def("thread_runtime", [] { return std::string(thread_runtime()); });
}
