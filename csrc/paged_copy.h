// Copies of rows into pages, and the walk of a draft tree: no arithmetic, one version for every instruction set.
#pragma once

#include <cstdint>

namespace specmemo {

struct PagedRows {
  const int32_t* block_table;  // [batch, max_pages]
  const int32_t* seq_lens;     // [batch]
  const int32_t* qo_indptr;    // [batch + 1]
  int64_t batch, max_pages, page_size;
};

// One of the two sides (keys or values), all sizes in bytes.
struct CopySide {
  const char* from;   // rows; strides say where layer and row are
  char* to;           // [layers, num_pages, page_size, row]
  int64_t row_bytes;  // bytes of one token, all heads
  int64_t from_row, from_layer, to_layer;
  int64_t from_head, head_bytes, heads;  // a row's heads may be apart in `from`
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
