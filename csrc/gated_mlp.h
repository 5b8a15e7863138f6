// Gated MLPs: gate, up, activation and product in one pass over the weights, then down.
#pragma once

#include "activation.h"
#include "linear.h"

namespace specmemo {
namespace {

// out[rows, outputs of gate] = activation(gate(x)) * up(x), each rounded to T, as separate layers do.
template <class T, class Products>
void run_gates(const ProductArgs& gate, const ProductArgs& up, Activation activation, typename T::Raw* out,
               char* shared, int threads) {
  struct Context {
    const ProductArgs& args;
    typename T::Raw* out;
    Outputs<T, Products> gate, up;
    Tasks<Products> tasks;
    Activation activation;
  } context{gate,
            out,
            Outputs<T, Products>(gate),
            Outputs<T, Products>(up),
            Tasks<Products>(gate.outputs, gate.inputs * T::kBits / 4, threads),
            activation};
  context.gate.prepare(shared, threads);
  context.up.prepare_as(context.gate);
  auto task = [](void* data, int64_t i) {
    const auto& c = *static_cast<Context*>(data);
    const int64_t size = c.gate.value_count();
    auto* sums = static_cast<char*>(arena(0, c.gate.sums_bytes() + 2 * size * 4));
    auto *gates = reinterpret_cast<float*>(sums + c.gate.sums_bytes()), *ups = gates + size;
    c.tasks.for_each_group(i, [&](int64_t first, int64_t count) {
      c.gate.compute(first, count, sums, gates);
      c.up.compute(first, count, sums, ups);
      for (int64_t at = 0; at < c.args.rows * Products::kGroupSize; at += kLanes)
        store(gates + at, T::round(activate(c.activation, load<VecF>(gates + at))) * load<VecF>(ups + at));
      for (int64_t r = 0; r < c.args.rows; ++r)
        store_values<T, Products::kGroupSize>(gates + r * Products::kGroupSize, count,
                                              c.out + r * c.args.outputs + first);
    });
  };
  parallel_parts(context.tasks.count, threads, task, &context);
}

// Bytes of run_gated_mlp's memory for `rows` rows: the activations, and the input of one product at a time.
template <class T, class Dot>
struct MlpMemory {
  MlpMemory(int64_t rows, int64_t inputs, int64_t middle) : activations(round_up(rows * middle * T::kBits / 8, 64)) {
    bytes = activations + std::max(prepared_bytes<T, Dot>(rows, inputs), prepared_bytes<T, Dot>(rows, middle));
  }
  int64_t activations, bytes;
};

// One pass of a gated MLP, with memory for its activations and for prepared input.
template <class T, class Products>
void run_mlp(const ProductArgs& gate, const ProductArgs& up, ProductArgs down, Activation activation,
             typename T::Raw* out, typename T::Raw* activations, char* prepared, int threads) {
  down.rows = gate.rows, down.x = activations, down.x_stride = gate.outputs;
  if (gate.outputs != 0) run_gates<T, Products>(gate, up, activation, activations, prepared, threads);
  const LinearArgs last{down, out};
  run_products<T, Products>(&last, 1, prepared, threads);
}

template <class T, class Dot>
void run_gated_mlp(const GatedMlpArgs& args, int threads) {
  typedef typename T::Raw Raw;
  if (args.down.outputs == 0) return;
  for (int64_t row = 0; row < args.gate.rows;) {
    const int64_t panels = rows_in_panels(args.gate, row);
    const ProductArgs gate = pass_of<T>(args.gate, row, panels), up = pass_of<T>(args.up, row, panels);
    const MlpMemory<T, Dot> sizes(gate.rows, gate.inputs, gate.outputs);
    auto* memory = static_cast<char*>(arena(1, sizes.bytes));
    by_storage<T>(gate.compressed, [&](auto stored) {
      typedef typename decltype(stored)::type Weights;
      const auto run = panels ? run_mlp<T, PanelProducts<T, Dot, Weights>> : run_mlp<T, RowProducts<T, Dot, Weights>>;
      run(gate, up, args.down, args.activation, static_cast<Raw*>(args.out) + row * args.down.outputs,
          reinterpret_cast<Raw*>(memory), memory + sizes.activations, threads);
    });
    row += gate.rows;
  }
}

}  // namespace
}  // namespace specmemo
