// Linear layers, a pass over the weights for some rows at a time.
#pragma once

#include <algorithm>
#include <optional>
#include <type_traits>

#include "code_products.h"
#include "column_products.h"
#include "panel_products.h"
#include "row_products.h"
#include "threads.h"

namespace specmemo {
namespace {

// Rows of one pass over the weights; more rows take several passes.
constexpr int64_t kPassRows = 32;                                                 // but for PanelProducts
constexpr int64_t kMostRows = kPanelsPay ? kPassPanels * kPanelRows : kPassRows;  // of all products

// Outputs x @ weight^T + bias of some rows, a group at a time. `Products` computes the sums: of weights in dtype
// (RowProducts, or PanelProducts for many rows) or in 4-bit codes (CodeProducts).
template <class T, class Products>
class Outputs {
  typedef typename T::Raw Raw;

 public:
  static constexpr int64_t kGroupSize = Products::kGroupSize;

  explicit Outputs(const ProductArgs& args) : args_(args), products_(args) {}
  Outputs(const Outputs&) = delete;
  Outputs& operator=(const Outputs&) = delete;

  // Memory for prepare(), of the caller, shared by all threads.
  int64_t shared_bytes() const { return round_up(products_.memory_bytes(), 64); }
  void prepare(char* shared, int threads) { products_.prepare(shared, threads); }
  void prepare_as(const Outputs& other) { products_.prepare_as(other.products_); }

  // With room for a whole vector from every value on.
  int64_t value_count() const { return round_up(products_.value_rows() * kGroupSize, kLanes) + kLanes; }
  int64_t sums_bytes() const { return round_up(products_.sums_bytes(), 64); }

  // values[row * kGroupSize + i] = output first + i, rounded to T as a linear layer does. count <= kGroupSize;
  // `values` has room for value_count(), `sums` for sums_bytes().
  void compute(int64_t first, int64_t count, char* sums, float* values) const {
    products_.multiply(first, count, reinterpret_cast<VecF*>(sums), values);
    if (args_.bias != nullptr) {
      float bias[kGroupSize] = {};
      for (int64_t i = 0; i < count; ++i) bias[i] = T::to_float(static_cast<const Raw*>(args_.bias)[first + i]);
      for (int64_t r = 0; r < args_.rows; ++r)
        for (int64_t i = 0; i < kGroupSize; ++i) values[r * kGroupSize + i] += bias[i];
    }
    if (T::kBits == 32) return;
    for (int64_t i = 0; i < args_.rows * kGroupSize; i += kLanes) store(values + i, T::round(load<VecF>(values + i)));
  }

 private:
  const ProductArgs& args_;
  Products products_;
};

// Divides outputs into tasks of consecutive tiles.
template <class Products>
struct Tasks {
  static constexpr int64_t kTile = Products::kTile, kGroupSize = Products::kGroupSize;

  Tasks(int64_t outputs, int64_t row_bytes, int threads)
      : count(Products::task_count(outputs, row_bytes, threads)),
        outputs(outputs),
        tiles((outputs + kTile - 1) / kTile, count) {}

  // Calls function(first, count) for each group of kGroupSize outputs of a task.
  template <class Function>
  void for_each_group(int64_t task, Function function) const {
    const int64_t end = std::min(tiles.begin(task + 1) * kTile, outputs);
    for (int64_t first = tiles.begin(task) * kTile; first < end; first += kGroupSize)
      function(first, std::min(end - first, kGroupSize));
  }

  int64_t count, outputs;
  Parts tiles;
};

template <class T, int64_t kGroupSize>
inline void store_values(const float* values, int64_t count, typename T::Raw* out) {
  constexpr int64_t kRest = kGroupSize % kLanes;  // of a whole group
  for (int64_t i = 0; i < count; i += kLanes) {
    const VecF x = load<VecF>(values + i);
    if (count - i == kRest)
      store_lanes<T>(out + i, x, kRest);
    else
      store_lanes<T>(out + i, x, count - i);
  }
}

// out[rows, outputs] = x @ weight^T + bias with one matrix.
template <class T, class Products>
struct Matrix {
  typedef typename T::Raw Raw;

  Matrix(const LinearArgs& args, int threads)
      : args(args.product),
        out(static_cast<Raw*>(args.out)),
        outputs(args.product),
        tasks(args.product.outputs, args.product.inputs * T::kBits / 8, threads) {}

  void run(int64_t task) const {
    const int64_t sums_bytes = outputs.sums_bytes();
    auto* sums = static_cast<char*>(arena(0, sums_bytes + outputs.value_count() * 4));
    auto* values = reinterpret_cast<float*>(sums + sums_bytes);
    tasks.for_each_group(task, [&](int64_t first, int64_t count) {
      outputs.compute(first, count, sums, values);
      for (int64_t r = 0; r < args.rows; ++r)
        store_values<T, Products::kGroupSize>(values + r * Products::kGroupSize, count, out + r * args.outputs + first);
    });
  }

