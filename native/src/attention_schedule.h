// How the attention of one step is cut into work for the threads.
#pragma once

#include <vector>

#include "buffers.h"

namespace toque {

// One kv head of a few neighbouring tokens of one sequence, over a range of 256-token chunks of its context.
struct AttentionUnit {
  int sequence, head;
  int token_begin, token_end;  // rows of the batch
  int chunk_begin, chunk_end;
  int partial;  // where its partial rows begin, or -1: it finishes its rows itself
};

// The tokens of one sequence that fall into one tile of its cache.
struct KvWrite {
  int sequence, token_begin, token_end;
};

// The same for all layers that have the same heads and window, so computed once per step for all of them.
//
// A unit holds as many tokens as make about 24 query rows with the heads that share a kv head, so that each
// key and value that is fetched serves them all. Heavy units come first. When there are too few units to go
// round (one sequence decoding far into its context), each chunk becomes a unit of its own that leaves
// partial rows, and `folds` lists what has to be put together afterwards.
class AttentionSchedule {
 public:
  struct Shape {
    int heads;  // kv heads
    int group;  // query heads per kv head
    int head_dim;
    int window;  // 0: none
    bool causal;
    bool operator==(const Shape&) const = default;
  };

  explicit AttentionSchedule(Shape shape);

  const Shape& shape() const { return shape_; }
  int max_rows() const { return tile_tokens_ * shape_.group; }

  void prepare(const StepInput& step, int threads);

  // Positions [first, last) that the token at `position` sees, in a context of `context` tokens.
  int first_seen(int position) const;
  int last_seen(int position, int context) const;

  // When every sequence has one token, units write the cache themselves (the one that holds the last chunk);
  // otherwise `writes` has to be done first.
  bool one_token_each() const { return one_token_each_; }
  const std::vector<KvWrite>& writes() const { return writes_; }
  const std::vector<AttentionUnit>& units() const { return units_; }
  const std::vector<AttentionUnit>& folds() const { return folds_; }

  // One partial row: head_dim values, then maximum and sum.
  int partial_stride() const { return shape_.head_dim + 16; }
  float* partial(int row) { return partials_.data() + static_cast<size_t>(row) * partial_stride(); }

 private:
  void add_writes(const StepInput& step, int sequence);
  void add_units(const StepInput& step, int sequence);
  void split_chunks();

  const Shape shape_;
  const int tile_tokens_;
  bool one_token_each_ = false;
  std::vector<int> order_;
  std::vector<KvWrite> writes_;
  std::vector<AttentionUnit> units_, folds_;
  std::vector<float> partials_;
};

}  // namespace toque
