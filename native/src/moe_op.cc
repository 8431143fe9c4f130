#include "moe_op.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

namespace toque {

namespace {

// So few tokens are routed faster by one thread than by several that meet.
constexpr int kAlone = 4;

void check(const KernelTable& kernels, const MoeSpec& spec, int width) {
  const size_t experts = spec.gate.size();
  if (experts == 0 || spec.up.size() != experts || spec.down.size() != experts || spec.used < 1 ||
      static_cast<size_t>(spec.used) > experts || (!spec.orders.empty() && spec.orders.size() != experts)) {
    throw std::invalid_argument("experts need as many up and down matrices as gates, and some of them used");
  }
  const PackedMatrix &gate = spec.gate[0], &down = spec.down[0];
  for (size_t e = 0; e < experts; ++e) {
    const auto fits = [&](const PackedMatrix& m, int rows, int cols, Format format) {
      return m.rows == rows && m.cols == cols && kernels.act_kind(m.format) == kernels.act_kind(format);
    };
    if (!fits(spec.gate[e], gate.rows, width, gate.format) ||
        !fits(spec.up[e], gate.rows, width, gate.format) ||
        !fits(spec.down[e], width, gate.rows, down.format)) {
      throw std::invalid_argument("the experts' matrices differ in shape or in the kind of activations");
    }
  }
}

}  // namespace

std::shared_ptr<MoeBuffers> MoeOp::buffers(Plan& plan, const KernelTable& kernels, const MoeSpec& spec,
                                           Domain domain) {
  const PackedMatrix &gate = spec.gate[0], &down = spec.down[0];
  auto made = std::make_shared<MoeBuffers>();
  made->experts = static_cast<int>(spec.gate.size());
  made->used = spec.used;
  made->domain = domain;
  made->in = plan.act(kernels.act_kind(gate.format), gate.cols, domain, kernels.tile_max, false, spec.used);
  made->hidden_act =
      plan.act(kernels.act_kind(down.format), down.cols, domain, kernels.tile_max, false, spec.used);
  if (gate.rows % kGroup) made->hidden = plan.rows(gate.rows, domain, spec.used);
  made->out = plan.rows(down.rows, domain, spec.used);
  const size_t rows = static_cast<size_t>(plan.max_count(domain)) * static_cast<size_t>(spec.used);
  for (auto* ints : {&made->chosen, &made->place, &made->token, &made->expert}) ints->resize(rows);
  made->weight.resize(rows);
  made->first.resize(spec.gate.size() + 1);
  made->active.reserve(spec.gate.size());
  return made;
}

MoeOp::MoeOp(std::string label, const KernelTable& kernels, MoeSpec spec, std::shared_ptr<MoeBuffers> buffers,
             Rows scores, Rows x, Rows out)
    : Op(std::move(label)),
      kernels_(kernels),
      spec_(std::move(spec)),
      shared_(std::move(buffers)),
      scores_(scores),
      x_(x),
      out_(out) {
  check(kernels_, spec_, x_.width);
  if (scores_.width != shared_->experts || out_.width != x_.width) {
    throw std::invalid_argument("the router does not score each of the experts");
  }
  gated_units_ = kernels_.linear_units(gated(0));
  down_units_ = kernels_.linear_units(down(0));
}

void MoeOp::prepare(const StepInput& step, int threads) {
  choose_.reset(count(step, shared_->domain), 2 * threads);
}

void MoeOp::run(const StepInput& step, Worker& worker) {
  const auto each = [](WorkQueue& queue, auto&& body) {
    for (auto range = queue.claim(); !range.empty(); range = queue.claim()) {
      for (int i = range.begin; i < range.end; ++i) body(i);
    }
  };
  MoeBuffers& b = *shared_;
  const int tokens = count(step, b.domain);
  if (tokens <= kAlone) {
    if (worker.id == 0) {
      for (int token = 0; token < tokens; ++token) choose(token);
      group(tokens, worker.pool.size());
      for (int row = 0; row < tokens * b.used; ++row) pack(row, worker);
    }
  } else {
    each(choose_, [&](int token) { choose(token); });
    worker.pool.barrier();
    if (worker.id == 0) group(tokens, worker.pool.size());
    worker.pool.barrier();
    each(pack_, [&](int row) { pack(row, worker); });
  }
  worker.pool.barrier();
  linears(gated_, gated_units_, &MoeOp::gated);
  worker.pool.barrier();
  if (b.hidden) {
    each(pack_hidden_, [&](int row) {
      const int expert = b.expert[row], i = row - b.first[expert];
      kernels_.pack_rows(rows_of(b.hidden_act, expert), b.hidden.row(row), 0, i, i + 1);
    });
    worker.pool.barrier();
  }
  linears(down_, down_units_, &MoeOp::down);
  worker.pool.barrier();
  each(add_, [&](int token) {
    float* y = out_.row(token);
    std::fill_n(y, out_.width, 0.0f);
    for (int k = 0; k < b.used; ++k) {
      const size_t i = static_cast<size_t>(token) * b.used + k;
      const float *part = b.out.row(b.place[i]), weight = b.weight[i];
      for (int column = 0; column < out_.width; ++column) y[column] += weight * part[column];
    }
  });
}

// The likeliest experts of a token, best first (of equals the one with the lower number), and their weights:
// a softmax over all experts, or over the chosen ones alone.
void MoeOp::choose(int token) const {
  MoeBuffers& b = *shared_;
  const float* score = scores_.row(token);
  int32_t* chosen = b.chosen.data() + static_cast<size_t>(token) * b.used;
  float* weight = b.weight.data() + static_cast<size_t>(token) * b.used;
  for (int k = 0; k < b.used; ++k) {
    int best = -1;
    for (int e = 0; e < b.experts; ++e) {
      if (std::find(chosen, chosen + k, e) != chosen + k) continue;
      if (best < 0 || score[e] > score[best]) best = e;
    }
    chosen[k] = best;
    weight[k] = std::exp(score[best] - score[chosen[0]]);
  }
  float sum = 0.0f;
  if (spec_.norm) {
    for (int k = 0; k < b.used; ++k) sum += weight[k];
  } else {
    for (int e = 0; e < b.experts; ++e) sum += std::exp(score[e] - score[chosen[0]]);
  }
  for (int k = 0; k < b.used; ++k) weight[k] /= sum;
}

// Gives every pair of a token and one of its experts a row, those of one expert together, and shares out the
// work on them.
void MoeOp::group(int tokens, int threads) {
  MoeBuffers& b = *shared_;
  const int rows = tokens * b.used;
  std::fill(b.first.begin(), b.first.end(), 0);
  for (int i = 0; i < rows; ++i) ++b.first[b.chosen[i] + 1];
  b.active.clear();
  for (int e = 0; e < b.experts; ++e) {
    if (b.first[e + 1] > 0) b.active.push_back(e);
    b.first[e + 1] += b.first[e];
  }
  for (int i = rows - 1; i >= 0; --i) {
    const int row = --b.first[b.chosen[i] + 1];  // ends as the first row of the expert
    b.place[i] = row;
    b.token[row] = i / b.used;
    b.expert[row] = b.chosen[i];
  }
  // Counting down has moved each end to its beginning: shift them back.
  for (int e = 0; e < b.experts; ++e) b.first[e] = b.first[e + 1];
  b.first[b.experts] = rows;
  const int active = static_cast<int>(b.active.size());
  pack_.reset(rows, 2 * threads);
  gated_.reset(active * gated_units_, 2 * threads);
  pack_hidden_.reset(rows, 2 * threads);
  down_.reset(active * down_units_, 2 * threads);
  add_.reset(tokens, 2 * threads);
}

// What an expert's gate and up read of the token that has this row: its values, in the expert's order.
void MoeOp::pack(int row, const Worker& worker) const {
  const MoeBuffers& b = *shared_;
  const int expert = b.expert[row], i = row - b.first[expert];
  const float* x = x_.row(b.token[row]);
  if (!spec_.orders.empty() && !spec_.orders[expert].empty()) {
    const std::vector<int32_t>& order = spec_.orders[expert];
    for (size_t k = 0; k < order.size(); ++k) worker.scratch[k] = x[order[k]];
    x = worker.scratch;
  }
  kernels_.pack_rows(rows_of(b.in, expert), x, 0, i, i + 1);
}

Act MoeOp::rows_of(const ActBuffer& act, int expert) const {
  const size_t first = static_cast<size_t>(shared_->first[expert]);
  const int rows = shared_->first[expert + 1] - shared_->first[expert];
  return {act.kind,
          rows,
          act.width,
          act.tile_max,
          act.codes[0] + first * code_stride(act.kind, act.width),
          act.scales[0] + first * scale_stride(act.kind, act.width),
          act.peaks[0] + first * peak_stride(act.kind, act.width)};
}

LinearArgs MoeOp::gated(int expert) const {
  const MoeBuffers& b = *shared_;
  LinearArgs args{};
  args.in = rows_of(b.in, expert);
  args.weight = spec_.gate[expert];
  args.up = spec_.up[expert];
  args.epilogue = Epilogue::kGated;
  args.activation = spec_.activation;
  if (b.hidden) {
    args.out = b.hidden.row(b.first[expert]);
    args.out_stride = b.hidden.stride;
  } else {
    args.out_act = rows_of(b.hidden_act, expert);
  }
  return args;
}

LinearArgs MoeOp::down(int expert) const {
  const MoeBuffers& b = *shared_;
  LinearArgs args{};
  args.in = rows_of(b.hidden_act, expert);
  args.weight = spec_.down[expert];
  args.epilogue = Epilogue::kStore;
  args.out = b.out.row(b.first[expert]);
  args.out_stride = b.out.stride;
  return args;
}

void MoeOp::linears(WorkQueue& queue, int units, LinearArgs (MoeOp::*args)(int) const) const {
  for (auto range = queue.claim(); !range.empty(); range = queue.claim()) {
    for (int begin = range.begin; begin < range.end;) {
      const int index = begin / units, end = std::min(range.end, (index + 1) * units);
      kernels_.linear((this->*args)(shared_->active[index]), begin - index * units, end - index * units);
      begin = end;
    }
  }
}

}  // namespace toque
