#include "ops.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace toque {

void RowOp::prepare(const StepInput& step, int threads) { queue_.reset(count(step, domain_), 2 * threads); }

void RowOp::run(const StepInput& step, Worker& worker) {
  if (is_private(step)) {
    function_(step, 0, worker);
    return;
  }
  for (auto range = queue_.claim(); !range.empty(); range = queue_.claim()) {
    for (int row = range.begin; row < range.end; ++row) function_(step, row, worker);
  }
}

LinearOp::LinearOp(std::string label, const KernelTable& kernels, ActBuffer in, std::vector<LinearPart> parts)
    : Op(std::move(label)), kernels_(kernels), in_(std::move(in)), parts_(std::move(parts)) {
  StepInput one;
  one.n_tokens = one.n_rows = 1;
  int end = 0;
  for (const auto& part : parts_) ends_.push_back(end += kernels_.linear_units(args(part, one, 0)));
}

LinearArgs LinearOp::args(const LinearPart& part, const StepInput& step, int worker) const {
  LinearArgs args{};
  args.in = in_.view(step, worker);
  args.weight = part.weight;
  args.up = part.up;
  args.epilogue = part.epilogue;
  args.activation = part.activation;
  args.bias = part.bias.empty() ? nullptr : part.bias.data();
  args.up_bias = part.up_bias.empty() ? nullptr : part.up_bias.data();
  args.out = part.out.data;
  args.out_stride = part.out.stride;
  if (part.out_act) args.out_act = part.out_act.view(step, 0);
  return args;
}

void LinearOp::prepare(const StepInput& step, int threads) {
  queue_.reset(count(step, in_.domain) > 0 ? ends_.back() : 0, 2 * threads);
}

void LinearOp::run(const StepInput& step, Worker& worker) {
  for (auto range = queue_.claim(); !range.empty(); range = queue_.claim()) {
    int first = 0;
    for (size_t i = 0; i < parts_.size(); first = ends_[i++]) {
      const int begin = std::max(range.begin, first), end = std::min(range.end, ends_[i]);
      if (begin < end) kernels_.linear(args(parts_[i], step, worker.id), begin - first, end - first);
    }
  }
}

void PlanBuilder::row_op(std::string label, Domain domain, RowOp::Function function, RowSink sink) {
  plan_.add(std::make_unique<RowOp>(std::move(label), domain, std::move(function), std::move(sink)));
}

void PlanBuilder::sink_op(std::string label, RowSink out, int width,
                          std::function<void(const StepInput&, int, float*)> compute) {
  plan_.need_scratch(static_cast<size_t>(width) + 64);
  const Domain domain = out.rows ? out.rows.domain : out.act.domain;
  row_op(
      std::move(label), domain,
      [this_kernels = &kernels_, out, compute = std::move(compute)](const StepInput& step, int row,
                                                                    Worker& worker) {
        float* y = out.rows ? out.rows.row(row) : worker.scratch;
        compute(step, row, y);
        // A stride of zero makes `y` stand for whichever row is asked for.
        if (out.act) this_kernels->pack_rows(out.act.view(step, worker.id), y, 0, row, row + 1);
      },
      out);
}

void PlanBuilder::embed(const PackedMatrix& table, EmbedIds ids, float scale, Rows out) {
  row_op("embed", out.domain,
         [kernels = &kernels_, table, ids, scale, out](const StepInput& step, int row, Worker&) {
           const int32_t id = ids == EmbedIds::kTokens      ? step.tokens[row]
                              : ids == EmbedIds::kPositions ? step.positions[row]
                                                            : 0;
           kernels->embed_rows(table, &id, scale, out.row(row), out.stride, 0, 1);
         });
}

void PlanBuilder::rms_norm(Rows x, std::vector<float> gain, float eps, int group, RowSink out) {
  const int run = group > 0 ? group : x.width;
  sink_op("rms_norm", std::move(out), x.width,
          [k = &row_kernels_, x, gain = std::move(gain), eps, run](const StepInput&, int row, float* y) {
            k->rms_norm(x.row(row), gain.data(), x.width, run, eps, y);
          });
}

void PlanBuilder::add_rms_norm(Rows a, Rows b, std::vector<float> gain, float eps, Rows sum, RowSink out) {
  sink_op("add_rms_norm", std::move(out), a.width,
          [k = &row_kernels_, a, b, gain = std::move(gain), eps, sum](const StepInput&, int row, float* y) {
            k->add(a.row(row), b.row(row), a.width, sum.row(row));
            k->rms_norm(sum.row(row), gain.data(), a.width, a.width, eps, y);
          });
}

