// Attention over one chunk of the paged cache; layouts in kv_cache.h, the contract in step_kernels.h.
//
// For each tile of 16 tokens, the scores of up to six query rows are kept in registers while K streams by;
// then one softmax per row; then, 16 or more output columns at a time, the same rows accumulate p * V. The
// number of rows and tiles that share a pass only changes what is kept in registers, never the order of any
// sum.
#include "simd.h"
#include "step_kernels_isa.h"

namespace toque::TOQUE_ISA {
namespace {

constexpr int kTile = 16;
constexpr int kChunk = 256;
constexpr int kMaxRows = 6;  // rows that share a pass over K or V
constexpr float kMasked = -1e30f;

// How keys, values, queries and probabilities are stored, and the one product over them:
//
//   add_pairs<R>: acc[r] += a * x[r][0] + b * x[r][1] for R rows `stride` elements apart, where a and b are
//   the vectors of two neighbouring dims of 16 keys, or of 16 columns of two neighbouring tokens' values.
#if defined(TOQUE_SIMD_AVX512)
// bf16 in pairs, for the dot-product instruction: K [dim / 2][16 tokens][2], V [16 / 2][dim][2]; 32
// registers.
using Element = uint16_t;
constexpr int tiles_at_once(int rows) { return rows == 1 ? 8 : rows <= 3 ? 4 : 2; }
constexpr int columns_at_once(int rows) { return rows <= 3 ? 4 : 2; }
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
// f16 in rows, K [dim][16 tokens], V [16][dim]: conversion is one instruction, and three more bits than bf16
// keep the cache out of the error. Queries and probabilities stay f32. There are 16 registers of half the
// width and twelve hold sums, so the compiler must not hold both vectors, or broadcasts for the next ones, at
// the same time: the fences make it load them again.
using Element = float;
constexpr int tiles_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
constexpr int columns_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#define TOQUE_FENCE asm volatile("" ::: "memory")
TOQUE_INLINE const uint8_t* key_pair(const uint8_t* keys, int d) { return keys + (size_t)d * 32; }
TOQUE_INLINE const uint8_t* value_pair(const uint8_t* values, int t, int column, int dim) {
  return values + ((size_t)t * dim + column) * 2;
}
template <int R>
TOQUE_INLINE void add_pairs(f32x16* acc, const uint8_t* first, size_t next, const Element* x, size_t stride) {
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

TOQUE_INLINE const Element* query(const AttendChunk& c, int row) {
  return (const Element*)c.queries + (size_t)row * c.head_dim;
}
TOQUE_INLINE float* scores(const AttendChunk& c, int row) { return c.scores + (size_t)row * kChunk; }
// A row's probabilities replace its scores.
TOQUE_INLINE Element* probabilities(const AttendChunk& c, int row) { return (Element*)scores(c, row); }
TOQUE_INLINE size_t half_tile_bytes(const AttendChunk& c) { return (size_t)kTile * c.head_dim * 2; }

// Scores of R rows against N tiles. `prefetch_v`: fetch those tiles' V meanwhile.
template <int R, int N>
void score(const AttendChunk& c, int row, int tile, bool prefetch_v) {
  f32x16 acc[N][R];
  TOQUE_UNROLL
  for (int n = 0; n < N; ++n) {
    TOQUE_UNROLL
    for (int r = 0; r < R; ++r) acc[n][r] = zero_f32();
  }
  const uint8_t* k[N];
  for (int n = 0; n < N; ++n) k[n] = c.tiles[tile + n];
  const Element* q = query(c, row);
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
void accumulate(const AttendChunk& c, int row, int column, int first_tile, bool prefetch_k) {
  f32x16 acc[C][R];
  TOQUE_UNROLL
  for (int j = 0; j < C; ++j) {
    TOQUE_UNROLL
    for (int r = 0; r < R; ++r) acc[j][r] = zero_f32();
  }
  const int dim = c.head_dim;
  const Element* p = probabilities(c, row);
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

template <int R>
void score_rows(const AttendChunk& c, int row, int tile, int count, bool prefetch_v) {
  constexpr int N = tiles_at_once(R);
  if (count == N) {
    score<R, N>(c, row, tile, prefetch_v);
  } else {
    for (int n = 0; n < count; ++n) score<R, 1>(c, row, tile + n, prefetch_v);
  }
}

template <int R>
void accumulate_rows(const AttendChunk& c, int row, int first_tile, bool prefetch_k) {
  constexpr int C = columns_at_once(R);
  int column = 0;
  for (; column + C * kTile <= c.head_dim; column += C * kTile) {
    accumulate<R, C>(c, row, column, first_tile, prefetch_k && column == 0);
  }
  for (; column < c.head_dim; column += kTile) accumulate<R, 1>(c, row, column, first_tile, false);
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

void softmax_row(const AttendChunk& c, int row, int tile_begin, int tile_end) {
  float* s = scores(c, row);
  const int first = c.first[row], last = c.last[row];
  const f32x16 hidden = broadcast(kMasked);
  f32x16 top = hidden;
  for (int tile = tile_begin; tile < tile_end; ++tile) {
    f32x16 x = load(s + tile * kTile);
    if (c.softcap > 0.0f) x = broadcast(c.softcap) * tanh(x * broadcast(1.0f / c.softcap));
    x = mask(x, tile * kTile, first, last, hidden);
    store(s + tile * kTile, x);
    top = max(top, x);
  }
  const float maximum = reduce_max(top);
  f32x16 sum = zero_f32();
  for (int tile = tile_begin; tile < tile_end; ++tile) {
    f32x16 e = exp(load(s + tile * kTile) - broadcast(maximum));
    e = mask(e, tile * kTile, first, last, zero_f32());  // exactly zero, so that hidden tokens change no bit
    sum = sum + e;
    store_elements(probabilities(c, row) + tile * kTile, e);
  }
  c.maximum[row] = maximum;
  c.sum[row] = reduce_add(sum);
}

}  // namespace

void attend(const AttendChunk& c) {
  int first = kChunk, last = 0;
  for (int r = 0; r < c.rows; ++r) {
    if (c.first[r] >= c.last[r]) continue;  // sees nothing of this chunk
    if (c.first[r] < first) first = c.first[r];
    if (c.last[r] > last) last = c.last[r];
  }
  const int tile_begin = first / kTile, tile_end = (last + kTile - 1) / kTile;
  // The tiles' loop is outside, so that a tile of K stays in L1 for all rows.
  const int step = c.rows >= 4 ? tiles_at_once(kMaxRows) : tiles_at_once(c.rows);
  for (int tile = tile_begin; tile < tile_end; tile += step) {
    const int count = tile_end - tile < step ? tile_end - tile : step;
    for (int row = 0; row < c.rows; row += kMaxRows) {
#define TOQUE_CALL(R) score_rows<R>(c, row, tile, count, row == 0)
      TOQUE_FOR_ROWS(c.rows - row, TOQUE_CALL)
#undef TOQUE_CALL
    }
  }
  for (int row = 0; row < c.rows; ++row) softmax_row(c, row, tile_begin, tile_end);
  for (int row = 0; row < c.rows; row += kMaxRows) {
#define TOQUE_CALL(R) accumulate_rows<R>(c, row, tile_begin, row == 0)
    TOQUE_FOR_ROWS(c.rows - row, TOQUE_CALL)
#undef TOQUE_CALL
  }
}

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

size_t query_bytes(int head_dim) { return sizeof(Element) * (size_t)head_dim; }

void prepare_query(const float* q, int head_dim, float scale, void* prepared) {
  for (int d = 0; d < head_dim; d += kTile)
    store_elements((Element*)prepared + d, load(q + d) * broadcast(scale));
}

void store_kv(uint8_t* tile, int slot, const float* k, const float* v, int head_dim) {
  uint16_t* const keys = (uint16_t*)tile;
  uint16_t* const values = keys + (size_t)kTile * head_dim;
  for (int begin = 0; begin < head_dim; begin += kTile) {
    uint16_t key[kTile], value[kTile];
    store_cache(key, load(k + begin));
    store_cache(value, load(v + begin));
    for (int i = 0; i < kTile; ++i) {
      keys[key_index(slot, begin + i, head_dim)] = key[i];
      values[value_index(slot, begin + i, head_dim)] = value[i];
    }
    // The neighbour's place is cleared: it is read, times zero, before the neighbour exists.
    for (int i = 0; i < kTile && slot % 2 == 0; ++i) values[value_index(slot + 1, begin + i, head_dim)] = 0;
  }
}

}  // namespace toque::TOQUE_ISA
