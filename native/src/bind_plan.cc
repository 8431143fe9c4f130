// Python bindings of Plan: building one (toque.backends.cpu.lower) and running it
// (toque.backends.cpu.executable).
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention_op.h"
#include "bind_arguments.h"
#include "bindings.h"
#include "kernels.h"
#include "moe_op.h"
#include "ops.h"
#include "plan.h"
#include "sample_op.h"

namespace toque {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename T>
std::optional<T> given(const T* value) {
  return value != nullptr ? std::optional<T>(*value) : std::nullopt;
}

// A model's plan together with its sampler and the buffer of its output.
class Model {
 public:
  Model(int threads, const std::string& isa, int max_tokens, int max_rows, int max_sequences, int vocab_limit)
      : kernels(kernel_table(isa.c_str())),
        plan(std::make_shared<Pool>(threads), max_tokens, max_rows, max_sequences),
        build(plan, kernels, *kernels.step) {
    plan.vocab_limit = vocab_limit;
  }

  RowSink sink(const Rows* rows, const ActBuffer* act) const {
    if (rows == nullptr && act == nullptr) throw std::invalid_argument("an op needs somewhere to write to");
    return {rows != nullptr ? *rows : Rows{}, act != nullptr ? *act : ActBuffer{}};
  }

  ActBuffer act(const PackedMatrix& reader, bool rows, bool per_worker) {
    const ActKind kind = kernels.act_kind(reader.format);
    return plan.act(kind, reader.cols, rows ? Domain::kRows : Domain::kTokens, kernels.tile_max, per_worker);
  }

  void linear(const std::string& label, const ActBuffer& in, const PackedMatrix& weight,
              std::optional<Floats> bias, const Rows& out, bool add) {
    pending_.push_back(part(in, weight, bias, out, add));
    flush(label, in);
  }

  void shared_linear(const std::string& label, const ActBuffer& in,
                     const std::vector<const PackedMatrix*>& weights,
                     const std::vector<std::optional<Floats>>& biases, const std::vector<const Rows*>& outs) {
    if (weights.size() != biases.size() || weights.size() != outs.size()) {
      throw std::invalid_argument("as many biases and outputs as weights are needed");
    }
    for (size_t i = 0; i < weights.size(); ++i) {
      pending_.push_back(part(in, *weights[i], biases[i], *outs[i], false));
    }
    flush(label, in);
  }

  void gated_linear(const std::string& label, const ActBuffer& in, const PackedMatrix& gate,
                    const PackedMatrix& up, std::optional<Floats> gate_bias, std::optional<Floats> up_bias,
                    const std::string& activation, const Rows* rows, const ActBuffer* act) {
    LinearPart gated;
    check_reads(in, gate);
    check_reads(in, up);
    if (up.rows != gate.rows) throw std::invalid_argument("gate and up differ in rows");
    gated.weight = gate;
    gated.up = up;
    gated.bias = floats(gate_bias, static_cast<size_t>(gate.rows), "gate bias");
    gated.up_bias = floats(up_bias, static_cast<size_t>(up.rows), "up bias");
    gated.epilogue = Epilogue::kGated;
    gated.activation = activation_named(activation);
    const RowSink out = sink(rows, act);
    gated.out = out.rows;
    gated.out_act = out.act;
    pending_.push_back(std::move(gated));
    flush(label, in);
  }

  void moe(const std::string& label, const Rows& scores, const Rows& x,
           const std::vector<const PackedMatrix*>& gate, const std::vector<const PackedMatrix*>& up,
           const std::vector<const PackedMatrix*>& down, const std::vector<Int64s>& orders, int used,
           bool norm, const std::string& activation, const Rows& out) {
    MoeSpec spec;
    for (const auto* matrix : gate) spec.gate.push_back(*matrix);
    for (const auto* matrix : up) spec.up.push_back(*matrix);
    for (const auto* matrix : down) spec.down.push_back(*matrix);
    for (const Int64s& order : orders) {
      spec.orders.push_back(order.shape(0) ? columns(order, x.width) : std::vector<int32_t>{});
    }
    if (!orders.empty()) plan.need_scratch(static_cast<size_t>(x.width) + 64);
    spec.used = used;
    spec.norm = norm;
    spec.activation = activation_named(activation);
    if (spec.gate.empty() || spec.down.empty()) throw std::invalid_argument("there are no experts");
    // Layers of one shape take turns with one set of buffers.
    const auto fits = [&](const std::shared_ptr<MoeBuffers>& made) {
      return made->domain == x.domain && made->used == used && made->experts == scores.width &&
             made->in.kind == kernels.act_kind(spec.gate[0].format) && made->in.width == x.width &&
             made->hidden_act.kind == kernels.act_kind(spec.down[0].format) &&
             made->hidden_act.width == spec.down[0].cols;
    };
    auto made = std::find_if(moe_buffers_.begin(), moe_buffers_.end(), fits);
    if (made == moe_buffers_.end()) {
      moe_buffers_.push_back(MoeOp::buffers(plan, kernels, spec, x.domain));
      made = moe_buffers_.end() - 1;
    }
    plan.add(std::make_unique<MoeOp>(label, kernels, std::move(spec), *made, scores, x, out));
  }

