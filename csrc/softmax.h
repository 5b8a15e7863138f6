// Online softmax of a group of tiles of rows, block by block.
#pragma once

#include "kernels.h"
#include "pack.h"
#include "vec_math.h"

namespace specmemo {
namespace {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kMinusInf = -__builtin_inff();

// Tiles per softmax pass: a row's maximum has a long latency, which many rows share.
constexpr int kGroupTiles = 8;
constexpr int kGroupRows = kGroupTiles * kTileRows;
constexpr int kGroupRoom = (kGroupRows + kLanes - 1) / kLanes * kLanes;  // in whole vectors

// Softmax state of one head's rows: output [rows][columns] before division by `sum`, scores in base 2.
struct State {
  float *output, *max, *sum;

  State from(int64_t row, int64_t columns) const { return {output + row * columns, max + row, sum + row}; }
};

// States of a task's heads: all outputs, then all maxima, then all sums.
struct States {
  float* memory;
  int64_t heads, rows, columns;

  State of(int64_t head) const {
    float* max = memory + heads * rows * columns;
    return State{memory + head * rows * columns, max + head * rows, max + (heads + head) * rows};
  }

  // Padded, because a whole vector is read from a row's maximum on.
  int64_t floats() const { return heads * rows * (columns + 2) + kLanes; }
};

// All heads of a task with `rows` rows each; of all its nodes.
template <class Word>
struct HeadsOfRows {
  int64_t heads, rows;
  const Word* query;  // [heads][rows][k_words]
  const States& states;
  float* lane_sums;         // [heads][rows][kLanes]
  const uint64_t* visible;  // [nodes]
  float* scores;            // [kGroupRows][kBlockKeys]
};

// Some nodes of a task.
struct Run {
  int64_t first, nodes;
};

inline float exp2_scalar(float x) { return exp2_nonpositive(splat(x))[0]; }

// state += part, both over the same rows. A part without a visible key changes nothing.
inline void merge(const State& state, const State& part, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    if (part.max[r] == kMinusInf) continue;
    const float top = state.max[r] > part.max[r] ? state.max[r] : part.max[r];
    const float keep = state.max[r] == kMinusInf ? 0.0f : exp2_scalar(state.max[r] - top);
    const float add = exp2_scalar(part.max[r] - top);
    float *out = state.output + r * columns, *in = part.output + r * columns;
    for (int64_t c = 0; c < columns; c += kLanes)
      store(out + c, load<VecF>(out + c) * splat(keep) + load<VecF>(in + c) * splat(add));
    state.sum[r] = state.sum[r] * keep + part.sum[r] * add;
    state.max[r] = top;
  }
}

// A group's scores and their mask.
struct Scores {
  float* scores;  // [count][kBlockKeys]
  int64_t first;  // the group's first row of the head
  int count;
  const uint64_t* visible;  // [nodes], bit i: the block's key i is visible
  int64_t rows_per_node;
  bool all_visible;
};

template <class T, class Dot>
class Weights {
  typedef typename Dot::Word Word;

 public:
  explicit Weights(const AttentionArgs& args) : args_(args) {}

  // Converts scores to weights in place, [count][kBlockKeys words], and computes each row's factor of its previous
  // output. One pass over the rows for the maxima and one for the weights: independent rows hide the latencies.
  const Word* weigh(const Scores& group, const State& state, float* lane_sums, float* factors) const {
    constexpr int kVecs = kBlockKeys / kLanes;
    // Scores are converted to base 2 with the weights, or before if that takes more than a factor.
    const bool before = args_.softcap != 0.0f || args_.scale <= 0.0f;
    const float unit = before ? 1.0f : args_.scale * kLog2e;
    // The factor's rounding error in float32, which would cost float32 inputs a digit.
    const float rest = before ? 0.0f : static_cast<float>(double(args_.scale) * 1.4426950408889634 - unit);
    alignas(64) float now[kGroupRoom];
    maxima(group, before, unit, state.max + group.first, now, factors);
    for (int r = 0; r < group.count; ++r) {
      float* scores = group.scores + r * kBlockKeys;
      float* sums = lane_sums + (group.first + r) * kLanes;
      VecF weights[kVecs], total = load<VecF>(sums) * splat(factors[r]);
      for (int v = 0; v < kVecs; ++v) {
        const VecF score = load<VecF>(scores + v * kLanes);
        VecF power = score * splat(unit) - splat(now[r]);
        if (T::kBits == 32) power = power + vmax(score, splat(-1e30f)) * splat(rest);  // masked keys stay masked
        weights[v] = exp2_nonpositive(power);
        total = total + weights[v];
      }
      store(sums, total);
      Dot::store_words(scores, weights, kVecs);
    }
    return reinterpret_cast<const Word*>(group.scores);
  }

 private:
  // Masks scores, updates each row's maximum in the state, and computes its factor.
  void maxima(const Scores& group, bool before, float unit, float* state_max, float* now, float* factors) const {
    int64_t node = group.first / group.rows_per_node, in_node = group.first % group.rows_per_node;
    for (int first = 0; first < group.count; first += kLanes) {
      uint32_t has_visible = 0;  // bit i: row first + i has a visible key in this block
      VecF top[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        top[i] = splat(kMinusInf);
        if (first + i >= group.count) continue;
        const uint64_t visible = group.visible[node];
        has_visible |= static_cast<uint32_t>(visible != 0) << i;
        if (++in_node == group.rows_per_node) ++node, in_node = 0;
        top[i] = highest(group.scores + (first + i) * kBlockKeys, visible, before, group.all_visible);
      }
      transpose(top);
      for (int i = 1; i < kLanes; ++i) top[0] = vmax(top[0], top[i]);
      // Lanes past the rows are unused.
      const VecF previous = load<VecF>(state_max + first), block_max = top[0] * splat(unit);
      VecF maximum = block_max > previous ? block_max : previous;
      // Only scores of NaN or minus infinity: they must reach the sum. Any later score is above this maximum.
      maximum = maximum == splat(kMinusInf) ? hide(splat(-3e38f), has_visible) : maximum;
      store_lanes<Float32>(state_max + first, maximum, group.count - first);
      maximum = maximum == splat(kMinusInf) ? VecF{} : maximum;  // no visible key yet: any reference gives zero weights
      store(now + first, maximum);
      store(factors + first, exp2_nonpositive(previous - maximum));
    }
  }

  // The maximum of a row's scores per lane; masked or converted scores are written back.
  VecF highest(float* scores, uint64_t visible, bool before, bool all_visible) const {
    VecF top = splat(kMinusInf);
    for (int v = 0; v < kBlockKeys / kLanes; ++v) {
      VecF s = load<VecF>(scores + v * kLanes);
      if (before) s = log2_units(s);
      if (!all_visible) s = hide(s, visible >> (v * kLanes));
      if (before || !all_visible) store(scores + v * kLanes, s);
      top = vmax(top, s);
    }
    return top;
  }

  VecF log2_units(VecF s) const {
    if (args_.softcap == 0.0f) return s * splat(args_.scale * kLog2e);
    return tanh(s * splat(args_.scale / args_.softcap)) * splat(args_.softcap * kLog2e);
  }

  // Minus infinity for neighbouring keys whose bit (lowest first) isn't set.
  static VecF hide(VecF s, uint64_t visible) {
    const VecU bits = (VecU{} + 1u) << bits_as<VecU>(lane_index());
    return ((bits & static_cast<uint32_t>(visible)) != 0u) ? s : splat(kMinusInf);
  }

  const AttentionArgs& args_;
};

}  // namespace
}  // namespace specmemo
