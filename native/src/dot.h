// The integer heart of a linear: dot products of 16 rows x `Group` k with T tokens.
//
//   group_dot<F, From, T, G>(codes, kept, a, emit)
//
// `codes` is a block of weights (32 k) in the form that From says, `a` the block's activations [8
// quads][T][4], G the group within the block (always 0 unless a group is 16 k). Calls emit(t, i32x16) once
// for every token with the exact integer sum of code * activation over the group. Being exact, it may be
// computed in any order and still give the same bits. kKeep writes the group's part of the unpacked block to
// `kept`.
#pragma once

#include "act.h"
#include "simd.h"
#include "unpack.h"

namespace toque::TOQUE_ISA {

// What a kernel reads: weights as they are packed, the same to be written down unpacked for other token
// tiles, or what was so written.
enum class Source { kPacked, kKeep, kUnpacked };

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

// Unpacking costs three operations per 16 rows x 8 k, as much as half a token's worth of arithmetic. When
// more than one token tile follows, it is done once per weight tile: the first token tile's kernel writes
// down what it unpacks (Source::kKeep), where its stores hide behind its arithmetic, and the others read
// that.
constexpr bool kUnpackAhead = true;

// Bytes of one unpacked block, 32 k x 16 rows: eight quads, for 8-bit codes as two planes each.
TOQUE_CONSTEXPR size_t unpacked_bytes(Format format) {
  return format_shape(format).code_bits == 8 ? 1024 : 512;
}

// A constant that stays in memory: every register that the compiler hoists one into is one that the sums
// lack.
alignas(32) static const int16_t kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
alignas(32) static const int16_t kSixteens[16] = {16, 16, 16, 16, 16, 16, 16, 16,
                                                  16, 16, 16, 16, 16, 16, 16, 16};
TOQUE_INLINE const __m256i* in_memory(const int16_t* constant) {
  __asm__ volatile("" : "+r"(constant));
  return (const __m256i*)constant;
}

// Keeps the compiler from moving loads and stores across, which would only lengthen the lives of registers.
TOQUE_INLINE void memory_fence() { __asm__ volatile("" ::: "memory"); }

// What was stored there is loaded from there.
TOQUE_INLINE void into_memory(const float* stored) { __asm__ volatile("" : : "r"(stored) : "memory"); }

TOQUE_INLINE __m256i broadcast_quad(const int8_t* a, int index) {
  int32_t quad;
  memcpy(&quad, a + 4 * index, 4);
  return _mm256_set1_epi32(quad);
}

// sum += 16-bit products of weights and activations. The addition is spelled out because GCC would otherwise
// regroup the sums of a whole group (integer addition is associative), holding every product until the end:
// hundreds of spills, half the speed.
template <bool First>
TOQUE_INLINE void accumulate(__m256i& sum, __m256i weights, __m256i activations) {
  if constexpr (First) {
    sum = _mm256_maddubs_epi16(weights, activations);
    __asm__("" : "+x"(sum));
  } else {
    __asm__("vpaddw %1, %0, %0" : "+x"(sum) : "x"(_mm256_maddubs_epi16(weights, activations)));
  }
}

// sums[t] (16-bit lanes) over quads Begin..End-1, all 16 rows.
template <Format F, Source From, int T, int Begin, int End, int J = Begin>
TOQUE_INLINE void sum_quads(const uint8_t* codes, uint8_t* kept, const int8_t* a, __m256i (&low)[T],
                            __m256i (&high)[T]) {
  if constexpr (J < End) {
    u8x64 w;
    if constexpr (From == Source::kUnpacked) {
      w = load_bytes(codes + 64 * J);
    } else {
      w = unpack_quad<F, J>(codes);
      if constexpr (From == Source::kKeep) store_bytes(kept + 64 * J, w);
    }
    TOQUE_UNROLL
    for (int t = 0; t < T; ++t) {
      __m256i x = broadcast_quad(a, J * T + t);
      accumulate<J == Begin>(low[t], w.lo, x);
      accumulate<J == Begin>(high[t], w.hi, x);
    }
    sum_quads<F, From, T, Begin, End, J + 1>(codes, kept, a, low, high);
  }
}

// All quads of the group fit one 16-bit sum.
template <Format F, Source From, int T, int Begin, int End, typename Emit>
TOQUE_INLINE void group_dot_once(const uint8_t* codes, uint8_t* kept, const int8_t* a, Emit&& emit) {
  __m256i low[T], high[T];
  sum_quads<F, From, T, Begin, End>(codes, kept, a, low, high);
  memory_fence();
  const __m256i ones = _mm256_load_si256(in_memory(kOnes));
  TOQUE_UNROLL
  for (int t = 0; t < T; ++t) {
    emit(t, i32x16{_mm256_madd_epi16(low[t], ones), _mm256_madd_epi16(high[t], ones)});
  }
  memory_fence();
}

// Half of the group's quads do: the first half waits, widened, in memory, for there are no registers left.
template <Format F, Source From, int T, int Begin, int End, typename Emit>
TOQUE_INLINE void group_dot_twice(const uint8_t* codes, uint8_t* kept, const int8_t* a, Emit&& emit) {
  constexpr int kMiddle = (Begin + End) / 2;
  __m256i low[T], high[T];
  alignas(32) __m256i first[2 * T];
  sum_quads<F, From, T, Begin, kMiddle>(codes, kept, a, low, high);
  memory_fence();
  __m256i ones = _mm256_load_si256(in_memory(kOnes));
  TOQUE_UNROLL
  for (int t = 0; t < T; ++t) {
    first[2 * t] = _mm256_madd_epi16(low[t], ones);
    first[2 * t + 1] = _mm256_madd_epi16(high[t], ones);
  }
  __asm__("" : "+m"(first));
  sum_quads<F, From, T, kMiddle, End>(codes, kept, a, low, high);
  memory_fence();
  ones = _mm256_load_si256(in_memory(kOnes));
  TOQUE_UNROLL
  for (int t = 0; t < T; ++t) {
    emit(t, i32x16{_mm256_add_epi32(first[2 * t], _mm256_madd_epi16(low[t], ones)),
                   _mm256_add_epi32(first[2 * t + 1], _mm256_madd_epi16(high[t], ones))});
  }
  memory_fence();
}

// Eight rows (Half 0 or 1) x 32 k of 8-bit codes as two nibble planes.
template <Format F, Source From, int T, int Half, int J = 0>
TOQUE_INLINE void sum_nibbles(const uint8_t* codes, uint8_t* kept, const int8_t* a, __m256i (&low)[T],
                              __m256i (&high)[T]) {
  if constexpr (J < 8) {
    __m256i w_low, w_high;
    if constexpr (From == Source::kUnpacked) {
      w_low = load_half(codes + 128 * J + 32 * Half);
      w_high = load_half(codes + 128 * J + 64 + 32 * Half);
    } else if constexpr (has_table(F)) {
      const __m256i codes4 = load_half(codes + 64 * (J / 2) + 32 * Half);
      const __m256i at =
          _mm256_and_si256(J % 2 ? _mm256_srli_epi16(codes4, 4) : codes4, _mm256_set1_epi8(15));
      const __m128i table = _mm_load_si128((const __m128i*)code_table(F));
      const __m128i nibble = _mm_set1_epi8(15);
      w_low = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_and_si128(table, nibble)), at);
      w_high = _mm256_shuffle_epi8(
          _mm256_broadcastsi128_si256(_mm_and_si128(_mm_srli_epi16(table, 4), nibble)), at);
    } else {
      const __m256i nibble = _mm256_set1_epi8(15), w = load_half(codes + 64 * J + 32 * Half);
      w_low = _mm256_and_si256(w, nibble);
      w_high = _mm256_and_si256(_mm256_srli_epi16(w, 4), nibble);
    }
    if constexpr (From == Source::kKeep) {
      _mm256_storeu_si256((__m256i*)(kept + 128 * J + 32 * Half), w_low);
      _mm256_storeu_si256((__m256i*)(kept + 128 * J + 64 + 32 * Half), w_high);
    }
    TOQUE_UNROLL
    for (int t = 0; t < T; ++t) {
      __m256i x = broadcast_quad(a, J * T + t);
      accumulate<J == 0>(low[t], w_low, x);
      accumulate<J == 0>(high[t], w_high, x);
    }
    sum_nibbles<F, From, T, Half, J + 1>(codes, kept, a, low, high);
  }
}

