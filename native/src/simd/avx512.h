// The vector layer on AVX-512 with VNNI and BF16: one 512-bit register. With TOQUE_EMULATE_AVX512 the same
// source is compiled for AVX2 against SIMDe's emulation, which is slow and only there so that machines
// without AVX-512 can test it.
#pragma once

#if defined(TOQUE_EMULATE_AVX512)
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#else
#include <immintrin.h>
#endif

namespace toque::TOQUE_ISA {

#if defined(TOQUE_EMULATE_AVX512)
constexpr int kTileMax = 3;  // as below in all but size: emulated instructions are slow to compile
#else
constexpr int kTileMax = 12;  // tokens in a tile
#endif
constexpr int kRegisterSums = 12;  // up to so many tokens, a tile's running sums are kept in registers
constexpr bool kBF16Pairs = true;  // bf16 weights take bf16 activations (bf16_dot is one instruction)

struct f32x16 {
  __m512 v;
};
struct i32x16 {
  __m512i v;
};
struct u8x64 {
  __m512i v;
};

// clang-format off
TOQUE_INLINE f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
TOQUE_INLINE void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
TOQUE_INLINE i32x16 load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
TOQUE_INLINE void store(int32_t* p, i32x16 a) { _mm512_storeu_si512(p, a.v); }
TOQUE_INLINE u8x64 load_bytes(const void* p) { return {_mm512_loadu_si512(p)}; }
TOQUE_INLINE void store_bytes(void* p, u8x64 a) { _mm512_storeu_si512(p, a.v); }
TOQUE_INLINE f32x16 broadcast(float x) { return {_mm512_set1_ps(x)}; }
TOQUE_INLINE i32x16 broadcast(int32_t x) { return {_mm512_set1_epi32(x)}; }
TOQUE_INLINE u8x64 broadcast4(const void* p) { int32_t x; memcpy(&x, p, 4); return {_mm512_set1_epi32(x)}; }
TOQUE_INLINE i32x16 iota() { return {_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)}; }

