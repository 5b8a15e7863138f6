// Writes rows to pages, copied or quantised.
#pragma once

#include "fetch.h"
#include "paged_rows.h"
#include "parts.h"
#include "quantise.h"
#include "threads.h"

namespace specmemo {
namespace {

enum class Way { kCaches, kPastCaches };

// Whole cache lines are written with non-temporal stores.
inline Way way([[maybe_unused]] const CopySide& side) {
#if defined(__SSE2__)
  if (side.type == KVType::kSame && side.head_bytes() % kLine == 0 && reinterpret_cast<uintptr_t>(side.to) % kLine == 0)
    return Way::kPastCaches;
#endif
  return Way::kCaches;
}

// One line by non-temporal stores, as few as possible: a core has few buffers for them.
inline void stream_line(char* to, const char* from) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), load<__m512i>(from));
#elif defined(__AVX2__)
  for (int i = 0; i < 64; i += 32) _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), load<__m256i>(from + i));
#elif defined(__SSE2__)
  for (int i = 0; i < 64; i += 16) _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), load<__m128i>(from + i));
#else
  std::memcpy(to, from, kLine);
#endif
}

inline void streamed() {  // fence before other threads read
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Writes all heads of a row to row `place` of all layers' pages, `next_head` rows apart. Prefetches the next layer's
// lines, if any: they are too far apart for the hardware prefetcher.
inline void copy_row(const CopySide& side, const char* from, int64_t place, int64_t next_head, Way way,
                     bool fetch_next) {
  const int64_t bytes = side.head_bytes();
  for (int64_t h = 0; h < side.heads; ++h, from += side.from_head, place += next_head) {
    char* to = side.to + place * bytes;
    if (fetch_next) prefetch_lines(from + side.from_layer, side.dim * side.element);
    if (way == Way::kPastCaches) {
      for (int64_t i = 0; i < bytes; i += kLine) stream_line(to + i, from + i);
      continue;
    }
    if (fetch_next) prefetch_lines(to + side.rows * bytes, bytes);
    if (side.type == KVType::kSame) {
      std::memcpy(to, from, static_cast<size_t>(bytes));
    } else {
      side.scales[place] = quantise_row(side.dtype, side.type, from, side.dim, reinterpret_cast<uint8_t*>(to));
    }
  }
}

void append_rows(const PagedRows& rows, const CopySide& side) {
  for (int64_t s = 0; s < rows.batch; ++s)
    for (int64_t i = rows.qo_indptr[s]; i < rows.qo_indptr[s + 1]; ++i) {
      const int64_t place = rows.place(s, rows.seq_lens[s] + i - rows.qo_indptr[s]);
      if (place < 0) continue;
      copy_row(side, side.row_from(0, i), place, rows.order.next_head(), Way::kCaches, false);
    }
}

void commit_rows(const PagedRows& rows, const CopySide& keys, const CopySide& values, int64_t layers,
                 const AcceptedPaths& paths, int threads) {
  int64_t accepted = 0;
  for (int64_t s = 0; s < rows.batch; ++s) accepted += paths.length[s] + 1;
  // Starting a second thread costs about as much as copying this many bytes.
  const bool small = layers * accepted * (keys.token_bytes() + values.token_bytes()) < 128 * 1024;
  struct Context {
    const PagedRows& rows;
    const CopySide* sides[2];
    const AcceptedPaths& paths;
    Parts layers;
  } context{rows, {&keys, &values}, paths, Parts(layers, small ? 1 : threads)};
  // Each task is a run of layers, so that a thread prefetches its own lines. Stores are non-temporal if possible: the
  // rows are read a step later, after all weights, and overwritten lines needn't be read first.
  auto some_layers = [](void* data, int64_t part) {
    const auto& c = *static_cast<Context*>(data);
    const int64_t end = c.layers.begin(part + 1), next_head = c.rows.order.next_head();
    const Way ways[] = {way(*c.sides[0]), way(*c.sides[1])};
    for (int64_t layer = c.layers.begin(part); layer < end; ++layer)
      for (int64_t s = 0; s < c.rows.batch; ++s)
        for (int64_t i = 0; i <= c.paths.length[s] && i < c.paths.width; ++i) {
          const int64_t row = c.rows.qo_indptr[s] + c.paths.index[s * c.paths.width + i];
          const int64_t place = c.rows.place(s, c.rows.seq_lens[s] + i);
          if (place < 0) continue;
          for (int k = 0; k < 2; ++k) {
            const CopySide& side = *c.sides[k];
            copy_row(side, side.row_from(layer, row), layer * side.rows + place, next_head, ways[k], layer + 1 < end);
          }
        }
    streamed();
  };
  parallel_for(context.layers.count, threads, some_layers, &context);
}

}  // namespace
}  // namespace specmemo
