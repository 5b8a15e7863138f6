// One block of keys and values, from pages or the step's new rows, in the layout of tile.h.
//
//   keys    packed: [k_words][kBlockKeys], word w of every key contiguous (a transposition)
//   values  read in place, or packed: [kBlockKeys / kPerWord][v_columns]; word = a pair of keys, or one
//
// A slot without a key points to a row of zeros: slots that were never written aren't read.
#pragma once

#include "blocks.h"
#include "tile.h"

namespace specmemo {
namespace {

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Transpose kLanes x kLanes words: columns[i] lane j becomes row j's word i.
inline void transpose(VecF rows[kLanes]) {
#if defined(__AVX512F__)
  __m512 t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps((__m512)rows[2 * i], (__m512)rows[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps((__m512)rows[2 * i], (__m512)rows[2 * i + 1]);
  }
  __m512 u[16];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const __m512d a = (__m512d)t[4 * i + j], b = (__m512d)t[4 * i + 2 + j];
      u[4 * i + 2 * j] = (__m512)_mm512_unpacklo_pd(a, b);
      u[4 * i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd(a, b);
    }
  }
  // u[4i + c] holds word 4q + c of rows 4i..4i+3 in its 128-bit quarter q.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512 low01 = _mm512_shuffle_f32x4(u[c], u[4 + c], 0x44),
                 high01 = _mm512_shuffle_f32x4(u[c], u[4 + c], 0xee);
    const __m512 low23 = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0x44);
    const __m512 high23 = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0xee);
    rows[c] = (VecF)_mm512_shuffle_f32x4(low01, low23, 0x88);
    rows[4 + c] = (VecF)_mm512_shuffle_f32x4(low01, low23, 0xdd);
    rows[8 + c] = (VecF)_mm512_shuffle_f32x4(high01, high23, 0x88);
    rows[12 + c] = (VecF)_mm512_shuffle_f32x4(high01, high23, 0xdd);
  }
#elif defined(__AVX2__)
  __m256 t[8], u[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps((__m256)rows[2 * i], (__m256)rows[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps((__m256)rows[2 * i], (__m256)rows[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const __m256d a = (__m256d)t[4 * i + j], b = (__m256d)t[4 * i + 2 + j];
      u[4 * i + 2 * j] = (__m256)_mm256_unpacklo_pd(a, b);
      u[4 * i + 2 * j + 1] = (__m256)_mm256_unpackhi_pd(a, b);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    rows[c] = (VecF)_mm256_permute2f128_ps(u[c], u[4 + c], 0x20);
    rows[4 + c] = (VecF)_mm256_permute2f128_ps(u[c], u[4 + c], 0x31);
  }
#elif defined(__aarch64__)
  const auto even = [](VecF a, VecF b) { return (float64x2_t)vtrn1q_f32((float32x4_t)a, (float32x4_t)b); };
  const auto odd = [](VecF a, VecF b) { return (float64x2_t)vtrn2q_f32((float32x4_t)a, (float32x4_t)b); };
  const float64x2_t a = even(rows[0], rows[1]), b = odd(rows[0], rows[1]);
  const float64x2_t c = even(rows[2], rows[3]), d = odd(rows[2], rows[3]);
  rows[0] = (VecF)vtrn1q_f64(a, c), rows[1] = (VecF)vtrn1q_f64(b, d);
  rows[2] = (VecF)vtrn2q_f64(a, c), rows[3] = (VecF)vtrn2q_f64(b, d);
#else
  static_assert(kLanes == 4, "four words a vector");
  VecF t[4] = {};
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) t[i][j] = rows[j][i];
  for (int i = 0; i < 4; ++i) rows[i] = t[i];
#endif
}

// Conversion of one row of keys from elements of type T to words of Dot. kWords: consecutive words per lane of load(),
// of which part() returns each lane's i-th. They are transposed together and then split: half as many transpositions.
template <class T, class Dot>
struct KeyWords {
  static constexpr int kWords = 1;
  static VecF load_words(const typename T::Raw* row, int64_t word) { return T::load_vec(row + word); }
  static float word(const typename T::Raw* row, int64_t word, int64_t) { return T::to_float(row[word]); }
};

template <>
struct KeyWords<BFloat16, Float32Dot> {
  static constexpr int kWords = 2;
  static VecU load(const uint16_t* row, int64_t word) { return specmemo::load<VecU>(row + word); }
  static VecF part(VecU words, int i) { return i == 0 ? low_halves(words) : high_halves(words); }
  static VecF load_words(const uint16_t* row, int64_t word) { return BFloat16::load_vec(row + word); }
  static float word(const uint16_t* row, int64_t word, int64_t) { return bf16_to_float(row[word]); }
};

#if defined(SPECMEMO_BF16_DOT)
template <>
struct KeyWords<BFloat16, BFloat16Dot> {
  static constexpr int kWords = 1;
  static VecF load_words(const uint16_t* row, int64_t word) { return specmemo::load<VecF>(row + 2 * word); }
  static float word(const uint16_t* row, int64_t word, int64_t dim) {
    const uint32_t low = row[2 * word], high = 2 * word + 1 < dim ? row[2 * word + 1] : 0u;
    return bits_as<float>(low | (high << 16));
  }
};
#endif

// Packs words w, ..., w + WORDS * kLanes - 1 of kLanes keys. Always inlined, so that `fetch` stays in registers.
template <class Words, int WORDS, class Raw>
__attribute__((always_inline)) inline void pack_words(const char* const* keys, int64_t w, float* packed, Fetch& fetch) {
  VecF block[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    const auto* row = reinterpret_cast<const Raw*>(keys[i]);
    fetch.vector();
    if constexpr (WORDS == 1) {
      block[i] = Words::load_words(row, w);
    } else {
      fetch.vector();
      block[i] = bits_as<VecF>(Words::load(row, w));
    }
  }
  transpose(block);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    float* out = packed + (w + i * WORDS) * kBlockKeys;
    if constexpr (WORDS == 1) {
      store(out, block[i]);
    } else {
      store(out, Words::part(bits_as<VecU>(block[i]), 0));
      store(out + kBlockKeys, Words::part(bits_as<VecU>(block[i]), 1));
    }
  }
}

// keys[i]: the row of key i. `count`: number of keys, in whole vectors.
template <class T, class Dot>
inline void pack_keys(const char* const* keys, int64_t count, int64_t dim, float* packed, Fetch& fetch) {
  typedef KeyWords<T, Dot> Words;
  typedef typename T::Raw Raw;
  const int64_t words = round_up(dim, Dot::kPerWord) / Dot::kPerWord;
  const int64_t whole = dim / (Dot::kPerWord * kLanes) * kLanes;
  Fetch walk = fetch;  // a copy stays in registers
  for (int64_t first = 0; first < count; first += kLanes) {
    int64_t w = 0;
    for (; w + Words::kWords * kLanes <= whole; w += Words::kWords * kLanes)
      pack_words<Words, Words::kWords, Raw>(keys + first, w, packed + first, walk);
    if constexpr (Words::kWords > 1) {
      if (w < whole) {
        pack_words<Words, 1, Raw>(keys + first, w, packed + first, walk);
        w = whole;
      }
    }
    for (; w < words; ++w)
      for (int i = 0; i < kLanes; ++i)
        packed[w * kBlockKeys + first + i] = Words::word(reinterpret_cast<const Raw*>(keys[first + i]), w, dim);
  }
  fetch = walk;
}

// B read in place: rows of values at any address; a step is one key's row, or a pair of keys' rows interleaved.
template <class T, class Dot>
struct ValueRows {
  const char* const* rows;
  template <int VECS>
  void load(int64_t step, int64_t column, VecF* out) const {
    const auto* row = reinterpret_cast<const typename T::Raw*>(rows[step]) + column;
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v) out[v] = T::load_vec(row + v * kLanes);
  }
};

