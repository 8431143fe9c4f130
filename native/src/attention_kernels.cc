// Attention over a cache of 16 bits a number (attention_core.h), and what both caches share.
//
// Numbers lie in pairs, for the instructions that add two products: K [dim / 2][16 tokens][2], V [16 / 2
// tokens][dim][2], each followed by the tokens' scales where the numbers are codes.
#include "attention_core.h"
#if !defined(TOQUE_SIMD_AVX512)
#include "attention_codes.h"
#endif

namespace toque::TOQUE_ISA {
namespace {

#if defined(TOQUE_SIMD_AVX512)
struct Bf16 {
  using Element = uint16_t;
  using Sum = f32x16;

  // There are 32 registers.
  static constexpr int tiles_at_once(int rows) { return rows == 1 ? 8 : rows <= 3 ? 4 : 2; }
  static constexpr int columns_at_once(int rows) { return rows <= 3 ? 4 : 2; }
  static constexpr size_t kScaleBytes = 0;
  static constexpr bool kClearNeighbour = true;  // it is read, times zero, before the neighbour exists

  TOQUE_INLINE Sum zero() { return zero_f32(); }
  TOQUE_INLINE Sum dot(Sum sum, i32x16 pairs, const Element* x) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return bf16_dot(sum, pairs, broadcast(pair));
  }
  TOQUE_INLINE f32x16 score(Sum sum, const uint8_t*, int) { return sum; }
  TOQUE_INLINE float unit(const Element*, int) { return 1.0f; }
  TOQUE_INLINE f32x16 output(Sum sum, const float*) { return sum; }

  static void prepare_query(const float* q, int dim, float by, void* prepared) {
    for (int d = 0; d < dim; d += kTile) store_bf16((Element*)prepared + d, load(q + d) * broadcast(by));
  }
  TOQUE_INLINE void convert(Element* p, f32x16 x, float) { store_bf16(p, x); }
  struct Token {
    float key = 1.0f, value = 1.0f;
    Token(const float*, const float*, int, int, uint8_t*, uint8_t*) {}
  };

  struct Weights {
    Element* const weights;
    Weights(const AttendChunk& c, int row) : weights((Element*)scores(c, row)) {}
    void put(int tile, f32x16 e) { store_bf16(weights + tile * kTile, e); }
    void close() {}
    static void finish(const AttendChunk&, int, int, int) {}
  };
};
using Numbers = Bf16;
#else
using Numbers = Codes;
#endif

struct Cache16 : Numbers {
  TOQUE_INLINE size_t half_tile_bytes(int dim) {
    return (size_t)kTile * (dim * sizeof(Element) + kScaleBytes);
  }
  TOQUE_INLINE size_t query_bytes(int dim) { return dim * sizeof(Element) + kScaleBytes; }

  TOQUE_INLINE float score_unit(const AttendChunk& c, int row) {
    return Numbers::unit(query<Cache16>(c, row), c.head_dim);
  }

  // acc[r] += a * x[r][0] + b * x[r][1] for R rows `stride` bytes apart, where a and b are the numbers of two
  // neighbouring dims of 16 keys, or of 16 columns of two neighbouring tokens' values.
  template <int R>
  TOQUE_INLINE void add_pairs(Sum* acc, const uint8_t* pairs, const uint8_t* x, size_t stride) {
    const i32x16 p = load((const int32_t*)pairs);
    TOQUE_UNROLL
    for (int r = 0; r < R; ++r) acc[r] = dot(acc[r], p, (const Element*)(x + r * stride));
  }

  // Scores of R rows against N tiles, while the K of the next call's tiles is fetched. `prefetch_v`: also
  // these tiles' V, unless the last call has.
  template <int R, int N>
  static void score(const AttendChunk& c, int row, int tile, bool prefetch_v) {
    Sum acc[N][R];
    TOQUE_UNROLL
    for (int n = 0; n < N; ++n) {
      TOQUE_UNROLL
      for (int r = 0; r < R; ++r) acc[n][r] = zero();
    }
    const uint8_t* k[N];
    for (int n = 0; n < N; ++n) k[n] = c.tiles[tile + n];
    const Element* q = query<Cache16>(c, row);
    const int dim = c.head_dim;
    const size_t v = half_tile_bytes(dim), stride = query_bytes(dim);
    prefetch_v = prefetch_v && tile + N > c.n_fetched;
    if (prefetch_v && kScaleBytes != 0) {
      for (int n = 0; n < N; ++n) prefetch(k[n] + 2 * v - 1);
    }
    // Fetching is spread evenly, for a core has room for a few lines on their way only, and what the products
    // read takes that same way. Of the two lines of four dims the first pass over the rows fetches one, the
    // second the other.
    const int pass = row / kMaxRows;
    const bool both = c.rows <= kMaxRows, ahead = pass < 2 && tile + N <= c.n_next;
    const uint8_t* next[N];
    for (int n = 0; n < N; ++n) next[n] = ahead ? c.next[tile + n] + 64 * pass : nullptr;
    if (ahead && pass == 0 && kScaleBytes != 0) {
      for (int n = 0; n < N; ++n) prefetch_far(next[n] + v - 1);
    }
    for (int d = 0; d < dim; d += 4) {
      if (prefetch_v) {
        for (int line = 0; line < 2 * N; ++line) prefetch(k[line / 2] + v + (size_t)d * 32 + line % 2 * 64);
      }
      for (int n = 0; ahead && n < N; ++n) {
        prefetch_far(next[n] + (size_t)d * 32);
        if (both) prefetch_far(next[n] + (size_t)d * 32 + 64);
      }
      TOQUE_UNROLL
      for (int n = 0; n < N; ++n) {
        const uint8_t* pairs = k[n] + (size_t)d * 32;
        TOQUE_UNROLL
        for (int i = 0; i < 2; ++i)
          add_pairs<R>(acc[n], pairs + i * 64, (const uint8_t*)(q + d + 2 * i), stride);
      }
    }
    float* const out = scores(c, row) + tile * kTile;
    TOQUE_UNROLL
    for (int n = 0; n < N; ++n) {
      TOQUE_UNROLL
      for (int r = 0; r < R; ++r) {
        store(out + r * kChunk + n * kTile, Numbers::score(acc[n][r], k[n], dim));
      }
    }
  }

