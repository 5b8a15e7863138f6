#include "compressed.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "threads.h"

namespace specmemo {
namespace {

// Index of weight i of a block's half among its low bytes: interleaved with their high bytes, the lower and the upper
// half of each 16 bytes are weights in order (decompress() in compressed_rows.h).
int64_t place(int64_t i) { return i % 32 / 8 * 16 + i / 32 * 8 + i % 8; }

bool compress_row(const uint16_t* weights, int64_t inputs, uint8_t* out) {
  std::memset(out, 0, static_cast<size_t>(compressed_bytes(inputs)));
  int64_t counts[256] = {};
  for (int64_t i = 0; i < inputs; ++i) ++counts[weights[i] >> 8];
  uint8_t order[256], code[256] = {};
  bool known[256] = {};
  for (int i = 0; i < 256; ++i) order[i] = static_cast<uint8_t>(i);
  std::stable_sort(order, order + 256, [&](uint8_t a, uint8_t b) { return counts[a] > counts[b]; });
  RowHead head{};
  for (int i = 0; i < 16; ++i)
    head.high[i] = order[i], code[order[i]] = static_cast<uint8_t>(i), known[order[i]] = true;
  for (int64_t i = 0; i < inputs; ++i) {
    const uint8_t high = static_cast<uint8_t>(weights[i] >> 8);
    const int64_t half = i % kBlockWeights / 64, at = place(i % 64);
    uint8_t* block = out + sizeof head + i / kBlockWeights * kBlockBytes;
    block[half * 64 + at] = static_cast<uint8_t>(weights[i]);
    block[kBlockWeights + at] |= static_cast<uint8_t>(code[high] << (4 * half));
    if (known[high]) continue;
    if (head.exceptions == kMostExceptions) return false;
    head.exception[head.exceptions].column = static_cast<uint16_t>(i);
    head.exception[head.exceptions++].bits = weights[i];
  }
  std::memcpy(out, &head, sizeof head);
  return true;
}

}  // namespace

bool compress_rows(const uint16_t* weights, int64_t rows, int64_t inputs, uint8_t* out, int threads) {
  struct Context {
    const uint16_t* weights;
    int64_t inputs;
    uint8_t* out;
    std::atomic<bool> failed;
  } context{weights, inputs, out, {false}};
  auto row = [](void* data, int64_t i) {
    auto& c = *static_cast<Context*>(data);
    if (c.failed) return;
    if (!compress_row(c.weights + i * c.inputs, c.inputs, c.out + i * compressed_bytes(c.inputs))) c.failed = true;
  };
  parallel_parts(rows, threads, row, &context);
  return !context.failed;
}

}  // namespace specmemo