void PlanBuilder::layer_norm(Rows x, std::vector<float> gain, std::vector<float> bias, float eps,
                             RowSink out) {
  sink_op("layer_norm", std::move(out), x.width,
          [k = &row_kernels_, x, gain = std::move(gain), bias = std::move(bias), eps](const StepInput&,
                                                                                      int row, float* y) {
            k->layer_norm(x.row(row), gain.data(), bias.data(), x.width, eps, y);
          });
}

void PlanBuilder::linear(std::string label, ActBuffer in, std::vector<LinearPart> parts) {
  plan_.add(std::make_unique<LinearOp>(std::move(label), kernels_, std::move(in), std::move(parts)));
}

void PlanBuilder::pack(Rows x, ActBuffer out) {
  row_op("pack", x.domain, [kernels = &kernels_, x, out](const StepInput& step, int row, Worker& worker) {
    kernels->pack_rows(out.view(step, worker.id), x.data, x.stride, row, row + 1);
  });
}

void PlanBuilder::pack_gathered(Rows x, ActBuffer out, std::vector<int32_t> order) {
  sink_op("pack_gathered", {{}, std::move(out)}, x.width,
          [x, order = std::move(order)](const StepInput&, int row, float* y) {
            const float* from = x.row(row);
            for (size_t i = 0; i < order.size(); ++i) y[i] = from[order[i]];
          });
}

void PlanBuilder::rotate(Rows x, int head_dim, std::shared_ptr<RopeTable> rope, Rows out) {
  row_op("rope", x.domain,
         [k = &row_kernels_, x, head_dim, rope, out](const StepInput& step, int row, Worker&) {
           const int position = step.positions[row];
           for (int head = 0; head < x.width; head += head_dim) {
             k->rotate(x.row(row) + head, rope->cos(position), rope->sin(position), rope->half(), head_dim,
                       out.row(row) + head);
           }
         });
  plan_.use(std::move(rope));
}

void PlanBuilder::act_mul(Activation act, Rows gate, Rows up, RowSink out) {
  sink_op("act_mul", std::move(out), gate.width,
          [k = &row_kernels_, act, gate, up](const StepInput&, int row, float* y) {
            k->activate_mul(act, gate.row(row), up.row(row), gate.width, y);
          });
}

void PlanBuilder::activate(Activation act, Rows x, RowSink out) {
  sink_op("activate", std::move(out), x.width,
          [k = &row_kernels_, act, x](const StepInput&, int row, float* y) {
            k->activate(act, x.row(row), x.width, y);
          });
}

void PlanBuilder::add(Rows a, Rows b, Rows out) {
  row_op("add", out.domain, [k = &row_kernels_, a, b, out](const StepInput&, int row, Worker&) {
    k->add(a.row(row), b.row(row), a.width, out.row(row));
  });
}

void PlanBuilder::scale(Rows x, float by, Rows out) {
  row_op("scale", out.domain, [k = &row_kernels_, x, by, out](const StepInput&, int row, Worker&) {
    k->scale(x.row(row), by, x.width, out.row(row));
  });
}

void PlanBuilder::softcap(Rows x, float cap, Rows out) {
  row_op("softcap", out.domain, [k = &row_kernels_, x, cap, out](const StepInput&, int row, Worker&) {
    k->softcap(x.row(row), cap, x.width, out.row(row));
  });
}

void PlanBuilder::select_rows(Rows x, Rows out) {
  row_op("select_rows", out.domain, [x, out](const StepInput& step, int row, Worker&) {
    std::memcpy(out.row(row), x.row(step.rows[row]), sizeof(float) * static_cast<size_t>(x.width));
  });
}

void PlanBuilder::pool(Pooling kind, Rows x, Rows out) {
  plan_.pools = true;
  row_op("pool", out.domain, [k = &row_kernels_, kind, x, out](const StepInput& step, int row, Worker&) {
    const int begin = step.starts[row], end = step.starts[row + 1];
    const float* first = x.row(kind == Pooling::kLast ? end - 1 : begin);
    std::memcpy(out.row(row), first, sizeof(float) * static_cast<size_t>(x.width));
    if (kind != Pooling::kMean) return;
    for (int token = begin + 1; token < end; ++token)
      k->add(out.row(row), x.row(token), x.width, out.row(row));
    k->scale(out.row(row), 1.0f / static_cast<float>(end - begin), x.width, out.row(row));
  });
}

}  // namespace toque
