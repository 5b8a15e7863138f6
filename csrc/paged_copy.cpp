#include "paged_copy.h"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

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

constexpr int64_t kLine = 64;

enum class Way { kCaches, kPastCaches };

// Past the caches goes what is whole lines.
Way way(const CopySide& side) {
#if defined(__SSE2__)
  if (side.type == KVType::kSame && side.head_bytes() % kLine == 0 && reinterpret_cast<uintptr_t>(side.to) % kLine == 0)
    return Way::kPastCaches;
#endif
  return Way::kCaches;
}

void stream(char* to, const char* from, int64_t bytes, int64_t next) {
  for (int64_t i = 0; i < bytes; i += kLine) {
    __builtin_prefetch(from + next + i);
#if defined(__SSE2__)
    const auto* source = reinterpret_cast<const __m128i*>(from + i);
    auto* target = reinterpret_cast<__m128i*>(to + i);
    for (int k = 0; k < 4; ++k) _mm_stream_si128(target + k, _mm_loadu_si128(source + k));
#else
    std::memcpy(to + i, from + i, kLine);
#endif
  }
}

void streamed() {  // before anybody else reads it
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

void fetch(const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(from + i);
}

// One row in all its heads. What the next layer needs (if there is a next one) is fetched meanwhile, as much as is
// copied at a time: rows lie far apart, where no hardware sees a pattern, and a core can't wait for many lines at once.
void copy_row(const CopySide& side, int64_t layer, int64_t row, Place place, Way way, bool fetch_next) {
  const char* from = side.row_from(layer, row);
  const int64_t next_from = fetch_next ? side.from_layer : 0;
  const int64_t next_to = fetch_next ? side.rows * side.head_bytes() : 0;
  place.row += layer * side.rows;
  for (int64_t h = 0; h < side.heads; ++h, from += side.from_head, place.row += place.next_head) {
    char* to = side.to + place.row * side.head_bytes();
    if (way == Way::kPastCaches) {
      stream(to, from, side.head_bytes(), next_from);
      continue;
    }
    fetch(from + next_from, side.dim * side.element);
    fetch(to + next_to, side.head_bytes());
    if (side.type == KVType::kSame) {
      std::memcpy(to, from, static_cast<size_t>(side.head_bytes()));
    } else {
      side.scales[place.row] = quantise_row(side.dtype, side.type, from, side.dim, reinterpret_cast<uint8_t*>(to));
    }
  }
}

}  // namespace

void append_rows(const PagedRows& rows, const CopySide& side) {
  for (int64_t s = 0; s < rows.batch; ++s)
    for (int64_t i = rows.qo_indptr[s]; i < rows.qo_indptr[s + 1]; ++i)
      copy_row(side, 0, i, place(rows, s, rows.seq_lens[s] + i - rows.qo_indptr[s]), Way::kCaches, false);
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
  // Some layers one after the other, so that a thread fetches what it copies itself. What is written goes past the
  // caches where it can: it is read a step later, after all weights, and memory that is overwritten isn't read first.
  auto some_layers = [](void* data, int64_t part) {
    const auto& c = *static_cast<Context*>(data);
    const int64_t end = c.layers * (part + 1) / c.parts;
    const Way ways[] = {way(*c.sides[0]), way(*c.sides[1])};
    for (int64_t layer = c.layers * part / c.parts; layer < end; ++layer)
      for (int64_t s = 0; s < c.rows.batch; ++s)
        for (int64_t i = 0; i <= c.length[s] && i < c.width; ++i) {
          const int64_t row = c.rows.qo_indptr[s] + c.index[s * c.width + i];
          const Place to = place(c.rows, s, c.rows.seq_lens[s] + i);
          for (int k = 0; k < 2; ++k) copy_row(*c.sides[k], layer, row, to, ways[k], layer + 1 < end);
        }
    streamed();
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
