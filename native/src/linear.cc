// Linear layers over packed weights: y = W x, by the kernels of linear_tiles.h.
//
// Loop order: output tile, token tile, K. A weight tile is read from memory once and stays in L1 for the
// token tiles that follow; nothing is ever dequantized to memory.
#include "act.h"
#include "isa.h"
#include "kernels.h"
#include "linear_tiles.h"
#include "packed.h"
#include "quantize.h"
#include "scratch.h"
#include "simd.h"

namespace toque::TOQUE_ISA {

namespace {

// The peaks of all token tiles, gathered once for all output tiles.
struct Peaks {
  const PeakAt* at = nullptr;
  const int* ends = nullptr;  // [token tiles + 1] tile i has ends[i] .. ends[i + 1] - 1; null: there are none

  static size_t bytes(const Act& act) {
    if (act.kind != ActKind::kI8) return 0;
    const size_t most = (size_t)act.tokens * (size_t)(act.width / kGroup);
    return ((most * sizeof(PeakAt) + ((size_t)act.tokens + 1) * sizeof(int)) + 63) / 64 * 64;
  }

  // In `memory` of at least bytes().
  void gather(const Act& act, uint8_t* memory) {
    if (act.kind != ActKind::kI8) return;
    int* end = (int*)memory;
    PeakAt* out = (PeakAt*)(end + act.tokens + 1);
    ends = end;
    at = out;
    const size_t flags = (size_t)peak_flags(act.width), stride = peak_stride(act.kind, act.width);
    const int tiles = token_tiles(act.tokens, act.tile_max);
    *end = 0;
    for (int i = 0; i < tiles; ++i) {
      const TokenTile tile = token_tile(act.tokens, act.tile_max, i);
      const uint8_t* places = act.peaks + (size_t)tile.first * stride;
      const Peak* peaks = (const Peak*)(places + (size_t)tile.size * flags);
      const int count = act.width / kGroup * tile.size;
      for (int first = 0; first < count; first += 8) {
        uint64_t any;
        memcpy(&any, places + first, 8);
        if (count - first < 8) any &= ((uint64_t)1 << 8 * (count - first)) - 1;
        while (any != 0) {
          const int byte = __builtin_ctzll(any) / 8, index = first + byte;
          any &= ~((uint64_t)0xff << 8 * byte);
          *out++ = {index / tile.size, places[index] - 1, index % tile.size, peaks[index]};
        }
      }
      *++end = (int)(out - at);
    }
  }
};

// One weight matrix against one set of packed activations.
struct Product {
  const PackedMatrix& weight;
  const Act& in;
  int tiles, larger, size;  // token tiles: the first `larger` of them have size + 1 tokens, the others size
  size_t code_bytes, scale_floats;  // of the activations, per token
  size_t unpacked_bytes;            // of one unpacked weight tile; 0: used as it is packed
  FormatKernels kernels;

  Product(const PackedMatrix& w, const Act& act) : weight(w), in(act) {
    tiles = token_tiles(in.tokens, in.tile_max);
    size = in.tokens / tiles;
    larger = in.tokens % tiles;
    code_bytes = code_stride(in.kind, in.width);
    scale_floats = scale_stride(in.kind, in.width);
    kernels = kernels_of(w.format);
    unpacked_bytes = 0;
    if (kernels.unpacked[kTileMax] != nullptr && tiles >= kUnpackTiles) {
      size_t bytes = unpacked_tile_bytes(w.format, w.cols);
      if (bytes <= kUnpackLimit) unpacked_bytes = bytes;
    }
  }

  TokenTile tokens(int i) const {
    return {i * size + (i < larger ? i : larger), size + (i < larger ? 1 : 0)};
  }

