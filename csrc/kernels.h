// Arguments of the operators' kernels, and the table of kernels of each instruction set.
// Plain pointers and integers only: nothing links torch, and only bindings.cpp, operators.cpp, program.cpp and
// tensors.cpp use Python's C API.
#pragma once

#include <cstdint>

namespace specmemo {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Elements of pages: q's dtype, or 8-bit codes with one float scale per token and head.
enum class KVType : int { kSame = 0, kInt8 = 1, kFp8 = 2 };

// Memory order of the rows (one token and head each) of [num_pages, page_size, num_kv_heads, dim]: as in the shape, or
// head by head within each page (FlashInfer's NHD and HND).
struct PageOrder {
  int64_t page_size, heads;
  bool by_head;

  int64_t next_token() const { return by_head ? 1 : heads; }
  int64_t next_head() const { return by_head ? page_size : 1; }
  int64_t row(int64_t page, int64_t slot) const { return page * page_size * heads + slot * next_token(); }  // of head 0
};

// Strides are in elements; the last dimension of every tensor is contiguous.
struct AttentionArgs {
  DType dtype;
  KVType kv;
  const void* q;      // [N, num_qo_heads, k_dim]
  const void* k_new;  // [N, num_kv_heads, k_dim]
  const void* v_new;  // [N, num_kv_heads, v_dim]
  int64_t q_strides[2], k_new_strides[2], v_new_strides[2];
  const void* k_pages;    // [num_pages, page_size, num_kv_heads, k_dim] in `order`
  const void* v_pages;    // [num_pages, page_size, num_kv_heads, v_dim] likewise
  const float* k_scales;  // [num_pages, page_size, num_kv_heads] likewise, or null if kv is kSame
  const float* v_scales;
  PageOrder order;
  const int32_t* block_table;  // [batch, max_pages]
  const int32_t* seq_lens;     // [batch]
  const int32_t* qo_indptr;    // [batch + 1]
  const int64_t* tree_mask;    // [N, mask_words], or null: causal
  const void* sinks;           // [num_qo_heads] float if float_sinks, else in q's dtype, or null
  void* out;                   // [N, num_qo_heads, v_dim], contiguous
  float* lse;                  // [N, num_qo_heads]
  int64_t batch, max_pages, mask_words;
  int64_t num_qo_heads, num_kv_heads, k_dim, v_dim;
  float scale;
  float softcap;   // 0: none
  int64_t window;  // 0: none
  bool invariant;  // a node's result is that of decoding its path's tokens one by one
  bool float_sinks;
};

// x @ weight^T + bias
struct ProductArgs {
  DType dtype;
  const void* x;  // [rows, inputs]
  int64_t x_stride;
  const void* weight;      // [outputs, inputs], contiguous; with scales 4-bit codes, 32 bytes per group of 64; or
                           // [outputs, compressed_bytes(inputs)] if `compressed`
  const uint16_t* scales;  // [outputs, groups] float16, or null: weights in dtype
  const void* bias;        // [outputs] or null
  int64_t rows, outputs, inputs;
  bool by_input;    // the weight is [inputs, outputs], without scales
  bool compressed;  // bfloat16 weights, without loss (compressed.h)
  bool invariant;   // read by `linear` and `gated_mlp` alone: a row's bits don't depend on the other rows
};

struct LmHeadArgs {
  ProductArgs product;
  int64_t k;        // 1: argmax
  int64_t* tokens;  // [rows, k]
  float* values;    // [rows, k], already rounded to dtype; with lse, log-probabilities
  float* lse;       // [rows], natural logarithm of the sum of all exponentials; null: not needed
};

struct LinearArgs {
  ProductArgs product;
  void* out;  // [rows, outputs], contiguous
};

constexpr int64_t kMatrices = 4;  // of a call of `linears`

// Products of consecutive rows with the matrices of groups: rows ends[i - 1] to ends[i] with the i-th. Rows behind the
// last end become zeros.
struct GroupedLinearArgs {
  // All rows; weight [groups, outputs, inputs] or [groups, inputs, outputs], bias [groups, outputs] or null.
  ProductArgs product;
  const int64_t* ends;  // [groups], read when the operator runs
  int64_t groups;
  void* out;  // [rows, outputs], contiguous
};

enum class Activation : int { kSilu = 0, kGeluTanh = 1, kRelu = 2 };

// down(activation(gate(x)) * up(x)); the weights are never in 4-bit codes, and all compressed or none.
struct GatedMlpArgs {
  ProductArgs gate, up, down;  // of the same x; that of `down` isn't read
  Activation activation;
  void* out;  // [rows, outputs of down], contiguous
};

// x / sqrt(mean(x^2) + eps) * weight for each row; with a residual of x + residual, which is an output too.
struct RmsNormArgs {
  DType dtype;
  const void* x;  // [rows, size]
  int64_t x_stride;
  const void* residual;  // [rows, size], contiguous, or null
  void* sum;             // likewise
  const void* weight;    // [size]
  void* out;             // [rows, size], contiguous
  int64_t rows, size;
  float eps, offset;  // added to the mean, and to the weight
  bool round_first;   // the normalised row is rounded to dtype before it is multiplied with the weight
};

// x * cos + [-second half of x, first half of x] * sin
struct RotaryArgs {
  DType dtype;
  const void* x;  // [tokens, heads, size]
  int64_t x_strides[2];
  const void *cos, *sin;  // [tokens, size]
  int64_t angle_stride;
  void* out;  // [tokens, heads, size], contiguous
  int64_t tokens, heads, size;
};

struct PagedRows;  // paged_rows.h
struct CopySide;
struct AcceptedPaths;

struct Kernels {
  const char* name;
  void (*tree_attention)(const AttentionArgs&, int threads);
  int64_t (*attention_workspace)(const AttentionArgs&);  // bytes of one thread, for any number of nodes
  void (*lm_head_topk)(const LmHeadArgs&, int threads);
  // With at most kMatrices matrices; several have the same rows, types, `compressed` and `invariant`, and are stored by
  // output, without scales.
  void (*linears)(const LinearArgs*, int64_t count, int threads);
  void (*grouped_linear)(const GroupedLinearArgs&, int threads);
  void (*gated_mlp)(const GatedMlpArgs&, int threads);
  void (*rms_norm)(const RmsNormArgs&, int threads);
  void (*rotary)(const RotaryArgs&, int threads);
  // Rows of bfloat16 [outputs, inputs] of compressed ones.
  void (*decompress)(const uint8_t* rows, int64_t outputs, int64_t inputs, uint16_t* out, int threads);
  // Bytes that these and lm_head_topk keep, for any rows.
  int64_t (*linear_workspace)(DType, int64_t inputs, int64_t middle, bool by_input, int threads);
  // Writes row i of each sequence to position seq_lens + i.
  void (*append_rows)(const PagedRows& rows, const CopySide& side);
  // Writes the accepted nodes of all layers to positions seq_lens, seq_lens + 1, ...
  void (*commit_rows)(const PagedRows& rows, const CopySide& keys, const CopySide& values, int64_t layers,
                      const AcceptedPaths& paths, int threads);
};

// The kernels in use: the best set this machine can run, or the one named by SPECMEMO_CPU_ISA.
const Kernels& kernels();

// Names of all sets that were built and that this machine supports, best first; count in *count.
const char* const* available_isas(int* count);

// Choose a set by name (for tests); returns false when it was not built or can't run here.
bool use_isa(const char* name);

// The Zen generation of an AMD CPU with BF16 instructions: 4, or 5 for the fifth and newer ones; else 0.
int zen();

// Bytes of a core's L1 data cache; 32 KiB if unknown.
int64_t l1_bytes();

}  // namespace specmemo
