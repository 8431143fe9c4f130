// Attention over a cache of 16 bits a number (attention_core.h), and what both caches share.
#include "attention_core.h"

namespace toque::TOQUE_ISA {
namespace {

// The one product of this cache:
//
//   add_pairs<R>: acc[r] += a * x[r][0] + b * x[r][1] for R rows `stride` elements apart, where a and b are
//   the vectors of two neighbouring dims of 16 keys, or of 16 columns of two neighbouring tokens' values.
struct Cache16 {
#if defined(TOQUE_SIMD_AVX512)
  // bf16 in pairs, for the dot-product instruction: K [dim / 2][16 tokens][2], V [16 / 2][dim][2]; 32
  // registers.
  using Element = uint16_t;
  static constexpr int tiles_at_once(int rows) { return rows == 1 ? 8 : rows <= 3 ? 4 : 2; }
  static constexpr int columns_at_once(int rows) { return rows <= 3 ? 4 : 2; }
  TOQUE_INLINE const uint8_t* key_pair(const uint8_t* keys, int d) { return keys + (size_t)d * 32; }
  TOQUE_INLINE const uint8_t* value_pair(const uint8_t* values, int t, int column, int dim) {
    return values + ((size_t)t * dim + 2 * (size_t)column) * 2;
  }
  template <int R>
  TOQUE_INLINE void add_pairs(f32x16* acc, const uint8_t* pairs, size_t, const Element* x, size_t stride) {
    const i32x16 p = load((const int32_t*)pairs);
    TOQUE_UNROLL
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      memcpy(&pair, x + r * stride, sizeof pair);
      acc[r] = bf16_dot(acc[r], p, broadcast(pair));
    }
  }
  TOQUE_INLINE void store_elements(Element* p, f32x16 x) { store_bf16(p, x); }
  TOQUE_INLINE void store_cache(uint16_t* p, f32x16 x) { store_bf16(p, x); }
  TOQUE_INLINE size_t key_index(int slot, int d, int) { return ((size_t)(d / 2) * kTile + slot) * 2 + d % 2; }
  TOQUE_INLINE size_t value_index(int slot, int d, int dim) {
    return ((size_t)(slot / 2) * dim + d) * 2 + slot % 2;
  }
#else
  // f16 in rows, K [dim][16 tokens], V [16][dim]: conversion is one instruction, and three more bits than
  // bf16 keep the cache out of the error. Queries and probabilities stay f32.
  using Element = float;
  static constexpr int tiles_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
  static constexpr int columns_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
  TOQUE_INLINE const uint8_t* key_pair(const uint8_t* keys, int d) { return keys + (size_t)d * 32; }
  TOQUE_INLINE const uint8_t* value_pair(const uint8_t* values, int t, int column, int dim) {
    return values + ((size_t)t * dim + column) * 2;
  }
  template <int R>
  TOQUE_INLINE void add_pairs(f32x16* acc, const uint8_t* first, size_t next, const Element* x,
                              size_t stride) {
    const f32x16 a = load_f16((const uint16_t*)first);
    TOQUE_UNROLL
    for (int r = 0; r < R; ++r) acc[r] = fma(a, broadcast(x[r * stride]), acc[r]);
    TOQUE_FENCE;
    const f32x16 b = load_f16((const uint16_t*)(first + next));
    TOQUE_UNROLL
    for (int r = 0; r < R; ++r) acc[r] = fma(b, broadcast(x[r * stride + 1]), acc[r]);
    TOQUE_FENCE;
  }
  TOQUE_INLINE void store_elements(Element* p, f32x16 x) { store(p, x); }
  TOQUE_INLINE void store_cache(uint16_t* p, f32x16 x) {
    const f32x16 limit = broadcast(65504.0f);  // the largest f16: a key beyond it must not become infinite
    store_f16(p, min(max(x, zero_f32() - limit), limit));
  }
  TOQUE_INLINE size_t key_index(int slot, int d, int) { return (size_t)d * kTile + slot; }
  TOQUE_INLINE size_t value_index(int slot, int d, int dim) { return (size_t)slot * dim + d; }
#endif
  TOQUE_INLINE size_t half_tile_bytes(const AttendChunk& c) { return (size_t)kTile * c.head_dim * 2; }

