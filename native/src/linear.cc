// Linear layers over packed weights: y = W x, 16 output rows x 1..kTileMax tokens at a time, K innermost.
//
// Loop order: output tile, token tile, K. A weight tile is read from memory once and stays in L1 for the
// token tiles that follow; nothing is ever dequantized to memory. Every output element is
//
//   acc = 0; for each group, in order of K:  acc = fma(fma(dot, d, offset), scale, acc)         symmetric
//                                            acc = fma(dot * d, scale, acc); acc = fma(min, d * sum, acc)
//                                            with mins
//
// with `dot` an exact integer, whatever T is and wherever the token sits in its tile: results do not depend
// on batching.
#include "act.h"
#include "dot.h"
#include "isa.h"
#include "kernels.h"
#include "packed.h"
#include "quantize.h"
#include "simd.h"
#include "unpack.h"

namespace toque::TOQUE_ISA {

namespace {

struct TileArgs {
  const uint8_t* weights;  // one tile of 16 rows
  int cols;
  const uint8_t* codes;  // one token tile of packed activations
  const float* scales;
  float* sums;  // out: [T][16]
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

// One group (G of block H) of one record for T tokens. `fields` are the group's activation scales [5][T].
template <Format F, int T, int H, int G, typename S>
TOQUE_INLINE void add_group(const uint8_t* record, const int8_t* a, const float* fields, S& sums) {
  constexpr FormatShape kShape = format_shape(F);
  constexpr int kGroupsPerBlock = kGroup / kShape.group;
  const uint8_t* scales = record + 32 * (H * kGroupsPerBlock + G);
  const uint8_t* codes = record + codes_offset(F) + H * block_bytes(F);
  const float* d = fields + kScale * T;
  if constexpr (kShape.asymmetric) {
    f32x16 scale = load_f16((const uint16_t*)scales),
           min = load_f16((const uint16_t*)(scales + scale_bytes(F)));
    const float* d_sum = fields + kSum * T;
    group_dot<F, T, G>(codes, a, [&](int t, i32x16 dot) __attribute__((always_inline)) {
      f32x16 sum = fma(to_f32(dot) * broadcast(d[t]), scale, sums.get(t));
      sums.set(t, fma(min, broadcast(d_sum[t]), sum));
    });
  } else {
    constexpr int kField = kShape.group == 16 ? (G == 0 ? kOffset6Low : kOffset6High) : kOffset4;
    // Powers of two: exact, whoever multiplies.
    constexpr float kMultiple = (float)zero_point(F) / (kShape.group == 16 ? 32.0f : 8.0f);
    const float* offset = fields + kField * T;
    f32x16 scale = load_f16((const uint16_t*)scales);
    group_dot<F, T, G>(codes, a, [&](int t, i32x16 dot) __attribute__((always_inline)) {
      f32x16 value = fma(to_f32(dot), broadcast(d[t]), broadcast(kMultiple * offset[t]));
      sums.set(t, fma(value, scale, sums.get(t)));
    });
  }
}

template <Format F, int T, int H, typename S>
TOQUE_INLINE void add_block(const uint8_t* record, const int8_t* a, const float* fields, S& sums) {
  add_group<F, T, H, 0>(record, a, fields, sums);
  if constexpr (format_shape(F).group == 16) add_group<F, T, H, 1>(record, a, fields, sums);
}

template <Format F, int T>
void integer_tile(const TileArgs& args) {
  Sums<T, (T > kRegisterSums)> sums(args.sums);
  const uint8_t* record = args.weights;
  const int8_t* a = (const int8_t*)args.codes;
  const float* fields = args.scales;
  for (int k = args.cols; k >= kRecord; k -= kRecord) {
    if constexpr (T == 1) {
      for (size_t i = 0; i < record_bytes(F); i += 64) prefetch(record + kPrefetchBytes + i);
    }
    add_block<F, T, 0>(record, a, fields, sums);
    add_block<F, T, 1>(record, a + kGroup * T, fields + kScaleFields * T, sums);
    record += record_bytes(F);
    a += kRecord * T;
    fields += 2 * kScaleFields * T;
  }
  if (args.cols % kRecord) add_block<F, T, 0>(record, a, fields, sums);
  sums.finish();
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

template <Format F, int T>
void any_tile(const TileArgs& args) {
  if constexpr (is_integer(F)) {
    integer_tile<F, T>(args);
  } else if constexpr (F == Format::kBF16 && kBF16Pairs) {
    bf16_tile<T>(args);
  } else {
    float_tile<F, T>(args);
  }
}

template <Format F, int T = kTileMax>
TileKernel kernel_for_tokens(int tokens) {
  if (tokens == T) return any_tile<F, T>;
  if constexpr (T > 1) return kernel_for_tokens<F, T - 1>(tokens);
  return nullptr;
}

TileKernel tile_kernel(Format format, int tokens) {
  switch (format) {
    case Format::kF32:
      return kernel_for_tokens<Format::kF32>(tokens);
    case Format::kF16:
      return kernel_for_tokens<Format::kF16>(tokens);
    case Format::kBF16:
      return kernel_for_tokens<Format::kBF16>(tokens);
    case Format::kW4:
      return kernel_for_tokens<Format::kW4>(tokens);
    case Format::kW4A:
      return kernel_for_tokens<Format::kW4A>(tokens);
    case Format::kW5:
      return kernel_for_tokens<Format::kW5>(tokens);
    case Format::kW5A:
      return kernel_for_tokens<Format::kW5A>(tokens);
    case Format::kW6:
      return kernel_for_tokens<Format::kW6>(tokens);
    case Format::kW8:
      return kernel_for_tokens<Format::kW8>(tokens);
  }
  return nullptr;
}

// The token tiles of one call have two sizes at most: the larger ones come first.
struct TilePlan {
  int tiles, larger, size;
  TileKernel kernel, larger_kernel;
  size_t code_bytes, scale_floats;  // per token

  TOQUE_INLINE_MEMBER TokenTile tile(int i) const {
    return {i * size + (i < larger ? i : larger), size + (i < larger ? 1 : 0)};
  }
  TOQUE_INLINE_MEMBER void run(const Act& in, int i, const PackedMatrix& weight, int row_tile,
                               float* sums) const {
    size_t first = (size_t)tile(i).first;
    TileArgs args{weight.data + (size_t)row_tile * weight.tile_bytes, weight.cols,
                  in.codes + first * code_bytes, in.scales + first * scale_floats, sums};
    (i < larger ? larger_kernel : kernel)(args);
  }
};

TilePlan plan_tiles(const Act& in, Format format) {
  TilePlan plan;
  plan.tiles = token_tiles(in.tokens, in.tile_max);
  plan.size = in.tokens / plan.tiles;
  plan.larger = in.tokens % plan.tiles;
  plan.kernel = tile_kernel(format, plan.size);
  plan.larger_kernel = plan.larger ? tile_kernel(format, plan.size + 1) : nullptr;
  plan.code_bytes = code_stride(in.kind, in.width);
  plan.scale_floats = scale_stride(in.kind, in.width);
  return plan;
}

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
  const TilePlan plan = plan_tiles(args.in, weight.format);
  const bool add_to_out = args.epilogue == Epilogue::kAdd;
  alignas(64) float sums[kTileMax * 16];
  for (int unit = first_unit; unit < last_unit; ++unit) {
    const int row = unit * kTileRows, rows = weight.rows - row < kTileRows ? weight.rows - row : kTileRows;
    const f32x16 bias = load_bias(args.bias, row, rows);
    for (int i = 0; i < plan.tiles; ++i) {
      plan.run(args.in, i, weight, unit, sums);
      const TokenTile tokens = plan.tile(i);
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
  const TilePlan plan = plan_tiles(args.in, weight.format);
  const TilePlan up_plan = gated ? plan_tiles(args.in, up.format) : plan;
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
    for (int i = 0; i < plan.tiles; ++i) {
      for (int h = 0; h < halves; ++h) {
        plan.run(args.in, i, weight, 2 * unit + h, sums[h]);
        if (gated) up_plan.run(args.in, i, up, 2 * unit + h, up_sums[h]);
      }
      const TokenTile tokens = plan.tile(i);
      for (int t = 0; t < tokens.size; ++t) {
        f32x16 y[2] = {zero_f32(), zero_f32()};
        for (int h = 0; h < halves; ++h) {
          y[h] = activate(args.activation, load(sums[h] + 16 * t) + bias[h]);
          if (gated) y[h] = y[h] * (load(up_sums[h] + 16 * t) + up_bias[h]);
        }
        if (args.out_act.codes != nullptr) {
          store_group(act_slot(args.out_act, tokens.first + t), unit, y[0], y[1], rows);
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

// Code of one weight. `record` and k as in packed.h, k relative to the record.
template <Format F>
TOQUE_INLINE int code_at(const uint8_t* record, int row, int k) {
  constexpr int kBits = format_shape(F).bits;
  const uint8_t* block = record + codes_offset(F) + (k / kGroup) * block_bytes(F);
  const int quad = k % kGroup / 4, byte = row * 4 + k % 4;
  if constexpr (kBits == 8) return block[quad * 64 + byte];
  int code = block[quad / 2 * 64 + byte] >> (quad % 2 * 4) & 15;
  if constexpr (kBits == 5) code |= (block[256 + byte] >> quad & 1) << 4;
  if constexpr (kBits == 6) code |= (block[256 + quad / 4 * 64 + byte] >> (quad % 4 * 2) & 3) << 4;
  return code;
}

template <Format F>
void dequantize_row(const uint8_t* tile, int row, int cols, float factor, float* out) {
  constexpr FormatShape kShape = format_shape(F);
  for (int k = 0; k < cols; k += kShape.group) {
    const uint8_t* record = tile + (size_t)(k / kRecord) * record_bytes(F);
    const int group = k % kRecord / kShape.group;
    alignas(64) float scales[16], mins[16] = {};
    store(scales, load_f16((const uint16_t*)(record + 32 * group)));
    if (kShape.asymmetric) store(mins, load_f16((const uint16_t*)(record + scale_bytes(F) + 32 * group)));
    const float scale = scales[row], min = kShape.asymmetric ? mins[row] : -(float)zero_point(F) * scale;
    for (int i = 0; i < kShape.group; ++i) {
      int code = code_at<F>(record, row, k % kRecord + i);
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
    }
  }
}

}  // namespace toque::TOQUE_ISA
