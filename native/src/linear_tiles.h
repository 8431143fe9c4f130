// The kernels of linear.cc: 16 output rows x 1..kTileMax tokens, K innermost. Every output element is
//
//   acc = 0; for each group, in order of K:  acc = fma(fma(dot, d, offset), scale, acc)         symmetric
//                                            acc = fma(dot * d, scale, acc); acc = fma(min, d * sum, acc)
//                                            with mins
//                                            acc = fma(fma(-zero, d * sum, dot * d), scale, acc)
//                                            with zeros
//
//                     for each peak (act.h), in order of K:  acc = fma(dot * peak scale, scale, acc)
//
// with `dot` an exact integer, whatever T is and wherever the token sits in its tile: results do not depend
// on batching.
#pragma once

#include "act.h"
#include "dot.h"
#include "packed.h"
#include "simd.h"
#include "unpack.h"

namespace toque::TOQUE_ISA {

namespace {

struct TileArgs {
  const uint8_t* weights;  // one tile of 16 rows
  int cols;
  const uint8_t* codes;  // one token tile of packed activations
  const float* scales;
  float* sums;    // out: [T][16]
  uint8_t* kept;  // out: the unpacked tile, of kernels that keep it
};
using TileKernel = void (*)(const TileArgs&);

// Running sums of T tokens x 16 rows. AVX2's sixteen registers are all taken by the integer sums of a group,
// so there they live in memory (L1), one load folded into the fma and one store per group.
template <int T, bool InMemory>
struct Sums {
  f32x16 registers[InMemory ? 1 : T];
  float* memory;

