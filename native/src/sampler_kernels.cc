#include "sampler_kernels.h"

#include "simd.h"

namespace toque::TOQUE_ISA {

static void block_maxima(const float* x, int n, float* maxima) {
  const float lowest = -__builtin_inff();
  int block = 0;
  for (; (block + 1) * kSampleBlock <= n; ++block) {
    const float* p = x + block * kSampleBlock;
    // max(a, b) is b where a is NaN, on every instruction set.
    f32x16 m = max(load(p), broadcast(lowest));
    m = max(load(p + 16), m);
    m = max(load(p + 32), m);
    m = max(load(p + 48), m);
    maxima[block] = reduce_max(m);
  }
  if (block * kSampleBlock < n) {
    float m = lowest;
    for (int i = block * kSampleBlock; i < n; ++i) m = x[i] > m ? x[i] : m;
    maxima[block] = m;
  }
}

TOQUE_INLINE f32x16 weight(f32x16 x, f32x16 shift, f32x16 temperature) {
  return exp((x - shift) / temperature);
}

static double exp_sum(const float* x, int n, float shift, float temperature, float* weights) {
  const f32x16 s = broadcast(shift), t = broadcast(temperature);
  double total = 0.0;
  for (int start = 0; start < n; start += kSampleBlock) {
    f32x16 sum = zero_f32();
    const int end = start + kSampleBlock < n ? start + kSampleBlock : n;
    for (int i = start; i < end; i += kLanes) {
      const int count = end - i < kLanes ? end - i : kLanes;
      f32x16 w = weight(count == kLanes ? load(x + i) : load_first(x + i, count), s, t);
      if (count < kLanes) w = select_first(count, w, zero_f32());
      sum = sum + w;
      if (weights != nullptr) {
        if (count == kLanes) {
          store(weights + i, w);
        } else {
          store_first(weights + i, w, count);
        }
      }
    }
    total += (double)reduce_add(sum);
  }
  return total;
}

extern const SamplerKernels sampler_kernels;
const SamplerKernels sampler_kernels = {.block_maxima = block_maxima, .exp_sum = exp_sum};

}  // namespace toque::TOQUE_ISA
