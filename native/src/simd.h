// Sixteen lanes, one vocabulary: the vector layer that every kernel is written over.
//
// A kernel source is compiled once per instruction set, with its own flags and its own namespace (TOQUE_ISA),
// and sees here exactly one implementation of the types
//
//   f32x16   sixteen floats          i32x16   sixteen 32-bit integers (also: sixteen pairs of bf16)
//   u8x64    sixty-four bytes, four per lane, signed or unsigned by the operation
//
// as one zmm register (AVX-512), two ymm (AVX2) or plain arrays (scalar). Every operation rounds identically
// on every implementation (fma really is fused in the scalar one; reductions use one fixed tree), so kernels
// that use only integer and f32 operations give the same bits everywhere. The exception is bf16_dot, see
// there.
//
// Kernel sources must not use std:: templates or inline functions with external linkage: the linker keeps one
// copy of those for the whole module, and if it keeps the AVX-512 one, an older machine dies of SIGILL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifndef TOQUE_ISA
#error "kernel sources are compiled with -DTOQUE_ISA=<namespace>"
#endif

#define TOQUE_INLINE static inline __attribute__((always_inline))
#define TOQUE_INLINE_MEMBER inline __attribute__((always_inline))
// Unrolls the loop that follows: trip counts are template parameters, and arrays of registers need constant
// indices.
// The scalar implementation has no registers to speak of and stays compact.
#if defined(TOQUE_SIMD_AVX512) || defined(TOQUE_SIMD_AVX2)
#define TOQUE_UNROLL _Pragma("GCC unroll 64")
#else
#define TOQUE_UNROLL
#endif

#if defined(TOQUE_SIMD_AVX512)
#include "simd/avx512.h"
#elif defined(TOQUE_SIMD_AVX2)
#include "simd/avx2.h"
#else
#include "simd/scalar.h"
#endif

namespace toque::TOQUE_ISA {

constexpr int kLanes = 16;

TOQUE_INLINE f32x16 zero_f32() { return broadcast(0.0f); }
TOQUE_INLINE f32x16 operator+(f32x16 a, f32x16 b) { return add(a, b); }
TOQUE_INLINE f32x16 operator-(f32x16 a, f32x16 b) { return sub(a, b); }
TOQUE_INLINE f32x16 operator*(f32x16 a, f32x16 b) { return mul(a, b); }
TOQUE_INLINE f32x16 operator/(f32x16 a, f32x16 b) { return div(a, b); }
TOQUE_INLINE f32x16 operator-(f32x16 a) { return sub(broadcast(-0.0f), a); }
TOQUE_INLINE i32x16 operator+(i32x16 a, i32x16 b) { return add(a, b); }

// The first `count` lanes from memory, zeros after them; count in 0..16.
TOQUE_INLINE f32x16 load_first(const float* p, int count) {
  alignas(64) float lanes[16] = {};
  for (int i = 0; i < count; ++i) lanes[i] = p[i];
  return load(lanes);
}

TOQUE_INLINE void store_first(float* p, f32x16 v, int count) {
  alignas(64) float lanes[16];
  store(lanes, v);
  for (int i = 0; i < count; ++i) p[i] = lanes[i];
}

// e^x with a relative error below 2e-7. Below -87.3 the result is clamped to e^-87.3 (about 1e-38: zero for
// every use here), above 88 to e^88. NaN gives an unspecified number.
TOQUE_INLINE f32x16 exp(f32x16 x) {
  x = min(max(x, broadcast(-87.3f)), broadcast(88.0f));
  // Adding 1.5 * 2^23 leaves round(x / ln 2) in the low mantissa bits; the subtraction recovers it as a
  // float.
  const f32x16 magic = broadcast(12582912.0f);
  f32x16 shifted = fma(x, broadcast(1.44269504f), magic);
  f32x16 n = shifted - magic;
  f32x16 f = fma(n, broadcast(-0.693145752f), x);  // ln 2 in two pieces (Cody-Waite)
  f = fma(n, broadcast(-1.42860677e-6f), f);
  f32x16 p = broadcast(1.9875691500e-4f);  // minimax polynomial of Cephes' expf
  p = fma(p, f, broadcast(1.3981999507e-3f));
  p = fma(p, f, broadcast(8.3334519073e-3f));
  p = fma(p, f, broadcast(4.1665795894e-2f));
  p = fma(p, f, broadcast(1.6666665459e-1f));
  p = fma(p, f, broadcast(5.0000001201e-1f));
  p = fma(p, f * f, f + broadcast(1.0f));
  // 2^n: n sits in the low bits of `shifted`; moving it into the exponent field of p is one shift and one
  // add.
  return as_f32(add(as_i32(p), shift_left<23>(as_i32(shifted))));
}

// tanh(x) = 1 - 2 / (e^2x + 1); absolute error below 2e-7.
TOQUE_INLINE f32x16 tanh(f32x16 x) {
  f32x16 e = exp(x + x);
  return broadcast(1.0f) - broadcast(2.0f) / (e + broadcast(1.0f));
}

TOQUE_INLINE f32x16 silu(f32x16 x) { return x / (broadcast(1.0f) + exp(-x)); }

TOQUE_INLINE f32x16 gelu_tanh(f32x16 x) {
  f32x16 inner = broadcast(0.797884561f) * fma(x * x * x, broadcast(0.044715f), x);
  return broadcast(0.5f) * x * (broadcast(1.0f) + tanh(inner));
}

// 0.5 x (1 + erf(x / sqrt 2)), erf by formula 7.1.26 of Abramowitz & Stegun (absolute error below 5e-7).
TOQUE_INLINE f32x16 gelu_erf(f32x16 x) {
  f32x16 z = abs(x) * broadcast(0.707106781f);
  f32x16 t = broadcast(1.0f) / fma(z, broadcast(0.3275911f), broadcast(1.0f));
  f32x16 p = broadcast(1.061405429f);
  p = fma(p, t, broadcast(-1.453152027f));
  p = fma(p, t, broadcast(1.421413741f));
  p = fma(p, t, broadcast(-0.284496736f));
  p = fma(p, t, broadcast(0.254829592f));
  f32x16 erf = broadcast(1.0f) - p * t * exp(-(z * z));
  return broadcast(0.5f) * fma(abs(x), erf, x);  // x * erf(x) = |x| * erf(|x|)
}

}  // namespace toque::TOQUE_ISA
