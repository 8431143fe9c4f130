// Writing packed activations (act.h), for every kernel that produces the input of a linear: norms, attention,
// activation functions, and the stand-alone pack_rows.
#pragma once

#include "act.h"
#include "simd.h"

namespace toque::TOQUE_ISA {

// Writes the loudest quad of a group in two parts: takes 128 * high off its four values in `quads`, the
// codes.
TOQUE_INLINE void store_peak(const ActSlot& slot, int group, float loudest, f32x16 x_low, f32x16 x_high,
                             float d, i32x16 q_low, i32x16 q_high, int32_t* quads) {
  alignas(64) int32_t values[kGroup];
  store(values, q_low);
  store(values + 16, q_high);
  const int quad = first_of(abs(x_low), abs(x_high), loudest) / 4;
  Peak peak;
  int8_t rest[4];
  for (int i = 0; i < 4; ++i) {
    const int value = values[4 * quad + i], above = (value + kPeakStep / 2) >> 7;
    peak.high[i] = (int8_t)above;
    rest[i] = (int8_t)(value - kPeakStep * above);
  }
  peak.scale = (float)kPeakStep * d;
  memcpy(quads + quad, rest, 4);
  const size_t at = (size_t)group * slot.size + slot.t;
  slot.peaks[at] = (uint8_t)(quad + 1);
  memcpy(slot.peaks + (size_t)slot.size * peak_flags(slot.width) + at * sizeof(Peak), &peak, sizeof peak);
}

// Values 32 * group .. 32 * group + 31 of one token. `count` < 32 marks the ragged end of a float row (lanes
// beyond it are not stored; kI8 widths are multiples of 32). Non-finite values: an infinity or NaN makes the
// token's whole group NaN, so that it stays visible downstream, and never another token's.
TOQUE_INLINE void store_group(const ActSlot& slot, int group, f32x16 low, f32x16 high, int count = kGroup) {
  const int T = slot.size;
  if (slot.kind == ActKind::kI8) {
    float first, second;  // the loudest values of the loudest two quads
    top_two_quads(abs(low), abs(high), first, second);
    // abs() and max() may drop a NaN operand; x - x is NaN for every non-finite x, and 0 otherwise.
    const float check = all_finite(low, high) ? 0.0f : reduce_add((low - low) + (high - high));
    const bool peak = first > kPeakRatio * second && first >= 1e-30f && check == 0.0f;
    float largest = first;
    if (peak) {  // at least so large that the peak's upper part fits a byte
      const float least = first / (float)kPeakStep;
      largest = second > least ? second : least;
    }
    float d = largest / 127.0f + check;
    f32x16 inverse = broadcast(largest > 0.0f ? 127.0f / largest : 0.0f);
    if (first < 1e-30f || check != 0.0f) inverse = zero_f32();
    i32x16 q_low = round_i32(low * inverse), q_high = round_i32(high * inverse);
    if (check != 0.0f) q_low = q_high = broadcast((int32_t)0);
    int sum_low, sum_high;
    reduce_add(q_low, q_high, sum_low, sum_high);

    alignas(32) int32_t quads[8];
    store_i8((int8_t*)quads, q_low);
    store_i8((int8_t*)(quads + 4), q_high);
    slot.peaks[(size_t)group * T + slot.t] = 0;
    if (peak) store_peak(slot, group, first, low, high, d, q_low, q_high, quads);
    int32_t* codes = (int32_t*)slot.codes + (size_t)group * 8 * T + slot.t;
    for (int j = 0; j < 8; ++j) codes[(size_t)j * T] = quads[j];

    float* fields = slot.scales + (size_t)group * kScaleFields * T + slot.t;
    fields[kScale * T] = d;
    fields[kSum * T] = d * (float)(sum_low + sum_high);
    fields[kOffset4 * T] = -8.0f * d * (float)(sum_low + sum_high);
    fields[kOffset6Low * T] = -32.0f * d * (float)sum_low;
    fields[kOffset6High * T] = -32.0f * d * (float)sum_high;
    return;
  }
  alignas(64) float values[kGroup];
  store(values, low);
  store(values + 16, high);
  if (slot.kind == ActKind::kF32) {
    float* out = (float*)slot.codes + (size_t)group * kGroup * T + slot.t;
    for (int i = 0; i < count; ++i) out[(size_t)i * T] = values[i];
    return;
  }
  if (count & 1) values[count] = 0.0f;
  alignas(64) uint16_t rounded[kGroup];
  store_bf16(rounded, load(values));
  store_bf16(rounded + 16, load(values + 16));
  uint32_t* out = (uint32_t*)slot.codes + (size_t)group * (kGroup / 2) * T + slot.t;
  for (int i = 0; i < (count + 1) / 2; ++i) {
    out[(size_t)i * T] = rounded[2 * i] | (uint32_t)rounded[2 * i + 1] << 16;
  }
}

// One token's whole row of slot.width values.
TOQUE_INLINE void store_row(const ActSlot& slot, const float* x) {
  int group = 0;
  for (; (group + 1) * kGroup <= slot.width; ++group) {
    store_group(slot, group, load(x + group * kGroup), load(x + group * kGroup + 16));
  }
  int rest = slot.width - group * kGroup;
  if (rest > 0) {
    const float* tail = x + group * kGroup;
    f32x16 low = load_first(tail, rest < 16 ? rest : 16);
    f32x16 high = rest > 16 ? load_first(tail + 16, rest - 16) : zero_f32();
    store_group(slot, group, low, high, rest);
  }
}

}  // namespace toque::TOQUE_ISA
