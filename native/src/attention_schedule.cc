#include "attention_schedule.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace toque {
namespace {

constexpr int kUnitRows = 24;          // a multiple of kKernelRows
constexpr int kKernelRows = 6;         // that the kernel takes at once
constexpr int kUnitsPerThread = 4;     // a unit of more than its part of so many is shared out
constexpr int kFewUnitsPerThread = 2;  // so many are enough if they are alike
constexpr int kChunkRows = 6;  // fetching a chunk costs about as much as attending it with so many rows
constexpr int kChunkBlocks = kChunkTokens / kBlockTokens;

int position_of(const StepInput& step, int sequence, int token) {
  return step.context[sequence] - (step.starts[sequence + 1] - token);
}

int chunks_of(int tokens) { return (tokens + kChunkTokens - 1) / kChunkTokens; }

// How many of their first `limit` chunks two sequences have in the same blocks.
int common_chunks(const StepInput& step, int a, int b, int limit) {
  int chunks = 0;
  while (chunks < limit) {
    const size_t at = static_cast<size_t>(chunks) * kChunkBlocks;
    if (std::memcmp(step.blocks(a) + at, step.blocks(b) + at, kChunkBlocks * sizeof(int32_t)) != 0) break;
    ++chunks;
  }
  return chunks;
}

}  // namespace

AttentionWork AttentionSchedule::work() const {
  AttentionWork work;
  const auto add = [&](int chunks, int rows) {
    work.chunks += chunks;
    work.rows += int64_t{chunks} * rows;
  };
  for (const AttentionUnit& unit : units_) {
    int rows = 0;
    for (int m = unit.member_begin; m < unit.member_end; ++m) {
      const int own = members_[m].tokens() * shape_.group;
      rows += own;
      if (unit.partial < 0) add(members_[m].chunk_end - unit.chunk_end, own);
    }
    add(unit.chunk_end - unit.chunk_begin, rows);
  }
  return work;
}

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
  members_.clear();
  bundles_.clear();
  one_token_each_ = step.n_tokens == step.n_sequences;
  shared_.assign(static_cast<size_t>(step.n_sequences), false);
  find_sharers(step, threads);
  for (int sequence = 0; sequence < step.n_sequences; ++sequence) {
    if (!one_token_each_) add_writes(step, sequence);
    if (!shared_[sequence]) add_sequence(step, sequence);
  }
  add_units(threads);
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

void AttentionSchedule::add_sequence(const StepInput& step, int sequence) {
  const int begin = step.starts[sequence], context = step.context[sequence];
  // Later tokens see more: last first.
  for (int end = step.starts[sequence + 1]; end > begin;) {
    const int first = std::max(begin, end - tile_tokens_);
    const int seen_from = first_seen(position_of(step, sequence, first)) / kChunkTokens;
    const int seen_to = chunks_of(last_seen(position_of(step, sequence, end - 1), context));
    const int member = static_cast<int>(members_.size());
    members_.push_back({sequence, first, end, seen_to});
    add_bundle(member, seen_from, seen_to, -1);
    end = first;
  }
}

// Finds the sequences whose first chunks lie in the same blocks. Only the first blocks are compared while
// they differ, so a step of strangers costs no more than a sort of small numbers.
void AttentionSchedule::find_sharers(const StepInput& step, int threads) {
  sharers_.clear();
  even_ = false;
  if (!shape_.causal) return;
  int others = 0, sharing = 0;  // units of those that do not share; tokens of those that may
  for (int sequence = 0; sequence < step.n_sequences; ++sequence) {
    const int tokens = step.starts[sequence + 1] - step.starts[sequence];
    const int own_units = (tokens + tile_tokens_ - 1) / tile_tokens_ * shape_.heads;
    others += own_units;
    if (tokens >= tile_tokens_) continue;  // fills units by itself
    const int position = position_of(step, sequence, step.starts[sequence]);
    // Nothing that this step writes: every row sees all of a shared chunk, but for what its window hides.
    const Sharer sharer{sequence, first_seen(position) / kChunkTokens, position / kChunkTokens};
    if (sharer.chunk_begin >= sharer.chunk_end) continue;
    sharers_.push_back(sharer);
    others -= own_units;
    sharing += tokens;
  }
  if (sharers_.size() < 2) return;
  share_tokens_ = tokens_to_share(sharing, others, threads);
  const auto first_block = [&](const Sharer& s) { return step.blocks(s.sequence)[0]; };
  std::sort(sharers_.begin(), sharers_.end(), [&](const Sharer& a, const Sharer& b) {
    return first_block(a) != first_block(b) ? first_block(a) < first_block(b) : a.sequence < b.sequence;
  });
  for (size_t begin = 0, end; begin < sharers_.size(); begin = end) {
    end = begin + 1;
    while (end < sharers_.size() && first_block(sharers_[end]) == first_block(sharers_[begin])) ++end;
    if (end - begin > 1) add_shared(step, begin, end);
  }
}

