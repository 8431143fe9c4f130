// The integer heart of a linear: dot products of 16 rows x `Group` k with T tokens.
//
//   group_dot<F, T, G>(codes, a, emit)
//
// `codes` is a block of packed weights (32 k), `a` the block's activations [8 quads][T][4], G the group
// within the block (always 0 unless a group is 16 k). Calls emit(t, i32x16) once for every token with the
// exact integer sum of code * activation over the group. Being exact, it may be computed in any order and
// still give the same bits.
#pragma once

#include "act.h"
#include "simd.h"
#include "unpack.h"

namespace toque::TOQUE_ISA {

#if defined(TOQUE_SIMD_AVX2)

// AVX2 has no 4-way dot product that accumulates in 32 bits: vpmaddubsw multiplies unsigned by signed bytes
// and adds neighbours into 16 bits, saturating. The whole art is to stay in 16 bits as long as the worst case
// allows:
//
//   codes   largest |vpmaddubsw|   sums that fit 16 bits
//   4 bit   15 * 127 * 2 =  3810   8: a whole group of 32
//   5 bit   31 * 127 * 2 =  7874   4
//   6 bit   63 * 127 * 2 = 16002   2
//   8 bit  255 * 127 * 2           0: computed as two 4-bit planes, value = low + 16 * high
//
// Widening then costs one vpmaddwd per 8 rows; with 16 as its constant it also puts a high nibble in its
// place. The budget is 16 registers: T <= 6 tokens x 2 halves of 8 rows + 2 weights + 1 broadcast + 1 product
// = 16.

TOQUE_INLINE __m256i broadcast_quad(const int8_t* a, int index) {
  int32_t quad;
  memcpy(&quad, a + 4 * index, 4);
  return _mm256_set1_epi32(quad);
}

template <bool First>
TOQUE_INLINE void accumulate(__m256i& sum, __m256i weights, __m256i activations) {
  __m256i product = _mm256_maddubs_epi16(weights, activations);
  sum = First ? product : _mm256_add_epi16(sum, product);
}

// sums[t] (16-bit lanes) over quads Begin..End-1, all 16 rows.
template <Format F, int T, int J, int Begin, int End>
TOQUE_INLINE void sum_quads(const uint8_t* codes, const int8_t* a, __m256i (&low)[T], __m256i (&high)[T]) {
  if constexpr (J < End) {
    u8x64 w = unpack_quad<F, J>(codes);
    TOQUE_UNROLL
    for (int t = 0; t < T; ++t) {
      __m256i x = broadcast_quad(a, J * T + t);
      accumulate<J == Begin>(low[t], w.lo, x);
      accumulate<J == Begin>(high[t], w.hi, x);
    }
    sum_quads<F, T, J + 1, Begin, End>(codes, a, low, high);
  }
}

template <int T, typename Emit>
TOQUE_INLINE void group_dot_4bit(const uint8_t* codes, const int8_t* a, Emit&& emit) {
  __m256i low[T], high[T];
  sum_quads<Format::kW4, T, 0, 0, 8>(codes, a, low, high);
  const __m256i ones = _mm256_set1_epi16(1);
  TOQUE_UNROLL
  for (int t = 0; t < T; ++t) {
    emit(t, i32x16{_mm256_madd_epi16(low[t], ones), _mm256_madd_epi16(high[t], ones)});
  }
}

template <int T, typename Emit>
TOQUE_INLINE void group_dot_5bit(const uint8_t* codes, const int8_t* a, Emit&& emit) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i low[T], high[T];
  alignas(32) __m256i first[T][2];  // quads 0..3; in memory, there are no registers left
  sum_quads<Format::kW5, T, 0, 0, 4>(codes, a, low, high);
  TOQUE_UNROLL
  for (int t = 0; t < T; ++t) {
    _mm256_store_si256(&first[t][0], _mm256_madd_epi16(low[t], ones));
    _mm256_store_si256(&first[t][1], _mm256_madd_epi16(high[t], ones));
  }
  sum_quads<Format::kW5, T, 4, 4, 8>(codes, a, low, high);
  TOQUE_UNROLL
  for (int t = 0; t < T; ++t) {
    emit(t, i32x16{_mm256_add_epi32(first[t][0], _mm256_madd_epi16(low[t], ones)),
                   _mm256_add_epi32(first[t][1], _mm256_madd_epi16(high[t], ones))});
  }
}

