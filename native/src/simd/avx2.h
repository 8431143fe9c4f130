// The vector layer on AVX2 + FMA + F16C: two 256-bit halves.
#pragma once

#include <immintrin.h>

namespace toque::TOQUE_ISA {

constexpr int kTileMax = 6;         // tokens in a tile
constexpr int kRegisterSums = 3;    // up to so many tokens, a tile's running sums are kept in registers
constexpr bool kBF16Pairs = false;  // bf16 weights take bf16 activations (bf16_dot is one instruction)

struct f32x16 {
  __m256 lo, hi;
};
struct i32x16 {
  __m256i lo, hi;
};
struct u8x64 {
  __m256i lo, hi;
};

// clang-format off
TOQUE_INLINE f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
TOQUE_INLINE void store(float* p, f32x16 a) { _mm256_storeu_ps(p, a.lo); _mm256_storeu_ps(p + 8, a.hi); }
TOQUE_INLINE __m256i load_half(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
TOQUE_INLINE i32x16 load(const int32_t* p) { return {load_half(p), load_half(p + 8)}; }
TOQUE_INLINE void store(int32_t* p, i32x16 a) { _mm256_storeu_si256((__m256i*)p, a.lo); _mm256_storeu_si256((__m256i*)(p + 8), a.hi); }
TOQUE_INLINE u8x64 load_bytes(const void* p) { return {load_half(p), load_half((const char*)p + 32)}; }
TOQUE_INLINE void store_bytes(void* p, u8x64 a) { _mm256_storeu_si256((__m256i*)p, a.lo); _mm256_storeu_si256((__m256i*)((char*)p + 32), a.hi); }
TOQUE_INLINE f32x16 broadcast(float x) { __m256 v = _mm256_set1_ps(x); return {v, v}; }
TOQUE_INLINE i32x16 broadcast(int32_t x) { __m256i v = _mm256_set1_epi32(x); return {v, v}; }
TOQUE_INLINE u8x64 broadcast4(const void* p) { int32_t x; memcpy(&x, p, 4); __m256i v = _mm256_set1_epi32(x); return {v, v}; }
TOQUE_INLINE i32x16 iota() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)}; }

