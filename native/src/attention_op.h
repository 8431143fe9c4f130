// Rotary embedding, KV write and paged attention over a ragged batch, as one op of a plan.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "attention_schedule.h"
#include "plan.h"
#include "rope.h"
#include "step_kernels.h"

namespace toque {

struct AttentionSpec {
  int layer = 0;
  int heads = 0;
  float scale = 1.0f;
  int window = 0;  // a token sees itself and window - 1 tokens before it; 0: all
  float softcap = 0.0f;
  bool causal = true;
  std::shared_ptr<RopeTable> rope;    // null: q and k are used as they are
  std::vector<float> q_norm, k_norm;  // head-wise RMS norms before the rotation; empty: none
  float norm_eps = 0.0f;
};

// Every row walks its context in chunks of 256 tokens counted from position 0; each chunk has a softmax of
// its own and is folded into the row's running result in order. That order is the row's own: neither the
// batch, nor how the prompt was cut, nor which thread took which unit of the schedule changes a bit of the
// result.
class AttentionOp : public Op {
 public:
  AttentionOp(std::string label, Plan& plan, const StepKernels& kernels, AttentionSpec spec, Rows q, Rows k,
              Rows v, RowSink out);

  void prepare(const StepInput& step, int threads) override;
  void run(const StepInput& step, Worker& worker) override;

 private:
  struct Scratch;
  struct Piece;

  size_t scratch_floats() const;
  Scratch carve(float* memory) const;
  uint8_t* kv_tile(const StepInput& step, int sequence, int position, int head) const;
  const float* prepare_head(const float* x, const std::vector<float>& norm, int position,
                            float* scratch) const;
  void write_head(const StepInput& step, int sequence, int token, int head, float* scratch) const;
  Piece first_piece(const AttentionUnit& unit) const;
  bool advance(const AttentionUnit& unit, Piece& piece) const;
  int gather_tiles(const StepInput& step, const AttentionUnit& unit, const Piece& piece,
                   const uint8_t** tiles) const;
  void load_queries(const StepInput& step, const AttentionUnit& unit, const Scratch& scratch) const;
  void look(const StepInput& step, const Piece& piece, const Scratch& scratch) const;
  int attend(const StepInput& step, const AttentionUnit& unit, const AttentionUnit* next, int fetched,
             const Scratch& scratch) const;
  void write_members(const StepInput& step, const AttentionUnit& unit, float* scratch) const;
  void fold(const StepInput& step, const AttentionFold& fold, const Scratch& scratch) const;
  void emit(const StepInput& step, int token, int head, float sum, float* out) const;

  Plan& plan_;
  const StepKernels& kernels_;
  const AttentionSpec spec_;
  const Rows q_, k_, v_;
  const RowSink out_;
  const KvLayer layer_;
  const KvKernels& kv_;
  AttentionSchedule& schedule_;
  const int group_;  // query heads per kv head
  WorkQueue writes_, units_, folds_;
};

}  // namespace toque
