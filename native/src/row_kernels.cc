// Norms, activations, rotation and the other ops on single rows; the contract is in step_kernels.h.
//
// Whole vectors of 16 first, then one partial vector for what is left of the row.
#include "quantize.h"
#include "simd.h"
#include "step_kernels_isa.h"

namespace toque::TOQUE_ISA {
namespace {

// y[i] = f(i) for i in [0, n), where f(i, load) reads through `load`.
template <typename F>
TOQUE_INLINE void each(int n, float* y, F f) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    store(y + i, f([i](const float* p) __attribute__((always_inline)) { return load(p + i); }));
  }
  if (i < n) {
    const int rest = n - i;
    store_first(y + i, f([i, rest](const float* p) __attribute__((always_inline)) {
                  return load_first(p + i, rest);
                }),
                rest);
  }
}

// Sum over the row of f(x), in four interleaved accumulators; lanes past the end count as f(zero, ...) masked
// to 0.
template <typename F>
TOQUE_INLINE float sum_over(const float* x, int n, F f) {
  f32x16 acc[4] = {zero_f32(), zero_f32(), zero_f32(), zero_f32()};
  int i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    TOQUE_UNROLL
    for (int j = 0; j < 4; ++j) acc[j] = acc[j] + f(load(x + i + j * kLanes));
  }
  for (; i < n; i += kLanes) {
    const int rest = n - i;
    acc[0] = acc[0] +
             (rest >= kLanes ? f(load(x + i)) : select_first(rest, f(load_first(x + i, rest)), zero_f32()));
  }
  return reduce_add((acc[0] + acc[1]) + (acc[2] + acc[3]));
}

template <typename F>
TOQUE_INLINE void with_activation(Activation act, F run) {
  switch (act) {
    case Activation::kNone:
      break;
    case Activation::kSilu:
      run([](f32x16 x) __attribute__((always_inline)) { return silu(x); });
      break;
    case Activation::kGelu:
      run([](f32x16 x) __attribute__((always_inline)) { return gelu_erf(x); });
      break;
    case Activation::kGeluTanh:
      run([](f32x16 x) __attribute__((always_inline)) { return gelu_tanh(x); });
      break;
  }
}

float square_root(float x) {
  float lanes[kLanes];
  store(lanes, sqrt(broadcast(x)));
  return lanes[0];
}

}  // namespace

void rms_norm(const float* x, const float* gain, int width, int group, float eps, float* y) {
  for (int begin = 0; begin < width; begin += group) {
    const float* in = x + begin;
    const float squares = sum_over(in, group, [](f32x16 v) __attribute__((always_inline)) { return v * v; });
    const f32x16 factor = broadcast(1.0f / square_root(squares / (float)group + eps));
    each(group, y + begin,
         [&](auto get) __attribute__((always_inline)) { return get(in) * factor * get(gain); });
  }
}

void layer_norm(const float* x, const float* gain, const float* bias, int width, float eps, float* y) {
  const float mean =
      sum_over(x, width, [](f32x16 v) __attribute__((always_inline)) { return v; }) / (float)width;
  const f32x16 center = broadcast(mean);
  const float squares = sum_over(x, width, [&](f32x16 v) __attribute__((always_inline)) {
    const f32x16 d = v - center;
    return d * d;
  });
  const f32x16 factor = broadcast(1.0f / square_root(squares / (float)width + eps));
  each(width, y, [&](auto get) __attribute__((always_inline)) {
    return fma((get(x) - center) * factor, get(gain), get(bias));
  });
}

void add_rows(const float* a, const float* b, int n, float* y) {
  each(n, y, [&](auto get) __attribute__((always_inline)) { return get(a) + get(b); });
}

void scale_row(const float* x, float by, int n, float* y) {
  const f32x16 factor = broadcast(by);
  each(n, y, [&](auto get) __attribute__((always_inline)) { return get(x) * factor; });
}

void softcap_row(const float* x, float cap, int n, float* y) {
  const f32x16 limit = broadcast(cap), inverse = broadcast(1.0f / cap);
  each(n, y, [&](auto get) __attribute__((always_inline)) { return limit * tanh(get(x) * inverse); });
}

void activate(Activation act, const float* x, int n, float* y) {
  with_activation(act, [&](auto f) __attribute__((always_inline)) {
    each(n, y, [&](auto get) __attribute__((always_inline)) { return f(get(x)); });
  });
}

void activate_mul(Activation act, const float* gate, const float* up, int n, float* y) {
  with_activation(act, [&](auto f) __attribute__((always_inline)) {
    each(n, y, [&](auto get) __attribute__((always_inline)) { return f(get(gate)) * get(up); });
  });
}

int argmax(const float* x, int n) {
  constexpr int kBlock = 1024;
  int best_block = 0;
  float best = x[0];
  for (int begin = 0; begin < n; begin += kBlock) {
    const int end = begin + kBlock < n ? begin + kBlock : n;
    f32x16 top = broadcast(x[begin]);
    int i = begin;
    for (; i + kLanes <= end; i += kLanes) top = max(top, load(x + i));
    float highest = reduce_max(top);
    for (; i < end; ++i) highest = x[i] > highest ? x[i] : highest;
    if (highest > best) {
      best = highest;
      best_block = begin;
    }
  }
  for (int i = best_block; i < n; ++i) {
    if (x[i] == best) return i;
  }
  return 0;
}

void pack_columns(const Act& act, int token, int column, const float* x, int n) {
  const ActSlot slot = act_slot(act, token);
  for (int i = 0; i < n; i += kGroup) {
    store_group(slot, (column + i) / kGroup, load(x + i), load(x + i + kLanes));
  }
}

void rotate(const float* x, const float* cos, const float* sin, int half, int head_dim, float* y) {
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const f32x16 a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(y + i, fma(a, c, -(b * s)));
    store(y + half + i, fma(a, s, b * c));
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    y[i] = a * cos[i] - b * sin[i];
    y[half + i] = a * sin[i] + b * cos[i];
  }
  for (i = 2 * half; i < head_dim; ++i) y[i] = x[i];
}

}  // namespace toque::TOQUE_ISA
