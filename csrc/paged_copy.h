// Rows into pages, copied or quantised on the way, and the walk of a draft tree: one version for every instruction set.
#pragma once

#include "kernels.h"

namespace specmemo {

struct PagedRows {
  const int32_t* block_table;  // [batch, max_pages]
  const int32_t* seq_lens;     // [batch]
  const int32_t* qo_indptr;    // [batch + 1]
  int64_t batch, max_pages;
  PageOrder order;  // of keys, values and scales alike
};

// One of the two sides (keys or values); strides in bytes.
struct CopySide {
  const char* from;  // rows of heads; strides say where layer, row and head are
  int64_t from_layer, from_row, from_head;
  char* to;                     // [layers, rows, dim], elements of `type`; PageOrder says which row is where
  float* scales;                // [layers, rows] where the elements are codes
  int64_t rows;                 // of one layer's pages
  int64_t heads, dim, element;  // element: bytes of one number in `from`
  DType dtype;                  // of `from`; not looked at when rows are copied as they are
  KVType type;

  const char* row_from(int64_t layer, int64_t row) const { return from + layer * from_layer + row * from_row; }
  int64_t head_bytes() const { return dim * (type == KVType::kSame ? element : 1); }  // in `to`
  int64_t token_bytes() const { return heads * head_bytes(); }
};

// Row i of each sequence goes to position seq_lens + i.
void append_rows(const PagedRows& rows, const CopySide& side);

// Accepted nodes of all layers go to positions seq_lens, seq_lens + 1, ...
void commit_rows(const PagedRows& rows, const CopySide& keys, const CopySide& values, int64_t layers,
                 const int32_t* accept_index, const int32_t* accept_length, int64_t width, int threads);

void verify_tree_greedy(const int64_t* draft, const int64_t* target, const int32_t* parents, const int32_t* qo_indptr,
                        int64_t batch, int64_t max_depth, int32_t* accept_index, int32_t* accept_length,
                        int64_t* bonus_token);

}  // namespace specmemo