  // out[:, columns] of R rows = weights * V, while the V of the next call's tiles is fetched.
  template <int R, int C>
  static void accumulate(const AttendChunk& c, int row, int column, int first_tile, bool) {
    Sum acc[C][R];
    TOQUE_UNROLL
    for (int j = 0; j < C; ++j) {
      TOQUE_UNROLL
      for (int r = 0; r < R; ++r) acc[j][r] = zero();
    }
    const int dim = c.head_dim;
    const uint8_t* w =
        (const uint8_t*)weights<Cache16>(c, row) + (size_t)first_tile * kTile * sizeof(Element);
    const size_t half = half_tile_bytes(dim), pair_bytes = (size_t)dim * 4;
    // Each pass over rows and columns fetches every so manieth line; after four nothing is left to fetch.
    const int row_passes = (c.rows + kMaxRows - 1) / kMaxRows, passes = row_passes * (dim / (C * kTile));
    const int pass = column / (C * kTile) * row_passes + row / kMaxRows;
    const size_t every = 64 * (size_t)(passes < 4 ? passes : 4);
    for (int tile = first_tile; tile * kTile < c.n_tokens; ++tile) {
      const int tokens = c.n_tokens - tile * kTile < kTile ? c.n_tokens - tile * kTile : kTile;
      const uint8_t* next = pass < 4 && tile < c.n_next ? c.next[tile] + half : nullptr;
      if (next && pass == 0 && kScaleBytes != 0) prefetch_far(next + half - 1);
      const uint8_t* v = c.tiles[tile] + half + (size_t)column * 4;
      const auto add = [&](int t) {
        TOQUE_UNROLL
        for (int j = 0; j < C; ++j) {
          add_pairs<R>(acc[j], v + t / 2 * pair_bytes + (size_t)j * kTile * 4, w + t * sizeof(Element),
                       kChunk * sizeof(float));
        }
      };
      if (next == nullptr && tokens > kTile - 2) {
        TOQUE_UNROLL
        for (int t = 0; t < kTile; t += 2) add(t);
      } else {
        for (int t = 0; t < tokens; t += 2) {
          if (next) {
            for (size_t line = 64 * (size_t)pass; line < pair_bytes; line += every) {
              prefetch_far(next + t / 2 * pair_bytes + line);
            }
          }
          add(t);
        }
      }
      w += kTile * sizeof(Element);
    }
    float* const out = c.out + (size_t)row * dim + column;
    const float* const s = scores(c, row);
    TOQUE_UNROLL
    for (int r = 0; r < R; ++r) {
      TOQUE_UNROLL
      for (int j = 0; j < C; ++j) store(out + (size_t)r * dim + j * kTile, output(acc[j][r], s + r * kChunk));
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
  using Element = Cache16::Element;
  uint8_t* const half = tile + Cache16::half_tile_bytes(head_dim);
  Element* const keys = (Element*)tile + slot * 2;
  Element* const values = (Element*)half + (size_t)(slot / 2) * head_dim * 2;
  const int place = slot % 2;
  const Cache16::Token token(k, v, head_dim, slot, tile, half);
  for (int begin = 0; begin < head_dim; begin += kTile) {
    Element key[kTile], value[kTile];
    Cache16::convert(key, load(k + begin), token.key);
    Cache16::convert(value, load(v + begin), token.value);
    for (int i = 0; i < kTile; i += 2)
      memcpy(keys + (size_t)(begin + i) * kTile, key + i, 2 * sizeof(Element));
    for (int i = 0; i < kTile; ++i) values[(begin + i) * 2 + place] = value[i];
    for (int i = 0; Cache16::kClearNeighbour && place == 0 && i < kTile; ++i) values[(begin + i) * 2 + 1] = 0;
  }
}

size_t tile_bytes16(int head_dim) { return 2 * Cache16::half_tile_bytes(head_dim); }
size_t query_bytes16(int head_dim) { return Cache16::query_bytes(head_dim); }
void prepare_query16(const float* q, int head_dim, float scale, void* prepared) {
  Cache16::prepare_query(q, head_dim, scale, prepared);
}
void attend16(const AttendChunk& c) { attend_with<Cache16>(c); }

}  // namespace toque::TOQUE_ISA
