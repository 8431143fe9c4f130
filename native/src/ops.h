// The ops of a plan besides attention.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "plan.h"
#include "rope.h"
#include "step_kernels.h"

namespace toque {

// Work that touches each row by itself: embedding, norms, elementwise ops, packing.
class RowOp : public Op {
 public:
  using Function = std::function<void(const StepInput& step, int row, Worker& worker)>;

  // `sink`: where the results go, when they may go to a buffer of the worker's own.
  RowOp(std::string label, Domain domain, Function function, RowSink sink = {})
      : Op(std::move(label)), domain_(domain), function_(std::move(function)), sink_(std::move(sink)) {}

  void prepare(const StepInput& step, int threads) override;
  void run(const StepInput& step, Worker& worker) override;
  bool is_private(const StepInput& step) const override { return sink_.is_private(step); }

 private:
  const Domain domain_;
  const Function function_;
  const RowSink sink_;
  WorkQueue queue_;
};

// One matrix of a linear op, and where its outputs go.
struct LinearPart {
  PackedMatrix weight;
  std::vector<float> bias;  // empty: none
  Rows out;                 // for Epilogue::kAdd holds what is added to
  Epilogue epilogue = Epilogue::kStore;
  PackedMatrix up = {};  // kGated
  std::vector<float> up_bias;
  Activation activation = Activation::kNone;
  ActBuffer out_act;  // kGated, instead of `out`
};

// One or more matrices over the same input; their tiles of outputs are shared out together.
class LinearOp : public Op {
 public:
  LinearOp(std::string label, const KernelTable& kernels, ActBuffer in, std::vector<LinearPart> parts);

  void prepare(const StepInput& step, int threads) override;
  void run(const StepInput& step, Worker& worker) override;

 private:
  LinearArgs args(const LinearPart& part, const StepInput& step, int worker) const;

  const KernelTable& kernels_;
  const ActBuffer in_;
  const std::vector<LinearPart> parts_;
  std::vector<int> ends_;  // last unit + 1 of each part, counted over all parts
  WorkQueue queue_;
};

// Which row of an embedding table a token takes.
enum class EmbedIds { kTokens, kPositions, kFirst };

// How the rows of a sequence become one.
enum class Pooling { kMean, kFirst, kLast };

// Builds ops and appends them to a plan.
class PlanBuilder {
 public:
  PlanBuilder(Plan& plan, const KernelTable& kernels, const StepKernels& row_kernels)
      : plan_(plan), kernels_(kernels), row_kernels_(row_kernels) {}

  void embed(const PackedMatrix& table, EmbedIds ids, float scale, Rows out);
  void rms_norm(Rows x, std::vector<float> gain, float eps, int group, RowSink out);
  void add_rms_norm(Rows a, Rows b, std::vector<float> gain, float eps, Rows sum, RowSink out);
  void layer_norm(Rows x, std::vector<float> gain, std::vector<float> bias, float eps, RowSink out);
  void linear(std::string label, ActBuffer in, std::vector<LinearPart> parts);
  void pack(Rows x, ActBuffer out);
  // `order` lists the column of x that each packed value is.
  void pack_gathered(Rows x, ActBuffer out, std::vector<int32_t> order);
  void rotate(Rows x, int head_dim, std::shared_ptr<RopeTable> rope, Rows out);
  void act_mul(Activation act, Rows gate, Rows up, RowSink out);
  void activate(Activation act, Rows x, RowSink out);
  void add(Rows a, Rows b, Rows out);
  void scale(Rows x, float by, Rows out);
  void softcap(Rows x, float cap, Rows out);
  void select_rows(Rows x, Rows out);
  // `out` has a row for each sequence, which the wanted rows stand for: `Plan::pools` makes sure of that.
  void pool(Pooling kind, Rows x, Rows out);

 private:
  void row_op(std::string label, Domain domain, RowOp::Function function, RowSink sink = {});
  // A row op whose result goes through a sink: `compute` fills one row of floats.
  void sink_op(std::string label, RowSink out, int width,
               std::function<void(const StepInput&, int row, float* y)> compute);

  Plan& plan_;
  const KernelTable& kernels_;
  const StepKernels& row_kernels_;
};

}  // namespace toque
