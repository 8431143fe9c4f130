// Attention over a cache of int8 (attention_core.h).
//
// A tile: K codes [dim][16 tokens], K scales [groups][16] f16, V codes [16][dim], V scales [groups][16] f16;
// each token has a scale of its own for each 32 dims of its key and of its value, so that writing one token
// never touches another's numbers. Codes become floats in registers; sums, queries and probabilities are f32.
#include "attention_core.h"

namespace toque::TOQUE_ISA {
namespace {

constexpr int kGroup = 32;  // dims of one token's key or value that share a scale

struct Cache8 {
  using Element = float;
#if defined(TOQUE_SIMD_AVX512)
  static constexpr int tiles_at_once(int rows) { return rows == 1 ? 8 : rows <= 3 ? 4 : 2; }
  static constexpr int columns_at_once(int rows) { return rows <= 3 ? 4 : 2; }
#else
  static constexpr int tiles_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
  static constexpr int columns_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#endif
  struct Weights {
    float* const weights;
    Weights(const AttendChunk& c, int row) : weights(scores(c, row)) {}
    void put(int tile, f32x16 e) { store(weights + tile * kTile, e); }
    void close() {}
    static void finish(const AttendChunk&, int, int, int) {}
  };
  TOQUE_INLINE size_t query_bytes(int dim) { return dim * sizeof(Element); }
  TOQUE_INLINE float score_unit(const AttendChunk&, int) { return 1.0f; }
  TOQUE_INLINE size_t half_tile_bytes(int dim) {
    return (size_t)kTile * (dim + (dim + kGroup - 1) / kGroup * sizeof(uint16_t));
  }
  TOQUE_INLINE uint16_t* scales(const uint8_t* half, int dim) {
    return (uint16_t*)(half + (size_t)kTile * dim);
  }

  template <int R, int N>
  static void score(const AttendChunk& c, int row, int tile, bool prefetch_v) {
    f32x16 acc[N][R];
    TOQUE_UNROLL
    for (int n = 0; n < N; ++n) {
      TOQUE_UNROLL
      for (int r = 0; r < R; ++r) acc[n][r] = zero_f32();
    }
    const int dim = c.head_dim;
    const size_t half = half_tile_bytes(dim);
    const Element* q = query<Cache8>(c, row);
    const uint8_t* k[N];
    for (int n = 0; n < N; ++n) k[n] = c.tiles[tile + n];
    alignas(64) float scale[N][kTile] = {};
    for (int group = 0, d = 0; d < dim; ++group) {
      for (int n = 0; n < N; ++n) {
        store(scale[n], load_f16(scales(k[n], dim) + (size_t)group * kTile));
        if (prefetch_v) {
          for (int line = 0; line < kGroup * kTile; line += 64)
            prefetch(k[n] + half + (size_t)d * kTile + line);
        }
      }
      const int end = d + kGroup < dim ? d + kGroup : dim;
      for (; d < end; ++d) {
        TOQUE_UNROLL
        for (int n = 0; n < N; ++n) {
          const f32x16 a = load_i8((const int8_t*)k[n] + (size_t)d * kTile) * load(scale[n]);
          TOQUE_UNROLL
          for (int r = 0; r < R; ++r) acc[n][r] = fma(a, broadcast(q[(size_t)r * dim + d]), acc[n][r]);
          TOQUE_FENCE;
        }
      }
    }
    TOQUE_UNROLL
    for (int n = 0; n < N; ++n) {
      TOQUE_UNROLL
      for (int r = 0; r < R; ++r) store(scores(c, row + r) + (tile + n) * kTile, acc[n][r]);
    }
  }

