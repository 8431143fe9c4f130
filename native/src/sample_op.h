// The last op of a plan: chooses a token for every wanted row.
#pragma once

#include <string>
#include <vector>

#include "plan.h"
#include "sampler.h"

namespace toque {

// What a step asks of its rows and where the answers go; the arrays of StepBatch and StepResult in
// backends/base.py.
struct SampleRequest {
  const int32_t* slots = nullptr;
  const int32_t* targets = nullptr;
  const int32_t* top = nullptr;
  const uint32_t* masks = nullptr;  // [n_rows][mask_words] or null
  int mask_words = 0;
  int32_t* tokens = nullptr;
  float* logprobs = nullptr;   // null when no row wants any
  int32_t* top_ids = nullptr;  // [n_rows][top_width]
  float* top_logprobs = nullptr;
  int top_width = 0;
};

// Sampled rows of one slot that lie next to each other are a verification: each is sampled in the slot's
// state after the rows before it, and only while every one of those chose the token that the next was
// computed with. The others get token -1 and leave no trace.
class SampleOp : public Op {
 public:
  SampleOp(Sampler& sampler, Rows logits, int threads);

  // Throws std::invalid_argument for a slot that is not open or a target outside the vocabulary.
  void prepare(const StepInput& step, int threads) override;
  void run(const StepInput& step, Worker& worker) override;

 private:
  bool follows(const StepInput& step, int row) const;
  int32_t sample(const StepInput& step, int row, Worker& worker);

  Sampler& sampler_;
  const Rows logits_;
  std::vector<Sampler::Scratch> scratch_;
  WorkQueue queue_;
};

}  // namespace toque