  TOQUE_INLINE_MEMBER explicit Sums(float* sums) : memory(sums) {
    TOQUE_UNROLL
    for (int t = 0; t < T; ++t) {
      if constexpr (InMemory) {
        store(memory + 16 * t, zero_f32());
      } else {
        registers[t] = zero_f32();
      }
    }
  }
  TOQUE_INLINE_MEMBER f32x16 get(int t) const {
    if constexpr (InMemory) return load(memory + 16 * t);
    return registers[InMemory ? 0 : t];
  }
  TOQUE_INLINE_MEMBER void set(int t, f32x16 v) {
    if constexpr (InMemory) {
      store(memory + 16 * t, v);
    } else {
      registers[t] = v;
    }
  }
  TOQUE_INLINE_MEMBER void finish() const {
    if constexpr (!InMemory) {
      TOQUE_UNROLL
      for (int t = 0; t < T; ++t) store(memory + 16 * t, registers[t]);
    }
  }
};

// How far ahead of the stream to fetch when every weight is used once (T small). The hardware prefetcher
// stops at page ends; 2 kB ahead hides a DRAM miss.
constexpr int kPrefetchBytes = 2048;

// Token counts for which the packed kernels fetch ahead: those that read a weight once or nearly so. (Where
// tiles are kept unpacked, the packed kernels only ever see the first token tile.)
constexpr int kPrefetchTokens = kUnpackAhead ? kTileMax : 4;

// Keep a weight tile unpacked for so many token tiles or more, if it takes no more than this (it should stay
// in L2).
constexpr int kUnpackTiles = 2;
constexpr size_t kUnpackLimit = 192 << 10;
// Tokens of the smallest first and the smallest later token tile then (token_tile).
constexpr int kLeastKeep = (kTileMax + kUnpackTiles) / kUnpackTiles;
constexpr int kLeastUnpacked = (kTileMax + 1) / kUnpackTiles;

// Scales or mins of a group, the same for all tokens. `load` fetches them; they stay in registers from token
// First on, when those of the tokens before it are free.
template <int First, typename Load>
struct Held {
  Load load;
  f32x16 value = zero_f32();
  TOQUE_INLINE_MEMBER explicit Held(Load from) : load(from) {}
  TOQUE_INLINE_MEMBER f32x16 get(int t) {
    if (t < First) return load();
    if (t == First) value = load();
    return value;
  }
};

// Registers that AVX2 has to spare when a group's T integer sums are complete: sixteen but for those, the
// constant that widens them, and three to compute in. Every token that is done frees two.
constexpr int spare_registers(int tokens) { return 16 - 1 - 3 - 2 * tokens; }
constexpr int first_held(int tokens, int wanted) {
  return !kUnpackAhead || spare_registers(tokens) >= wanted ? 0 : (wanted - spare_registers(tokens) + 1) / 2;
}

// Adds one group (G of its block) for T tokens. `fields` are the group's activation scales [5][T]. Scales and
// mins are fetched by scale() and min() when the integer part is done: before that, it needs the registers.
template <Format F, Source From, int T, int G, typename S, typename Scale, typename Min>
TOQUE_INLINE void add_group(Scale&& scale, Min&& min, const uint8_t* codes, uint8_t* kept, const int8_t* a,
                            const float* fields, S& sums) {
  constexpr FormatShape kShape = format_shape(F);
  const float* d = fields + kScale * T;
  Held<first_held(T, 2), Scale> scales(scale);
  if constexpr (kShape.asymmetric) {
    // Of a group of 16, half a block, the sum is among the fields as an offset.
    constexpr bool kHalf = kShape.group == 16;
    const float* d_sum = fields + (!kHalf ? kSum : G == 0 ? kOffset6Low : kOffset6High) * T;
    Held<first_held(T, 4), Min> mins(min);
    group_dot<F, From, T, G>(codes, kept, a, [&](int t, i32x16 dot) __attribute__((always_inline)) {
      f32x16 by = broadcast(d_sum[t]);
      if constexpr (has_zeros(F)) {
        sums.set(t, fma(fma(mins.get(t), by, to_f32(dot) * broadcast(d[t])), scales.get(t), sums.get(t)));
      } else {
        f32x16 sum = fma(to_f32(dot) * broadcast(d[t]), scales.get(t), sums.get(t));
        if constexpr (kHalf) by = by * broadcast(-1.0f / 32.0f);  // exact
        sums.set(t, fma(mins.get(t), by, sum));
      }
    });
  } else {
    constexpr int kField = kShape.group == 16 ? (G == 0 ? kOffset6Low : kOffset6High) : kOffset4;
    // Powers of two: exact, whoever multiplies.
    constexpr float kMultiple = (float)zero_point(F) / (kShape.group == 16 ? 32.0f : 8.0f);
    const float* offset = fields + kField * T;
    group_dot<F, From, T, G>(codes, kept, a, [&](int t, i32x16 dot) __attribute__((always_inline)) {
      f32x16 bias = broadcast(offset[t]);
      if constexpr (kMultiple != 1.0f) bias = bias * broadcast(kMultiple);
      sums.set(t, fma(fma(to_f32(dot), broadcast(d[t]), bias), scales.get(t), sums.get(t)));
    });
  }
}

// An unpacked tile: per block of 32 k its scales and mins as floats, then its codes (see group_dot).
TOQUE_CONSTEXPR size_t unpacked_scales(Format format) {
  FormatShape shape = format_shape(format);
  return (size_t)(kGroup / shape.group) * (shape.asymmetric ? 2 : 1) * 64;
}
TOQUE_CONSTEXPR size_t unpacked_block_bytes(Format format) {
  return unpacked_scales(format) + unpacked_bytes(format);
}
// An unpacked tile of FP8: each record with its scales, then its weights as f16.
TOQUE_CONSTEXPR size_t unpacked_f8_bytes(Format format) {
  return 64 + (size_t)f8_span(format) * kTileRows * sizeof(uint16_t);
}
TOQUE_CONSTEXPR size_t unpacked_tile_bytes(Format format, int cols) {
  if (is_f8(format)) {
    return (size_t)((cols + f8_span(format) - 1) / f8_span(format)) * unpacked_f8_bytes(format);
  }
  return (size_t)(cols / kGroup) * unpacked_block_bytes(format);
}

// The groups of a block whose scales and mins lie as floats at `scales`.
template <Format F, Source From, int T, int G = 0, typename S>
TOQUE_INLINE void add_groups(const float* scales, const uint8_t* codes, uint8_t* kept, const int8_t* a,
                             const float* fields, S& sums) {
  constexpr int kGroups = kGroup / format_shape(F).group;
  if constexpr (G < kGroups) {
    add_group<F, From, T, G>([=]() __attribute__((always_inline)) { return load(scales + 16 * G); },
                             [=]()
                                 __attribute__((always_inline)) { return load(scales + 16 * (kGroups + G)); },
                             codes, kept, a, fields, sums);
    add_groups<F, From, T, G + 1>(scales, codes, kept, a, fields, sums);
  }
}

// The groups of a block of a packed record, its f16 scales at `scales`.
template <Format F, int T, int G = 0, typename S>
TOQUE_INLINE void add_packed_groups(const uint16_t* scales, const uint8_t* codes, const int8_t* a,
                                    const float* fields, S& sums) {
  if constexpr (G < kGroup / format_shape(F).group) {
    add_group<F, Source::kPacked, T, G>(
        [=]() __attribute__((always_inline)) { return load_f16(scales + kTileRows * G); },
        [=]()
            __attribute__((always_inline)) { return load_f16(scales + kTileRows * G + scale_bytes(F) / 2); },
        codes, nullptr, a, fields, sums);
    add_packed_groups<F, T, G + 1>(scales, codes, a, fields, sums);
  }
}

// Block H of a packed record. Where there are no registers to keep them in, its scales are converted to
// memory, once for all tokens: to `out`, where the unpacked block is kept, or to a place of their own.
template <Format F, Source From, int T, int H, typename S>
TOQUE_INLINE void add_packed_block(const uint8_t* record, const int8_t* a, const float* fields, S& sums,
                                   uint8_t* out) {
  constexpr FormatShape kShape = format_shape(F);
  constexpr int kGroups = kGroup / kShape.group;
  const uint16_t* halves = (const uint16_t*)record + H * kGroups * kTileRows;
  const uint8_t* codes = record + codes_offset(F) + H * block_bytes(F);
  if constexpr (!kUnpackAhead || T <= kRegisterSums) {
    add_packed_groups<F, T>(halves, codes, a, fields, sums);
  } else {
    alignas(64) float place[From == Source::kKeep ? 1 : unpacked_scales(F) / sizeof(float)];
    float* scales = From == Source::kKeep ? (float*)out : place;
    for (int g = 0; g < kGroups; ++g) {
      store(scales + 16 * g, load_f16(halves + 16 * g));
      if constexpr (kShape.asymmetric) {
        store(scales + 16 * (kGroups + g), load_f16(halves + scale_bytes(F) / 2 + 16 * g));
      }
    }
    into_memory(scales);
    add_groups<F, From, T>(scales, codes, out + unpacked_scales(F), a, fields, sums);
  }
}

// From packed weights: kPacked or kKeep.
template <Format F, Source From, int T>
void packed_tile(const TileArgs& args) {
  Sums<T, (T > kRegisterSums)> sums(args.sums);
  const uint8_t* record = args.weights;
  const int8_t* a = (const int8_t*)args.codes;
  const float* fields = args.scales;
  uint8_t* out = args.kept;
  constexpr size_t kKept = From == Source::kKeep ? unpacked_block_bytes(F) : 0;
  for (int k = args.cols; k >= kRecord; k -= kRecord) {
    if constexpr (T <= kPrefetchTokens) {
      for (size_t i = 0; i < record_bytes(F); i += 64) prefetch(record + kPrefetchBytes + i);
    }
    add_packed_block<F, From, T, 0>(record, a, fields, sums, out);
    add_packed_block<F, From, T, 1>(record, a + kGroup * T, fields + kScaleFields * T, sums, out + kKept);
    record += record_bytes(F);
    a += kRecord * T;
    fields += 2 * kScaleFields * T;
    out += 2 * kKept;
  }
  if (args.cols % kRecord) add_packed_block<F, From, T, 0>(record, a, fields, sums, out);
  sums.finish();
}

template <Format F, int T>
void unpacked_tile(const TileArgs& args) {
  Sums<T, (T > kRegisterSums)> sums(args.sums);
  const uint8_t* block = args.weights;
  const int8_t* a = (const int8_t*)args.codes;
  const float* fields = args.scales;
  for (int k = args.cols; k > 0; k -= kGroup) {
    add_groups<F, Source::kUnpacked, T>((const float*)block, block + unpacked_scales(F), nullptr, a, fields,
                                        sums);
    block += unpacked_block_bytes(F);
    a += kGroup * T;
    fields += kScaleFields * T;
  }
  sums.finish();
}

// A peak as the kernels want it.
struct PeakAt {
  int block, quad;
  int token;  // of its tile
  Peak peak;
};

// Adds the upper parts of a token tile's peaks to its sums. They come in order of K, so that neighbours are
// mostly different tokens' and do not wait for each other.
template <Format F, bool Unpacked>
void add_peaks(const uint8_t* tile, const PeakAt* at, const PeakAt* end, float* sums) {
  constexpr int kGroups = kGroup / format_shape(F).group;
  for (; at != end; ++at) {
    const int group = kGroups == 1 ? 0 : at->quad / 4;
    f32x16 scale;
    const uint8_t* codes;
    if constexpr (Unpacked) {
      const uint8_t* block = tile + (size_t)at->block * unpacked_block_bytes(F);
      scale = load((const float*)block + 16 * group);
      codes = block + unpacked_scales(F);
    } else {
      const uint8_t* record = tile + (size_t)(at->block / 2) * record_bytes(F);
      const int half = at->block % 2;
      scale = load_f16((const uint16_t*)record + (half * kGroups + group) * kTileRows);
      codes = record + codes_offset(F) + half * block_bytes(F);
    }
    const i32x16 dot = quad_dot<F, Unpacked>(codes, at->quad, at->peak.high);
    float* sum = sums + 16 * at->token;
    store(sum, fma(to_f32(dot) * broadcast(at->peak.scale), scale, load(sum)));
  }
}

// Weights of one k for 16 rows.
template <Format F>
TOQUE_INLINE f32x16 load_weights(const uint8_t* tile, int k) {
  if constexpr (F == Format::kF32) return load((const float*)tile + (size_t)k * 16);
  if constexpr (F == Format::kF16) return load_f16((const uint16_t*)tile + (size_t)k * 16);
  if constexpr (F == Format::kBF16) {
    i32x16 pairs = load((const int32_t*)tile + (size_t)(k / 2) * 16);
    return k & 1 ? bf16_high(pairs) : bf16_low(pairs);
  }
}

// FP8 weights with f32 activations: each record's sum is scaled as a whole.
template <Format F, Source From, int T>
void f8_tile(const TileArgs& args) {
  constexpr int kSpan = f8_span(F);
  constexpr size_t kRecordBytes = From == Source::kUnpacked ? unpacked_f8_bytes(F) : f8_record_bytes(F);
  Sums<T, (T > kRegisterSums)> sums(args.sums);
  const float* a = (const float*)args.codes;
  const uint8_t* record = args.weights;
  uint8_t* kept = args.kept;
  for (int k = 0; k < args.cols; k += kSpan, record += kRecordBytes) {
    const int count = args.cols - k < kSpan ? args.cols - k : kSpan;
    if constexpr (T == 1) {
      for (size_t i = 0; i < f8_record_bytes(F); i += 64) prefetch(record + kPrefetchBytes + i);
    }
    const uint8_t* codes = record + 64;
    if constexpr (From == Source::kKeep) {
      store((float*)kept, load((const float*)record));
      kept += 64;
    }
    f32x16 part[T];
    TOQUE_UNROLL
    for (int t = 0; t < T; ++t) part[t] = zero_f32();
    for (int i = 0; i < count; ++i, a += T) {
      f32x16 w;
      if constexpr (From == Source::kUnpacked) {
        w = load_f16((const uint16_t*)codes);
        codes += kTileRows * sizeof(uint16_t);
      } else {
        w = load_f8(codes);
        codes += kTileRows;
      }
      if constexpr (From == Source::kKeep) {
        store_f16((uint16_t*)kept, w);  // exact: f16 has more bits in both parts
        kept += kTileRows * sizeof(uint16_t);
      }
      TOQUE_UNROLL
      for (int t = 0; t < T; ++t) part[t] = fma(w, broadcast(a[t]), part[t]);
    }
    TOQUE_UNROLL
    for (int t = 0; t < T; ++t) sums.set(t, fma(part[t], load((const float*)record), sums.get(t)));
  }
  sums.finish();
}

// Float weights with f32 activations.
template <Format F, int T>
void float_tile(const TileArgs& args) {
  f32x16 sums[T];
  TOQUE_UNROLL
  for (int t = 0; t < T; ++t) sums[t] = zero_f32();
  const float* a = (const float*)args.codes;
  const int even = args.cols & ~1;
  for (int k = 0; k < even; k += 2) {
    f32x16 w = load_weights<F>(args.weights, k);
    TOQUE_UNROLL
    for (int t = 0; t < T; ++t) sums[t] = fma(w, broadcast(a[t]), sums[t]);
    w = load_weights<F>(args.weights, k + 1);
    TOQUE_UNROLL
    for (int t = 0; t < T; ++t) sums[t] = fma(w, broadcast(a[T + t]), sums[t]);
    a += 2 * T;
  }
  if (even < args.cols) {
    f32x16 w = load_weights<F>(args.weights, even);
    TOQUE_UNROLL
    for (int t = 0; t < T; ++t) sums[t] = fma(w, broadcast(a[t]), sums[t]);
  }
  TOQUE_UNROLL
  for (int t = 0; t < T; ++t) store(args.sums + 16 * t, sums[t]);
}

// bf16 weights with bf16 activations, where the instruction set multiplies pairs.
template <int T>
void bf16_tile(const TileArgs& args) {
  f32x16 sums[T];
  TOQUE_UNROLL
  for (int t = 0; t < T; ++t) sums[t] = zero_f32();
  const int32_t* w = (const int32_t*)args.weights;
  const int32_t* a = (const int32_t*)args.codes;
  for (int pair = 0; pair < (args.cols + 1) / 2; ++pair, w += 16, a += T) {
    if constexpr (T == 1) prefetch((const uint8_t*)w + kPrefetchBytes);
    i32x16 weights = load(w);
    TOQUE_UNROLL
    for (int t = 0; t < T; ++t) sums[t] = bf16_dot(sums[t], weights, broadcast(a[t]));
  }
  TOQUE_UNROLL
  for (int t = 0; t < T; ++t) store(args.sums + 16 * t, sums[t]);
}

// The kernels of one format. Null where they have no use.
struct FormatKernels {
  TileKernel packed[kTileMax + 1];    // by tokens
  TileKernel keep[kTileMax + 1];      // the same, keeping the tile unpacked
  TileKernel unpacked[kTileMax + 1];  // the same from a tile that is kept unpacked
  void (*packed_peaks)(const uint8_t* tile, const PeakAt* begin, const PeakAt* end, float* sums);
  void (*unpacked_peaks)(const uint8_t* tile, const PeakAt* begin, const PeakAt* end, float* sums);
};

template <Format F, int T = 1>
TOQUE_INLINE void fill_kernels(FormatKernels& kernels) {
  if constexpr (T <= kTileMax) {
    if constexpr (is_integer(F)) {
      kernels.packed[T] = packed_tile<F, Source::kPacked, T>;
      if constexpr (kUnpackAhead && T >= kLeastKeep) kernels.keep[T] = packed_tile<F, Source::kKeep, T>;
      if constexpr (kUnpackAhead && T >= kLeastUnpacked) kernels.unpacked[T] = unpacked_tile<F, T>;
    } else if constexpr (F == Format::kBF16 && kBF16Pairs) {
      kernels.packed[T] = bf16_tile<T>;
    } else if constexpr (is_f8(F)) {
      kernels.packed[T] = f8_tile<F, Source::kPacked, T>;
      if constexpr (kUnpackAhead && T >= kLeastKeep) kernels.keep[T] = f8_tile<F, Source::kKeep, T>;
      if constexpr (kUnpackAhead && T >= kLeastUnpacked)
        kernels.unpacked[T] = f8_tile<F, Source::kUnpacked, T>;
    } else {
      kernels.packed[T] = float_tile<F, T>;
    }
    fill_kernels<F, T + 1>(kernels);
  } else if constexpr (is_integer(F)) {
    kernels.packed_peaks = add_peaks<F, false>;
    if constexpr (kUnpackAhead) kernels.unpacked_peaks = add_peaks<F, true>;
  }
}

FormatKernels kernels_of(Format format) {
  FormatKernels kernels{};
  switch (format) {
    case Format::kF32:
      fill_kernels<Format::kF32>(kernels);
      break;
    case Format::kF16:
      fill_kernels<Format::kF16>(kernels);
      break;
    case Format::kBF16:
      fill_kernels<Format::kBF16>(kernels);
      break;
    case Format::kW4:
      fill_kernels<Format::kW4>(kernels);
      break;
    case Format::kW4A:
      fill_kernels<Format::kW4A>(kernels);
      break;
    case Format::kW5:
      fill_kernels<Format::kW5>(kernels);
      break;
    case Format::kW5A:
      fill_kernels<Format::kW5A>(kernels);
      break;
    case Format::kW6:
      fill_kernels<Format::kW6>(kernels);
      break;
    case Format::kW8:
      fill_kernels<Format::kW8>(kernels);
      break;
    case Format::kW8Z:
      fill_kernels<Format::kW8Z>(kernels);
      break;
    case Format::kIQ4:
      fill_kernels<Format::kIQ4>(kernels);
      break;
    case Format::kMX4:
      fill_kernels<Format::kMX4>(kernels);
      break;
    case Format::kW2A:
      fill_kernels<Format::kW2A>(kernels);
      break;
    case Format::kW3:
      fill_kernels<Format::kW3>(kernels);
      break;
    case Format::kF8:
      fill_kernels<Format::kF8>(kernels);
      break;
    case Format::kF8Short:
      fill_kernels<Format::kF8Short>(kernels);
      break;
  }
  return kernels;
}

}  // namespace

}  // namespace toque::TOQUE_ISA