  template <int R, int C>
  static void accumulate(const AttendChunk& c, int row, int column, int first_tile, bool prefetch_k) {
    f32x16 acc[C][R];
    TOQUE_UNROLL
    for (int j = 0; j < C; ++j) {
      TOQUE_UNROLL
      for (int r = 0; r < R; ++r) acc[j][r] = zero_f32();
    }
    const int dim = c.head_dim;
    const size_t half = half_tile_bytes(dim);
    const Element* p = weights<Cache8>(c, row);
    alignas(64) float scale[C][kTile] = {};  // of each 16 columns, of the tile's tokens
    for (int tile = first_tile; tile * kTile < c.n_tokens; ++tile) {
      const uint8_t* v = c.tiles[tile] + half;
      for (int j = 0; j < C; ++j) {
        store(scale[j], load_f16(scales(v, dim) + (size_t)((column + j * kTile) / kGroup) * kTile));
      }
      if (prefetch_k && tile < c.n_next) {
        for (size_t line = 0; line < half; line += 64) prefetch(c.next[tile] + line);
      }
      const int tokens = c.n_tokens - tile * kTile < kTile ? c.n_tokens - tile * kTile : kTile;
      for (int t = 0; t < tokens; ++t) {
        const int8_t* codes = (const int8_t*)v + (size_t)t * dim + column;
        const Element* weights = p + tile * kTile + t;
        TOQUE_UNROLL
        for (int j = 0; j < C; ++j) {
          const f32x16 a = load_i8(codes + j * kTile) * broadcast(scale[j][t]);
          TOQUE_UNROLL
          for (int r = 0; r < R; ++r) acc[j][r] = fma(a, broadcast(weights[(size_t)r * kChunk]), acc[j][r]);
          TOQUE_FENCE;
        }
      }
    }
    TOQUE_UNROLL
    for (int r = 0; r < R; ++r) {
      TOQUE_UNROLL
      for (int j = 0; j < C; ++j) store(c.out + (size_t)(row + r) * dim + column + j * kTile, acc[j][r]);
    }
  }
};

// Up to 32 numbers as codes, and the f16 scale that they are multiples of.
uint16_t quantize_group(const float* x, int n, int8_t* codes) {
  const f32x16 limit = broadcast(127.0f * 65504.0f);  // beyond it the scale would be infinite
  f32x16 part[kGroup / kTile], top = zero_f32();
  for (int i = 0; i * kTile < n; ++i) {
    part[i] = min(max(load(x + i * kTile), zero_f32() - limit), limit);
    top = max(top, abs(part[i]));
  }
  uint16_t halves[kTile];
  store_f16(halves, broadcast(reduce_max(top) / 127.0f));
  float scale[kTile];
  store(scale, load_f16(halves));
  const f32x16 inverse = broadcast(scale[0] > 0.0f ? 1.0f / scale[0] : 0.0f);
  const f32x16 largest = broadcast(127.0f);  // the scale may have been rounded down
  for (int i = 0; i * kTile < n; ++i) {
    store_i8(codes + i * kTile, round_i32(min(max(part[i] * inverse, zero_f32() - largest), largest)));
  }
  return halves[0];
}

}  // namespace

void store_kv8(uint8_t* tile, int slot, const float* k, const float* v, int head_dim) {
  uint8_t* const values = tile + Cache8::half_tile_bytes(head_dim);
  for (int begin = 0, group = 0; begin < head_dim; begin += kGroup, ++group) {
    const int n = head_dim - begin < kGroup ? head_dim - begin : kGroup;
    int8_t key[kGroup];
    Cache8::scales(tile, head_dim)[group * kTile + slot] = quantize_group(k + begin, n, key);
    for (int i = 0; i < n; ++i) tile[(size_t)(begin + i) * kTile + slot] = (uint8_t)key[i];
    int8_t* const value = (int8_t*)values + (size_t)slot * head_dim + begin;
    Cache8::scales(values, head_dim)[group * kTile + slot] = quantize_group(v + begin, n, value);
  }
}

size_t tile_bytes8(int head_dim) { return 2 * Cache8::half_tile_bytes(head_dim); }
size_t query_bytes8(int head_dim) { return Cache8::query_bytes(head_dim); }
void prepare_query8(const float* q, int head_dim, float scale, void* prepared) {
  for (int d = 0; d < head_dim; d += kTile) store((float*)prepared + d, load(q + d) * broadcast(scale));
}
void attend8(const AttendChunk& c) { attend_with<Cache8>(c); }

}  // namespace toque::TOQUE_ISA
