// Rows of a step and their target pages.
#pragma once

#include "kernels.h"

namespace specmemo {

struct PagedRows {
  const int32_t* block_table;  // [batch, max_pages]
  const int32_t* seq_lens;     // [batch]
  const int32_t* qo_indptr;    // [batch + 1]
  int64_t batch, max_pages;
  PageOrder order;  // of keys, values and scales

  // A token's target: the row of its first head within a layer's pages; negative where it has no page.
  int64_t place(int64_t sequence, int64_t position) const {
    return order.row(block_table[sequence * max_pages + position / order.page_size], position % order.page_size);
  }
};

// Keys or values; strides in bytes.
struct CopySide {
  const char* from;  // rows of heads, with strides of layer, row and head
  int64_t from_layer, from_row, from_head;
  char* to;                     // [layers, rows, dim], elements of `type`, rows in PageOrder
  float* scales;                // [layers, rows] if the elements are codes
  int64_t rows;                 // of one layer's pages
  int64_t heads, dim, element;  // element: bytes of one number in `from`
  DType dtype;                  // of `from`; unused if rows are copied
  KVType type;

  const char* row_from(int64_t layer, int64_t row) const { return from + layer * from_layer + row * from_row; }
  int64_t head_bytes() const { return dim * (type == KVType::kSame ? element : 1); }  // in `to`
  int64_t token_bytes() const { return heads * head_bytes(); }
};

struct AcceptedPaths {
  const int32_t* index;   // [batch, width], nodes of each sequence's tree
  const int32_t* length;  // [batch], accepted drafts; -1: no nodes
  int64_t width;
};

}  // namespace specmemo