  // sums[t][16] of output tile n and token tile i. Token tile 0 comes first and writes to `kept`
  // (unpacked_bytes of it) what the others read.
  void run(int n, uint8_t* kept, const Peaks& peaks, int i, float* sums) const {
    const TokenTile tile = tokens(i);
    const bool unpacked = unpacked_bytes != 0 && i > 0;
    const TileKernel* by_tokens = unpacked_bytes == 0 ? kernels.packed
                                  : i == 0            ? kernels.keep
                                                      : kernels.unpacked;
    const uint8_t* weights = unpacked ? kept : weight.data + (size_t)n * weight.tile_bytes;
    by_tokens[tile.size](TileArgs{weights, weight.cols, in.codes + tile.first * code_bytes,
                                  in.scales + tile.first * scale_floats, sums, kept});
    if (peaks.ends == nullptr) return;
    const auto add = unpacked ? kernels.unpacked_peaks : kernels.packed_peaks;
    if (peaks.ends[i] < peaks.ends[i + 1])
      add(weights, peaks.at + peaks.ends[i], peaks.at + peaks.ends[i + 1], sums);
  }
};

TOQUE_INLINE f32x16 load_bias(const float* bias, int first, int count) {
  if (bias == nullptr) return zero_f32();
  return count == kTileRows ? load(bias + first) : load_first(bias + first, count);
}

TOQUE_INLINE f32x16 activate(Activation activation, f32x16 x) {
  switch (activation) {
    case Activation::kSilu:
      return silu(x);
    case Activation::kGeluTanh:
      return gelu_tanh(x);
    case Activation::kGelu:
      return gelu_erf(x);
    case Activation::kNone:
      return x;
  }
  return x;
}

// Units of one output tile: out = y + bias, or out += y + bias.
void store_units(const LinearArgs& args, int first_unit, int last_unit) {
  const PackedMatrix& weight = args.weight;
  const Product product(weight, args.in);
  const size_t peak_bytes = Peaks::bytes(args.in);
  uint8_t* const memory = thread_scratch(peak_bytes + product.unpacked_bytes);
  uint8_t* const scratch = memory + peak_bytes;
  Peaks peaks;
  peaks.gather(args.in, memory);
  const bool add_to_out = args.epilogue == Epilogue::kAdd;
  alignas(64) float sums[kTileMax * 16];
  for (int unit = first_unit; unit < last_unit; ++unit) {
    const int row = unit * kTileRows, rows = weight.rows - row < kTileRows ? weight.rows - row : kTileRows;
    const f32x16 bias = load_bias(args.bias, row, rows);
    for (int i = 0; i < product.tiles; ++i) {
      product.run(unit, scratch, peaks, i, sums);
      const TokenTile tokens = product.tokens(i);
      float* out = args.out + tokens.first * args.out_stride + row;
      for (int t = 0; t < tokens.size; ++t, out += args.out_stride) {
        f32x16 y = load(sums + 16 * t) + bias;
        if (rows == kTileRows) {
          store(out, add_to_out ? load(out) + y : y);
        } else {
          store_first(out, add_to_out ? load_first(out, rows) + y : y, rows);
        }
      }
    }
  }
}

// Units of 32 outputs: h = act(y) or act(gate) * up. 32 outputs are one group of the next linear's
// activations, so they are quantized here, while they are in registers.
void activate_units(const LinearArgs& args, int first_unit, int last_unit) {
  const PackedMatrix &weight = args.weight, &up = args.up;
  const bool gated = args.epilogue == Epilogue::kGated;
  const Product product(weight, args.in), up_product(gated ? up : weight, args.in);
  const size_t peak_bytes = Peaks::bytes(args.in);
  uint8_t* const memory =
      thread_scratch(peak_bytes + 2 * (product.unpacked_bytes + up_product.unpacked_bytes));
  uint8_t *const scratch = memory + peak_bytes, *const up_scratch = scratch + 2 * product.unpacked_bytes;
  Peaks peaks;
  peaks.gather(args.in, memory);
  alignas(64) float sums[2][kTileMax * 16], up_sums[2][kTileMax * 16];
  for (int unit = first_unit; unit < last_unit; ++unit) {
    const int row = unit * kGroup, rows = weight.rows - row < kGroup ? weight.rows - row : kGroup;
    const int halves = (rows + kTileRows - 1) / kTileRows;
    f32x16 bias[2] = {zero_f32(), zero_f32()}, up_bias[2] = {zero_f32(), zero_f32()};
    for (int h = 0; h < halves; ++h) {
      int count = rows - h * kTileRows < kTileRows ? rows - h * kTileRows : kTileRows;
      bias[h] = load_bias(args.bias, row + h * kTileRows, count);
      up_bias[h] = load_bias(args.up_bias, row + h * kTileRows, count);
    }
    for (int i = 0; i < product.tiles; ++i) {
      for (int h = 0; h < halves; ++h) {
        product.run(2 * unit + h, scratch + h * product.unpacked_bytes, peaks, i, sums[h]);
        if (!gated) continue;
        up_product.run(2 * unit + h, up_scratch + h * up_product.unpacked_bytes, peaks, i, up_sums[h]);
      }
      const TokenTile tokens = product.tokens(i);  // a tile of what is written as well: both hold all tokens
      for (int t = 0; t < tokens.size; ++t) {
        f32x16 y[2] = {zero_f32(), zero_f32()};
        for (int h = 0; h < halves; ++h) {
          y[h] = activate(args.activation, load(sums[h] + 16 * t) + bias[h]);
          if (gated) y[h] = y[h] * (load(up_sums[h] + 16 * t) + up_bias[h]);
        }
        if (args.out_act.codes != nullptr) {
          store_group(act_slot(args.out_act, tokens, t), unit, y[0], y[1], rows);
          continue;
        }
        float* out = args.out + (tokens.first + t) * args.out_stride + row;
        for (int h = 0; h < halves; ++h) {
          int count = rows - h * kTileRows < kTileRows ? rows - h * kTileRows : kTileRows;
          store_first(out + h * kTileRows, y[h], count);
        }
      }
    }
  }
}

template <Format F>
void dequantize_row(const uint8_t* tile, int row, int cols, float factor, float* out) {
  constexpr FormatShape kShape = format_shape(F);
  for (int k = 0; k < cols; k += kShape.group) {
    const uint8_t* record = tile + (size_t)(k / kRecord) * record_bytes(F);
    const uint8_t* block = record + codes_offset(F) + (k % kRecord / kGroup) * block_bytes(F);
    const int group = k % kRecord / kShape.group;
    alignas(64) float scales[16], mins[16] = {};
    store(scales, load_f16((const uint16_t*)(record + 32 * group)));
    if (kShape.asymmetric) store(mins, load_f16((const uint16_t*)(record + scale_bytes(F) + 32 * group)));
    const float scale = scales[row], min = has_zeros(F)        ? mins[row] * scale
                                           : kShape.asymmetric ? mins[row]
                                                               : -(float)zero_point(F) * scale;
    for (int i = 0; i < kShape.group; ++i) {
      int code = code_at<F>(block, row, (k + i) % kGroup);
      out[k + i] = factor * __builtin_fmaf((float)code, scale, min);
    }
  }
}

template <Format F>
void convert_row(const uint8_t* tile, int row, int cols, float factor, float* out) {
  alignas(64) float lanes[16];
  for (int k = 0; k < cols; ++k) {
    store(lanes, load_weights<F>(tile, k));
    out[k] = factor * lanes[row];
  }
}

void convert_f8_row(Format format, const uint8_t* tile, int row, int cols, float factor, float* out) {
  const int span = f8_span(format);
  alignas(64) float lanes[16];
  for (int k = 0; k < cols; ++k) {
    const uint8_t* record = tile + (size_t)(k / span) * f8_record_bytes(format);
    store(lanes, load_f8(record + 64 + (size_t)(k % span) * kTileRows) * load((const float*)record));
    out[k] = factor * lanes[row];
  }
}

}  // namespace

ActKind act_kind(Format format) {
  if (is_integer(format)) return ActKind::kI8;
  return format == Format::kBF16 && kBF16Pairs ? ActKind::kBF16 : ActKind::kF32;
}

void pack_rows(const Act& act, const float* x, int64_t stride, int first, int last) {
  for (int token = first; token < last; ++token) store_row(act_slot(act, token), x + token * stride);
}

int linear_units(const LinearArgs& args) {
  bool pairs = args.epilogue == Epilogue::kActivate || args.epilogue == Epilogue::kGated;
  return pairs ? (args.weight.rows + kGroup - 1) / kGroup : tile_count(args.weight.rows);
}

void linear(const LinearArgs& args, int first_unit, int last_unit) {
  if (args.in.tokens == 0) return;
  if (args.epilogue == Epilogue::kActivate || args.epilogue == Epilogue::kGated) {
    activate_units(args, first_unit, last_unit);
  } else {
    store_units(args, first_unit, last_unit);
  }
}

void embed_rows(const PackedMatrix& weight, const int32_t* ids, float scale, float* out, int64_t out_stride,
                int first, int last) {
  for (int i = first; i < last; ++i) {
    const uint8_t* tile = weight.data + (size_t)(ids[i] / kTileRows) * weight.tile_bytes;
    const int row = ids[i] % kTileRows;
    float* to = out + i * out_stride;
    switch (weight.format) {
      case Format::kF32:
        convert_row<Format::kF32>(tile, row, weight.cols, scale, to);
        break;
      case Format::kF16:
        convert_row<Format::kF16>(tile, row, weight.cols, scale, to);
        break;
      case Format::kBF16:
        convert_row<Format::kBF16>(tile, row, weight.cols, scale, to);
        break;
      case Format::kW4:
        dequantize_row<Format::kW4>(tile, row, weight.cols, scale, to);
        break;
      case Format::kW4A:
        dequantize_row<Format::kW4A>(tile, row, weight.cols, scale, to);
        break;
      case Format::kW5:
        dequantize_row<Format::kW5>(tile, row, weight.cols, scale, to);
        break;
      case Format::kW5A:
        dequantize_row<Format::kW5A>(tile, row, weight.cols, scale, to);
        break;
      case Format::kW6:
        dequantize_row<Format::kW6>(tile, row, weight.cols, scale, to);
        break;
      case Format::kW8:
        dequantize_row<Format::kW8>(tile, row, weight.cols, scale, to);
        break;
      case Format::kW8Z:
        dequantize_row<Format::kW8Z>(tile, row, weight.cols, scale, to);
        break;
      case Format::kIQ4:
        dequantize_row<Format::kIQ4>(tile, row, weight.cols, scale, to);
        break;
      case Format::kMX4:
        dequantize_row<Format::kMX4>(tile, row, weight.cols, scale, to);
        break;
      case Format::kW2A:
        dequantize_row<Format::kW2A>(tile, row, weight.cols, scale, to);
        break;
      case Format::kW3:
        dequantize_row<Format::kW3>(tile, row, weight.cols, scale, to);
        break;
      case Format::kF8:
      case Format::kF8Short:
        convert_f8_row(weight.format, tile, row, weight.cols, scale, to);
        break;
    }
  }
}

}  // namespace toque::TOQUE_ISA
