// The passes over a whole row of logits that sampling needs, one table per instruction set.
#pragma once

#include <cstdint>

namespace toque {

constexpr int kSampleBlock = 64;  // logits per block

struct SamplerKernels {
  // maxima[b] = the largest of x[64 b, 64 b + 64), NaN ignored; -inf for a block of nothing else. ceil(n /
  // 64) blocks.
  void (*block_maxima)(const float* x, int n, float* maxima);
  // The sum of e^((x[i] - shift) / temperature), NaN as zero; stores the terms where `weights` is not null.
  // Terms are summed in f32 within a block of 64 and in f64 across blocks.
  double (*exp_sum)(const float* x, int n, float shift, float temperature, float* weights);
};

}  // namespace toque
