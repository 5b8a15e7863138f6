// Bytes of memory that products keep from one call to the next.
#pragma once

#include "gated_mlp.h"
#include "lm_head.h"

namespace specmemo {
namespace {

// Bytes of a thread's sums and values, of gate and of up.
template <class T, class Products>
int64_t thread_bytes(int64_t rows) {
  ProductArgs args{};
  args.rows = rows;
  const Outputs<T, Products> outputs(args);
  return outputs.sums_bytes() + outputs.value_count() * 8;
}

// Bytes that linear layers and lm_heads keep for any number of rows: of a gated MLP of these sizes (middle 0: of one
// product), and of every thread.
template <class T, class Dot>
int64_t linear_workspace(int64_t inputs, int64_t middle, bool by_input, int threads) {
  constexpr int64_t kPage = 4096;  // arenas are rounded up to it
  const int64_t shared = by_input ? ColumnProducts<T>::memory_bytes(kPassRows, inputs)
                                  : MlpMemory<T, Dot>(kMostRows, inputs, middle).bytes;
  const int64_t exponentials = kPassRows * 2 * static_cast<int64_t>(sizeof(VecF));  // of an lm_head
  const int64_t few_rows = by_storage<T>(true, [](auto stored) {
    return thread_bytes<T, RowProducts<T, Dot, typename decltype(stored)::type>>(kPassRows);
  });
  const int64_t each =
      std::max({few_rows + exponentials, kPanelsPay ? thread_bytes<T, PanelProducts<T, Dot>>(kMostRows) : 0,
                ColumnProducts<T>::thread_bytes(kPassRows)});
  return round_up(shared, kPage) + threads * (round_up(each, kPage) + kPieces * kPieceBytes);
}

}  // namespace
}  // namespace specmemo