template <Format F, Source From, int T, int Half>
TOQUE_INLINE void half_dot_8bit(const uint8_t* codes, uint8_t* kept, const int8_t* a, __m256i* sum) {
  __m256i low[T], high[T];
  sum_nibbles<F, From, T, Half>(codes, kept, a, low, high);
  memory_fence();
  const __m256i *ones = in_memory(kOnes), *sixteens = in_memory(kSixteens);
  TOQUE_UNROLL
  for (int t = 0; t < T; ++t) {
    sum[2 * t + Half] =
        _mm256_add_epi32(_mm256_madd_epi16(low[t], *ones), _mm256_madd_epi16(high[t], *sixteens));
  }
}

template <Format F, Source From, int T, typename Emit>
TOQUE_INLINE void group_dot_8bit(const uint8_t* codes, uint8_t* kept, const int8_t* a, Emit&& emit) {
  alignas(32) __m256i sum[2 * T];
  half_dot_8bit<F, From, T, 0>(codes, kept, a, sum);
  if constexpr (T > 2) __asm__("" : "+m"(sum));  // into memory, see group_dot_twice
  half_dot_8bit<F, From, T, 1>(codes, kept, a, sum);
  TOQUE_UNROLL
  for (int t = 0; t < T; ++t) emit(t, i32x16{sum[2 * t], sum[2 * t + 1]});
  memory_fence();
}

