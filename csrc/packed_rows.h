// Rows of queries over a block of keys and values that are packed once for all of them (pack.h), head by head.
#pragma once

#include "dequantise.h"
#include "softmax.h"

namespace specmemo {
namespace {

inline bool is_quantised(const AttentionArgs& args) { return args.kv != KVType::kSame; }

// Whether values must be copied first: they are codes, or their rows aren't whole vectors.
inline bool values_are_staged(const AttentionArgs& args) { return is_quantised(args) || args.v_dim % kLanes != 0; }

template <class Raw>
struct PackingBuffers {
  float *keys, *values;              // [k_words][kBlockKeys], [kBlockKeys / kPerWord][columns]
  Raw *staged_keys, *staged_values;  // [kBlockKeys][k_dim], [kBlockKeys][columns]
};

template <class T, class Dot>
class PackedRows {
  typedef typename T::Raw Raw;
  typedef typename Dot::Word Word;

 public:
  PackedRows(const AttentionArgs& args, int64_t k_words, int64_t columns, const PackingBuffers<Raw>& buffers)
      : args_(args),
        to_(buffers),
        k_words_(k_words),
        columns_(columns),
        group_(args.num_qo_heads / args.num_kv_heads) {}

  // Some nodes over the first `keys` keys of a block. `read`: the first head's rows of this block, replaced by those of
  // `ahead`, which are prefetched.
  void run_block(const Block& block, const Block& ahead, int64_t keys, const Run& run, HeadRows& read,
                 const HeadsOfRows<Word>& all) const {
    const int64_t rows = run.nodes * group_;
    const bool staged = values_are_staged(args_);
    for (int64_t h = 0; h < all.heads; ++h) {
      const HeadRows next = h + 1 < all.heads ? block.head(h + 1) : ahead.head(0);
      const Upcoming upcoming(staged ? next : read, next);
      if (staged) stage(block, h, read, next);
      Fetch fetch = fetch_ahead(upcoming, rows, keys);
      pack_keys<T, Dot>(read.keys.at, keys, args_.k_dim, to_.keys, fetch);
      const int64_t in_head = run.first * group_, row = h * all.rows + in_head;
      run_head(rows, read, keys, all.scores, all.visible + run.first, all.query + row * k_words_,
               all.lane_sums + row * kLanes, all.states.of(h).from(in_head, columns_), fetch);
      read = next;
    }
  }

 private:
  // Dequantises rows into the buffers and prefetches the next block's codes.
  void stage(const Block& block, int64_t head, HeadRows& now, const HeadRows& ahead) const {
    const int64_t k_dim = args_.k_dim, v_dim = args_.v_dim;
    for (int i = 0; i < kBlockKeys; ++i) {
      const bool coded = is_quantised(args_) && block.scales[i] >= 0;
      const int64_t scale = block.scales[i] + head * args_.order.next_head();
      Raw *k = to_.staged_keys + i * k_dim, *v = to_.staged_values + i * columns_;
      if (is_quantised(args_)) {
        prefetch_lines(ahead.keys.at[i], k_dim);
        prefetch_lines(ahead.values.at[i], v_dim);
      }
      if (coded) {
        dequantise_row<T>(args_.kv, reinterpret_cast<const uint8_t*>(now.keys.at[i]), args_.k_scales[scale], k_dim, k);
        dequantise_row<T>(args_.kv, reinterpret_cast<const uint8_t*>(now.values.at[i]), args_.v_scales[scale], v_dim,
                          v);
        now.keys.at[i] = reinterpret_cast<const char*>(k);
      } else {
        std::memcpy(v, now.values.at[i], static_cast<size_t>(v_dim * static_cast<int64_t>(sizeof(Raw))));
      }
      now.values.at[i] = reinterpret_cast<const char*>(v);
    }
  }

  // Prefetch of the next rows, spread evenly over the work of this block; codes were prefetched before.
  Fetch fetch_ahead(const Upcoming& next, int64_t rows, int64_t keys) const {
    const int64_t wider = args_.k_dim > args_.v_dim ? args_.k_dim : args_.v_dim;
    const int64_t vectors = k_words_ / kLanes * keys;
    const int64_t steps = tiles_of(rows).count * (k_words_ * strips(keys) + keys / Dot::kPerWord * strips(columns_));
    return Fetch(next, is_quantised(args_) ? 0 : wider * static_cast<int64_t>(sizeof(Raw)), vectors, steps);
  }

  // One head's rows over the first `keys` keys of the block; the others are masked.
  void run_head(int64_t rows, const HeadRows& block, int64_t keys, float* scores, const uint64_t* visible,
                const Word* query, float* lane_sums, const State& state, Fetch& fetch) const {
    const Parts tiles = tiles_of(rows);
    // With one group the keys aren't needed when values are packed: the shared buffer saves L1 cache.
    float* values = tiles.count <= kGroupTiles ? to_.keys : to_.values;
    bool packed = tiles.count == 1;  // a single tile reads values in place
    for (int64_t begin = 0; begin < tiles.count; begin += kGroupTiles) {
      const int64_t end = begin + kGroupTiles < tiles.count ? begin + kGroupTiles : tiles.count;
      const int64_t first = tiles.begin(begin), last = tiles.begin(end) - 1;
      uint64_t some = 0, all = ~uint64_t{0};
      for (int64_t node = first / group_; node <= last / group_; ++node) {
        some |= visible[node];
        all &= visible[node];
      }
      if (some == 0) continue;
      for (int64_t t = begin; t < end; ++t)
        multiply<Dot>(tiles.size(t), query + tiles.begin(t) * k_words_, k_words_, PackedColumns{to_.keys, kBlockKeys},
                      k_words_, scores + (tiles.begin(t) - first) * kBlockKeys, kBlockKeys, nullptr, keys / kLanes,
                      fetch);
      alignas(64) float factors[kGroupRoom];
      const Scores group{scores, first, static_cast<int>(last + 1 - first), visible, group_, all == ~uint64_t{0}};
      const Word* weights = Weights<T, Dot>(args_).weigh(group, state, lane_sums, factors);
      if (!packed) pack_values<T, Dot>(block.values.at, keys, columns_, values);
      packed = true;
      for (int64_t t = begin; t < end; ++t) {
        const int64_t row = tiles.begin(t);
        const auto add = [&](const auto& columns) {
          multiply<Dot>(tiles.size(t), weights + (row - first) * kBlockKeys, kBlockKeys, columns, keys / Dot::kPerWord,
                        state.output + row * columns_, columns_, factors + (row - first), columns_ / kLanes, fetch);
        };
        if (tiles.count == 1) {
          add(ValueRows<T, Dot>{block.values.at});
        } else {
          add(PackedColumns{values, columns_});
        }
      }
    }
  }

  const AttentionArgs& args_;
  const PackingBuffers<Raw>& to_;
  int64_t k_words_, columns_, group_;
};

}  // namespace
}  // namespace specmemo
