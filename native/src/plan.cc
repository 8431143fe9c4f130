#include "plan.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace toque {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

[[noreturn]] void refuse(const char* what, int64_t index, int64_t value, int64_t limit) {
  throw std::invalid_argument(std::string(what) + "[" + std::to_string(index) + "] is " +
                              std::to_string(value) + ", outside the bound " + std::to_string(limit));
}

void within(const char* what, int64_t index, int64_t value, int64_t low, int64_t high) {
  if (value < low) refuse(what, index, value, low);
  if (value > high) refuse(what, index, value, high);
}

}  // namespace

Plan::Plan(std::shared_ptr<Pool> pool, int max_tokens, int max_rows, int max_sequences)
    : pool_(std::move(pool)), max_tokens_(max_tokens), max_rows_(max_rows), max_sequences_(max_sequences) {}

uint8_t* Plan::memory(size_t bytes) {
  // Small pages: a step of one token touches the first row of each buffer, and would commit 2 MB for each.
  memory_.emplace_back(round_up(bytes, 64), false);
  return memory_.back().data();
}

Rows Plan::rows(int width, Domain domain, int copies) {
  Rows rows;
  rows.width = width;
  rows.stride = static_cast<int>(round_up(static_cast<size_t>(width), 64));
  rows.domain = domain;
  rows.data = reinterpret_cast<float*>(
      memory(sizeof(float) * rows.stride * static_cast<size_t>(copies * max_count(domain))));
  return rows;
}

ActBuffer Plan::act(ActKind kind, int width, Domain domain, int tile_max, bool per_worker, int copies) {
  ActBuffer buffer{kind, width, domain, tile_max, copies, {}, {}, {}};
  const auto add = [&](int tokens) {
    buffer.codes.push_back(memory(act_code_bytes(kind, tokens, width)));
    buffer.scales.push_back(
        reinterpret_cast<float*>(memory(act_scale_count(kind, tokens, width) * sizeof(float) + 64)));
    buffer.peaks.push_back(memory(act_peak_bytes(kind, tokens, width) + 64));
  };
  add(copies * max_count(domain));
  for (int worker = 1; per_worker && worker < threads(); ++worker) add(1);
  return buffer;
}

AttentionSchedule& Plan::attention_schedule(AttentionSchedule::Shape shape) {
  for (auto& schedule : schedules_) {
    if (schedule->shape() == shape) return *schedule;
  }
  return *schedules_.emplace_back(std::make_unique<AttentionSchedule>(shape));
}

void Plan::need_scratch(size_t floats) {
  if (floats > scratch_floats_) scratch_floats_ = floats;
}

void Plan::check(const StepInput& step) const {
  within("len(tokens)", 0, step.n_tokens, 1, max_tokens_);
  within("len(context)", 0, step.n_sequences, 1, max_sequences_);
  within("len(rows)", 0, step.n_rows, 0, max_rows_);
  if (pools) within("len(rows)", 0, step.n_rows, step.n_sequences, step.n_sequences);
  within("starts", 0, step.starts[0], 0, 0);
  within("starts", step.n_sequences, step.starts[step.n_sequences], step.n_tokens, step.n_tokens);
  for (int s = 0; s < step.n_sequences; ++s) {
    const int begin = step.starts[s], end = step.starts[s + 1];
    within("starts", s + 1, end, begin + 1, step.n_tokens);
    const int context = step.context[s];
    within("context", s, context, end - begin, int64_t{step.table_width} * kBlockTokens);
    within("context", s, context, end - begin, position_limit);
    for (int t = begin; t < end; ++t) {
      const int position = context - (end - t);
      within("positions", t, step.positions[t], position, position);
    }
    for (int b = 0; b * kBlockTokens < context; ++b) {
      within("block_tables", int64_t{s} * step.table_width + b, step.blocks(s)[b], 0, kv_.blocks() - 1);
    }
  }
  for (int t = 0; t < step.n_tokens; ++t) within("tokens", t, step.tokens[t], 0, vocab_limit - 1);
  for (int r = 0; r < step.n_rows; ++r) {
    within("rows", r, step.rows[r], r == 0 ? 0 : step.rows[r - 1], step.n_tokens - 1);
  }
}

void Plan::step(const StepInput& step) {
  check(step);
  while (static_cast<int>(scratch_.size()) < threads())
    scratch_.emplace_back(scratch_floats_ * sizeof(float), false);
  int last = 0;
  for (int s = 0; s < step.n_sequences; ++s) last = std::max(last, step.context[s] - 1);
  for (auto& rope : ropes_) rope->cover(last);
  for (auto& schedule : schedules_) schedule->prepare(step, threads());
  for (auto& op : ops_) op->prepare(step, threads());
  pool_->run([&](int worker) { replay(step, worker); });
}

void Plan::replay(const StepInput& step, int id) {
  Worker worker{id, *pool_, reinterpret_cast<float*>(scratch_[static_cast<size_t>(id)].data())};
  const bool timed = profiling_ && id == 0;
  double last = timed ? now() : 0.0;
  for (size_t i = 0; i < ops_.size(); ++i) {
    ops_[i]->run(step, worker);
    if (!ops_[i]->is_private(step)) pool_->barrier();
    if (timed) {
      const double time = now();
      seconds_[i] += time - last;
      last = time;
    }
  }
}

void Plan::set_profiling(bool on) {
  profiling_ = on;
  seconds_.assign(ops_.size(), 0.0);
}

std::vector<OpTime> Plan::profile() const {
  std::vector<OpTime> times;
  for (size_t i = 0; i < seconds_.size(); ++i) times.push_back({ops_[i]->label(), seconds_[i]});
  return times;
}

std::vector<AttentionWork> Plan::attention_work() const {
  std::vector<AttentionWork> work;
  for (const auto& schedule : schedules_) work.push_back(schedule->work());
  return work;
}

}  // namespace toque
