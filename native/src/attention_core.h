// Attention over one chunk of the paged cache; layouts in kv_cache.h, the contract in step_kernels.h.
//
// For each tile of 16 tokens, the scores of up to six query rows are kept in registers while K streams by;
// then one softmax per row; then, 16 or more output columns at a time, the same rows accumulate p * V. The
// number of rows and tiles that share a pass only changes what is kept in registers, never the order of any
// sum.
//
// `Cache` is one number format of the cache: how it is stored, and the two products over it:
//
//   Element                        of prepared queries and of weights, which are the probabilities or take
//                                  the values' scales as well
//   query_bytes(head_dim)
//   tiles_at_once(R), columns_at_once(R)   how many tiles, columns / 16, R rows take at once
//   score<R, N>(c, row, tile, first_pass)  scores of R rows against N tiles
//   score_unit(c, row)             what one unit of a row's scores is worth
//   Weights(c, row)                puts a row's weights into the place of its scores: put(tile, e) for all
//                                  tiles in order, then close(); after all rows, finish()
//   accumulate<R, C>(c, row, column, first_tile, first_pass)   out[:, columns] of R rows = weights * V
//
// The first pass over a tile is a time to fetch what comes next.
#pragma once

#include "simd.h"
#include "step_kernels_isa.h"