// How many tokens to attend together, of so many that share, beside `others` units. More rows for each chunk
// that is read are better, but no unit may have to be shared out between threads, which costs each layer a
// barrier: either there are many units, or they are alike and fall evenly on the threads. Where neither can
// be even if each attends alone, as many tokens as a unit takes.
int AttentionSchedule::tokens_to_share(int sharing, int others, int threads) {
  if (threads == 1) return tile_tokens_;
  const int full = kKernelRows / std::gcd(kKernelRows, shape_.group);  // tokens that fill the kernel's passes
  int tokens = tile_tokens_;
  while (tokens > 1) {
    const int bundles = (sharing + tokens - 1) / tokens;
    const int units = bundles * shape_.heads;
    if (units + others >= kUnitsPerThread * threads) return tokens;
    if (others == 0 && units % threads == 0 && units >= kFewUnitsPerThread * threads) {
      even_ = true;
      // The last bundle is to be as large as the others.
      const int each = (sharing + bundles - 1) / bundles, unit = std::min(full, tokens);
      return std::min(tile_tokens_, (each + unit - 1) / unit * unit);
    }
    tokens -= tokens > full ? (tokens % full != 0 ? tokens % full : full) : 1;
  }
  const bool enough_apart = sharing * shape_.heads + others >= kUnitsPerThread * threads;
  return enough_apart ? 1 : tile_tokens_;
}

// Bundles sequences that have their first block in common.
void AttentionSchedule::add_shared(const StepInput& step, size_t begin, size_t end) {
  // Any order does that puts those next to each other that have most in common.
  const auto before = [&](const Sharer& a, const Sharer& b) {
    const size_t blocks = static_cast<size_t>(std::min(a.chunk_end, b.chunk_end)) * kChunkBlocks;
    const int order = std::memcmp(step.blocks(a.sequence), step.blocks(b.sequence), blocks * sizeof(int32_t));
    if (order != 0) return order < 0;
    return a.chunk_end != b.chunk_end ? a.chunk_end < b.chunk_end : a.sequence < b.sequence;
  };
  const auto first = sharers_.begin() + static_cast<std::ptrdiff_t>(begin);
  const auto last = sharers_.begin() + static_cast<std::ptrdiff_t>(end);
  if (!std::is_sorted(first, last, before)) std::sort(first, last, before);

  const auto tokens_of = [&](size_t i) {
    return step.starts[sharers_[i].sequence + 1] - step.starts[sharers_[i].sequence];
  };
  const auto in_common = [&](size_t a, size_t b, int limit) {
    return common_chunks(step, sharers_[a].sequence, sharers_[b].sequence,
                         std::min(limit, sharers_[b].chunk_end));
  };
  const int family = sharers_[begin].sequence;
  for (size_t i = begin; i < end;) {
    // All from i to before `next` have the chunks before chunk_end in common; their windows begin between.
    int chunk_begin = sharers_[i].chunk_begin, latest = chunk_begin, chunk_end = sharers_[i].chunk_end;
    int tokens = tokens_of(i);
    size_t next = i + 1;
    for (; next < end && tokens + tokens_of(next) <= share_tokens_; ++next) {
      const int common = in_common(i, next, chunk_end);
      const int from = std::min(chunk_begin, sharers_[next].chunk_begin);
      const int to = std::max(latest, sharers_[next].chunk_begin);
      if (to - from >= common - to) break;  // more would be attended that some do not see than is saved
      // It joins if that saves more fetches of chunks than if the one after it joins it.
      const int size = static_cast<int>(next - i);
      const int saved = size * (common - from) - (size - 1) * (chunk_end - chunk_begin);
      const int otherwise =
          next + 1 < end ? in_common(next, next + 1, sharers_[next].chunk_end) - sharers_[next].chunk_begin
                         : 0;
      if (saved < std::max(otherwise, 1)) break;
      chunk_begin = from, latest = to, chunk_end = common;
      tokens += tokens_of(next);
    }
    if (next - i > 1) {
      const int member = static_cast<int>(members_.size());
      for (size_t k = i; k < next; ++k) {
        const int sequence = sharers_[k].sequence;
        shared_[sequence] = true;
        members_.push_back(
            {sequence, step.starts[sequence], step.starts[sequence + 1], chunks_of(step.context[sequence])});
      }
      add_bundle(member, chunk_begin, chunk_end, family);
    }
    i = next;
  }
}

