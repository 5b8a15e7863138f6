// Calls the kernels without Python, for tests in an emulator: a loop over the calls in standard input (messages.h).
//
// The calls are those of the Python module specmemo_kernels.backends._cpu, with the number of threads as one more
// argument.
#include <map>

#include "compressed.h"
#include "messages.h"
#include "paged_rows.h"
#include "threads.h"
#include "verify.h"

namespace specmemo {
namespace {

DType dtype_of(const Value& value) {
  const Tensor& tensor = value.tensor;
  if (tensor.code == kFloating && tensor.bits == 32) return DType::kFloat32;
  if (tensor.code == kBrain && tensor.bits == 16) return DType::kBFloat16;
  if (tensor.code == kFloating && tensor.bits == 16) return DType::kFloat16;
  throw std::runtime_error("type " + std::to_string(tensor.code) + " of " + std::to_string(tensor.bits) + " bits");
}

KVType kv_type(const Value& scales, const Tensor& pages) {
  if (scales.kind == kNone) return KVType::kSame;
  return pages.code == kSigned ? KVType::kInt8 : KVType::kFp8;
}

PageOrder page_order(const Tensor& pages) {
  const int heads = pages.ndim() - 2;
  return PageOrder{pages.shape[heads - 1], pages.shape[heads], pages.strides[heads - 1] < pages.strides[heads]};
}

int threads_of(const Values& a) { return static_cast<int>(a.back().integer); }

Values tree_attention(const Values& a) {
  const Tensor &q = a[0].tensor, &values = a[2].tensor, &pages = a[3].tensor, &table = a[5].tensor;
  AttentionArgs args{};
  args.dtype = dtype_of(a[0]), args.kv = kv_type(a[16], pages), args.order = page_order(pages);
  args.q = a[0].at<void>(), args.k_new = a[1].at<void>(), args.v_new = a[2].at<void>();
  for (int i = 0; i < 2; ++i) {
    args.q_strides[i] = q.strides[i];
    args.k_new_strides[i] = a[1].tensor.strides[i];
    args.v_new_strides[i] = values.strides[i];
  }
  args.k_pages = a[3].at<void>(), args.v_pages = a[4].at<void>();
  args.k_scales = a[16].at<float>(), args.v_scales = a[17].at<float>();
  args.block_table = a[5].at<int32_t>(), args.seq_lens = a[6].at<int32_t>(), args.qo_indptr = a[7].at<int32_t>();
  args.tree_mask = a[8].at<int64_t>(), args.sinks = a[12].at<void>();
  args.float_sinks = a[12].kind != kNone && a[12].tensor.bits == 32;
  args.batch = a[6].tensor.shape[0], args.max_pages = table.shape[1];
  args.mask_words = a[8].kind == kNone ? 0 : a[8].tensor.shape[1];
  args.num_qo_heads = q.shape[1], args.num_kv_heads = values.shape[1], args.k_dim = q.shape[2];
  args.v_dim = values.shape[2];
  args.scale = static_cast<float>(a[9].number), args.window = a[10].integer;
  args.softcap = static_cast<float>(a[11].number), args.invariant = a[15].integer != 0;
  Values results{new_tensor(q.code, q.bits, {q.shape[0], q.shape[1], args.v_dim}),
                 new_tensor(kFloating, 32, {q.shape[0], q.shape[1]})};
  args.out = results[0].at<void>(), args.lse = results[1].at<float>();
  kernels().tree_attention(args, threads_of(a));
  return results;
}

PagedRows paged_rows(const Values& a, const Tensor& pages) {  // from argument 4 on: block_table, seq_lens, qo_indptr
  return PagedRows{a[4].at<int32_t>(),   a[5].at<int32_t>(),   a[6].at<int32_t>(),
                   a[5].tensor.shape[0], a[4].tensor.shape[1], page_order(pages)};
}

CopySide copy_side(const Value& rows, const Value& pages, const Value& scales) {
  const Tensor &from = rows.tensor, &to = pages.tensor;
  const int last = from.ndim() - 1, slot = to.ndim() - 3;
  CopySide side{};
  side.type = kv_type(scales, to), side.dtype = side.type == KVType::kSame ? DType::kFloat32 : dtype_of(rows);
  side.element = from.bits / 8, side.heads = from.shape[last - 1], side.dim = from.shape[last];
  side.from = rows.at<char>(), side.to = pages.at<char>(), side.scales = scales.at<float>();
  side.from_layer = last > 2 ? from.strides[0] * side.element : 0;
  side.from_row = from.strides[last - 2] * side.element, side.from_head = from.strides[last - 1] * side.element;
  side.rows = to.shape[slot - 1] * to.shape[slot] * to.shape[slot + 1];
  return side;
}

Values append_paged_kv(const Values& a) {
  const PagedRows rows = paged_rows(a, a[2].tensor);
  kernels().append_rows(rows, copy_side(a[0], a[2], a[7]));
  kernels().append_rows(rows, copy_side(a[1], a[3], a[8]));
  return {};
}

Values commit_paged_kv(const Values& a) {
  const PagedRows rows = paged_rows(a, a[2].tensor);
  const AcceptedPaths paths{a[7].at<int32_t>(), a[8].at<int32_t>(), a[7].tensor.shape[1]};
  kernels().commit_rows(rows, copy_side(a[0], a[2], a[9]), copy_side(a[1], a[3], a[10]), a[2].tensor.shape[0], paths,
                        threads_of(a));
  return {};
}

Values verify(const Values& a) {
  const int64_t batch = a[3].tensor.shape[0] - 1, max_depth = a[4].integer;
  Values results{new_tensor(kSigned, 32, {batch, max_depth + 1}), new_tensor(kSigned, 32, {batch}),
                 new_tensor(kSigned, 64, {batch})};
  verify_tree_greedy(a[0].at<int64_t>(), a[1].at<int64_t>(), a[2].at<int32_t>(), a[3].at<int32_t>(), batch, max_depth,
                     results[0].at<int32_t>(), results[1].at<int32_t>(), results[2].at<int64_t>());
  return results;
}

int64_t rows_of(const Tensor& x) {
  int64_t rows = 1;
  for (int i = 0; i < x.ndim() - 1; ++i) rows *= x.shape[i];
  return rows;
}

Value like_rows(const Tensor& x, int64_t size) {
  std::vector<int64_t> shape = x.shape;
  shape.back() = size;
  return new_tensor(x.code, x.bits, shape);
}

ProductArgs product_args(const Value& x, const Value& weight, const Value& scales, const Value& bias) {
  ProductArgs args{};
  const int outputs = weight.tensor.ndim() - 2;  // behind groups
  args.dtype = dtype_of(x), args.x = x.at<void>(), args.rows = rows_of(x.tensor), args.inputs = x.tensor.shape.back();
  args.x_stride = x.tensor.ndim() == 2 ? x.tensor.strides[0] : args.inputs, args.outputs = weight.tensor.shape[outputs];
  args.by_input = weight.tensor.strides[outputs] < weight.tensor.strides[outputs + 1];
  args.compressed = weight.tensor.code == kUnsigned && scales.kind == kNone;
  args.weight = weight.at<void>(), args.scales = scales.at<uint16_t>(), args.bias = bias.at<void>();
  return args;
}

Values lm_head_topk(const Values& a) {  // hidden, weight, scales, bias, k, tokens, values, lse
  LmHeadArgs args{};
  args.product = product_args(a[0], a[1], a[2], a[3]), args.k = a[4].integer;
  args.tokens = a[5].at<int64_t>(), args.values = a[6].at<float>(), args.lse = a[7].at<float>();
  kernels().lm_head_topk(args, threads_of(a));
  return {};
}

Values linear(const Values& a) {  // x, weight, bias, scales, invariant
  LinearArgs args{};
  args.product = product_args(a[0], a[1], a[3], a[2]), args.product.invariant = a[4].integer != 0;
  Values results{like_rows(a[0].tensor, args.product.outputs)};
  args.out = results[0].at<void>();
  kernels().linears(&args, 1, threads_of(a));
  return results;
}

Values grouped_linear(const Values& a) {  // x, weight, bias, ends
  GroupedLinearArgs args{};
  args.product = product_args(a[0], a[1], Value{}, a[2]), args.product.invariant = true;
  args.groups = a[1].tensor.shape[0], args.ends = a[3].at<int64_t>();
  Values results{like_rows(a[0].tensor, args.product.outputs)};
  args.out = results[0].at<void>();
  kernels().grouped_linear(args, threads_of(a));
  return results;
}

Values gated_mlp(const Values& a) {  // x, weights of gate, up and down, their biases, activation, invariant
  GatedMlpArgs args{};
  args.gate = product_args(a[0], a[1], Value{}, a[4]), args.up = product_args(a[0], a[2], Value{}, a[5]);
  args.gate.invariant = args.up.invariant = a[8].integer != 0;
  args.down = product_args(a[0], a[3], Value{}, a[6]);
  args.down.inputs = args.gate.outputs;
  args.activation = static_cast<Activation>(a[7].integer);
  Values results{like_rows(a[0].tensor, args.down.outputs)};
  args.out = results[0].at<void>();
  kernels().gated_mlp(args, threads_of(a));
  return results;
}

// From argument `first` on: weight, eps, offset, round_first.
Values norm(const Values& a, int first, const Value& residual) {
  RmsNormArgs args{};
  args.dtype = dtype_of(a[0]), args.x = a[0].at<void>(), args.rows = rows_of(a[0].tensor);
  args.size = args.x_stride = a[0].tensor.shape.back();
  args.weight = a[first].at<void>(), args.eps = static_cast<float>(a[first + 1].number);
  args.offset = static_cast<float>(a[first + 2].number), args.round_first = a[first + 3].integer != 0;
  Values results;
  if (residual.kind != kNone) results.push_back(like_rows(a[0].tensor, args.size));
  results.push_back(like_rows(a[0].tensor, args.size));
  args.residual = residual.at<void>(), args.sum = residual.kind == kNone ? nullptr : results[0].at<void>();
  args.out = results.back().at<void>();
  kernels().rms_norm(args, threads_of(a));
  return results;
}

Values rms_norm(const Values& a) { return norm(a, 1, Value{}); }

Values add_rms_norm(const Values& a) { return norm(a, 2, a[1]); }

Values rotary(const Values& a) {  // x, cos, sin
  const Tensor& x = a[0].tensor;
  RotaryArgs args{};
  args.dtype = dtype_of(a[0]), args.x = a[0].at<void>();
  args.tokens = x.shape[0], args.heads = x.shape[1], args.size = x.shape[2];
  args.x_strides[0] = x.strides[0], args.x_strides[1] = x.strides[1];
  args.cos = a[1].at<void>(), args.sin = a[2].at<void>(), args.angle_stride = a[1].tensor.strides[0];
  Values results{new_tensor(x.code, x.bits, x.shape)};
  args.out = results[0].at<void>();
  kernels().rotary(args, threads_of(a));
  return results;
}

Values compress(const Values& a) {  // weight, out
  const auto& shape = a[0].tensor.shape;
  return {integer_value(compress_rows(a[0].at<uint16_t>(), shape[0], shape[1], a[1].at<uint8_t>(), threads_of(a)))};
}

Values decompress(const Values& a) {  // compressed, out
  const auto& shape = a[1].tensor.shape;
  kernels().decompress(a[0].at<uint8_t>(), shape[0], shape[1], a[1].at<uint16_t>(), threads_of(a));
  return {};
}

Values isas(const Values&) {  // the one in use, then all, best first
  int count = 0;
  const char* const* names = available_isas(&count);
  Values results{text_value(kernels().name)};
  for (int i = 0; i < count; ++i) results.push_back(text_value(names[i]));
  return results;
}

Values attention_workspace(const Values& a) {
  AttentionArgs args{};
  args.dtype = static_cast<DType>(a[0].integer), args.kv = static_cast<KVType>(a[1].integer);
  args.num_qo_heads = a[2].integer, args.num_kv_heads = a[3].integer, args.k_dim = a[4].integer;
  args.v_dim = a[5].integer;
  return {integer_value(kernels().attention_workspace(args))};
}

Values linear_workspace(const Values& a) {
  return {integer_value(kernels().linear_workspace(static_cast<DType>(a[0].integer), a[1].integer, a[2].integer,
                                                   a[3].integer != 0, static_cast<int>(a[4].integer)))};
}

const std::map<std::string, Values (*)(const Values&)> kCalls = {
    {"tree_attention", tree_attention},
    {"append_paged_kv", append_paged_kv},
    {"commit_paged_kv", commit_paged_kv},
    {"verify_tree_greedy", verify},
    {"lm_head_topk", lm_head_topk},
    {"linear", linear},
    {"grouped_linear", grouped_linear},
    {"gated_mlp", gated_mlp},
    {"rms_norm", rms_norm},
    {"add_rms_norm", add_rms_norm},
    {"rotary", rotary},
    {"compress", compress},
    {"decompress", decompress},
    {"isas", isas},
    {"attention_workspace", attention_workspace},
    {"linear_workspace", linear_workspace},
};

void answer(const std::string& name, const Values& arguments) {
  Values results;
  std::string error;
  try {
    results = kCalls.at(name)(arguments);
  } catch (const std::exception& exception) {
    error = exception.what();
    if (error.empty()) error = "an exception without a text";
  }
  for (const Value& argument : arguments)
    if (argument.tensor.changed) results.push_back(argument);
  write_text(error);
  write_integer(static_cast<int64_t>(results.size()));
  for (const Value& result : results) write_value(result);
  std::fflush(stdout);
}

}  // namespace
}  // namespace specmemo

int main() {
  using namespace specmemo;
  for (int64_t length; read_bytes(&length, sizeof length);) {
    std::string name(length, '\0');
    if (!read_bytes(&name[0], name.size())) return 1;
    answer(name, read_values());
  }
}
