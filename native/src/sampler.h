// Chooses tokens from rows of logits. The definition, step by step, is
// src/toque/backends/reference/sampler.py: every choice is the same as there (up to f32 rounding at the very
// edge of a filter or a draw).
//
// Threads: `run` may be called from several threads at once for rows of different slots, each thread with its
// own Scratch; rows of one slot are run one after the other, in order. `open` and `close` need that slot to
// be idle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sampler_kernels.h"

namespace toque {

struct SlotParams {
  bool greedy = false;
  double temperature = 1.0;
  int top_k = 0;  // 0 or less: off
  double top_p = 1.0;
  double min_p = 0.0;
  double repetition_penalty = 1.0;
  double presence_penalty = 0.0;
  double frequency_penalty = 0.0;
  uint64_t seed = 0;
  std::vector<std::pair<int32_t, float>> logit_bias;
  std::vector<int32_t> suppress;  // not sampled while fewer than `suppress_until` tokens are generated
  int suppress_until = 0;
};

// One row of a step. Null or negative where something is not wanted.
struct SampleRow {
  float* logits;                   // [vocab] raw; changed in place where the slot's parameters ask for it
  int slot = 0;                    // not looked at when target >= 0
  int32_t target = -1;             // >= 0: nothing is sampled, this token's logprob is reported
  int top = -1;                    // >= 0: report the token's logprob and that many alternatives
  const uint32_t* mask = nullptr;  // allowed-token bits, (vocab + 31) / 32 words
  float* logprob = nullptr;        // [1], with top >= 0
  int32_t* top_ids = nullptr;      // [top]; -1 where the vocabulary has no more
  float* top_logprobs = nullptr;   // [top]
};

class Sampler {
 public:
  struct Candidate {
    float logit;
    int32_t id;
    float weight;
  };
  // A thread's working memory; grows to what the vocabulary needs and is reused.
  struct Scratch {
    std::vector<float> maxima, values, weights;
    std::vector<Candidate> candidates;
    std::vector<std::pair<int32_t, float>> raw;  // logits of edited ids before the edit
  };

  // Ids at or above `valid_vocab` are padding: never sampled, never reported as alternatives.
  Sampler(const SamplerKernels& kernels, int vocab, int valid_vocab, int slots);

  int vocab() const { return vocab_; }
  int slots() const { return static_cast<int>(slots_.size()); }

  // Throws std::out_of_range for a slot that does not exist. Ids outside the vocabulary are ignored.
  void open(int slot, SlotParams params, const int32_t* prompt, int n_prompt, const int32_t* output,
            int n_output);
  void close(int slot);
  bool is_open(int slot) const { return slot >= 0 && slot < slots() && slots_[slot].open; }

  // The chosen token, recorded in the slot, or the target. -1 when every token is removed: nothing was
  // recorded.
  int32_t run(const SampleRow& row, Scratch& scratch);

 private:
  struct Seen {
    int32_t id;
    int32_t generated;  // times among the output tokens
  };
  struct Slot {
    bool open = false;
    SlotParams params;
    bool counting = false;  // some penalty is on
    int64_t generated = 0;
    std::vector<Seen> seen;
    std::unordered_map<int32_t, std::size_t> index;  // of an id in `seen`
  };

  Slot& slot(int index);
  void count(Slot& slot, int32_t token, bool generated) const;
  void edit(const Slot& slot, const SampleRow& row, Scratch& scratch) const;
  float maximum(float* logits, int n, Scratch& scratch) const;
  int32_t choose(const Slot& slot, float* logits, Scratch& scratch) const;
  void keep_top_k(const float* logits, int k, Scratch& scratch) const;
  double keep_mass(const float* logits, const SlotParams& params, float maximum, double share,
                   Scratch& scratch) const;
  void gather(const float* logits, float threshold, Scratch& scratch) const;
  double weigh(float maximum, double temperature, Scratch& scratch) const;
  void report(const SampleRow& row, float maximum, double log_total, Scratch& scratch) const;

  const SamplerKernels& kernels_;
  const int vocab_, valid_vocab_;
  std::vector<Slot> slots_;
};

}  // namespace toque