namespace toque::TOQUE_ISA {
namespace {

constexpr int kTile = 16;
constexpr int kChunk = 256;
constexpr int kMaxRows = 6;  // rows that share a pass over K or V
constexpr float kMasked = -1e30f;
// 2^(x - 1) on [1, 2]: least largest relative error (7.5e-5), found by Lawson's iteration.
constexpr float kExp2[] = {0.4521343299f, 0.4777727726f, -0.008006405941f, 0.07802452354f};
constexpr float kOctave = 8388608.0f;  // 2^23: one in a float's exponent

// On AVX2 there are 16 registers of half the width and twelve hold sums, so the compiler must not hold loads
// or broadcasts for the next products at the same time: the fence makes it load them again.
#if defined(TOQUE_SIMD_AVX512)
#define TOQUE_FENCE
#else
#define TOQUE_FENCE asm volatile("" ::: "memory")
#endif

template <class Cache>
TOQUE_INLINE const typename Cache::Element* query(const AttendChunk& c, int row) {
  return (const typename Cache::Element*)((const uint8_t*)c.queries + row * Cache::query_bytes(c.head_dim));
}
TOQUE_INLINE float* scores(const AttendChunk& c, int row) { return c.scores + (size_t)row * kChunk; }
template <class Cache>
TOQUE_INLINE typename Cache::Element* weights(const AttendChunk& c, int row) {
  return (typename Cache::Element*)scores(c, row);
}

template <class Cache, int R>
void score_rows(const AttendChunk& c, int row, int tile, int count, bool first_pass) {
  constexpr int N = Cache::tiles_at_once(R);
  if (count == N) {
    Cache::template score<R, N>(c, row, tile, first_pass);
  } else {
    for (int n = 0; n < count; ++n) Cache::template score<R, 1>(c, row, tile + n, first_pass);
  }
}

template <class Cache, int R>
void accumulate_rows(const AttendChunk& c, int row, int column, int count, int first_tile, bool first_pass) {
  constexpr int C = Cache::columns_at_once(R);
  if (count == C) {
    Cache::template accumulate<R, C>(c, row, column, first_tile, first_pass);
  } else {
    for (int i = 0; i < count; ++i) {
      Cache::template accumulate<R, 1>(c, row, column + i * kTile, first_tile, first_pass && i == 0);
    }
  }
}

#define TOQUE_FOR_ROWS(n, call) \
  switch (n) {                  \
    case 1:                     \
      call(1);                  \
      break;                    \
    case 2:                     \
      call(2);                  \
      break;                    \
    case 3:                     \
      call(3);                  \
      break;                    \
    case 4:                     \
      call(4);                  \
      break;                    \
    case 5:                     \
      call(5);                  \
      break;                    \
    default:                    \
      call(6);                  \
      break;                    \
  }

// Lanes of the tile at `base` that the row may see, others replaced.
TOQUE_INLINE f32x16 mask(f32x16 x, int base, int first, int last, f32x16 hidden) {
  if (base + kTile > last) x = select_first(last > base ? last - base : 0, x, hidden);
  if (base < first) x = select_first(first - base < kTile ? first - base : kTile, hidden, x);
  return x;
}

// Calls pass(tile, whether it needs a mask): most tiles are seen whole.
template <bool masked>
struct Masked {
  static constexpr bool value = masked;
};
template <class Pass>
TOQUE_INLINE void for_tiles(int begin, int end, int first, int last, Pass pass) {
  const int open = (first + kTile - 1) / kTile, close = last / kTile;
  int tile = begin;
  for (; tile < end && tile < open; ++tile) pass(tile, Masked<true>());
  for (; tile < close; ++tile) pass(tile, Masked<false>());
  for (; tile < end; ++tile) pass(tile, Masked<true>());
}

// 2^(x / kOctave) for x of at most a little above 0, with a relative error below 1e-4: the weights that it
// makes become codes of fewer bits. Below 2^-100 it is 2^-100; what it makes of 1e30 is hidden. Floor(x /
// kOctave) and the rest lie in the bits of the rounded x like exponent and mantissa of a float.
TOQUE_INLINE f32x16 weight_exp2(f32x16 x) {
  const i32x16 bits = round_wide_i32(max(x, broadcast(-100.0f * kOctave)));
  const f32x16 f = as_f32((bits & broadcast((int32_t)0x007fffff)) | broadcast((int32_t)0x3f800000));
  f32x16 p = broadcast(kExp2[3]);
  p = fma(p, f, broadcast(kExp2[2]));
  p = fma(p, f, broadcast(kExp2[1]));
  p = fma(p, f, broadcast(kExp2[0]));
  return as_f32(as_i32(p) + (bits & broadcast((int32_t)0xff800000)));
}

// The softmax of all rows, pass by pass rather than row by row: what ends a row's pass waits for its own sums
// only, and the next row's pass runs meanwhile.
template <class Cache>
void softmax_rows(const AttendChunk& c, int tile_begin, int tile_end) {
  const f32x16 hidden = broadcast(kMasked);
  for (int row = 0; row < c.rows; ++row) {
    float* s = scores(c, row);
    const int first = c.first[row], last = c.last[row];
    float unit = Cache::score_unit(c, row);
    if (c.softcap > 0.0f) {
      for (int tile = tile_begin; tile < tile_end; ++tile) {
        const f32x16 x = load(s + tile * kTile) * broadcast(unit / c.softcap);
        store(s + tile * kTile, broadcast(c.softcap) * tanh(x));
      }
      unit = 1.0f;
    }
    f32x16 top = hidden;
    for_tiles(tile_begin, tile_end, first, last, [&](int tile, auto masked) {
      f32x16 x = load(s + tile * kTile);
      if constexpr (masked.value) x = mask(x, tile * kTile, first, last, hidden);
      top = max(top, x);
    });
    c.maximum[row] = reduce_max(top) * unit;
  }
  for (int row = 0; row < c.rows; ++row) {
    const float* s = scores(c, row);
    const int first = c.first[row], last = c.last[row];
    const float octaves = 1.44269504f * kOctave;
    const f32x16 by = broadcast((c.softcap > 0.0f ? 1.0f : Cache::score_unit(c, row)) * octaves);
    const f32x16 maximum = broadcast(c.maximum[row] * -octaves);
    f32x16 sum = zero_f32();
    typename Cache::Weights weights(c, row);
    for_tiles(tile_begin, tile_end, first, last, [&](int tile, auto masked) {
      f32x16 e = weight_exp2(fma(load(s + tile * kTile), by, maximum));
      // Exactly zero: hidden tokens change no bit.
      if constexpr (masked.value) e = mask(e, tile * kTile, first, last, zero_f32());
      sum = sum + e;
      weights.put(tile, e);
    });
    weights.close();
    c.sum[row] = reduce_add(sum);
  }
  for (int row = 0; row < c.rows; ++row) Cache::Weights::finish(c, row, tile_begin, tile_end);
}

template <class Cache>
void attend_with(const AttendChunk& c) {
  int first = kChunk, last = 0;
  for (int r = 0; r < c.rows; ++r) {
    if (c.first[r] >= c.last[r]) continue;  // sees nothing of this chunk
    if (c.first[r] < first) first = c.first[r];
    if (c.last[r] > last) last = c.last[r];
  }
  const int tile_begin = first / kTile, tile_end = (last + kTile - 1) / kTile;
  // The tiles' loop is outside, so that a tile of K stays in L1 for all rows.
  const int step = c.rows >= 4 ? Cache::tiles_at_once(kMaxRows) : Cache::tiles_at_once(c.rows);
  for (int tile = tile_begin; tile < tile_end; tile += step) {
    const int count = tile_end - tile < step ? tile_end - tile : step;
    for (int row = 0; row < c.rows; row += kMaxRows) {
#define TOQUE_CALL(R) score_rows<Cache, R>(c, row, tile, count, row == 0)
      TOQUE_FOR_ROWS(c.rows - row, TOQUE_CALL)
#undef TOQUE_CALL
    }
  }
  softmax_rows<Cache>(c, tile_begin, tile_end);
  // Likewise a few columns of V.
  const int columns = c.head_dim / kTile;
  const int width = c.rows >= 4 ? Cache::columns_at_once(kMaxRows) : Cache::columns_at_once(c.rows);
  for (int column = 0; column < columns; column += width) {
    const int count = columns - column < width ? columns - column : width;
    for (int row = 0; row < c.rows; row += kMaxRows) {
#define TOQUE_CALL(R) \
  accumulate_rows<Cache, R>(c, row, column * kTile, count, tile_begin, row == 0 && column == 0)
      TOQUE_FOR_ROWS(c.rows - row, TOQUE_CALL)
#undef TOQUE_CALL
    }
  }
}

}  // namespace
}  // namespace toque::TOQUE_ISA
