// bfloat16 weights in 12 bits without loss (layout: specmemo_kernels/ops/compressed_weights.py).
#pragma once

#include <cstdint>

namespace specmemo {

constexpr int64_t kBlockWeights = 128, kBlockBytes = kBlockWeights * 3 / 2;
constexpr int kMostExceptions = 11;

// Of each row, in front of its blocks.
struct RowHead {
  uint8_t high[16];  // the high byte of each code
  uint16_t exceptions;
  struct {
    uint16_t column, bits;
  } exception[kMostExceptions];
  uint16_t unused;
};
static_assert(sizeof(RowHead) == 64, "a cache line");

inline int64_t compressed_bytes(int64_t inputs) {
  return static_cast<int64_t>(sizeof(RowHead)) + (inputs + kBlockWeights - 1) / kBlockWeights * kBlockBytes;
}

// Compresses rows of `inputs` weights. Returns false, with some rows written, if one has too many exceptions.
bool compress_rows(const uint16_t* weights, int64_t rows, int64_t inputs, uint8_t* out, int threads);

}  // namespace specmemo
