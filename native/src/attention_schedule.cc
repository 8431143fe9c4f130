#include "attention_schedule.h"

#include <algorithm>
#include <numeric>

namespace toque {
namespace {

constexpr int kUnitRows = 24;       // a multiple of the six rows that the kernel takes at once
constexpr int kUnitsPerThread = 4;  // fewer, and chunks are shared out

int position_of(const StepInput& step, int sequence, int token) {
  return step.context[sequence] - (step.starts[sequence + 1] - token);
}

}  // namespace

AttentionSchedule::AttentionSchedule(Shape shape)
    : shape_(shape), tile_tokens_(std::max(1, kUnitRows / shape.group)) {}

int AttentionSchedule::first_seen(int position) const {
  return shape_.window > 0 ? std::max(0, position - shape_.window + 1) : 0;
}

int AttentionSchedule::last_seen(int position, int context) const {
  if (shape_.causal) return position + 1;
  return shape_.window > 0 ? std::min(context, position + shape_.window) : context;
}

void AttentionSchedule::prepare(const StepInput& step, int threads) {
  writes_.clear();
  units_.clear();
  folds_.clear();
  one_token_each_ = step.n_tokens == step.n_sequences;
  order_.resize(static_cast<size_t>(step.n_sequences));
  std::iota(order_.begin(), order_.end(), 0);
  std::sort(order_.begin(), order_.end(), [&](int a, int b) {
    return step.context[a] != step.context[b] ? step.context[a] > step.context[b] : a < b;
  });
  for (const int sequence : order_) {
    if (!one_token_each_) add_writes(step, sequence);
    add_units(step, sequence);
  }
  if (threads > 1 && static_cast<int>(units_.size()) < kUnitsPerThread * threads) split_chunks();
}

void AttentionSchedule::add_writes(const StepInput& step, int sequence) {
  const int end = step.starts[sequence + 1];
  for (int token = step.starts[sequence]; token < end;) {
    const int in_tile = position_of(step, sequence, token) % kTileTokens;
    const int next = std::min(end, token + kTileTokens - in_tile);
    writes_.push_back({sequence, token, next});
    token = next;
  }
}

void AttentionSchedule::add_units(const StepInput& step, int sequence) {
  const int begin = step.starts[sequence], context = step.context[sequence];
  // Later tokens see more: last first.
  for (int end = step.starts[sequence + 1]; end > begin;) {
    const int first = std::max(begin, end - tile_tokens_);
    const int seen_from = first_seen(position_of(step, sequence, first));
    const int seen_to = last_seen(position_of(step, sequence, end - 1), context);
    for (int head = 0; head < shape_.heads; ++head) {
      units_.push_back({sequence, head, first, end, seen_from / kChunkTokens,
                        (seen_to + kChunkTokens - 1) / kChunkTokens, -1});
    }
    end = first;
  }
}

void AttentionSchedule::split_chunks() {
  std::vector<AttentionUnit> whole;
  whole.swap(units_);
  int partial_rows = 0;
  for (AttentionUnit unit : whole) {
    if (unit.chunk_end - unit.chunk_begin < 2) {
      units_.push_back(unit);
      continue;
    }
    const int rows = (unit.token_end - unit.token_begin) * shape_.group;
    unit.partial = partial_rows;
    folds_.push_back(unit);
    for (int chunk = unit.chunk_begin; chunk < unit.chunk_end; ++chunk) {
      units_.push_back(
          {unit.sequence, unit.head, unit.token_begin, unit.token_end, chunk, chunk + 1, partial_rows});
      partial_rows += rows;
    }
  }
  const size_t needed = static_cast<size_t>(partial_rows) * partial_stride();
  if (partials_.size() < needed) partials_.resize(needed);
}

}  // namespace toque
