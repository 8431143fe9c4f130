// How the attention of one step is cut into work for the threads.
#pragma once

#include <cstdint>
#include <vector>

#include "buffers.h"

namespace toque {

// The tokens of one sequence that a unit attends.
struct AttentionMember {
  int sequence;
  int token_begin, token_end;  // rows of the batch
  int chunk_end;               // of the 256-token chunks that they see

  int tokens() const { return token_end - token_begin; }
};

// One kv head of a few tokens: of neighbours in one sequence, or of several sequences whose contexts begin
// with the same blocks. All attend the chunks [chunk_begin, chunk_end) together, in the blocks of the first
// member; then each its own, up to its member's chunk_end.
struct AttentionUnit {
  int head;
  int member_begin, member_end;
  int chunk_begin, chunk_end;
  int partial;  // where it leaves a row for each of the one chunk that it attends, or -1: it finishes its
                // rows
};

// One kv head of a member whose chunks were shared out: the partial rows to merge, in the order of the
// chunks.
struct AttentionFold {
  int head, member;
  int chunk_begin, chunk_end;     // of those attended together with others
  int together, together_stride;  // their first row, rows from one chunk to the next
  int alone;                      // the first row of those after
};

// The tokens of one sequence that fall into one tile of its cache.
struct KvWrite {
  int sequence, token_begin, token_end;
};

// What a step's schedule makes one attention layer do.
struct AttentionWork {
  int64_t chunks = 0;  // that are read, each time that they are
  int64_t rows = 0;    // that attend them, summed over the chunks
};

// The same for all layers that have the same heads and window, so computed once per step for all of them.
//
// A unit holds as many tokens as make about 24 query rows with the heads that share a kv head, so that each
// key and value that is fetched serves them all. Sequences that have fewer tokens in the step, as those that
// decode have, join in one unit over the chunks that lie in the same blocks of the cache for all of them (a
// cached prefix). Heavy units come first. One that is a large part of all the work (a sequence far into its
// context) is shared out instead: each chunk becomes a unit of its own that leaves partial rows, and `folds`
// lists what has to be put together afterwards. There are too few of these for partial rows to take much
// memory.
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
  const std::vector<AttentionMember>& members() const { return members_; }
  const std::vector<AttentionUnit>& units() const { return units_; }
  const std::vector<AttentionFold>& folds() const { return folds_; }
  AttentionWork work() const;

  // One partial row: head_dim values, then maximum and sum.
  int partial_stride() const { return shape_.head_dim + 16; }
  float* partial(int row) { return partials_.data() + static_cast<size_t>(row) * partial_stride(); }

 private:
  // Members that attend together, whatever the head.
  struct Bundle {
    int member_begin, member_end;
    int chunk_begin, chunk_end;  // attended together
    int rows;
    int64_t cost;
    int family;  // what its neighbours of the same family attend lies in the same blocks; -1: none
  };
  // A sequence that may share, and of its chunks those that are complete before this step.
  struct Sharer {
    int sequence, chunk_begin, chunk_end;
  };

  void add_writes(const StepInput& step, int sequence);
  void add_sequence(const StepInput& step, int sequence);
  void find_sharers(const StepInput& step, int threads);
  int tokens_to_share(int sharing, int others, int threads);
  void add_shared(const StepInput& step, size_t begin, size_t end);
  void add_bundle(int member_begin, int chunk_begin, int chunk_end, int family);
  void add_units(int threads);
  void split(const Bundle& bundle);

  const Shape shape_;
  const int tile_tokens_;
  bool one_token_each_ = false;
  int partial_rows_ = 0;
  bool even_ = false;     // what is attended together is few units, alike, that fall evenly on the threads
  int share_tokens_ = 0;  // that attend together in this step, at most
  std::vector<char> shared_;  // [sequence] whether it attends together with others
  std::vector<Sharer> sharers_;
  std::vector<Bundle> bundles_;
  std::vector<KvWrite> writes_;
  std::vector<AttentionMember> members_;
  std::vector<AttentionUnit> units_;
  std::vector<AttentionFold> folds_;
  std::vector<float> partials_;
};

}  // namespace toque