void AttentionSchedule::add_bundle(int member_begin, int chunk_begin, int chunk_end, int family) {
  const int member_end = static_cast<int>(members_.size());
  int rows = 0;
  int64_t cost = 0;
  for (int m = member_begin; m < member_end; ++m) {
    const int own = members_[m].tokens() * shape_.group;
    rows += own;
    cost += int64_t{members_[m].chunk_end - chunk_end} * (own + kChunkRows);
  }
  cost += int64_t{chunk_end - chunk_begin} * (rows + kChunkRows);
  bundles_.push_back({member_begin, member_end, chunk_begin, chunk_end, rows, cost, family});
}

void AttentionSchedule::add_units(int threads) {
  units_.clear();
  folds_.clear();
  partial_rows_ = 0;
  std::sort(bundles_.begin(), bundles_.end(), [](const Bundle& a, const Bundle& b) {
    return a.cost != b.cost ? a.cost > b.cost : a.member_begin < b.member_begin;
  });
  int64_t total = 0;
  for (const Bundle& bundle : bundles_) total += bundle.cost * shape_.heads;
  const auto is_large = [&](const Bundle& bundle) {
    const int least = even_ && bundle.family >= 0 ? kFewUnitsPerThread : kUnitsPerThread;
    return threads > 1 && bundle.cost * least * threads > total;
  };
  const auto small = std::stable_partition(bundles_.begin(), bundles_.end(), is_large);
  const size_t large = static_cast<size_t>(small - bundles_.begin());
  for (size_t i = large, end; i < bundles_.size(); i = end) {
    end = i + 1;
    // Those of one family take turns head by head, so that its keys and values are still in the cache.
    while (end < bundles_.size() && bundles_[i].family >= 0 && bundles_[end].family == bundles_[i].family)
      ++end;
    for (int head = 0; head < shape_.heads; ++head) {
      for (size_t k = i; k < end; ++k) {
        const Bundle& b = bundles_[k];
        units_.push_back({head, b.member_begin, b.member_end, b.chunk_begin, b.chunk_end, -1});
      }
    }
  }
  for (size_t i = 0; i < large; ++i) split(bundles_[i]);
  const size_t needed = static_cast<size_t>(partial_rows_) * partial_stride();
  if (partials_.size() < needed) partials_.resize(needed);
}

void AttentionSchedule::split(const Bundle& bundle) {
  int last = bundle.chunk_end;
  for (int m = bundle.member_begin; m < bundle.member_end; ++m) last = std::max(last, members_[m].chunk_end);
  if (last - bundle.chunk_begin < 2) {
    for (int head = 0; head < shape_.heads; ++head) {
      units_.push_back(
          {head, bundle.member_begin, bundle.member_end, bundle.chunk_begin, bundle.chunk_end, -1});
    }
    return;
  }
  for (int head = 0; head < shape_.heads; ++head) {
    const int together = partial_rows_;
    for (int chunk = bundle.chunk_begin; chunk < bundle.chunk_end; ++chunk) {
      units_.push_back({head, bundle.member_begin, bundle.member_end, chunk, chunk + 1, partial_rows_});
      partial_rows_ += bundle.rows;
    }
    const size_t folds = folds_.size();
    for (int m = bundle.member_begin, row = 0; m < bundle.member_end; ++m) {
      const int rows = members_[m].tokens() * shape_.group;
      folds_.push_back(
          {head, m, bundle.chunk_begin, bundle.chunk_end, together + row, bundle.rows, partial_rows_});
      partial_rows_ += rows * (members_[m].chunk_end - bundle.chunk_end);
      row += rows;
    }
    // Chunk by chunk: where sharing ends inside one, its members still have much of it in common.
    for (int chunk = bundle.chunk_end; chunk < last; ++chunk) {
      for (int m = bundle.member_begin; m < bundle.member_end; ++m) {
        if (chunk >= members_[m].chunk_end) continue;
        const AttentionFold& fold = folds_[folds + static_cast<size_t>(m - bundle.member_begin)];
        const int rows = members_[m].tokens() * shape_.group;
        units_.push_back({head, m, m + 1, chunk, chunk + 1, fold.alone + (chunk - bundle.chunk_end) * rows});
      }
    }
  }
}

}  // namespace toque
