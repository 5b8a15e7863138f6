// The kernels for one instruction set. CMakeLists.txt compiles this file once for each, with SPECMEMO_ISA set to its
// name and the compiler's flags for it. All included code is in anonymous namespaces, so that no function compiled for
// a newer machine is linked into the code for an older one.
#include "attention_run.h"
#include "gated_mlp.h"
#include "lm_head.h"
#include "norm.h"
#include "paged_copy.h"
#include "product_memory.h"
#include "rotary.h"

#define SPECMEMO_TEXT(x) #x
#define SPECMEMO_NAME(x) SPECMEMO_TEXT(x)
#define SPECMEMO_JOIN(a, b) a##b
#define SPECMEMO_TABLE(isa) SPECMEMO_JOIN(kernels_, isa)

namespace specmemo {
namespace {

#if defined(SPECMEMO_BF16_DOT)
typedef BFloat16Dot DotOfBFloat16;
#else
typedef Float32Dot DotOfBFloat16;
#endif

// function(T, Dot) with the types for a dtype, as empty values.
template <class Function>
auto by_dtype(DType dtype, Function function) {
  switch (dtype) {
    case DType::kBFloat16:
      return function(BFloat16{}, DotOfBFloat16{});
    case DType::kFloat16:
      return function(Float16{}, Float32Dot{});
    default:
      return function(Float32{}, Float32Dot{});
  }
}

void tree_attention(const AttentionArgs& args, int threads) {
  by_dtype(args.dtype, [&](auto t, auto dot) { run_attention<decltype(t), decltype(dot)>(args, threads); });
}

int64_t attention_workspace(const AttentionArgs& args) {
  const int64_t nodes = max_nodes_per_task(args);
  return by_dtype(args.dtype, [&](auto t, auto dot) {
    return Attention<decltype(t), decltype(dot)>(args, nodes, max_heads_per_task(args, nodes)).workspace_bytes();
  });
}

void lm_head_topk(const LmHeadArgs& args, int threads) {
  by_dtype(args.product.dtype, [&](auto t, auto dot) { run_lm_head<decltype(t), decltype(dot)>(args, threads); });
}

void linears(const LinearArgs* all, int64_t count, int threads) {
  by_dtype(all->product.dtype, [&](auto t, auto dot) { run_linears<decltype(t), decltype(dot)>(all, count, threads); });
}

void grouped_linear(const GroupedLinearArgs& args, int threads) {
  by_dtype(args.product.dtype, [&](auto t, auto dot) { run_grouped<decltype(t), decltype(dot)>(args, threads); });
}

void decompress(const uint8_t* rows, int64_t outputs, int64_t inputs, uint16_t* out, int threads) {
  ProductArgs args{};
  args.weight = rows, args.inputs = inputs;
  struct Context {
    CompressedWeights weights;
    int64_t inputs;
    uint16_t* out;
  } context{CompressedWeights(args), inputs, out};
  auto row = [](void* data, int64_t i) {
    const auto& c = *static_cast<Context*>(data);
    const CompressedRow from = c.weights.row(i, 0);
    uint16_t* to = c.out + i * c.inputs;
    int64_t at = 0;
    for (; at + kBlockWeights <= c.inputs; at += kBlockWeights) from.read(at, to + at);
    if (at == c.inputs) return;
    uint16_t rest[kBlockWeights];
    from.read(at, rest);
    std::memcpy(to + at, rest, static_cast<size_t>(c.inputs - at) * sizeof(uint16_t));
  };
  parallel_parts(outputs, threads, row, &context);
}

int64_t linear_workspace(DType dtype, int64_t inputs, int64_t middle, bool by_input, int threads) {
  return by_dtype(dtype, [&](auto t, auto dot) {
    return linear_workspace<decltype(t), decltype(dot)>(inputs, middle, by_input, threads);
  });
}

void gated_mlp(const GatedMlpArgs& args, int threads) {
  by_dtype(args.gate.dtype, [&](auto t, auto dot) { run_gated_mlp<decltype(t), decltype(dot)>(args, threads); });
}

void rms_norm(const RmsNormArgs& args, int threads) {
  by_dtype(args.dtype, [&](auto t, auto) { run_rms_norm<decltype(t)>(args, threads); });
}

void rotary(const RotaryArgs& args, int threads) {
  by_dtype(args.dtype, [&](auto t, auto) { run_rotary<decltype(t)>(args, threads); });
}

}  // namespace

extern const Kernels SPECMEMO_TABLE(SPECMEMO_ISA);
const Kernels SPECMEMO_TABLE(SPECMEMO_ISA) = {SPECMEMO_NAME(SPECMEMO_ISA),
                                              tree_attention,
                                              attention_workspace,
                                              lm_head_topk,
                                              linears,
                                              grouped_linear,
                                              gated_mlp,
                                              rms_norm,
                                              rotary,
                                              decompress,
                                              linear_workspace,
                                              append_rows,
                                              commit_rows};

}  // namespace specmemo
