// Portable implementation of the vector layer: plain arrays, no intrinsics. The oracle of the other two.
#pragma once

namespace toque::TOQUE_ISA {

constexpr int kTileMax = 4;         // tokens in a tile
constexpr int kRegisterSums = 4;    // up to so many tokens, a tile's running sums are kept in registers
constexpr bool kBF16Pairs = false;  // bf16 weights take bf16 activations (bf16_dot is one instruction)

struct f32x16 {
  float v[16];
};
struct i32x16 {
  int32_t v[16];
};
struct u8x64 {
  uint8_t v[64];
};

#define TOQUE_LANES(expression)            \
  for (int i = 0; i < 16; ++i) expression; \
  return r

TOQUE_INLINE float bits_to_f32(uint32_t bits) {
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}
TOQUE_INLINE uint32_t f32_to_bits(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return bits;
}
TOQUE_INLINE float f16_to_f32(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff;
  if (magnitude >= 0x7c00) return bits_to_f32(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude >= 0x400) return bits_to_f32(sign | ((magnitude << 13) + 0x38000000));
  float subnormal = (float)magnitude * 5.9604644775390625e-8f;  // 2^-24
  return bits_to_f32(sign | f32_to_bits(subnormal));
}
TOQUE_INLINE uint16_t f32_to_f16(float f) {
  uint32_t bits = f32_to_bits(f), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
  if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (magnitude < 0x38800000) {  // subnormal: let the float adder round to a multiple of 2^-24
    return (uint16_t)(sign | (f32_to_bits(bits_to_f32(magnitude) + 0.5f) - 0x3f000000));
  }
  return (uint16_t)(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
}
TOQUE_INLINE uint16_t f32_to_bf16(float f) {
  uint32_t bits = f32_to_bits(f);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// clang-format off
TOQUE_INLINE f32x16 load(const float* p) { f32x16 r; memcpy(r.v, p, sizeof r); return r; }
TOQUE_INLINE void store(float* p, f32x16 a) { memcpy(p, a.v, sizeof a); }
TOQUE_INLINE i32x16 load(const int32_t* p) { i32x16 r; memcpy(r.v, p, sizeof r); return r; }
TOQUE_INLINE void store(int32_t* p, i32x16 a) { memcpy(p, a.v, sizeof a); }
TOQUE_INLINE u8x64 load_bytes(const void* p) { u8x64 r; memcpy(r.v, p, sizeof r); return r; }
TOQUE_INLINE void store_bytes(void* p, u8x64 a) { memcpy(p, a.v, sizeof a); }
TOQUE_INLINE f32x16 broadcast(float x) { f32x16 r; TOQUE_LANES(r.v[i] = x); }
TOQUE_INLINE i32x16 broadcast(int32_t x) { i32x16 r; TOQUE_LANES(r.v[i] = x); }
TOQUE_INLINE u8x64 broadcast4(const void* p) { u8x64 r; TOQUE_LANES(memcpy(r.v + 4 * i, p, 4)); }
TOQUE_INLINE i32x16 iota() { i32x16 r; TOQUE_LANES(r.v[i] = i); }

TOQUE_INLINE f32x16 add(f32x16 a, f32x16 b) { f32x16 r; TOQUE_LANES(r.v[i] = a.v[i] + b.v[i]); }
TOQUE_INLINE f32x16 sub(f32x16 a, f32x16 b) { f32x16 r; TOQUE_LANES(r.v[i] = a.v[i] - b.v[i]); }
TOQUE_INLINE f32x16 mul(f32x16 a, f32x16 b) { f32x16 r; TOQUE_LANES(r.v[i] = a.v[i] * b.v[i]); }
TOQUE_INLINE f32x16 div(f32x16 a, f32x16 b) { f32x16 r; TOQUE_LANES(r.v[i] = a.v[i] / b.v[i]); }
TOQUE_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { f32x16 r; TOQUE_LANES(r.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
TOQUE_INLINE f32x16 sqrt(f32x16 a) { f32x16 r; TOQUE_LANES(r.v[i] = __builtin_sqrtf(a.v[i])); }
TOQUE_INLINE f32x16 max(f32x16 a, f32x16 b) { f32x16 r; TOQUE_LANES(r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
TOQUE_INLINE f32x16 min(f32x16 a, f32x16 b) { f32x16 r; TOQUE_LANES(r.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
TOQUE_INLINE f32x16 abs(f32x16 a) { f32x16 r; TOQUE_LANES(r.v[i] = bits_to_f32(f32_to_bits(a.v[i]) & 0x7fffffff)); }
TOQUE_INLINE i32x16 add(i32x16 a, i32x16 b) { i32x16 r; TOQUE_LANES(r.v[i] = (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i])); }
TOQUE_INLINE i32x16 operator&(i32x16 a, i32x16 b) { i32x16 r; TOQUE_LANES(r.v[i] = a.v[i] & b.v[i]); }
TOQUE_INLINE i32x16 operator|(i32x16 a, i32x16 b) { i32x16 r; TOQUE_LANES(r.v[i] = a.v[i] | b.v[i]); }
template <int N> TOQUE_INLINE i32x16 shift_left(i32x16 a) { i32x16 r; TOQUE_LANES(r.v[i] = (int32_t)((uint32_t)a.v[i] << N)); }

TOQUE_INLINE f32x16 as_f32(i32x16 a) { f32x16 r; memcpy(r.v, a.v, sizeof r); return r; }
TOQUE_INLINE i32x16 as_i32(f32x16 a) { i32x16 r; memcpy(r.v, a.v, sizeof r); return r; }
TOQUE_INLINE f32x16 to_f32(i32x16 a) { f32x16 r; TOQUE_LANES(r.v[i] = (float)a.v[i]); }
// Rounds to nearest, ties to even, numbers of any size; beyond 32 bits to some number.
TOQUE_INLINE int32_t round_wide(float a) {
    if (!(a < 2147483648.0f && a >= -2147483648.0f)) return INT32_MIN;
    if (a >= 8388608.0f || a <= -8388608.0f) return (int32_t)a;  // has no fraction
    return a < 0.0f ? (int32_t)((a - 8388608.0f) + 8388608.0f) : (int32_t)((a + 8388608.0f) - 8388608.0f);
}
TOQUE_INLINE i32x16 round_wide_i32(f32x16 a) { i32x16 r; TOQUE_LANES(r.v[i] = round_wide(a.v[i])); }
// Sixteen e4m3 bytes as the f16 of the same bits: 2^-8 of their value. 0x7f is no NaN here.
TOQUE_INLINE f32x16 load_f8(const uint8_t* p) { f32x16 r; TOQUE_LANES(r.v[i] = f16_to_f32((uint16_t)((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7))); }
TOQUE_INLINE f32x16 load_i8(const int8_t* p) { f32x16 r; TOQUE_LANES(r.v[i] = (float)p[i]); }
// Rounds to nearest, ties to even; |a| below 2^22.
TOQUE_INLINE i32x16 round_i32(f32x16 a) {
    i32x16 r;
    TOQUE_LANES(r.v[i] = (int32_t)(f32_to_bits(a.v[i] + 12582912.0f) - f32_to_bits(12582912.0f)));
}
TOQUE_INLINE f32x16 load_f16(const uint16_t* p) { f32x16 r; TOQUE_LANES(r.v[i] = f16_to_f32(p[i])); }
TOQUE_INLINE f32x16 load_bf16(const uint16_t* p) { f32x16 r; TOQUE_LANES(r.v[i] = bits_to_f32((uint32_t)p[i] << 16)); }
TOQUE_INLINE void store_f16(uint16_t* p, f32x16 a) { for (int i = 0; i < 16; ++i) p[i] = f32_to_f16(a.v[i]); }
TOQUE_INLINE void store_bf16(uint16_t* p, f32x16 a) { for (int i = 0; i < 16; ++i) p[i] = f32_to_bf16(a.v[i]); }
// Sixteen integers in -128..127 as bytes.
TOQUE_INLINE void store_i8(int8_t* p, i32x16 a) { for (int i = 0; i < 16; ++i) p[i] = (int8_t)a.v[i]; }
// Sixteen integers in -32768..32767 as 16 bits each.
TOQUE_INLINE void store_i16(int16_t* p, i32x16 a) { for (int i = 0; i < 16; ++i) p[i] = (int16_t)a.v[i]; }
// acc + a.low * b.low + a.high * b.high per lane, of pairs of signed 16-bit integers; b is the pair at `p` in all lanes.
TOQUE_INLINE i32x16 dot2(i32x16 acc, i32x16 a, const int16_t* p) { i32x16 r; TOQUE_LANES(r.v[i] = acc.v[i] + (int16_t)a.v[i] * p[0] + (a.v[i] >> 16) * p[1]); }
// clang-format on
#undef TOQUE_LANES

// Lane i of a where i < count, else of b.
TOQUE_INLINE f32x16 select_first(int count, f32x16 a, f32x16 b) {
  for (int i = 0; i < 16; ++i) {
    if (i >= count) a.v[i] = b.v[i];
  }
  return a;
}
// The low (even k) and high (odd k) halves of sixteen bf16 pairs.
TOQUE_INLINE f32x16 bf16_low(i32x16 a) {
  f32x16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = bits_to_f32((uint32_t)a.v[i] << 16);
  return r;
}
TOQUE_INLINE f32x16 bf16_high(i32x16 a) {
  f32x16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = bits_to_f32((uint32_t)a.v[i] & 0xffff0000u);
  return r;
}
// acc + a.low * b.low + a.high * b.high per lane.
TOQUE_INLINE f32x16 bf16_dot(f32x16 acc, i32x16 a, i32x16 b) {
  acc = fma(bf16_low(a), bf16_low(b), acc);
  return fma(bf16_high(a), bf16_high(b), acc);
}
// acc + sum of four products of unsigned bytes of a and signed bytes of b, per lane.
TOQUE_INLINE i32x16 dot4(i32x16 acc, u8x64 a, u8x64 b) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 4; ++j) acc.v[i] += (int32_t)a.v[4 * i + j] * (int8_t)b.v[4 * i + j];
  }
  return acc;
}

// Byte i of the result is byte (index i) of a table of 16, given four times; indices are below 16.
TOQUE_INLINE u8x64 broadcast16(const void* p) {
  u8x64 r;
  for (int i = 0; i < 4; ++i) memcpy(r.v + 16 * i, p, 16);
  return r;
}
TOQUE_INLINE u8x64 lookup(u8x64 table, u8x64 index) {
  for (int i = 0; i < 64; ++i) index.v[i] = table.v[index.v[i]];
  return index;
}

// Byte operations for unpacking codes. Shifts move 16-bit words, as x86 does: bits that cross a byte must be
// masked off.
TOQUE_INLINE u8x64 broadcast_byte(uint8_t x) {
  u8x64 r;
  memset(r.v, x, sizeof r);
  return r;
}
TOQUE_INLINE u8x64 operator&(u8x64 a, u8x64 b) {
  for (int i = 0; i < 64; ++i) a.v[i] &= b.v[i];
  return a;
}
TOQUE_INLINE u8x64 operator|(u8x64 a, u8x64 b) {
  for (int i = 0; i < 64; ++i) a.v[i] |= b.v[i];
  return a;
}
// Left by N bits, right by -N.
template <int N>
TOQUE_INLINE u8x64 shift_words(u8x64 a) {
  uint16_t words[32];
  memcpy(words, a.v, sizeof words);
  for (int i = 0; i < 32; ++i) words[i] = (uint16_t)(N >= 0 ? words[i] << (N & 15) : words[i] >> (-N & 15));
  memcpy(a.v, words, sizeof words);
  return a;
}

// Right by n bits, n known at run time only.
TOQUE_INLINE u8x64 shift_words_right(u8x64 a, int n) {
  uint16_t words[32];
  memcpy(words, a.v, sizeof words);
  for (int i = 0; i < 32; ++i) words[i] = (uint16_t)(words[i] >> n);
  memcpy(a.v, words, sizeof words);
  return a;
}

// The largest and the second largest of the maxima of eight quads.
TOQUE_INLINE void top_two_quads(f32x16 low, f32x16 high, float& first, float& second) {
  first = second = 0.0f;
  for (int quad = 0; quad < 8; ++quad) {
    const float* x = quad < 4 ? low.v + 4 * quad : high.v + 4 * (quad - 4);
    float largest = x[0];
    for (int i = 1; i < 4; ++i) largest = x[i] > largest ? x[i] : largest;
    if (largest > first) {
      second = first;
      first = largest;
    } else if (largest > second) {
      second = largest;
    }
  }
}

// Reductions fold 16 -> 8 -> 4 -> 2 -> 1, always adding lane i + half to lane i.
TOQUE_INLINE float reduce_add(f32x16 a) {
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) a.v[i] = a.v[i] + a.v[i + half];
  }
  return a.v[0];
}
TOQUE_INLINE float reduce_max(f32x16 a) {
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
  }
  return a.v[0];
}
TOQUE_INLINE int32_t reduce_add(i32x16 a) {
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += a.v[i];
  return sum;
}

TOQUE_INLINE bool all_finite(f32x16 a, f32x16 b) {
  for (int i = 0; i < 16; ++i) {
    if (!__builtin_isfinite(a.v[i]) || !__builtin_isfinite(b.v[i])) return false;
  }
  return true;
}
// The first of the lanes of a, then of b, that is x; the last one if none is.
TOQUE_INLINE int first_of(f32x16 a, f32x16 b, float x) {
  for (int i = 0; i < 31; ++i) {
    if ((i < 16 ? a.v[i] : b.v[i - 16]) == x) return i;
  }
  return 31;
}
TOQUE_INLINE void reduce_add(i32x16 a, i32x16 b, int32_t& sum_a, int32_t& sum_b) {
  sum_a = reduce_add(a);
  sum_b = reduce_add(b);
}

TOQUE_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
// To the second level of caches only.
TOQUE_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace toque::TOQUE_ISA
