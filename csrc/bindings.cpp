// The Python module specmemo_kernels._cpu: tensors or their addresses, checked by ops and shaped by backends/cpu.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>
#include <vector>

#include "kernels.h"
#include "paged_copy.h"
#include "tensors.h"
#include "threads.h"

namespace py = pybind11;
using namespace specmemo;

namespace {

using Address = std::uintptr_t;
using Pair = std::array<int64_t, 2>;
using AddressPair = std::array<Address, 2>;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

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

void lm_head_topk(int dtype, Address hidden, int64_t hidden_stride, Address weight, Address scales, Address bias,
                  int64_t rows, int64_t vocab, int64_t hidden_size, int64_t k, Address tokens, Address values,
                  int threads) {
  LmHeadArgs args{static_cast<DType>(dtype),
                  at<void>(hidden),
                  hidden_stride,
                  at<void>(weight),
                  at<uint16_t>(scales),
                  at<void>(bias),
                  rows,
                  vocab,
                  hidden_size,
                  k,
                  at<int64_t>(tokens),
                  at<float>(values)};
  const Kernels& table = kernels();
  py::gil_scoped_release unlocked;
  table.lm_head_topk(args, threads);
}

PagedRows paged_rows(Address block_table, Address seq_lens, Address qo_indptr, int64_t batch, int64_t max_pages,
                     int64_t page_size) {
  return PagedRows{
      at<int32_t>(block_table), at<int32_t>(seq_lens), at<int32_t>(qo_indptr), batch, max_pages, page_size};
}

// strides in bytes: row, head; element: bytes of a number in `from`
void append_paged_kv(int dtype, int kv, Address from, Pair strides, int64_t element, Address pages, Address scales,
                     int64_t heads, int64_t dim, Address block_table, Address seq_lens, Address qo_indptr,
                     int64_t batch, int64_t max_pages, int64_t page_size) {
  const PagedRows rows = paged_rows(block_table, seq_lens, qo_indptr, batch, max_pages, page_size);
  CopySide side{};
  side.from = at<char>(from), side.from_row = strides[0], side.from_head = strides[1];
  side.to = at<char>(pages), side.scales = at<float>(scales);
  side.heads = heads, side.dim = dim, side.element = element;
  side.dtype = static_cast<DType>(dtype), side.type = static_cast<KVType>(kv);
  py::gil_scoped_release unlocked;
  append_rows(rows, side);
}

// scratch, pages and scales are contiguous; pairs are of keys and values
void commit_paged_kv(int dtype, int kv, AddressPair scratch, int64_t element, AddressPair pages, AddressPair scales,
                     int64_t heads, Pair dims, int64_t scratch_rows, int64_t page_rows, int64_t layers,
                     Address block_table, Address seq_lens, Address qo_indptr, Address accept_index,
                     Address accept_length, int64_t width, int64_t batch, int64_t max_pages, int64_t page_size,
                     int threads) {
  const PagedRows rows = paged_rows(block_table, seq_lens, qo_indptr, batch, max_pages, page_size);
  CopySide sides[2]{};
  for (int i = 0; i < 2; ++i) {
    CopySide& side = sides[i];
    const int64_t head_bytes = dims[i] * element;
    side.from = at<char>(scratch[i]), side.to = at<char>(pages[i]), side.scales = at<float>(scales[i]);
    side.from_layer = scratch_rows * heads * head_bytes, side.from_row = heads * head_bytes;
    side.from_head = head_bytes, side.slots = page_rows;
    side.heads = heads, side.dim = dims[i], side.element = element;
    side.dtype = static_cast<DType>(dtype), side.type = static_cast<KVType>(kv);
  }
  py::gil_scoped_release unlocked;
  commit_rows(rows, sides[0], sides[1], layers, at<int32_t>(accept_index), at<int32_t>(accept_length), width, threads);
}

void verify(Address draft, Address target, Address parents, Address qo_indptr, int64_t batch, int64_t max_depth,
            Address accept_index, Address accept_length, Address bonus_token) {
  verify_tree_greedy(at<int64_t>(draft), at<int64_t>(target), at<int32_t>(parents), at<int32_t>(qo_indptr), batch,
                     max_depth, at<int32_t>(accept_index), at<int32_t>(accept_length), at<int64_t>(bonus_token));
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
