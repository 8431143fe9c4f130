// Packed activations: what linear kernels read, written by whoever produces the values.
//
// `tokens` rows of `width` values are cut into balanced token tiles of at most `tile_max` tokens (64 tokens
// at 12: 11 11 11 11 10 10), and a tile of T tokens is laid out so that the kernel's T broadcasts have
// constant offsets:
//
//   kI8    codes  int8  [width / 4][T][4]        x = d * code, one d per token and group of 32
//          scales float [width / 32][5][T]       the five fields of ScaleField
//          peaks  uint8 [width / 32][T], padded; Peak [width / 32][T]    see Peak
//   kBF16  codes  bf16  [ceil(width / 2)][T][2]  (odd width: the last value is zero)
//   kF32   codes  float [width][T]
//
// The codes of the tile that starts at token `first` begin at first * code_stride(act) bytes, its scales at
// first * scale_stride(act) floats. kI8 needs a width that is a multiple of 32.
//
// Only plain data and force-inlined functions here: this header is compiled for several instruction sets at
// once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "packed.h"

namespace toque {

enum class ActKind : uint8_t { kI8, kBF16, kF32 };

// Everything a kernel adds per group is precomputed, so that a group costs one multiply-add per 16 outputs:
// sum(w a) = scale * (d * sum(code a) + offset) with the offset of a symmetric format, plus min * d * sum(a).
enum ScaleField : int {
  kScale = 0,       // d
  kSum = 1,         // d * sum of the group's 32 codes
  kOffset4 = 2,     // -8 * d * sum: the offset of a 4-bit code (wider symmetric formats use multiples of it)
  kOffset6Low = 3,  // -32 * d * sum of codes 0..15, for 6-bit weights with a scale per 16
  kOffset6High = 4,
  kScaleFields = 5,
};

// Where one value of a group towers over the others, a scale that fits it leaves the others few of the 127
// steps. So the loudest quad of such a group is stored in two parts, x = d * (code + 128 * high), and d fits
// the other seven quads. Transformers have few such groups, but those make most of the noise of int8
// activations: with peaks, SmolLM2's logits diverge five times less from the float model's, for about a
// twentieth more arithmetic.
//
// A tile's peaks are bytes [width / 32][T], 0 or 1 + the quad's place in its group, padded to
// T * peak_flags(width) of them, then Peak [width / 32][T].
struct Peak {
  int8_t high[4];
  float scale;  // 128 * d
};
constexpr int kPeakStep = 128;
// A group has a peak when its loudest quad exceeds the next by more than this factor.
constexpr float kPeakRatio = 2.0f;

struct Act {
  ActKind kind;
  int32_t tokens, width, tile_max;
  uint8_t* codes;  // 64-byte aligned, act_code_bytes() long
  float* scales;   // 64-byte aligned, act_scale_count() long; unused unless kI8
  uint8_t* peaks;  // 8-byte aligned, act_peak_bytes() long; unused unless kI8
};

TOQUE_CONSTEXPR size_t code_stride(ActKind kind, int width) {
  switch (kind) {
    case ActKind::kI8:
      return (size_t)width;
    case ActKind::kBF16:
      return ((size_t)width + 1) / 2 * 4;
    default:
      return (size_t)width * 4;
  }
}
TOQUE_CONSTEXPR size_t scale_stride(ActKind kind, int width) {
  return kind == ActKind::kI8 ? (size_t)(width / kGroup) * kScaleFields : 0;
}
TOQUE_CONSTEXPR int peak_flags(int width) { return (width / kGroup + 7) / 8 * 8; }
TOQUE_CONSTEXPR size_t peak_stride(ActKind kind, int width) {
  return kind == ActKind::kI8 ? (size_t)peak_flags(width) + (size_t)(width / kGroup) * sizeof(Peak) : 0;
}
TOQUE_CONSTEXPR size_t act_code_bytes(ActKind kind, int tokens, int width) {
  return (size_t)tokens * code_stride(kind, width) + 64;
}
TOQUE_CONSTEXPR size_t act_scale_count(ActKind kind, int tokens, int width) {
  return (size_t)tokens * scale_stride(kind, width);
}
TOQUE_CONSTEXPR size_t act_peak_bytes(ActKind kind, int tokens, int width) {
  return (size_t)tokens * peak_stride(kind, width);
}

struct TokenTile {
  int first, size;
};
TOQUE_CONSTEXPR int token_tiles(int tokens, int tile_max) { return (tokens + tile_max - 1) / tile_max; }
// Tile `index`: the first (tokens % tiles) tiles are one token larger than the others.
TOQUE_CONSTEXPR TokenTile token_tile(int tokens, int tile_max, int index) {
  int tiles = token_tiles(tokens, tile_max), size = tokens / tiles, larger = tokens % tiles;
  return {index * size + (index < larger ? index : larger), size + (index < larger ? 1 : 0)};
}

// Where one token's values go. `t` is its place in its tile of `size` tokens.
struct ActSlot {
  ActKind kind;
  int32_t size, t, width;
  uint8_t* codes;  // of the tile
  float* scales;   // of the tile
  uint8_t* peaks;  // of the tile
};
static inline __attribute__((always_inline)) ActSlot act_slot(const Act& act, TokenTile tile, int t) {
  return {act.kind,
          tile.size,
          t,
          act.width,
          act.codes + (size_t)tile.first * code_stride(act.kind, act.width),
          act.scales + (size_t)tile.first * scale_stride(act.kind, act.width),
          act.peaks + (size_t)tile.first * peak_stride(act.kind, act.width)};
}
// Divides several times: not for every group of a token.
static inline __attribute__((always_inline)) ActSlot act_slot(const Act& act, int token) {
  int tiles = token_tiles(act.tokens, act.tile_max), size = act.tokens / tiles, larger = act.tokens % tiles;
  int in_larger = larger * (size + 1);
  int index = token < in_larger ? token / (size + 1) : larger + (token - in_larger) / size;
  TokenTile tile = {index * size + (index < larger ? index : larger), size + (index < larger ? 1 : 0)};
  return act_slot(act, tile, token - tile.first);
}

}  // namespace toque
