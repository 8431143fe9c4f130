// Python bindings of the sampler. Plans call it per row of a step; `run` here is the same for a single row.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "kernels.h"
#include "sampler.h"

namespace toque {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Row = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Mask = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Result = std::tuple<int32_t, float, std::vector<int32_t>, std::vector<float>>;

void open_slot(Sampler& sampler, int slot, Ids prompt, Ids output, bool greedy, double temperature, int top_k,
               double top_p, double min_p, double repetition_penalty, double presence_penalty,
               double frequency_penalty, int64_t seed, std::vector<std::pair<int32_t, float>> logit_bias,
               std::vector<int32_t> suppress, int suppress_until) {
  SlotParams params;
  params.greedy = greedy;
  params.temperature = temperature;
  params.top_k = top_k;
  params.top_p = top_p;
  params.min_p = min_p;
  params.repetition_penalty = repetition_penalty;
  params.presence_penalty = presence_penalty;
  params.frequency_penalty = frequency_penalty;
  params.seed = static_cast<uint64_t>(seed);
  params.logit_bias = std::move(logit_bias);
  params.suppress = std::move(suppress);
  params.suppress_until = suppress_until;
  sampler.open(slot, std::move(params), prompt.data(), static_cast<int>(prompt.shape(0)), output.data(),
               static_cast<int>(output.shape(0)));
}

Result run(Sampler& sampler, Row logits, int slot, int32_t target, int top, std::optional<Mask> mask) {
  if (static_cast<int>(logits.shape(0)) != sampler.vocab()) {
    throw std::invalid_argument("logits have " + std::to_string(logits.shape(0)) +
                                " entries for a vocabulary of " + std::to_string(sampler.vocab()));
  }
  if (mask && static_cast<int>(mask->shape(0)) != (sampler.vocab() + 31) / 32) {
    throw std::invalid_argument("mask must have " + std::to_string((sampler.vocab() + 31) / 32) +
                                " words, got " + std::to_string(mask->shape(0)));
  }
  thread_local Sampler::Scratch scratch;
  std::vector<int32_t> ids(top > 0 ? static_cast<size_t>(top) : 0);
  std::vector<float> logprobs(ids.size());
  float logprob = 0.0f;
  SampleRow row{logits.data(), slot,       target,         top, mask ? mask->data() : nullptr,
                &logprob,      ids.data(), logprobs.data()};
  const int32_t token = sampler.run(row, scratch);
  return {token, logprob, std::move(ids), std::move(logprobs)};
}

}  // namespace

void bind_sampler(nb::module_& m) {
  nb::class_<Sampler>(m, "Sampler",
                      "Per-request sampling state in slots; see toque.backends.reference.sampler.")
      .def(
          "__init__",
          [](Sampler* self, int vocab, int valid_vocab, int slots, const std::string& isa) {
            if (vocab < 1 || slots < 1) throw std::invalid_argument("vocab and slots must be positive");
            new (self) Sampler(*kernel_table(isa.c_str()).sampler, vocab, valid_vocab, slots);
          },
          "vocab"_a, "valid_vocab"_a, "slots"_a, "isa"_a = "")
      .def("open", &open_slot, "slot"_a, "prompt"_a, "output"_a, nb::kw_only(), "greedy"_a, "temperature"_a,
           "top_k"_a, "top_p"_a, "min_p"_a, "repetition_penalty"_a, "presence_penalty"_a,
           "frequency_penalty"_a, "seed"_a, "logit_bias"_a, "suppress"_a, "suppress_until"_a)
      .def("close", &Sampler::close, "slot"_a)
      .def("run", &run, "logits"_a, "slot"_a, "target"_a = -1, "top"_a = -1, "mask"_a = nb::none(),
           "(token, logprob, alternatives' ids, their logprobs) of one row; changes `logits` in place.");
}

}  // namespace toque
