// The softmax of one tile of rows, one block of keys after the other.
#pragma once

#include "kernels.h"
#include "pack.h"

namespace specmemo {
namespace {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kMinusInf = -__builtin_inff();
constexpr int kTileRoom = (kTileRows + kLanes - 1) / kLanes * kLanes;  // rows of a tile, in whole vectors

// Softmax state of up to kTaskRows rows: output [rows][columns] not yet divided by `sum`, scores in units of log2.
struct State {
  float *output, *max, *sum;
};

inline float exp2_scalar(float x) { return exp2_nonpositive(splat(x))[0]; }

// state += part, both over the same rows. Adding a part that saw no key changes nothing.
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

// A tile's products of queries and keys, and which of them count.
struct Scores {
  float* scores;  // [count][kBlockKeys]
  int64_t first;  // row of the head that the tile begins with
  int count;
  const uint64_t* visible;  // [nodes], bit i: the block's key i is seen
  int64_t group;            // rows per node
  bool all_visible;
};

template <class T, class Dot>
class Weights {
  typedef typename Dot::Word Word;

 public:
  explicit Weights(const AttentionArgs& args) : args_(args) {}

  // A tile's scores into weights, and the factor that each row's output so far must be multiplied by. One pass over the
  // rows for their maxima and one for the weights: rows are independent, so the second has much to do at once.
  void weigh(const Scores& tile, const State& state, float* lane_sums, Word* out, float* factors) const {
    const int64_t first = tile.first;
    const int count = tile.count;
    const bool all = tile.all_visible;
    constexpr int kVecs = kBlockKeys / kLanes;
    // Scores become units of log2 while they are weighed, or before where that takes more than a factor.
    const bool before = args_.softcap != 0.0f || args_.scale <= 0.0f;
    const float unit = before ? 1.0f : args_.scale * kLog2e;
    // What float32 can't hold of the factor: it would cost float32 inputs a digit, others round more themselves.
    const float rest = before ? 0.0f : static_cast<float>(double(args_.scale) * 1.4426950408889634 - unit);
    alignas(64) float old[kTileRoom] = {}, now[kTileRoom] = {};
    for (int r = 0; r < count; ++r) {
      float* scores = tile.scores + r * kBlockKeys;
      const uint64_t visible = tile.visible[(first + r) / tile.group];
      VecF top = splat(kMinusInf);
      for (int v = 0; v < kVecs; ++v) {
        VecF s = load<VecF>(scores + v * kLanes);
        if (before) s = log2_units(s);
        if (!all) s = hide(s, visible >> (v * kLanes));
        if (before || !all) store(scores + v * kLanes, s);
        top = vmax(top, s);
      }
      old[r] = state.max[first + r];
      now[r] = max(top) * unit;
      if (!(now[r] > old[r])) now[r] = old[r];
      // Only scores of NaN or minus infinity: they must reach the sum.
      if (now[r] == kMinusInf && visible != 0) now[r] = 0.0f;
      state.max[first + r] = now[r];
      if (now[r] == kMinusInf) now[r] = 0.0f;  // nothing seen yet: any reference gives weights of zero
    }
    for (int r = 0; r < kTileRoom; r += kLanes)
      store(factors + r, exp2_nonpositive(load<VecF>(old + r) - load<VecF>(now + r)));
    for (int r = 0; r < count; ++r) {
      const float* scores = tile.scores + r * kBlockKeys;
      float* sums = lane_sums + (first + r) * kLanes;
      VecF weights[kVecs], total = load<VecF>(sums) * splat(factors[r]);
      for (int v = 0; v < kVecs; ++v) {
        const VecF score = load<VecF>(scores + v * kLanes);
        VecF power = score * splat(unit) - splat(now[r]);
        if (T::kBits == 32) power = power + vmax(score, splat(-1e30f)) * splat(rest);  // hidden keys stay hidden
        weights[v] = exp2_nonpositive(power);
        total = total + weights[v];
      }
      store(sums, total);
      store_weights(out + r * (kBlockKeys / Dot::kPerWord), weights);
    }
  }

 private:
  VecF log2_units(VecF s) const {
    if (args_.softcap == 0.0f) return s * splat(args_.scale * kLog2e);
    return tanh(s * splat(args_.scale / args_.softcap)) * splat(args_.softcap * kLog2e);
  }

  // Minus infinity for neighbouring keys whose bit (lowest first) isn't set.
  static VecF hide(VecF s, uint64_t visible) {
    const VecU seen = ((VecU{} + static_cast<uint32_t>(visible)) >> bits_as<VecU>(lane_index())) & 1u;
    return (seen != 0u) ? s : splat(kMinusInf);
  }

  static void store_weights(float* out, const VecF* weights) {
    for (int v = 0; v < kBlockKeys / kLanes; ++v) store(out + v * kLanes, weights[v]);
  }
#if defined(__AVX512BF16__)
  static void store_weights(uint32_t* out, const VecF* weights) {
    for (int v = 0; v < kBlockKeys / kLanes; v += 2)
      store(out + v * kLanes / 2, _mm512_cvtne2ps_pbh((__m512)weights[v + 1], (__m512)weights[v]));
  }
#endif

  const AttentionArgs& args_;
};

}  // namespace
}  // namespace specmemo
