#include "sample_op.h"

#include <stdexcept>

namespace toque {

SampleOp::SampleOp(Sampler& sampler, Rows logits, int threads)
    : Op("sample"), sampler_(sampler), logits_(logits), scratch_(static_cast<size_t>(threads)) {}

void SampleOp::prepare(const StepInput& step, int threads) {
  queue_.reset(step.sample != nullptr ? step.n_rows : 0, 2 * threads);
  if (step.sample == nullptr) return;
  for (int row = 0; row < step.n_rows; ++row) {
    const int target = step.sample->targets[row], slot = step.sample->slots[row];
    if (target >= sampler_.vocab()) {
      throw std::invalid_argument("targets[" + std::to_string(row) + "] is " + std::to_string(target) +
                                  ", of " + std::to_string(sampler_.vocab()) + " tokens");
    }
    if (target < 0 && !sampler_.is_open(slot)) {
      throw std::invalid_argument("slots[" + std::to_string(row) + "] is " + std::to_string(slot) +
                                  ", which is not open");
    }
  }
}

void SampleOp::run(const StepInput& step, Worker& worker) {
  for (auto range = queue_.claim(); !range.empty(); range = queue_.claim()) {
    const SampleRequest& ask = *step.sample;
    for (int i = range.begin; i < range.end; ++i) {
      const size_t at = static_cast<size_t>(i) * ask.top_width;
      SampleRow row;
      row.logits = logits_.row(i);
      row.slot = ask.slots[i];
      row.target = ask.targets[i];
      row.top = ask.top[i];
      row.mask = ask.masks != nullptr ? ask.masks + static_cast<size_t>(i) * ask.mask_words : nullptr;
      row.logprob = ask.logprobs != nullptr ? ask.logprobs + i : nullptr;
      row.top_ids = ask.top_ids != nullptr ? ask.top_ids + at : nullptr;
      row.top_logprobs = ask.top_logprobs != nullptr ? ask.top_logprobs + at : nullptr;
      ask.tokens[i] = sampler_.run(row, scratch_[static_cast<size_t>(worker.id)]);
    }
  }
}

}  // namespace toque