TOQUE_INLINE f32x16 add(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
TOQUE_INLINE f32x16 sub(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
TOQUE_INLINE f32x16 mul(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
TOQUE_INLINE f32x16 div(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
TOQUE_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
TOQUE_INLINE f32x16 sqrt(f32x16 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
TOQUE_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
TOQUE_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
TOQUE_INLINE f32x16 abs(f32x16 a) { __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)); return {_mm256_and_ps(a.lo, m), _mm256_and_ps(a.hi, m)}; }
TOQUE_INLINE i32x16 add(i32x16 a, i32x16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
TOQUE_INLINE i32x16 operator&(i32x16 a, i32x16 b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
TOQUE_INLINE i32x16 operator|(i32x16 a, i32x16 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
template <int N> TOQUE_INLINE i32x16 shift_left(i32x16 a) { return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)}; }

TOQUE_INLINE f32x16 as_f32(i32x16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
TOQUE_INLINE i32x16 as_i32(f32x16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
TOQUE_INLINE f32x16 to_f32(i32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
// Rounds to nearest, ties to even; |a| below 2^22.
TOQUE_INLINE i32x16 round_i32(f32x16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
// Rounds to nearest, ties to even, numbers of any size; beyond 32 bits to some number.
TOQUE_INLINE i32x16 round_wide_i32(f32x16 a) { return round_i32(a); }
TOQUE_INLINE __m256 half_from_f16(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
TOQUE_INLINE f32x16 load_f16(const uint16_t* p) { return {half_from_f16(p), half_from_f16(p + 8)}; }
// Sixteen e4m3 bytes as the f16 of the same bits: 2^-8 of their value. 0x7f is no NaN here.
TOQUE_INLINE f32x16 load_f8(const uint8_t* p) {
    __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
    x = _mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8), _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7f)), 7));
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
TOQUE_INLINE __m256 half_from_bf16(const void* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16)); }
TOQUE_INLINE f32x16 load_bf16(const uint16_t* p) { return {half_from_bf16(p), half_from_bf16(p + 8)}; }
TOQUE_INLINE void store_f16(uint16_t* p, f32x16 a) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// clang-format on

// f32 to bf16 in the low half of each lane, to nearest even; a NaN stays a (quiet) NaN.
TOQUE_INLINE __m256i half_to_bf16(__m256 a) {
  __m256i bits = _mm256_castps_si256(a);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, nan, is_nan), 16);
}
TOQUE_INLINE void store_bf16(uint16_t* p, f32x16 a) {
  __m256i packed = _mm256_packus_epi32(half_to_bf16(a.lo), half_to_bf16(a.hi));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}
TOQUE_INLINE f32x16 load_i8(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
// Sixteen integers in -128..127 as bytes.
TOQUE_INLINE void store_i8(int8_t* p, i32x16 a) {
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
  _mm_storeu_si128((__m128i*)p,
                   _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

// Sixteen integers in -32768..32767 as 16 bits each.
TOQUE_INLINE void store_i16(int16_t* p, i32x16 a) {
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8));
}
// acc + a.low * b.low + a.high * b.high per lane, of pairs of signed 16-bit integers; b is the pair at `p` in
// all lanes. In assembly, because twelve sums leave four registers: GCC wants more and spills.
TOQUE_INLINE i32x16 dot2(i32x16 acc, i32x16 a, const int16_t* p) {
  __m256i b, product;
  asm("vpbroadcastd %[pair], %[b]\n\t"
      "vpmaddwd %[a_lo], %[b], %[product]\n\t"
      "vpaddd %[product], %[lo], %[lo]\n\t"
      "vpmaddwd %[a_hi], %[b], %[b]\n\t"
      "vpaddd %[b], %[hi], %[hi]"
      : [lo] "+x"(acc.lo), [hi] "+x"(acc.hi), [b] "=&x"(b), [product] "=&x"(product)
      : [a_lo] "x"(a.lo), [a_hi] "x"(a.hi), [pair] "m"(*(const int32_t*)p));
  return acc;
}

// Lane i of a where i < count, else of b.
TOQUE_INLINE f32x16 select_first(int count, f32x16 a, f32x16 b) {
  i32x16 lane = iota();
  __m256i n = _mm256_set1_epi32(count);
  return {_mm256_blendv_ps(b.lo, a.lo, _mm256_castsi256_ps(_mm256_cmpgt_epi32(n, lane.lo))),
          _mm256_blendv_ps(b.hi, a.hi, _mm256_castsi256_ps(_mm256_cmpgt_epi32(n, lane.hi)))};
}
// The low (even k) and high (odd k) halves of sixteen bf16 pairs.
TOQUE_INLINE f32x16 bf16_low(i32x16 a) { return as_f32(shift_left<16>(a)); }
TOQUE_INLINE f32x16 bf16_high(i32x16 a) {
  __m256i m = _mm256_set1_epi32((int32_t)0xffff0000);
  return as_f32(i32x16{_mm256_and_si256(a.lo, m), _mm256_and_si256(a.hi, m)});
}
// acc + a.low * b.low + a.high * b.high per lane.
TOQUE_INLINE f32x16 bf16_dot(f32x16 acc, i32x16 a, i32x16 b) {
  acc = fma(bf16_low(a), bf16_low(b), acc);
  return fma(bf16_high(a), bf16_high(b), acc);
}

// acc + sum of four products of unsigned bytes of a and signed bytes of b, per lane. maddubs saturates at 16
// bits, so a is used as two nibbles; madd with 16 puts the high one in its place.
TOQUE_INLINE __m256i dot4_half(__m256i acc, __m256i a, __m256i b) {
  const __m256i nibble = _mm256_set1_epi8(15);
  __m256i low = _mm256_maddubs_epi16(_mm256_and_si256(a, nibble), b);
  __m256i high = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(a, 4), nibble), b);
  acc = _mm256_add_epi32(acc, _mm256_madd_epi16(low, _mm256_set1_epi16(1)));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(high, _mm256_set1_epi16(16)));
}
TOQUE_INLINE i32x16 dot4(i32x16 acc, u8x64 a, u8x64 b) {
  return {dot4_half(acc.lo, a.lo, b.lo), dot4_half(acc.hi, a.hi, b.hi)};
}

// Byte i of the result is byte (index i) of a table of 16, given four times; indices are below 16.
TOQUE_INLINE u8x64 broadcast16(const void* p) {
  __m256i v = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
  return {v, v};
}
TOQUE_INLINE u8x64 lookup(u8x64 table, u8x64 index) {
  return {_mm256_shuffle_epi8(table.lo, index.lo), _mm256_shuffle_epi8(table.hi, index.hi)};
}