  // Scores of R rows against N tiles. `prefetch_v`: fetch those tiles' V meanwhile.
  template <int R, int N>
  static void score(const AttendChunk& c, int row, int tile, bool prefetch_v) {
    f32x16 acc[N][R];
    TOQUE_UNROLL
    for (int n = 0; n < N; ++n) {
      TOQUE_UNROLL
      for (int r = 0; r < R; ++r) acc[n][r] = zero_f32();
    }
    const uint8_t* k[N];
    for (int n = 0; n < N; ++n) k[n] = c.tiles[tile + n];
    const Element* q = query<Cache16>(c, row);
    const size_t v = half_tile_bytes(c);
    const int dim = c.head_dim;
    for (int d = 0; d < dim; d += 2) {
      if (prefetch_v) {
        for (int n = 0; n < N; ++n) prefetch(k[n] + v + (size_t)d * 32);
      }
      TOQUE_UNROLL
      for (int n = 0; n < N; ++n) add_pairs<R>(acc[n], key_pair(k[n], d), kTile * 2, q + d, (size_t)dim);
    }
    TOQUE_UNROLL
    for (int n = 0; n < N; ++n) {
      TOQUE_UNROLL
      for (int r = 0; r < R; ++r) store(scores(c, row + r) + (tile + n) * kTile, acc[n][r]);
    }
  }

  // out[:, columns] of R rows = probabilities * V. `prefetch_k`: fetch the K of the next call's tiles
  // meanwhile.
  template <int R, int C>
  static void accumulate(const AttendChunk& c, int row, int column, int first_tile, bool prefetch_k) {
    f32x16 acc[C][R];
    TOQUE_UNROLL
    for (int j = 0; j < C; ++j) {
      TOQUE_UNROLL
      for (int r = 0; r < R; ++r) acc[j][r] = zero_f32();
    }
    const int dim = c.head_dim;
    const Element* p = probabilities<Cache16>(c, row);
    constexpr size_t kRowElements = kChunk * sizeof(float) / sizeof(Element);
    const size_t pair_bytes = (size_t)dim * 4;
    const int pairs_end = (c.n_tokens + 1) / 2;
    for (int i = first_tile * kTile / 2; i < pairs_end; ++i) {
      const int tile = i / 8;
      const uint8_t* v = c.tiles[tile] + half_tile_bytes(c);
      if (prefetch_k && tile < c.n_next) {
        const uint8_t* next = c.next[tile] + (size_t)(i % 8) * pair_bytes;
        for (size_t line = 0; line < pair_bytes; line += 64) prefetch(next + line);
      }
      TOQUE_UNROLL
      for (int j = 0; j < C; ++j) {
        add_pairs<R>(acc[j], value_pair(v, 2 * (i % 8), column + j * kTile, dim), (size_t)dim * 2, p + 2 * i,
                     kRowElements);
      }
    }
    TOQUE_UNROLL
    for (int r = 0; r < R; ++r) {
      TOQUE_UNROLL
      for (int j = 0; j < C; ++j) store(c.out + (size_t)(row + r) * dim + column + j * kTile, acc[j][r]);
    }
  }
};

}  // namespace

void merge(float* maximum, float* sum, float* out, float chunk_maximum, float chunk_sum,
           const float* chunk_out, int head_dim) {
  const float top = *maximum > chunk_maximum ? *maximum : chunk_maximum;
  const f32x16 old_weight = exp(broadcast(*maximum - top));
  const f32x16 new_weight = exp(broadcast(chunk_maximum - top));
  for (int d = 0; d < head_dim; d += kTile) {
    store(out + d, fma(load(out + d), old_weight, load(chunk_out + d) * new_weight));
  }
  float weights[2][kTile];
  store(weights[0], old_weight);
  store(weights[1], new_weight);
  *sum = *sum * weights[0][0] + chunk_sum * weights[1][0];
  *maximum = top;
}

void store_kv16(uint8_t* tile, int slot, const float* k, const float* v, int head_dim) {
  uint16_t* const keys = (uint16_t*)tile;
  uint16_t* const values = keys + (size_t)kTile * head_dim;
  for (int begin = 0; begin < head_dim; begin += kTile) {
    uint16_t key[kTile], value[kTile];
    Cache16::store_cache(key, load(k + begin));
    Cache16::store_cache(value, load(v + begin));
    for (int i = 0; i < kTile; ++i) {
      keys[Cache16::key_index(slot, begin + i, head_dim)] = key[i];
      values[Cache16::value_index(slot, begin + i, head_dim)] = value[i];
    }
    // The neighbour's place is cleared: it is read, times zero, before the neighbour exists.
    for (int i = 0; i < kTile && slot % 2 == 0; ++i)
      values[Cache16::value_index(slot + 1, begin + i, head_dim)] = 0;
  }
}

void attend16(const AttendChunk& c) { attend_with<Cache16>(c); }
size_t query_bytes16(int head_dim) { return sizeof(Cache16::Element) * (size_t)head_dim; }
void prepare_query16(const float* q, int head_dim, float scale, void* prepared) {
  prepare_query_with<Cache16>(q, head_dim, scale, prepared);
}

}  // namespace toque::TOQUE_ISA