  const ProductArgs& args;
  Raw* out;
  Outputs<T, Products> outputs;
  Tasks<Products> tasks;
};

// The products of the same rows with up to kMatrices matrices, in one loop.
template <class T, class Products>
void run_products(const LinearArgs* all, int64_t count, char* shared, int threads) {
  std::optional<Matrix<T, Products>> matrices[kMatrices];
  int64_t tasks = 0;
  for (int64_t i = 0; i < count; ++i) {
    matrices[i].emplace(all[i], threads);
    if (i == 0)
      matrices[0]->outputs.prepare(shared, threads);
    else
      matrices[i]->outputs.prepare_as(matrices[0]->outputs);
    tasks += matrices[i]->tasks.count;
  }
  auto task = [](void* data, int64_t i) {
    const auto* matrix = static_cast<const std::optional<Matrix<T, Products>>*>(data);
    for (; i >= (*matrix)->tasks.count; ++matrix) i -= (*matrix)->tasks.count;
    (*matrix)->run(i);
  };
  parallel_parts(tasks, threads, task, matrices);
}

// function(Weights) with how a matrix is stored, as an empty type.
template <class Weights>
struct StoredAs {
  typedef Weights type;
};
template <class T, class Function>
auto by_storage(bool compressed, Function function) {
  if constexpr (std::is_same_v<T, BFloat16>)
    if (compressed) return function(StoredAs<CompressedWeights>{});
  return function(StoredAs<PlainWeights<T>>{});
}

// Bytes of prepared input.
template <class T, class Dot>
int64_t prepared_bytes(int64_t rows, int64_t inputs) {
  ProductArgs args{};
  args.rows = rows < kPassRows ? rows : kPassRows, args.inputs = inputs;
  const int64_t dense = Outputs<T, RowProducts<T, Dot>>(args).shared_bytes();
  const int64_t codes = Outputs<T, CodeProducts<T, Dot>>(args).shared_bytes();
  args.rows = rows;
  const int64_t panels = rows_in_panels(rows) > 0 ? Outputs<T, PanelProducts<T, Dot>>(args).shared_bytes() : 0;
  return std::max({dense, codes, panels});
}

// Rows of the pass from `row` on if PanelProducts compute it, otherwise 0.
inline int64_t rows_in_panels(const ProductArgs& args, int64_t row) {
  return args.invariant || args.scales != nullptr || args.by_input ? 0 : rows_in_panels(args.rows - row);
}

// The same arguments for the rows of that pass.
template <class T>
ProductArgs pass_of(ProductArgs args, int64_t row, int64_t in_panels) {
  args.x = static_cast<const typename T::Raw*>(args.x) + row * args.x_stride;
  args.rows = in_panels > 0 ? in_panels : std::min(args.rows - row, kPassRows);
  return args;
}

// The same rows with at most kMatrices matrices; several are stored alike, by output, without scales.
template <class T, class Dot>
void run_linears(const LinearArgs* all, int64_t count, int threads) {
  const ProductArgs& first = all[0].product;
  if (count == 1 && first.outputs == 0) return;
  for (int64_t row = 0; row < first.rows;) {
    const int64_t panels = rows_in_panels(first, row);
    LinearArgs parts[kMatrices];
    for (int64_t i = 0; i < count; ++i) {
      auto* out = static_cast<typename T::Raw*>(all[i].out);
      parts[i] = {pass_of<T>(all[i].product, row, panels), out + row * all[i].product.outputs};
    }
    const ProductArgs& part = parts[0].product;
    const int64_t bytes = part.by_input ? ColumnProducts<T>::memory_bytes(part.rows, part.inputs)
                                        : prepared_bytes<T, Dot>(part.rows, part.inputs);
    auto* shared = static_cast<char*>(arena(1, bytes));
    if (part.by_input)
      run_columns<T>(part, static_cast<typename T::Raw*>(parts[0].out), shared, threads);
    else if (part.scales != nullptr)
      run_products<T, CodeProducts<T, Dot>>(parts, count, shared, threads);
    else
      by_storage<T>(part.compressed, [&](auto stored) {
        typedef typename decltype(stored)::type Weights;
        const auto run =
            panels ? run_products<T, PanelProducts<T, Dot, Weights>> : run_products<T, RowProducts<T, Dot, Weights>>;
        run(parts, count, shared, threads);
      });
    row += part.rows;
  }
}

template <class T, class Dot>
void run_grouped(const GroupedLinearArgs& args, int threads) {
  typedef typename T::Raw Raw;
  const ProductArgs& all = args.product;
  Raw* out = static_cast<Raw*>(args.out);
  const int64_t row_bytes = all.compressed ? compressed_bytes(all.inputs) : all.inputs * sizeof(Raw);
  int64_t begin = 0;
  for (int64_t group = 0; group < args.groups; ++group) {
    const int64_t end = args.ends[group] < all.rows ? args.ends[group] : all.rows;
    if (end <= begin) continue;
    ProductArgs product = all;
    product.x = static_cast<const Raw*>(all.x) + begin * all.x_stride;
    product.weight = static_cast<const char*>(all.weight) + group * all.outputs * row_bytes;
    if (all.bias != nullptr) product.bias = static_cast<const Raw*>(all.bias) + group * all.outputs;
    product.rows = end - begin;
    const LinearArgs linear{product, out + begin * all.outputs};
    run_linears<T, Dot>(&linear, 1, threads);
    begin = end;
  }
  std::memset(out + begin * all.outputs, 0, static_cast<size_t>((all.rows - begin) * all.outputs) * sizeof(Raw));
}

}  // namespace
}  // namespace specmemo
