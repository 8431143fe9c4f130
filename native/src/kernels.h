// The kernels of one instruction set as a table of functions, and the choice of a table.
//
// Functions work on ranges ("units", rows) so that the caller decides which thread does what; a result never
// depends on how the range was split, nor on which other tokens share the call: for each output element the
// sequence of floating point operations is fixed by the weights' format and the instruction set alone.
#pragma once

#include <cstdint>

#include "act.h"
#include "packed.h"

namespace toque {

struct SamplerKernels;  // sampler_kernels.h
struct StepKernels;     // step_kernels.h

enum class Activation : uint8_t { kNone, kSilu, kGeluTanh, kGelu };

enum class Epilogue : uint8_t {
  kStore,     // out = y
  kAdd,       // out += y
  kActivate,  // act(y), to out_act or out
  kGated,     // act(y) * (up's y), to out_act or out
};

// y = weight * in + bias for every token of `in`, then the epilogue. Which kind of activations `in` must have
// follows from the weight's format: KernelTable::act_kind.
struct LinearArgs {
  Act in;
  PackedMatrix weight;
  PackedMatrix up;  // kGated only: same shape as weight, any format that takes the same kind of activations
  Epilogue epilogue;
  Activation activation;
  const float* bias;     // [weight.rows] or null
  const float* up_bias;  // [up.rows] or null
  float* out;            // row-major [in.tokens][out_stride]; unused when out_act.codes is set
  int64_t out_stride;
  Act out_act;  // kActivate and kGated: when .codes is not null, the packed activations of the next linear
};

struct KernelTable {
  const char* name;  // "scalar", "avx2", "avx512" (and in test builds "avx512_emulated")
  int tile_max;      // most tokens in a token tile: what Act::tile_max must be

  ActKind (*act_kind)(Format format);

  // Rows [first, last) of x (row-major, `stride` floats apart, act.width used) into the packed activations.
  void (*pack_rows)(const Act& act, const float* x, int64_t stride, int first, int last);

  // A unit is one tile of 16 outputs (kStore, kAdd) or 32 outputs (kActivate, kGated), for all tokens.
  int (*linear_units)(const LinearArgs& args);
  void (*linear)(const LinearArgs& args, int first_unit, int last_unit);

  // out[i] = scale * weight's row ids[i], dequantized. Rows [first, last) of the batch.
  void (*embed_rows)(const PackedMatrix& weight, const int32_t* ids, float scale, float* out,
                     int64_t out_stride, int first, int last);

  const StepKernels* step;
  const SamplerKernels* sampler;
};

// The tables this machine can run, best first; returns how many.
constexpr int kMaxTables = 4;
int supported_tables(const KernelTable* (&tables)[kMaxTables]);

// The table called `name`, or the best one supported when `name` is empty (then TOQUE_ISA is consulted
// first). Throws std::invalid_argument naming the instruction sets there are when it is unknown or not
// supported here.
const KernelTable& kernel_table(const char* name = "");

}  // namespace toque