  void attention(AttentionSpec spec, const Rows& q, const Rows& k, const Rows& v, const Rows* rows,
                 const ActBuffer* act) {
    plan.add(std::make_unique<AttentionOp>("attention", plan, *kernels.step, std::move(spec), q, k, v,
                                           sink(rows, act)));
  }

  void finish(const Rows& output, int valid_vocab, int slots) {
    logits = output;
    sampler = std::make_unique<Sampler>(*kernels.sampler, output.width, valid_vocab, slots);
    plan.add(std::make_unique<SampleOp>(*sampler, output, plan.threads()));
  }

  const KernelTable& kernels;
  Plan plan;
  PlanBuilder build;
  Rows logits;
  std::unique_ptr<Sampler> sampler;

 private:
  void check_reads(const ActBuffer& in, const PackedMatrix& weight) const {
    if (in.width != weight.cols || in.kind != kernels.act_kind(weight.format)) {
      throw std::invalid_argument("the weight takes another width or kind of activations");
    }
  }

  LinearPart part(const ActBuffer& in, const PackedMatrix& weight, const std::optional<Floats>& bias,
                  const Rows& out, bool add) const {
    check_reads(in, weight);
    if (out.width != weight.rows)
      throw std::invalid_argument("the output is not as wide as the weight has rows");
    LinearPart part;
    part.weight = weight;
    part.bias = floats(bias, static_cast<size_t>(weight.rows), "bias");
    part.out = out;
    part.epilogue = add ? Epilogue::kAdd : Epilogue::kStore;
    return part;
  }

  void flush(const std::string& label, const ActBuffer& in) {
    build.linear(label, in, std::move(pending_));
    pending_.clear();
  }

