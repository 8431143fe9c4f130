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

// Row i is sampled only if what the row before it chose is the token that row i was computed with.
bool SampleOp::follows(const StepInput& step, int i) const {
  const SampleRequest& ask = *step.sample;
  return i > 0 && i < step.n_rows && ask.targets[i] < 0 && ask.targets[i - 1] < 0 &&
         ask.slots[i] == ask.slots[i - 1] && step.rows[i] == step.rows[i - 1] + 1;
}

void SampleOp::run(const StepInput& step, Worker& worker) {
  for (auto range = queue_.claim(); !range.empty(); range = queue_.claim()) {
    for (int i = range.begin; i < range.end; ++i) {
      if (follows(step, i)) continue;  // belongs to whoever claimed the first row of its slot
      int row = i;
      int32_t token = sample(step, row, worker);
      while (follows(step, row + 1)) {
        ++row;
        const bool verified = token >= 0 && token == step.tokens[step.rows[row]];
        token = verified ? sample(step, row, worker) : (step.sample->tokens[row] = -1);
      }
    }
  }
}

int32_t SampleOp::sample(const StepInput& step, int i, Worker& worker) {
  const SampleRequest& ask = *step.sample;
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
  return ask.tokens[i] = sampler_.run(row, scratch_[static_cast<size_t>(worker.id)]);
}

}  // namespace toque