// Byte operations for unpacking codes. Shifts move 16-bit words: bits that cross a byte must be masked off.
TOQUE_INLINE u8x64 broadcast_byte(uint8_t x) {
  __m256i v = _mm256_set1_epi8((char)x);
  return {v, v};
}
TOQUE_INLINE u8x64 operator&(u8x64 a, u8x64 b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
TOQUE_INLINE u8x64 operator|(u8x64 a, u8x64 b) {
  return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
// Left by N bits, right by -N.
template <int N>
TOQUE_INLINE __m256i shift_words_half(__m256i a) {
  if constexpr (N == 0) return a;
  return N > 0 ? _mm256_slli_epi16(a, N & 15) : _mm256_srli_epi16(a, -N & 15);
}
template <int N>
TOQUE_INLINE u8x64 shift_words(u8x64 a) {
  return {shift_words_half<N>(a.lo), shift_words_half<N>(a.hi)};
}

// Right by n bits, n known at run time only.
TOQUE_INLINE u8x64 shift_words_right(u8x64 a, int n) {
  const __m128i count = _mm_cvtsi32_si128(n);
  return {_mm256_srl_epi16(a.lo, count), _mm256_srl_epi16(a.hi, count)};
}

// In each lane the largest of its four neighbours 4i..4i+3.
TOQUE_INLINE __m256 max_of_quads(__m256 a) {
  a = _mm256_max_ps(a, _mm256_permute_ps(a, 0xb1));
  return _mm256_max_ps(a, _mm256_permute_ps(a, 0x4e));
}
// The largest and the second largest of the maxima of eight quads, by a tournament.
TOQUE_INLINE void top_two_quads(f32x16 low, f32x16 high, float& first, float& second) {
  const __m256 a = max_of_quads(low.lo), b = max_of_quads(low.hi), c = max_of_quads(high.lo),
               d = max_of_quads(high.hi);
  const __m256 ab = _mm256_max_ps(a, b), cd = _mm256_max_ps(c, d);
  const __m256 losers = _mm256_max_ps(_mm256_min_ps(a, b), _mm256_min_ps(c, d));
  const __m256 top = _mm256_max_ps(ab, cd), next = _mm256_max_ps(_mm256_min_ps(ab, cd), losers);
  const __m128 x = _mm256_castps256_ps128(top), y = _mm256_extractf128_ps(top, 1);
  const __m128 rest = _mm_max_ps(_mm256_castps256_ps128(next), _mm256_extractf128_ps(next, 1));
  first = _mm_cvtss_f32(_mm_max_ss(x, y));
  second = _mm_cvtss_f32(_mm_max_ss(_mm_min_ss(x, y), rest));
}

// Reductions fold 16 -> 8 -> 4 -> 2 -> 1, always adding lane i + half to lane i.
TOQUE_INLINE float reduce_add(f32x16 a) {
  __m256 s8 = _mm256_add_ps(a.lo, a.hi);
  __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}
TOQUE_INLINE float reduce_max(f32x16 a) {
  __m256 s8 = _mm256_max_ps(a.lo, a.hi);
  __m128 s4 = _mm_max_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  __m128 s2 = _mm_max_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_max_ss(s2, _mm_movehdup_ps(s2)));
}
TOQUE_INLINE int32_t reduce_add(i32x16 a) {
  __m256i s8 = _mm256_add_epi32(a.lo, a.hi);
  __m128i s4 = _mm_add_epi32(_mm256_castsi256_si128(s8), _mm256_extracti128_si256(s8, 1));
  __m128i s2 = _mm_add_epi32(s4, _mm_shuffle_epi32(s4, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s2, _mm_shuffle_epi32(s2, 0xb1)));
}

TOQUE_INLINE bool all_finite(f32x16 a, f32x16 b) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  const __m256i x = _mm256_max_epi32(_mm256_castps_si256(_mm256_andnot_ps(sign, a.lo)),
                                     _mm256_castps_si256(_mm256_andnot_ps(sign, a.hi)));
  const __m256i y = _mm256_max_epi32(_mm256_castps_si256(_mm256_andnot_ps(sign, b.lo)),
                                     _mm256_castps_si256(_mm256_andnot_ps(sign, b.hi)));
  const __m256i largest_finite = _mm256_set1_epi32(0x7f7fffff);
  return _mm256_movemask_epi8(_mm256_cmpgt_epi32(_mm256_max_epi32(x, y), largest_finite)) == 0;
}
// The first of the lanes of a, then of b, that is x; the last one if none is.
TOQUE_INLINE int first_of(f32x16 a, f32x16 b, float x) {
  const __m256 v = _mm256_set1_ps(x);
  const auto equal = [v](__m256 y) __attribute__((always_inline)) {
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(y, v, _CMP_EQ_OQ));
  };
  const uint32_t lanes = equal(a.lo) | equal(a.hi) << 8 | equal(b.lo) << 16 | equal(b.hi) << 24;
  return __builtin_ctz(lanes | 1u << 31);
}
TOQUE_INLINE void reduce_add(i32x16 a, i32x16 b, int32_t& sum_a, int32_t& sum_b) {
  __m256i sums = _mm256_hadd_epi32(_mm256_add_epi32(a.lo, a.hi), _mm256_add_epi32(b.lo, b.hi));
  sums = _mm256_hadd_epi32(sums, sums);
  const __m128i both = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  sum_a = _mm_cvtsi128_si32(both);
  sum_b = _mm_extract_epi32(both, 1);
}

TOQUE_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
// To the second level of caches only.
TOQUE_INLINE void prefetch_far(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

}  // namespace toque::TOQUE_ISA