// Eight rows (Half 0 or 1) x 16 k.
template <int G, int Half, int T>
TOQUE_INLINE void sum_6bit(const uint8_t* codes, const int8_t* a, __m256i (&sum)[T]) {
  const __m256i ones = _mm256_set1_epi16(1);
  constexpr int J = 4 * G;
  auto half = [](u8x64 w) { return Half ? w.hi : w.lo; };
  __m256i w0 = half(unpack_quad<Format::kW6, J>(codes)), w1 = half(unpack_quad<Format::kW6, J + 1>(codes));
  TOQUE_UNROLL
  for (int t = 0; t < T; ++t) {
    __m256i pair = _mm256_maddubs_epi16(w0, broadcast_quad(a, J * T + t));
    pair = _mm256_add_epi16(pair, _mm256_maddubs_epi16(w1, broadcast_quad(a, (J + 1) * T + t)));
    sum[t] = _mm256_madd_epi16(pair, ones);
  }
  w0 = half(unpack_quad<Format::kW6, J + 2>(codes)), w1 = half(unpack_quad<Format::kW6, J + 3>(codes));
  TOQUE_UNROLL
  for (int t = 0; t < T; ++t) {
    __m256i pair = _mm256_maddubs_epi16(w0, broadcast_quad(a, (J + 2) * T + t));
    pair = _mm256_add_epi16(pair, _mm256_maddubs_epi16(w1, broadcast_quad(a, (J + 3) * T + t)));
    sum[t] = _mm256_add_epi32(sum[t], _mm256_madd_epi16(pair, ones));
  }
}

template <int T, int G, typename Emit>
TOQUE_INLINE void group_dot_6bit(const uint8_t* codes, const int8_t* a, Emit&& emit) {
  __m256i low[T], high[T];
  sum_6bit<G, 0, T>(codes, a, low);
  sum_6bit<G, 1, T>(codes, a, high);
  TOQUE_UNROLL
  for (int t = 0; t < T; ++t) emit(t, i32x16{low[t], high[t]});
}

// Eight rows x 32 k as two nibble planes.
template <int Half, int T>
TOQUE_INLINE void sum_8bit(const uint8_t* codes, const int8_t* a, __m256i (&sum)[T]) {
  const __m256i nibble = _mm256_set1_epi8(15);
  __m256i low[T], high[T];
  TOQUE_UNROLL
  for (int j = 0; j < 8; ++j) {
    __m256i w = load_half(codes + 64 * j + 32 * Half);
    __m256i w_low = _mm256_and_si256(w, nibble), w_high = _mm256_and_si256(_mm256_srli_epi16(w, 4), nibble);
    TOQUE_UNROLL
    for (int t = 0; t < T; ++t) {
      __m256i x = broadcast_quad(a, j * T + t);
      __m256i p_low = _mm256_maddubs_epi16(w_low, x), p_high = _mm256_maddubs_epi16(w_high, x);
      low[t] = j == 0 ? p_low : _mm256_add_epi16(low[t], p_low);
      high[t] = j == 0 ? p_high : _mm256_add_epi16(high[t], p_high);
    }
  }
  TOQUE_UNROLL
  for (int t = 0; t < T; ++t) {
    sum[t] = _mm256_add_epi32(_mm256_madd_epi16(low[t], _mm256_set1_epi16(1)),
                              _mm256_madd_epi16(high[t], _mm256_set1_epi16(16)));
  }
}

template <int T, typename Emit>
TOQUE_INLINE void group_dot_8bit(const uint8_t* codes, const int8_t* a, Emit&& emit) {
  __m256i low[T], high[T];
  sum_8bit<0, T>(codes, a, low);
  sum_8bit<1, T>(codes, a, high);
  TOQUE_UNROLL
  for (int t = 0; t < T; ++t) emit(t, i32x16{low[t], high[t]});
}

template <Format F, int T, int G, typename Emit>
TOQUE_INLINE void group_dot(const uint8_t* codes, const int8_t* a, Emit&& emit) {
  constexpr int kBits = format_shape(F).bits;
  if constexpr (kBits == 4) group_dot_4bit<T>(codes, a, emit);
  if constexpr (kBits == 5) group_dot_5bit<T>(codes, a, emit);
  if constexpr (kBits == 6) group_dot_6bit<T, G>(codes, a, emit);
  if constexpr (kBits == 8) group_dot_8bit<T>(codes, a, emit);
}

#else

template <Format F, int T, int J, int End>
TOQUE_INLINE void dot_quads(const uint8_t* codes, const int8_t* a, i32x16 (&sum)[T]) {
  if constexpr (J < End) {
    u8x64 w = unpack_quad<F, J>(codes);
    TOQUE_UNROLL
    for (int t = 0; t < T; ++t) sum[t] = dot4(sum[t], w, broadcast4(a + 4 * (J * T + t)));
    dot_quads<F, T, J + 1, End>(codes, a, sum);
  }
}

template <Format F, int T, int G, typename Emit>
TOQUE_INLINE void group_dot(const uint8_t* codes, const int8_t* a, Emit&& emit) {
  constexpr int kQuads = format_shape(F).group / 4;
  i32x16 sum[T];
  TOQUE_UNROLL
  for (int t = 0; t < T; ++t) sum[t] = broadcast((int32_t)0);
  dot_quads<F, T, G * kQuads, (G + 1) * kQuads>(codes, a, sum);
  TOQUE_UNROLL
  for (int t = 0; t < T; ++t) emit(t, sum[t]);
}

#endif

}  // namespace toque::TOQUE_ISA