TOQUE_INLINE f32x16 add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
TOQUE_INLINE f32x16 sub(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
TOQUE_INLINE f32x16 mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
TOQUE_INLINE f32x16 div(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
TOQUE_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
TOQUE_INLINE f32x16 sqrt(f32x16 a) { return {_mm512_sqrt_ps(a.v)}; }
TOQUE_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
TOQUE_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
TOQUE_INLINE f32x16 abs(f32x16 a) { return {_mm512_abs_ps(a.v)}; }
TOQUE_INLINE i32x16 add(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
TOQUE_INLINE i32x16 operator&(i32x16 a, i32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
TOQUE_INLINE i32x16 operator|(i32x16 a, i32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int N> TOQUE_INLINE i32x16 shift_left(i32x16 a) { return {_mm512_slli_epi32(a.v, N)}; }

TOQUE_INLINE f32x16 as_f32(i32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
TOQUE_INLINE i32x16 as_i32(f32x16 a) { return {_mm512_castps_si512(a.v)}; }
TOQUE_INLINE f32x16 load_bf16(const uint16_t* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))}; }
// clang-format on

#if defined(TOQUE_EMULATE_AVX512)
// What SIMDe lacks or does lane by lane.
TOQUE_INLINE __m256 emulated_half(f32x16 a, int half) {
  alignas(64) float lanes[16];
  store(lanes, a);
  return _mm256_load_ps(lanes + 8 * half);
}
TOQUE_INLINE f32x16 emulated_join(__m256 lo, __m256 hi) {
  alignas(64) float lanes[16];
  _mm256_store_ps(lanes, lo);
  _mm256_store_ps(lanes + 8, hi);
  return load(lanes);
}
TOQUE_INLINE f32x16 to_f32(i32x16 a) {
  alignas(64) int32_t lanes[16];
  store(lanes, a);
  return emulated_join(_mm256_cvtepi32_ps(_mm256_load_si256((const __m256i*)lanes)),
                       _mm256_cvtepi32_ps(_mm256_load_si256((const __m256i*)(lanes + 8))));
}
TOQUE_INLINE f32x16 load_i8(const int8_t* p) {
  alignas(64) int32_t lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = p[i];
  return to_f32(load(lanes));
}
TOQUE_INLINE i32x16 round_i32(f32x16 a) {
  alignas(64) int32_t lanes[16];
  _mm256_store_si256((__m256i*)lanes, _mm256_cvtps_epi32(emulated_half(a, 0)));
  _mm256_store_si256((__m256i*)(lanes + 8), _mm256_cvtps_epi32(emulated_half(a, 1)));
  return load(lanes);
}
TOQUE_INLINE f32x16 load_f16(const uint16_t* p) {
  return emulated_join(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
                       _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8))));
}
TOQUE_INLINE void store_f16(uint16_t* p, f32x16 a) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(emulated_half(a, 0), _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(emulated_half(a, 1), _MM_FROUND_TO_NEAREST_INT));
}
TOQUE_INLINE void store_bf16(uint16_t* p, f32x16 a) {  // like VCVTNEPS2BF16 except for subnormals
  alignas(64) uint32_t bits[16];
  store((int32_t*)bits, as_i32(a));
  for (int i = 0; i < 16; ++i) {
    bool nan = (bits[i] & 0x7fffffff) > 0x7f800000;
    p[i] = (uint16_t)(nan ? bits[i] >> 16 | 0x40 : (bits[i] + 0x7fff + (bits[i] >> 16 & 1)) >> 16);
  }
}
TOQUE_INLINE void store_i8(int8_t* p, i32x16 a) {
  alignas(64) int32_t lanes[16];
  store(lanes, a);
  for (int i = 0; i < 16; ++i) p[i] = (int8_t)lanes[i];
}
TOQUE_INLINE f32x16 bf16_dot(f32x16 acc, i32x16 a, i32x16 b) {
  f32x16 a0{_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))},
      b0{_mm512_castsi512_ps(_mm512_slli_epi32(b.v, 16))};
  const __m512i high = _mm512_set1_epi32((int32_t)0xffff0000);
  f32x16 a1{_mm512_castsi512_ps(_mm512_and_si512(a.v, high))},
      b1{_mm512_castsi512_ps(_mm512_and_si512(b.v, high))};
  return fma(a0, b0, fma(a1, b1, acc));
}
TOQUE_INLINE f32x16 select_first(int count, f32x16 a, f32x16 b) {
  alignas(64) float x[16], y[16];
  store(x, a);
  store(y, b);
  for (int i = count; i < 16; ++i) x[i] = y[i];
  return load(x);
}
#else
// clang-format off
TOQUE_INLINE f32x16 to_f32(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
TOQUE_INLINE f32x16 load_i8(const int8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))}; }
// Rounds to nearest, ties to even; |a| below 2^22.
TOQUE_INLINE i32x16 round_i32(f32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
TOQUE_INLINE f32x16 load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
TOQUE_INLINE void store_f16(uint16_t* p, f32x16 a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
TOQUE_INLINE void store_bf16(uint16_t* p, f32x16 a) { __m256bh h = _mm512_cvtneps_pbh(a.v); memcpy(p, &h, sizeof h); }
// Sixteen integers in -128..127 as bytes.
TOQUE_INLINE void store_i8(int8_t* p, i32x16 a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }
// acc + a.low * b.low + a.high * b.high per lane. VDPBF16PS flushes subnormals and rounds on its own terms: results
// differ from the other implementations in the last bits.
TOQUE_INLINE f32x16 bf16_dot(f32x16 acc, i32x16 a, i32x16 b) { return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)}; }
// Lane i of a where i < count, else of b; count in 0..16 or beyond.
TOQUE_INLINE f32x16 select_first(int count, f32x16 a, f32x16 b) {
    return {_mm512_mask_mov_ps(b.v, _mm512_cmplt_epi32_mask(iota().v, _mm512_set1_epi32(count)), a.v)};
}
// clang-format on
#endif
// Rounds to nearest, ties to even, numbers of any size; beyond 32 bits to some number.
TOQUE_INLINE i32x16 round_wide_i32(f32x16 a) { return round_i32(a); }

// The low (even k) and high (odd k) halves of sixteen bf16 pairs.
TOQUE_INLINE f32x16 bf16_low(i32x16 a) { return as_f32(shift_left<16>(a)); }
TOQUE_INLINE f32x16 bf16_high(i32x16 a) {
  return as_f32(i32x16{_mm512_and_si512(a.v, _mm512_set1_epi32((int32_t)0xffff0000))});
}

// Sixteen e4m3 bytes as the f16 of the same bits: 2^-8 of their value. 0x7f is no NaN here.
TOQUE_INLINE f32x16 load_f8(const uint8_t* p) {
  __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
  x = _mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8),
                      _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7f)), 7));
  alignas(32) uint16_t halves[16];
  _mm256_store_si256((__m256i*)halves, x);
  return load_f16(halves);
}

// acc + sum of four products of unsigned bytes of a and signed bytes of b, per lane.
TOQUE_INLINE i32x16 dot4(i32x16 acc, u8x64 a, u8x64 b) { return {_mm512_dpbusd_epi32(acc.v, a.v, b.v)}; }

// Byte i of the result is byte (index i) of a table of 16, given four times; indices are below 16.
TOQUE_INLINE u8x64 broadcast16(const void* p) {
  return {_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p))};
}
TOQUE_INLINE u8x64 lookup(u8x64 table, u8x64 index) { return {_mm512_shuffle_epi8(table.v, index.v)}; }

