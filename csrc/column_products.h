// Products of few rows with a matrix [inputs, outputs] (GPT-2's Conv1D, the experts of gpt-oss), read once and in
// place.
//
// A block of outputs keeps its sums in the caches while the inputs pass by, kInputBlock rows of weights at a time. A
// sum's order depends neither on the other rows nor on the other outputs.
#pragma once

#include "row_products.h"
#include "threads.h"

namespace specmemo {
namespace {

constexpr int kColumnVecs = 2;
constexpr int64_t kColumnTile = kColumnVecs * kLanes;  // outputs whose sums are in registers
constexpr int64_t kColumnBlock = 256;                  // outputs of a task at most
constexpr int64_t kInputBlock = 16;
static_assert(kColumnBlock % kColumnTile == 0, "whole tiles in a block");

// A tile of weights as floats, and of sums as results. Two bfloat16 in a word are two floats after a shift and after a
// mask, so that these sums are first those of the even outputs, then those of the odd ones.
template <class T>
struct Column {
  typedef typename T::Raw Raw;
  static void load_tile(const Raw* p, VecF* out) {
    for (int v = 0; v < kColumnVecs; ++v) out[v] = T::load_vec(p + v * kLanes);
  }
  static void store_tile(const VecF* sums, Raw* p) {
    for (int v = 0; v < kColumnVecs; ++v) T::store_vec(p + v * kLanes, sums[v]);
  }
};

template <>
struct Column<BFloat16> {
  static void load_tile(const uint16_t* p, VecF* out) {
    const VecU words = load<VecU>(p);
    out[0] = low_halves(words), out[1] = high_halves(words);
  }
  static void store_tile(const VecF* sums, uint16_t* p) {
    const VecU even = bits_as<VecU>(BFloat16::round(sums[0])), odd = bits_as<VecU>(BFloat16::round(sums[1]));
    store(p, (even >> 16) | odd);
  }
};

// The first `count` outputs of a tile; zeros behind them.
template <class T>
inline void load_part(const typename T::Raw* p, int64_t count, VecF* out) {
  typename T::Raw padded[kColumnTile] = {};
  std::memcpy(padded, p, static_cast<size_t>(count) * sizeof *p);
  Column<T>::load_tile(padded, out);
}

// sums[r] += x[i][r] * weight[i] for `inputs` rows of weights and ROWS rows of x. `count`: outputs of the tile.
template <class T, int ROWS, bool WHOLE>
__attribute__((noinline)) void add_columns(const float* x, const typename T::Raw* weight, int64_t stride,
                                           int64_t inputs, int64_t count, const char* ahead, int64_t ahead_stride,
                                           float* sums, int64_t sums_stride) {
  VecF sum[ROWS][kColumnVecs];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kColumnVecs; ++v) sum[r][v] = load<VecF>(sums + r * sums_stride + v * kLanes);
  for (int64_t i = 0; i < inputs; ++i, x += ROWS, weight += stride, ahead += ahead_stride) {
    constexpr int64_t kBytes = kColumnTile * static_cast<int64_t>(sizeof(typename T::Raw));
#pragma GCC unroll 2
    for (int64_t byte = 0; byte < kBytes; byte += kLine) prefetch(ahead + byte);
    VecF w[kColumnVecs];
    if (WHOLE)
      Column<T>::load_tile(weight, w);
    else
      load_part<T>(weight, count, w);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const VecF element = splat(x[r]);
#pragma GCC unroll 2
      for (int v = 0; v < kColumnVecs; ++v) sum[r][v] = fused_multiply_add(sum[r][v], element, w[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kColumnVecs; ++v) store(sums + r * sums_stride + v * kLanes, sum[r][v]);
}

template <class T>
class ColumnProducts {
  typedef typename T::Raw Raw;

 public:
  ColumnProducts(const ProductArgs& args, Raw* out, int threads)
      : args_(args), out_(out), tiles_(Parts::at_most(args.rows, kRowTile)) {
    // Blocks as wide as possible, equally many for each thread.
    const int64_t each = (args.outputs + threads * kColumnBlock - 1) / (threads * kColumnBlock);
    block_ = round_up((args.outputs + each * threads - 1) / (each * threads), kColumnTile);
  }
  ColumnProducts(const ColumnProducts&) = delete;
  ColumnProducts& operator=(const ColumnProducts&) = delete;

  static int64_t memory_bytes(int64_t rows, int64_t inputs) { return rows * inputs * 4; }
  static int64_t thread_bytes(int64_t rows) { return rows * kColumnBlock * 4; }
  int64_t blocks() const { return (args_.outputs + block_ - 1) / block_; }

  // The input's rows: [tile][inputs, rows of the tile].
  void prepare(char* memory) {
    auto* x = reinterpret_cast<float*>(memory);
    x_ = x;
    for (int64_t t = 0; t < tiles_.count; ++t)
      for (int64_t i = 0; i < args_.inputs; ++i)
        for (int64_t r = tiles_.begin(t); r < tiles_.begin(t + 1); ++r)
          *x++ = T::to_float(static_cast<const Raw*>(args_.x)[r * args_.x_stride + i]);
  }

  // One block of outputs of all rows. `sums` has thread_bytes().
  void compute(int64_t block, float* sums) const {
    const int64_t first = block * block_, width = args_.outputs - first < block_ ? args_.outputs - first : block_;
    for (int64_t i = 0; i < args_.rows * block_; i += kLanes) store(sums + i, VecF{});
    const Raw* weight = static_cast<const Raw*>(args_.weight) + first;
    for (int64_t begin = 0; begin < args_.inputs; begin += kInputBlock) {
      const int64_t inputs = args_.inputs - begin < kInputBlock ? args_.inputs - begin : kInputBlock;
      const int64_t next = begin + inputs < args_.inputs ? inputs * args_.outputs : width - begin * args_.outputs;
      for (int64_t t = 0; t < tiles_.count; ++t) {
        const int64_t top = tiles_.begin(t), height = tiles_.size(t);
        const float* x = x_ + top * args_.inputs + begin * height;
        for (int64_t o = 0; o < width; o += kColumnTile) {
          const Raw* w = weight + begin * args_.outputs + o;
          // The next weights; all tiles but the first repeat a line that is there.
          const char* ahead = reinterpret_cast<const char*>(t == 0 ? w + next : w);
          add_rows<kRowTile>(height, x, w, inputs, width - o, ahead, t == 0 ? args_.outputs * kSize : 0,
                             sums + top * block_ + o);
        }
      }
    }
    for (int64_t r = 0; r < args_.rows; ++r)
      for (int64_t o = 0; o < width; o += kColumnTile) write(sums + r * block_ + o, r, first + o, width - o);
  }

 private:
  static constexpr int64_t kSize = sizeof(Raw);

  template <int ROWS>
  void add_rows(int64_t height, const float* x, const Raw* w, int64_t inputs, int64_t count, const char* ahead,
                int64_t ahead_stride, float* sums) const {
    if constexpr (ROWS > 0) {
      if (height < ROWS) return add_rows<ROWS - 1>(height, x, w, inputs, count, ahead, ahead_stride, sums);
      if (count >= kColumnTile)
        add_columns<T, ROWS, true>(x, w, args_.outputs, inputs, count, ahead, ahead_stride, sums, block_);
      else
        add_columns<T, ROWS, false>(x, w, args_.outputs, inputs, count, ahead, ahead_stride, sums, block_);
    }
  }

  void write(const float* sums, int64_t row, int64_t output, int64_t count) const {
    VecF values[kColumnVecs];
    for (int v = 0; v < kColumnVecs; ++v) values[v] = load<VecF>(sums + v * kLanes);
    const bool whole = count >= kColumnTile;
    if (args_.bias != nullptr) {
      VecF bias[kColumnVecs];
      load_part<T>(static_cast<const Raw*>(args_.bias) + output, whole ? kColumnTile : count, bias);
      for (int v = 0; v < kColumnVecs; ++v) values[v] += bias[v];
    }
    Raw* out = out_ + row * args_.outputs + output;
    if (whole) return Column<T>::store_tile(values, out);
    Raw padded[kColumnTile];
    Column<T>::store_tile(values, padded);
    std::memcpy(out, padded, static_cast<size_t>(count) * sizeof(Raw));
  }

  const ProductArgs& args_;
  Raw* out_;
  Parts tiles_;  // of rows
  int64_t block_;
  const float* x_ = nullptr;
};

// out[rows, outputs] = x @ weight + bias; `shared` has memory_bytes().
template <class T>
void run_columns(const ProductArgs& args, typename T::Raw* out, char* shared, int threads) {
  ColumnProducts<T> products(args, out, threads);
  products.prepare(shared);
  struct Context {
    const ColumnProducts<T>& products;
    int64_t bytes;
  } context{products, ColumnProducts<T>::thread_bytes(args.rows)};
  auto block = [](void* data, int64_t i) {
    const auto& c = *static_cast<Context*>(data);
    c.products.compute(i, static_cast<float*>(arena(0, c.bytes)));
  };
  parallel_for(products.blocks(), threads, block, &context);
}

}  // namespace
}  // namespace specmemo
