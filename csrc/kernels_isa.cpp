// The kernels for one instruction set. CMakeLists.txt compiles this file once for each, with SPECMEMO_ISA set to its
// name and the compiler's flags for it. All included code is in anonymous namespaces, so that no function compiled for
// a newer machine is linked into the code for an older one.
#include "attention_run.h"
#include "lm_head.h"
#include "norm.h"
#include "paged_copy.h"
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

void tree_attention(const AttentionArgs& args, int threads) {
  switch (args.dtype) {
    case DType::kFloat32:
      return run_attention<Float32, Float32Dot>(args, threads);
    case DType::kBFloat16:
      return run_attention<BFloat16, DotOfBFloat16>(args, threads);
    case DType::kFloat16:
      return run_attention<Float16, Float32Dot>(args, threads);
  }
}

template <class T, class Dot>
int64_t workspace_of(const AttentionArgs& args) {
  const int64_t nodes = max_nodes_per_task(args);
  return Attention<T, Dot>(args, nodes, max_heads_per_task(args, nodes)).workspace_bytes();
}

int64_t attention_workspace(const AttentionArgs& args) {
  switch (args.dtype) {
    case DType::kBFloat16:
      return workspace_of<BFloat16, DotOfBFloat16>(args);
    case DType::kFloat16:
      return workspace_of<Float16, Float32Dot>(args);
    default:
      return workspace_of<Float32, Float32Dot>(args);
  }
}

void lm_head_topk(const LmHeadArgs& args, int threads) {
  switch (args.product.dtype) {
    case DType::kFloat32:
      return run_lm_head<Float32, Float32Dot>(args, threads);
    case DType::kBFloat16:
      return run_lm_head<BFloat16, DotOfBFloat16>(args, threads);
    case DType::kFloat16:
      return run_lm_head<Float16, Float32Dot>(args, threads);
  }
}

void linear(const LinearArgs& args, int threads) {
  switch (args.product.dtype) {
    case DType::kFloat32:
      return run_linear<Float32, Float32Dot>(args, threads);
    case DType::kBFloat16:
      return run_linear<BFloat16, DotOfBFloat16>(args, threads);
    case DType::kFloat16:
      return run_linear<Float16, Float32Dot>(args, threads);
  }
}

int64_t linear_workspace(DType dtype, int64_t inputs, int64_t middle, int threads) {
  switch (dtype) {
    case DType::kBFloat16:
      return linear_workspace<BFloat16, DotOfBFloat16>(inputs, middle, threads);
    case DType::kFloat16:
      return linear_workspace<Float16, Float32Dot>(inputs, middle, threads);
    default:
      return linear_workspace<Float32, Float32Dot>(inputs, middle, threads);
  }
}

void gated_mlp(const GatedMlpArgs& args, int threads) {
  switch (args.gate.dtype) {
    case DType::kFloat32:
      return run_gated_mlp<Float32, Float32Dot>(args, threads);
    case DType::kBFloat16:
      return run_gated_mlp<BFloat16, DotOfBFloat16>(args, threads);
    case DType::kFloat16:
      return run_gated_mlp<Float16, Float32Dot>(args, threads);
  }
}

void rms_norm(const RmsNormArgs& args, int threads) {
  switch (args.dtype) {
    case DType::kFloat32:
      return run_rms_norm<Float32>(args, threads);
    case DType::kBFloat16:
      return run_rms_norm<BFloat16>(args, threads);
    case DType::kFloat16:
      return run_rms_norm<Float16>(args, threads);
  }
}

void rotary(const RotaryArgs& args, int threads) {
  switch (args.dtype) {
    case DType::kFloat32:
      return run_rotary<Float32>(args, threads);
    case DType::kBFloat16:
      return run_rotary<BFloat16>(args, threads);
    case DType::kFloat16:
      return run_rotary<Float16>(args, threads);
  }
}

}  // namespace

extern const Kernels SPECMEMO_TABLE(SPECMEMO_ISA);
const Kernels SPECMEMO_TABLE(SPECMEMO_ISA) = {SPECMEMO_NAME(SPECMEMO_ISA),
                                              tree_attention,
                                              attention_workspace,
                                              lm_head_topk,
                                              linear,
                                              gated_mlp,
                                              rms_norm,
                                              rotary,
                                              linear_workspace,
                                              append_rows,
                                              commit_rows};

}  // namespace specmemo