// Byte operations for unpacking codes. Shifts move 16-bit words: bits that cross a byte must be masked off.
TOQUE_INLINE u8x64 broadcast_byte(uint8_t x) { return {_mm512_set1_epi8((char)x)}; }
TOQUE_INLINE u8x64 operator&(u8x64 a, u8x64 b) { return {_mm512_and_si512(a.v, b.v)}; }
TOQUE_INLINE u8x64 operator|(u8x64 a, u8x64 b) { return {_mm512_or_si512(a.v, b.v)}; }
// Left by N bits, right by -N.
template <int N>
TOQUE_INLINE u8x64 shift_words(u8x64 a) {
  if constexpr (N == 0) return a;
  return {N > 0 ? _mm512_slli_epi16(a.v, N & 15) : _mm512_srli_epi16(a.v, -N & 15)};
}

// Right by n bits, n known at run time only.
TOQUE_INLINE u8x64 shift_words_right(u8x64 a, int n) { return {_mm512_srl_epi16(a.v, _mm_cvtsi32_si128(n))}; }

// Reductions fold 16 -> 8 -> 4 -> 2 -> 1, always adding lane i + half to lane i.
TOQUE_INLINE __m256 fold_low(f32x16 a) { return _mm512_castps512_ps256(a.v); }
TOQUE_INLINE __m256 fold_high(f32x16 a) {
  return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
}
// In each lane the largest of its four neighbours 4i..4i+3.
TOQUE_INLINE __m256 max_of_quads(__m256 a) {
  a = _mm256_max_ps(a, _mm256_permute_ps(a, 0xb1));
  return _mm256_max_ps(a, _mm256_permute_ps(a, 0x4e));
}
// The largest and the second largest of the maxima of eight quads, by a tournament.
TOQUE_INLINE void top_two_quads(f32x16 low, f32x16 high, float& first, float& second) {
  const __m256 a = max_of_quads(fold_low(low)), b = max_of_quads(fold_high(low)),
               c = max_of_quads(fold_low(high)), d = max_of_quads(fold_high(high));
  const __m256 ab = _mm256_max_ps(a, b), cd = _mm256_max_ps(c, d);
  const __m256 losers = _mm256_max_ps(_mm256_min_ps(a, b), _mm256_min_ps(c, d));
  const __m256 top = _mm256_max_ps(ab, cd), next = _mm256_max_ps(_mm256_min_ps(ab, cd), losers);
  const __m128 x = _mm256_castps256_ps128(top), y = _mm256_extractf128_ps(top, 1);
  const __m128 rest = _mm_max_ps(_mm256_castps256_ps128(next), _mm256_extractf128_ps(next, 1));
  first = _mm_cvtss_f32(_mm_max_ss(x, y));
  second = _mm_cvtss_f32(_mm_max_ss(_mm_min_ss(x, y), rest));
}
TOQUE_INLINE float reduce_add(f32x16 a) {
  __m256 s8 = _mm256_add_ps(fold_low(a), fold_high(a));
  __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}
TOQUE_INLINE float reduce_max(f32x16 a) {
  __m256 s8 = _mm256_max_ps(fold_low(a), fold_high(a));
  __m128 s4 = _mm_max_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  __m128 s2 = _mm_max_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_max_ss(s2, _mm_movehdup_ps(s2)));
}
TOQUE_INLINE int32_t reduce_add(i32x16 a) {
  alignas(64) int32_t lanes[16];
  store(lanes, a);
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += lanes[i];
  return sum;
}

TOQUE_INLINE bool all_finite(f32x16 a, f32x16 b) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), infinite = _mm512_set1_epi32(0x7f800000);
  const __m512i x = _mm512_and_si512(_mm512_castps_si512(a.v), magnitude);
  const __m512i y = _mm512_and_si512(_mm512_castps_si512(b.v), magnitude);
  return _mm512_cmpgt_epi32_mask(infinite, _mm512_max_epi32(x, y)) == 0xffff;
}
// The first of the lanes of a, then of b, that is x; the last one if none is.
TOQUE_INLINE int first_of(f32x16 a, f32x16 b, float x) {
  const __m512 v = _mm512_set1_ps(x);
  const uint32_t low = _mm512_cmp_ps_mask(a.v, v, _CMP_EQ_OQ), high = _mm512_cmp_ps_mask(b.v, v, _CMP_EQ_OQ);
  return __builtin_ctz(low | high << 16 | 1u << 31);
}
TOQUE_INLINE void reduce_add(i32x16 a, i32x16 b, int32_t& sum_a, int32_t& sum_b) {
  sum_a = reduce_add(a);
  sum_b = reduce_add(b);
}

TOQUE_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
// To the second level of caches only.
TOQUE_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace toque::TOQUE_ISA