#if defined(SPECMEMO_BF16_DOT)
template <>
struct ValueRows<BFloat16, BFloat16Dot> {
  const char* const* rows;

#if defined(__AVX512BF16__)
  // Interleaves elements start, start + 1, ... of two vectors.
  static __m512i interleaving(int start) {
    alignas(64) uint16_t index[32];
    for (int i = 0; i < 32; ++i) index[i] = static_cast<uint16_t>(start + i / 2 + (i % 2) * 32);
    return _mm512_load_si512(index);
  }

  template <int VECS>
  void load(int64_t step, int64_t column, VecF* out) const {
    const char *even = rows[2 * step] + column * 2, *odd = rows[2 * step + 1] + column * 2;
#pragma GCC unroll 8
    for (int v = 0; v + 2 <= VECS; v += 2) {
      const __m512i low = specmemo::load<__m512i>(even + v * 32), high = specmemo::load<__m512i>(odd + v * 32);
      out[v] = (VecF)_mm512_permutex2var_epi16(low, interleaving(0), high);
      out[v + 1] = (VecF)_mm512_permutex2var_epi16(low, interleaving(16), high);
    }
    if (VECS % 2 == 1) {
      const __m512i low = _mm512_cvtepu16_epi32(specmemo::load<__m256i>(even + (VECS - 1) * 32));
      const __m512i high = _mm512_cvtepu16_epi32(specmemo::load<__m256i>(odd + (VECS - 1) * 32));
      out[VECS - 1] = (VecF)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    }
  }
#else
  template <int VECS>
  void load(int64_t step, int64_t column, VecF* out) const {
    const auto* even = reinterpret_cast<const uint16_t*>(rows[2 * step]) + column;
    const auto* odd = reinterpret_cast<const uint16_t*>(rows[2 * step + 1]) + column;
#pragma GCC unroll 8
    for (int v = 0; v + 2 <= VECS; v += 2) {
      const uint16x8_t low = vld1q_u16(even + v * kLanes), high = vld1q_u16(odd + v * kLanes);
      out[v] = (VecF)vzip1q_u16(low, high);
      out[v + 1] = (VecF)vzip2q_u16(low, high);
    }
    if (VECS % 2 == 1) {
      const int last = (VECS - 1) * kLanes;
      const uint16x4x2_t pairs = vzip_u16(vld1_u16(even + last), vld1_u16(odd + last));
      out[VECS - 1] = (VecF)vcombine_u16(pairs.val[0], pairs.val[1]);
    }
  }
#endif
};
#endif

// Packs the first `count` values of a block to [count / kPerWord][columns], if several tiles read them: rows of a page
// are a power of two apart, so that L1's associativity limits how many stay cached.
template <class T, class Dot>
inline void pack_values(const char* const* rows, int64_t count, int64_t columns, float* packed) {
  const ValueRows<T, Dot> values{rows};
  for (int64_t step = 0; step < count / Dot::kPerWord; ++step, packed += columns) {
    int64_t c = 0;
    VecF pair[2];
    for (; c + 2 * kLanes <= columns; c += 2 * kLanes) {
      values.template load<2>(step, c, pair);
      store(packed + c, pair[0]);
      store(packed + c + kLanes, pair[1]);
    }
    if (c == columns) continue;
    values.template load<1>(step, c, pair);
    store(packed + c, pair[0]);
  }
}

}  // namespace
}  // namespace specmemo
