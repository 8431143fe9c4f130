// How the 16-bit cache stores numbers where there is no dot product for bf16: as integer codes with one scale
// per token, for the products of neighbouring 16-bit integers that every SIMD instruction set has. They are
// exact, so the order of a sum never matters, and twice as many at a time as products of floats.
//
// Sums are 32 bits and must not overflow, whatever the numbers:
//
// - Queries and keys are scaled to a Euclidean length of 32,700 codes, so (Cauchy and Schwarz) no part of
//   their product exceeds 32,700^2, half of what fits, at any head size.
// - Values are scaled to at most 8,191 codes. A chunk's weights, probabilities times the values' scales, are
//   scaled to a sum of at most 261,000 codes, and 8,191 times that is what fits.
//
// A number beyond 1e12, which only a broken model makes, counts as 1e12, and NaN as -1e12: no score reaches
// the -1e30 of hidden tokens.
#pragma once

#include "attention_core.h"

namespace toque::TOQUE_ISA {
namespace {

struct Codes {
  using Element = int16_t;
  using Sum = i32x16;

  static constexpr float kLength = 32700.0f, kLargest = 8191.0f;         // of a query or key; in a value
  static constexpr float kLargestWeight = 32700.0f, kTotal = 261000.0f;  // in a row's weights; their sum
  static constexpr float kBeyond = 1e12f;

  static constexpr int tiles_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
  static constexpr int columns_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
  // The tokens' scales follow the codes of each half of a tile; a query's follows its codes.
  static constexpr size_t kScaleBytes = sizeof(float);
  static constexpr bool kClearNeighbour = false;  // whatever is there, zero times it is zero
  TOQUE_INLINE float* scales(const uint8_t* half, int dim) {
    return (float*)(half + (size_t)kTile * dim * sizeof(Element));
  }

  TOQUE_INLINE Sum zero() { return broadcast((int32_t)0); }
  TOQUE_INLINE Sum dot(Sum sum, i32x16 pairs, const Element* x) { return dot2(sum, pairs, x); }
  // Scores lack the query's scale: the softmax multiplies by it anyway.
  TOQUE_INLINE f32x16 score(Sum sum, const uint8_t* keys, int dim) {
    return to_f32(sum) * load(scales(keys, dim));
  }
  TOQUE_INLINE float unit(const Element* query, int dim) {
    float scale;
    memcpy(&scale, query + dim, sizeof scale);
    return scale;
  }
  TOQUE_INLINE f32x16 output(Sum sum, const float* row_scores) {
    return to_f32(sum) * broadcast(row_scores[kChunk - 1]);
  }

  TOQUE_INLINE f32x16 limited(f32x16 x) {
    return min(max(x, broadcast(-kBeyond)), broadcast(kBeyond));  // max() gives its second argument for a NaN
  }
  TOQUE_INLINE void convert(Element* p, f32x16 x, float codes_per_unit) {
    store_i16(p, round_i32(limited(x) * broadcast(codes_per_unit)));
  }
  // How many codes make 1, and what one code is worth, so that codes have the `length` or `largest` above.
  struct Scale {
    float codes_per_unit, worth;
  };
  TOQUE_INLINE Scale scale_to(float codes, float size) {
    if (!(size > 1e-15f)) return {0.0f, 0.0f};
    return {codes / size, size / codes};
  }
  static Scale scale_by_length(const float* x, int n, float by) {
    f32x16 squares = zero_f32();
    for (int d = 0; d < n; d += kTile) {
      const f32x16 y = limited(load(x + d) * broadcast(by));
      squares = fma(y, y, squares);
    }
    return scale_to(kLength, __builtin_sqrtf(reduce_add(squares)));
  }
  static Scale scale_by_largest(const float* x, int n) {
    f32x16 top = zero_f32();
    for (int d = 0; d < n; d += kTile) top = max(top, abs(limited(load(x + d))));
    return scale_to(kLargest, reduce_max(top));
  }

  static void prepare_query(const float* q, int dim, float by, void* prepared) {
    Element* const codes = (Element*)prepared;
    const Scale scale = scale_by_length(q, dim, by);
    for (int d = 0; d < dim; d += kTile)
      convert(codes + d, load(q + d) * broadcast(by), scale.codes_per_unit);
    memcpy(codes + dim, &scale.worth, sizeof scale.worth);
  }

  // Scales one token's key and value; convert() takes what it keeps.
  struct Token {
    float key, value;
    Token(const float* k, const float* v, int dim, int slot, uint8_t* keys, uint8_t* values) {
      const Scale k_scale = scale_by_length(k, dim, 1.0f), v_scale = scale_by_largest(v, dim);
      scales(keys, dim)[slot] = k_scale.worth;
      scales(values, dim)[slot] = v_scale.worth;
      key = k_scale.codes_per_unit;
      value = v_scale.codes_per_unit;
    }
  };

  // A row's weights: first floats in the place of its scores, then codes at the front of it and their worth
  // at its end. Hidden tokens weigh nothing: zeros in every sum.
  class Weights {
   public:
    Weights(const AttendChunk& c, int row)
        : tiles_(c.tiles),
          scales_(kTile * (c.head_dim * sizeof(Element) + kScaleBytes) +
                  kTile * c.head_dim * sizeof(Element)),
          weights_(scores(c, row)),
          kept_(c.out + (size_t)row * c.head_dim),
          top_(zero_f32()),
          total_(zero_f32()) {}
    void put(int tile, f32x16 e) {
      const f32x16 w = e * load((const float*)(tiles_[tile] + scales_));
      top_ = max(top_, w);
      total_ = total_ + w;
      store(weights_ + tile * kTile, w);
    }
    // Leaves what finish() needs in the row's place of the output, which is still free.
    void close() {
      const float top = reduce_max(top_), total = reduce_add(total_);
      float scale = 0.0f;
      if (top > 1e-30f) scale = kLargestWeight / top < kTotal / total ? kLargestWeight / top : kTotal / total;
      kept_[0] = scale;
      kept_[1] = total;
    }
    static void finish(const AttendChunk& c, int row, int tile_begin, int tile_end) {
      float* const weights = scores(c, row);
      const float* const kept = c.out + (size_t)row * c.head_dim;
      i32x16 codes = zero();
      for (int tile = tile_begin; tile < tile_end; ++tile) {
        const i32x16 code = round_i32(load(weights + tile * kTile) * broadcast(kept[0]));
        codes = codes + code;
        store_i16((Element*)weights + tile * kTile, code);
      }
      // Not 1 / scale: many equal weights are all rounded to the same side, and their sum must stay.
      weights[kChunk - 1] = kept[0] > 0.0f ? kept[1] / (float)reduce_add(codes) : 0.0f;
    }

   private:
    const uint8_t* const* const tiles_;
    const size_t scales_;  // where those of values are in a tile
    float *const weights_, *const kept_;
    f32x16 top_, total_;
  };
};

}  // namespace
}  // namespace toque::TOQUE_ISA