// 16 rows x one quad.
template <Format F, bool Unpacked>
TOQUE_INLINE i32x16 quad_dot(const uint8_t* codes, int quad, const int8_t* a) {
  const u8x64 x = broadcast4(a);
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (format_shape(F).code_bits == 8 && Unpacked) {
    const u8x64 low = load_bytes(codes + 128 * quad), high = load_bytes(codes + 128 * quad + 64);
    const __m256i sixteens = _mm256_set1_epi16(16);
    return {_mm256_add_epi32(_mm256_madd_epi16(_mm256_maddubs_epi16(low.lo, x.lo), ones),
                             _mm256_madd_epi16(_mm256_maddubs_epi16(high.lo, x.lo), sixteens)),
            _mm256_add_epi32(_mm256_madd_epi16(_mm256_maddubs_epi16(low.hi, x.hi), ones),
                             _mm256_madd_epi16(_mm256_maddubs_epi16(high.hi, x.hi), sixteens))};
  } else {
    u8x64 w;
    if constexpr (Unpacked) {
      w = load_bytes(codes + 64 * quad);
    } else {
      w = unpack_quad_at<F>(codes, quad);
    }
    if constexpr (format_shape(F).code_bits == 8) return dot4(broadcast((int32_t)0), w, x);
    return {_mm256_madd_epi16(_mm256_maddubs_epi16(w.lo, x.lo), ones),
            _mm256_madd_epi16(_mm256_maddubs_epi16(w.hi, x.hi), ones)};
  }
}

template <Format F, Source From, int T, int G, typename Emit>
TOQUE_INLINE void group_dot(const uint8_t* codes, uint8_t* kept, const int8_t* a, Emit&& emit) {
  constexpr int kBits = format_shape(F).code_bits;
  if constexpr (kBits <= 3) group_dot_once<F, From, T, 4 * G, 4 * G + 4>(codes, kept, a, emit);
  if constexpr (kBits == 4) group_dot_once<F, From, T, 0, 8>(codes, kept, a, emit);
  if constexpr (kBits == 5) group_dot_twice<F, From, T, 0, 8>(codes, kept, a, emit);
  if constexpr (kBits == 6) group_dot_twice<F, From, T, 4 * G, 4 * G + 4>(codes, kept, a, emit);
  if constexpr (kBits == 8) group_dot_8bit<F, From, T>(codes, kept, a, emit);
}

#else

// Unpacking ahead buys nothing: with a real dot product it hides behind the arithmetic, and scalar code is a
// reference.
constexpr bool kUnpackAhead = false;
TOQUE_INLINE void into_memory(const float*) {}
TOQUE_CONSTEXPR size_t unpacked_bytes(Format) { return 0; }

// 16 rows x one quad.
template <Format F, bool Unpacked>
TOQUE_INLINE i32x16 quad_dot(const uint8_t* codes, int quad, const int8_t* a) {
  static_assert(!Unpacked);
  return dot4(broadcast((int32_t)0), unpack_quad_at<F>(codes, quad), broadcast4(a));
}

#if defined(TOQUE_SIMD_AVX512)

template <Format F, int T, int J, int End>
TOQUE_INLINE void dot_quads(const uint8_t* codes, const int8_t* a, i32x16 (&sum)[T]) {
  if constexpr (J < End) {
    u8x64 w = unpack_quad<F, J>(codes);
    TOQUE_UNROLL
    for (int t = 0; t < T; ++t) sum[t] = dot4(sum[t], w, broadcast4(a + 4 * (J * T + t)));
    dot_quads<F, T, J + 1, End>(codes, a, sum);
  }
}

template <Format F, Source From, int T, int G, typename Emit>
TOQUE_INLINE void group_dot(const uint8_t* codes, uint8_t*, const int8_t* a, Emit&& emit) {
  static_assert(From == Source::kPacked);
  constexpr int kQuads = format_shape(F).group / 4;
  i32x16 sum[T];
  TOQUE_UNROLL
  for (int t = 0; t < T; ++t) sum[t] = broadcast((int32_t)0);
  dot_quads<F, T, G * kQuads, (G + 1) * kQuads>(codes, a, sum);
  TOQUE_UNROLL
  for (int t = 0; t < T; ++t) emit(t, sum[t]);
}

#else

template <Format F, Source From, int T, int G, typename Emit>
TOQUE_INLINE void group_dot(const uint8_t* codes, uint8_t*, const int8_t* a, Emit&& emit) {
  static_assert(From == Source::kPacked);
  constexpr int kSize = format_shape(F).group;
  for (int t = 0; t < T; ++t) {
    i32x16 sum = broadcast((int32_t)0);
    for (int k = G * kSize; k < (G + 1) * kSize; ++k) {
      const int x = a[k / 4 * 4 * T + 4 * t + k % 4];
      for (int row = 0; row < 16; ++row) sum.v[row] += code_at<F>(codes, row, k) * x;
    }
    emit(t, sum);
  }
}

#endif

#endif

}  // namespace toque::TOQUE_ISA
