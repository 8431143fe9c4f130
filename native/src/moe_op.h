// A mixture of experts: each token goes through the few gated ffns that its router scores highest.
//
// The tokens of one expert are gathered, so that each expert's weights are read once a step however many
// tokens use it, and a linear kernel sees them as an ordinary batch. A token's result does not depend on the
// others: kernels promise that for their tokens, and its experts' outputs are added in order of their scores.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "plan.h"

namespace toque {

struct MoeSpec {
  std::vector<PackedMatrix> gate, up, down;  // of each expert
  // Of each expert, the column of x that each input of gate and up is; empty: as they come. Or none at all.
  std::vector<std::vector<int32_t>> orders;
  int used;   // experts per token
  bool norm;  // the weights of a token's experts are made to sum to 1
  Activation activation;
};

// What the experts of all layers share: places for `used` rows of every token, grouped by expert.
struct MoeBuffers {
  int experts, used;
  Domain domain;
  ActBuffer in, hidden_act;
  Rows hidden, out;                    // `hidden` only where the kernels cannot pack it themselves
  std::vector<int32_t> chosen, place;  // [token][used]: the experts of a token, and the rows it has there
  std::vector<float> weight;           // [token][used]
  std::vector<int32_t> token, expert;  // of a row
  std::vector<int32_t> first;          // [experts + 1]: first row of each expert
  std::vector<int32_t> active;         // experts that have rows
};

class MoeOp : public Op {
 public:
  // `scores` [token][experts]: the router's. Throws std::invalid_argument when the matrices do not fit.
  MoeOp(std::string label, const KernelTable& kernels, MoeSpec spec, std::shared_ptr<MoeBuffers> buffers,
        Rows scores, Rows x, Rows out);

  static std::shared_ptr<MoeBuffers> buffers(Plan& plan, const KernelTable& kernels, const MoeSpec& spec,
                                             Domain domain);

  void prepare(const StepInput& step, int threads) override;
  void run(const StepInput& step, Worker& worker) override;

 private:
  void choose(int token) const;
  void group(int tokens, int threads);
  void pack(int row, const Worker& worker) const;
  Act rows_of(const ActBuffer& act, int expert) const;
  LinearArgs gated(int expert) const;
  LinearArgs down(int expert) const;
  // Units [begin, end) of the active experts' linears, each of `units`.
  void linears(WorkQueue& queue, int units, LinearArgs (MoeOp::*args)(int) const) const;

  const KernelTable& kernels_;
  const MoeSpec spec_;
  const std::shared_ptr<MoeBuffers> shared_;
  const Rows scores_, x_, out_;
  int gated_units_ = 0, down_units_ = 0;  // of one expert
  WorkQueue choose_, pack_, gated_, pack_hidden_, down_, add_;
};

}  // namespace toque
