#include "paged_copy.h"

#include <cstring>

#include "quantise.h"
#include "threads.h"

namespace specmemo {
namespace {

// Where a token goes: the row of its first head within a layer's pages, and how far it is to the next head's.
struct Place {
  int64_t row, next_head;
};

Place place(const PagedRows& rows, int64_t sequence, int64_t position) {
  const PageOrder& order = rows.order;
  const int32_t page = rows.block_table[sequence * rows.max_pages + position / order.page_size];
  return {order.row(page, position % order.page_size), order.next_head()};
}

void copy_token(const CopySide& side, int64_t layer, int64_t row, Place place) {
  const char* from = side.row_from(layer, row);
  const auto bytes = static_cast<size_t>(side.head_bytes());
  place.row += layer * side.rows;
  if (side.type == KVType::kSame && place.next_head == 1 && side.from_head == side.head_bytes()) {
    std::memcpy(side.to + place.row * side.head_bytes(), from, static_cast<size_t>(side.token_bytes()));
    return;
  }
  for (int64_t h = 0; h < side.heads; ++h, from += side.from_head, place.row += place.next_head) {
    char* to = side.to + place.row * side.head_bytes();
    if (side.type == KVType::kSame) {
      std::memcpy(to, from, bytes);
    } else {
      side.scales[place.row] = quantise_row(side.dtype, side.type, from, side.dim, reinterpret_cast<uint8_t*>(to));
    }
  }
}

// Tokens lie far apart, where no hardware sees a pattern. What is written has to be fetched as well.
void fetch_token(const CopySide& side, int64_t layer, int64_t row, Place place) {
  const char* from = side.row_from(layer, row);
  const char* to = side.to + (layer * side.rows + place.row) * side.head_bytes();
  for (int64_t i = 0; i < side.heads * side.dim * side.element; i += 64) __builtin_prefetch(from + i, 0);
  for (int64_t h = 0; h < side.heads; ++h, to += place.next_head * side.head_bytes())
    for (int64_t i = 0; i < side.head_bytes(); i += 64) __builtin_prefetch(to + i, 1);
}

}  // namespace

void append_rows(const PagedRows& rows, const CopySide& side) {
  for (int64_t s = 0; s < rows.batch; ++s)
    for (int64_t i = rows.qo_indptr[s]; i < rows.qo_indptr[s + 1]; ++i)
      copy_token(side, 0, i, place(rows, s, rows.seq_lens[s] + i - rows.qo_indptr[s]));
}

void commit_rows(const PagedRows& rows, const CopySide& keys, const CopySide& values, int64_t layers,
                 const int32_t* accept_index, const int32_t* accept_length, int64_t width, int threads) {
  int64_t accepted = 0;
  for (int64_t s = 0; s < rows.batch; ++s) accepted += accept_length[s] + 1;
  // Starting a second thread costs about as much as copying this many bytes.
  const bool small = layers * accepted * (keys.token_bytes() + values.token_bytes()) < 128 * 1024;
  struct Context {
    const PagedRows& rows;
    const CopySide* sides[2];
    const int32_t *index, *length;
    int64_t width, layers, parts;
  } context{rows, {&keys, &values}, accept_index, accept_length, width, layers, small ? 1 : threads};
  // Some layers one after the other, so that a thread fetches what it copies itself.
  auto some_layers = [](void* data, int64_t part) {
    const auto& c = *static_cast<Context*>(data);
    const int64_t end = c.layers * (part + 1) / c.parts;
    for (int64_t layer = c.layers * part / c.parts; layer < end; ++layer)
      for (int64_t s = 0; s < c.rows.batch; ++s)
        for (int64_t i = 0; i <= c.length[s] && i < c.width; ++i) {
          const int64_t row = c.rows.qo_indptr[s] + c.index[s * c.width + i];
          const Place to = place(c.rows, s, c.rows.seq_lens[s] + i);
          for (const CopySide* side : c.sides) {
            if (layer + 1 < end) fetch_token(*side, layer + 1, row, to);
            copy_token(*side, layer, row, to);
          }
        }
  };
  parallel_for(context.parts, threads, some_layers, &context);
}

void verify_tree_greedy(const int64_t* draft, const int64_t* target, const int32_t* parents, const int32_t* qo_indptr,
                        int64_t batch, int64_t max_depth, int32_t* accept_index, int32_t* accept_length,
                        int64_t* bonus_token) {
  const int64_t width = max_depth + 1;
  for (int64_t s = 0; s < batch; ++s) {
    const int64_t first = qo_indptr[s], nodes = qo_indptr[s + 1] - first;
    int32_t* path = accept_index + s * width;
    for (int64_t i = 0; i < width; ++i) path[i] = -1;
    accept_length[s] = -1;
    bonus_token[s] = -1;
    if (nodes == 0) continue;
    int64_t node = 0, length = 0;
    path[0] = 0;
    while (length < max_depth) {
      int64_t child = node + 1;  // parents come before their children
      while (child < nodes && !(parents[first + child] == node && draft[first + child] >= 0 &&
                                draft[first + child] == target[first + node]))
        ++child;
      if (child == nodes) break;
      node = child;
      path[++length] = static_cast<int32_t>(node);
    }
    accept_length[s] = static_cast<int32_t>(length);
    bonus_token[s] = target[first + node];
  }
}

}  // namespace specmemo