  std::vector<LinearPart> pending_;
  std::vector<std::shared_ptr<MoeBuffers>> moe_buffers_;
};

StepInput step_input(const Ints& tokens, const Ints& positions, const Ints& starts, const Ints& context,
                     const IntTable& block_tables, const Ints& rows) {
  StepInput step;
  step.n_tokens = static_cast<int>(tokens.shape(0));
  step.n_sequences = static_cast<int>(context.shape(0));
  step.n_rows = static_cast<int>(rows.shape(0));
  step.table_width = static_cast<int>(block_tables.shape(1));
  if (positions.shape(0) != tokens.shape(0) || starts.shape(0) != context.shape(0) + 1 ||
      block_tables.shape(0) != context.shape(0)) {
    throw std::invalid_argument("the batch's arrays do not belong together");
  }
  step.tokens = tokens.data();
  step.positions = positions.data();
  step.starts = starts.data();
  step.context = context.data();
  step.block_tables = block_tables.data();
  step.rows = rows.data();
  return step;
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> run_logits(Model& model, Ints tokens, Ints positions, Ints starts,
                                                      Ints context, IntTable block_tables, Ints rows) {
  const StepInput step = step_input(tokens, positions, starts, context, block_tables, rows);
  {
    nb::gil_scoped_release release;
    model.plan.step(step);
  }
  const size_t width = static_cast<size_t>(model.logits.width);
  auto out = new_array<float, 2>({static_cast<size_t>(step.n_rows), width});
  for (int row = 0; row < step.n_rows; ++row) {
    std::memcpy(out.data() + row * width, model.logits.row(row), width * sizeof(float));
  }
  return out;
}

// (tokens, logprobs, top_ids, top_logprobs); the last three are None when no row asked for any.
nb::tuple run_step(Model& model, Ints tokens, Ints positions, Ints starts, Ints context,
                   IntTable block_tables, Ints rows, Ints slots, Ints targets, Ints top,
                   std::optional<Bits> masks) {
  StepInput step = step_input(tokens, positions, starts, context, block_tables, rows);
  const size_t n = rows.shape(0);
  if (slots.shape(0) != n || targets.shape(0) != n || top.shape(0) != n || (masks && masks->shape(0) != n)) {
    throw std::invalid_argument("slots, targets, top and masks need an entry for each of rows");
  }
  SampleRequest ask;
  ask.slots = slots.data();
  ask.targets = targets.data();
  ask.top = top.data();
  if (masks) {
    if (masks->shape(1) * 32 < static_cast<size_t>(model.logits.width)) {
      throw std::invalid_argument("masks have too few words for the vocabulary");
    }
    ask.masks = masks->data();
    ask.mask_words = static_cast<int>(masks->shape(1));
  }
  int most = -1;
  for (size_t i = 0; i < n; ++i) most = std::max(most, top.data()[i]);
  auto chosen = new_array<int32_t, 1>({n});
  ask.tokens = chosen.data();
  step.sample = &ask;
  nb::object logprobs = nb::none(), top_ids = nb::none(), top_logprobs = nb::none();
  if (most >= 0) {
    const size_t width = static_cast<size_t>(most);
    auto a = new_array<float, 1>({n});
    auto b = new_array<int32_t, 2>({n, width});
    auto c = new_array<float, 2>({n, width});
    std::fill_n(b.data(), n * width, -1);
    std::fill_n(c.data(), n * width, -std::numeric_limits<float>::infinity());
    ask.logprobs = a.data();
    ask.top_ids = b.data();
    ask.top_logprobs = c.data();
    ask.top_width = most;
    logprobs = nb::cast(a);
    top_ids = nb::cast(b);
    top_logprobs = nb::cast(c);
  }
  {
    nb::gil_scoped_release release;
    model.plan.step(step);
  }
  return nb::make_tuple(chosen, logprobs, top_ids, top_logprobs);
}

KvType kv_type(bool int8) { return int8 ? KvType::kInt8 : KvType::k16Bit; }

}  // namespace

void bind_plan(nb::module_& m) {
  nb::class_<Rows>(m, "Rows", "A float32 buffer with a row per token, or per wanted row.")
      .def_ro("width", &Rows::width);
  nb::class_<ActBuffer>(m, "ActBuffer", "A buffer of packed activations, the input of linear ops.")
      .def_ro("width", &ActBuffer::width);
  nb::class_<RopeTable>(m, "RopeTable", "Angles of a rotary embedding by position.")
      .def("__init__", [](RopeTable* self, Doubles inverse_frequencies, double scale) {
        const double* data = inverse_frequencies.data();
        new (self) RopeTable(std::vector<double>(data, data + inverse_frequencies.shape(0)), scale);
      });

  m.def(
      "kv_bytes",
      [](int head_dim, bool int8, const std::string& isa) {
        const KvKernels& kernels = kernel_table(isa.c_str()).step->kv[static_cast<int>(kv_type(int8))];
        return kernels.tile_bytes(head_dim) / kTileTokens;
      },
      "head_dim"_a, "int8"_a = false, "isa"_a = "",
      "Bytes of the cache that one head takes for the key and value of one token.");

  nb::class_<Model>(m, "Model", "A model's step: a list of ops over buffers, its KV cache, and its sampler.")
      .def(nb::init<int, const std::string&, int, int, int, int>(), nb::kw_only(), "threads"_a, "isa"_a,
           "max_tokens"_a, "max_rows"_a, "max_sequences"_a, "vocab_limit"_a)
      .def_prop_rw(
          "position_limit", [](const Model& self) { return self.plan.position_limit; },
          [](Model& self, int limit) { self.plan.position_limit = limit; })
      .def_prop_ro("isa", [](const Model& self) { return self.kernels.name; })
      .def_prop_ro("threads", [](const Model& self) { return self.plan.threads(); })
      .def(
          "add_kv_layer",
          [](Model& self, int heads, int head_dim, bool int8) {
            const KvType type = kv_type(int8);
            const KvKernels& kernels = self.kernels.step->kv[static_cast<int>(type)];
            self.plan.kv().add_layer(heads, head_dim, type, kernels.tile_bytes(head_dim));
          },
          "heads"_a, "head_dim"_a, "int8"_a = false)
      .def(
          "act_kind",
          [](const Model& self, const PackedMatrix& w) {
            return static_cast<int>(self.kernels.act_kind(w.format));
          },
          "weight"_a, "Matrices with the same number read the same kind of activations.")
      .def_prop_ro("kv_bytes_per_block", [](Model& self) { return self.plan.kv().block_bytes(); })
      .def(
          "allocate_kv", [](Model& self, int blocks) { self.plan.kv().allocate(blocks); }, "blocks"_a)

      .def(
          "rows",
          [](Model& self, int width, bool per_row) {
            return self.plan.rows(width, per_row ? Domain::kRows : Domain::kTokens);
          },
          "width"_a, "per_row"_a)
      .def("act", &Model::act, "reader"_a, "per_row"_a, "per_worker"_a,
           "A buffer of the kind and width that `reader`, a packed matrix, takes.")
      .def(
          "embed",
          [](Model& self, const PackedMatrix& table, const std::string& ids, float scale, const Rows& out) {
            self.build.embed(table, embed_ids_named(ids), scale, out);
          },
          "table"_a, "ids"_a, "scale"_a, "out"_a)
      .def("moe", &Model::moe, "label"_a, "scores"_a, "x"_a, "gate"_a, "up"_a, "down"_a, "orders"_a, "used"_a,
           "norm"_a, "act_name"_a, "out"_a,
           "`scores` are the router's, a column for each expert. `orders`: the column of `x` that each input "
           "of an "
           "expert's gate and up is, none for as they come; or nothing at all.")
      .def(
          "rms_norm",
          [](Model& self, const Rows& x, Floats gain, float eps, int group, const Rows* rows,
             const ActBuffer* act) {
            self.build.rms_norm(x, floats(gain, static_cast<size_t>(group ? group : x.width), "gain"), eps,
                                group, self.sink(rows, act));
          },
          "x"_a, "gain"_a, "eps"_a, "group"_a, "rows"_a.none(), "act"_a.none())
      .def(
          "add_rms_norm",
          [](Model& self, const Rows& a, const Rows& b, Floats gain, float eps, const Rows& sum,
             const Rows* rows, const ActBuffer* act) {
            self.build.add_rms_norm(a, b, floats(gain, static_cast<size_t>(a.width), "gain"), eps, sum,
                                    self.sink(rows, act));
          },
          "a"_a, "b"_a, "gain"_a, "eps"_a, "sum"_a, "rows"_a.none(), "act"_a.none())
      .def(
          "layer_norm",
          [](Model& self, const Rows& x, Floats gain, Floats bias, float eps, const Rows* rows,
             const ActBuffer* act) {
            const size_t width = static_cast<size_t>(x.width);
            self.build.layer_norm(x, floats(gain, width, "gain"), floats(bias, width, "bias"), eps,
                                  self.sink(rows, act));
          },
          "x"_a, "gain"_a, "bias"_a, "eps"_a, "rows"_a.none(), "act"_a.none())
      .def(
          "pack", [](Model& self, const Rows& x, const ActBuffer& out) { self.build.pack(x, out); }, "x"_a,
          "out"_a)
      .def(
          "pack_gathered",
          [](Model& self, const Rows& x, const ActBuffer& out, Int64s order) {
            self.build.pack_gathered(x, out, columns(order, x.width));
          },
          "x"_a, "out"_a, "order"_a, "`order`: the column of `x` that each value of `out` is.")
      .def("linear", &Model::linear, "label"_a, "x"_a, "weight"_a, "bias"_a.none(), "out"_a, "add"_a,
           "`add`: to what `out` already holds.")
      .def("shared_linear", &Model::shared_linear, "label"_a, "x"_a, "weights"_a, "biases"_a, "outs"_a)
      .def("gated_linear", &Model::gated_linear, "label"_a, "x"_a, "gate"_a, "up"_a, "gate_bias"_a.none(),
           "up_bias"_a.none(), "act_name"_a, "rows"_a.none(), "act"_a.none())
      .def(
          "rotate",
          [](Model& self, const Rows& x, int head_dim, std::shared_ptr<RopeTable> rope, const Rows& out) {
            self.build.rotate(x, head_dim, std::move(rope), out);
          },
          "x"_a, "head_dim"_a, "rope"_a, "out"_a)
      .def(
          "attention",
          [](Model& self, const Rows& q, const Rows& k, const Rows& v, int layer, int heads, float scale,
             int window, float softcap, bool causal, std::shared_ptr<RopeTable> rope,
             std::optional<Floats> q_norm, std::optional<Floats> k_norm, float norm_eps, const Rows* rows,
             const ActBuffer* act) {
            self.attention({layer, heads, scale, window, softcap, causal, std::move(rope), floats(q_norm),
                            floats(k_norm), norm_eps},
                           q, k, v, rows, act);
          },
          "q"_a, "k"_a, "v"_a, nb::kw_only(), "layer"_a, "heads"_a, "scale"_a, "window"_a, "softcap"_a,
          "causal"_a, "rope"_a.none(), "q_norm"_a.none(), "k_norm"_a.none(), "norm_eps"_a, "rows"_a.none(),
          "act"_a.none())
      .def(
          "act_mul",
          [](Model& self, const std::string& name, const Rows& gate, const Rows& up, const Rows* rows,
             const ActBuffer* act) {
            self.build.act_mul(activation_named(name), gate, up, self.sink(rows, act));
          },
          "act_name"_a, "gate"_a, "up"_a, "rows"_a.none(), "act"_a.none())
      .def(
          "activate",
          [](Model& self, const std::string& name, const Rows& x, const Rows* rows, const ActBuffer* act) {
            self.build.activate(activation_named(name), x, self.sink(rows, act));
          },
          "act_name"_a, "x"_a, "rows"_a.none(), "act"_a.none())
      .def(
          "add",
          [](Model& self, const Rows& a, const Rows& b, const Rows& out) { self.build.add(a, b, out); },
          "a"_a, "b"_a, "out"_a)
      .def(
          "scale",
          [](Model& self, const Rows& x, float by, const Rows& out) { self.build.scale(x, by, out); }, "x"_a,
          "by"_a, "out"_a)
      .def(
          "softcap",
          [](Model& self, const Rows& x, float cap, const Rows& out) { self.build.softcap(x, cap, out); },
          "x"_a, "cap"_a, "out"_a)
      .def(
          "select_rows", [](Model& self, const Rows& x, const Rows& out) { self.build.select_rows(x, out); },
          "x"_a, "out"_a)
      .def(
          "pool",
          [](Model& self, const std::string& kind, const Rows& x, const Rows& out) {
            self.build.pool(pooling_named(kind), x, out);
          },
          "kind"_a, "x"_a, "out"_a)
      .def("finish", &Model::finish, "output"_a, "valid_vocab"_a, "slots"_a)

      .def(
          "open_slot",
          [](Model& self, int slot, bool greedy, double temperature, int top_k, double top_p, double min_p,
             double repetition_penalty, double presence_penalty, double frequency_penalty, uint64_t seed,
             std::vector<std::pair<int32_t, float>> logit_bias, std::vector<int32_t> suppress,
             int suppress_until, Ints prompt, Ints output) {
            self.sampler->open(
                slot,
                {greedy, temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty,
                 frequency_penalty, seed, std::move(logit_bias), std::move(suppress), suppress_until},
                prompt.data(), static_cast<int>(prompt.shape(0)), output.data(),
                static_cast<int>(output.shape(0)));
          },
          "slot"_a, nb::kw_only(), "greedy"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a,
          "repetition_penalty"_a, "presence_penalty"_a, "frequency_penalty"_a, "seed"_a, "logit_bias"_a,
          "suppress"_a, "suppress_until"_a, "prompt"_a, "output"_a)
      .def(
          "close_slot", [](Model& self, int slot) { self.sampler->close(slot); }, "slot"_a)
      .def("logits", &run_logits, "tokens"_a, "positions"_a, "starts"_a, "context"_a, "block_tables"_a,
           "rows"_a)
      .def("step", &run_step, "tokens"_a, "positions"_a, "starts"_a, "context"_a, "block_tables"_a, "rows"_a,
           "slots"_a, "targets"_a, "top"_a, "masks"_a.none())
      .def(
          "set_profiling", [](Model& self, bool on) { self.plan.set_profiling(on); }, "on"_a)
      .def(
          "profile",
          [](const Model& self) {
            std::vector<std::pair<std::string, double>> times;
            for (const auto& time : self.plan.profile()) times.emplace_back(time.label, time.seconds);
            return times;
          },
          "(label, seconds) of each op since profiling was switched on.")
      .def(
          "attention_work",
          [](const Model& self) {
            std::vector<std::pair<int64_t, int64_t>> work;
            for (const auto& each : self.plan.attention_work()) work.emplace_back(each.chunks, each.rows);
            return work;
          },
          "Of the last step, for each kind of attention layer: (chunks of the cache that one layer reads, "
          "query rows\n"
          "that attend them, summed over the chunks). Sequences attended together read a chunk once.");
}

}  // namespace toque
