#include "compressed.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "threads.h"

namespace specmemo {
namespace {

// The index of weight i of a block's half among its low bytes: interleaved with their high bytes, the lower and the
// upper half of each 16 bytes are weights in order (decompress_half() in stored_weights.h).
struct Places {
  Places() {
    for (int i = 0; i < 64; ++i) of[i] = static_cast<uint8_t>(i % 32 / 8 * 16 + i / 32 * 8 + i % 8);
  }
  uint8_t of[64];
};

constexpr uint8_t kNoCode = 0xff;

// The 16 most frequent high bytes, ties by value, and the code of every byte.
void choose_codes(const uint16_t* weights, int64_t inputs, uint8_t* high, uint8_t* code) {
  uint32_t counts[2][256] = {};  // equal bytes follow each other often, and a count waits for the last one
  for (int64_t i = 0; i < inputs; ++i) ++counts[i % 2][weights[i] >> 8];
  int found[256], count = 0;
  for (int i = 0; i < 256; ++i)
    if ((counts[0][i] += counts[1][i]) != 0) found[count++] = i;
  std::stable_sort(found, found + count, [&](int a, int b) { return counts[0][a] > counts[0][b]; });
  std::memset(code, kNoCode, 256);
  for (int i = 0; i < std::min(count, 16); ++i) high[i] = static_cast<uint8_t>(found[i]), code[high[i]] = i;
}

bool compress_row(const uint16_t* weights, int64_t inputs, uint8_t* out) {
  static const Places places;
  RowHead head{};
  uint8_t code[256];
  choose_codes(weights, inputs, head.high, code);
  uint8_t* block = out + sizeof head;
  for (int64_t begin = 0; begin < inputs; begin += kBlockWeights, block += kBlockBytes) {
    std::memset(block, 0, kBlockBytes);
    const int64_t count = std::min(inputs - begin, kBlockWeights);
    for (int64_t i = 0; i < count; ++i) {
      const uint16_t weight = weights[begin + i];
      const int64_t half = i / 64, place = places.of[i % 64];
      uint8_t index = code[weight >> 8];
      if (index == kNoCode) {
        if (head.exceptions == kMostExceptions) return false;
        head.exception[head.exceptions].column = static_cast<uint16_t>(begin + i);
        head.exception[head.exceptions++].bits = weight;
        index = 0;
      }
      block[half * 64 + place] = static_cast<uint8_t>(weight);
      block[kBlockWeights + place] |= static_cast<uint8_t>(index << (4 * half));
    }
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
