#include "sampler.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "philox.h"

namespace toque {
namespace {

constexpr double kTopPSlack = 1.0 - 1e-6;  // see step 6
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// The order of filters and draws: largest logit first, equal ones by id.
bool before(const Sampler::Candidate& a, const Sampler::Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

struct Crossing {
  size_t index;
  double sum;  // of the weights up to and including `index`
};

// Reorders so that the first tokens of the order come first, as far as needed, and finds where the running
// sum of weights reaches `need` (`beyond`: exceeds it); the last candidate when it never does. Halves the
// range with nth_element until it is short: linear time, no sort of everything.
Crossing cross(std::vector<Sampler::Candidate>& candidates, double need, bool beyond) {
  const auto crossed = [&](double sum) { return beyond ? sum > need : sum >= need; };
  size_t first = 0, last = candidates.size();
  double sum = 0.0;
  while (last - first > 32) {
    const size_t middle = first + (last - first) / 2;
    const auto begin = candidates.begin();
    std::nth_element(begin + first, begin + middle, begin + last, before);
    double upper = sum;
    for (size_t i = first; i < middle; ++i) upper += candidates[i].weight;
    if (crossed(upper)) {
      last = middle;
    } else {
      sum = upper;
      first = middle;
    }
  }
  std::sort(candidates.begin() + first, candidates.begin() + last, before);
  for (size_t i = first; i < last; ++i) {
    sum += candidates[i].weight;
    if (crossed(sum)) return {i, sum};
  }
  // Rounding kept the sum from arriving, though the range was chosen because it should: the last one of the
  // range.
  return {last - 1, sum};
}

}  // namespace

Sampler::Sampler(const SamplerKernels& kernels, int vocab, int valid_vocab, int slots)
    : kernels_(kernels),
      vocab_(vocab),
      valid_vocab_(valid_vocab > 0 ? std::min(valid_vocab, vocab) : vocab),
      slots_(static_cast<size_t>(slots)) {}

Sampler::Slot& Sampler::slot(int index) {
  if (index < 0 || index >= slots()) {
    throw std::out_of_range("sampler slot must be 0.." + std::to_string(slots() - 1) + ", got " +
                            std::to_string(index));
  }
  return slots_[index];
}

void Sampler::open(int index, SlotParams params, const int32_t* prompt, int n_prompt, const int32_t* output,
                   int n_output) {
  Slot& opened = slot(index);
  opened = Slot{};
  opened.open = true;
  opened.params = std::move(params);
  opened.generated = n_output;
  const SlotParams& p = opened.params;
  opened.counting = p.repetition_penalty != 1.0 || p.presence_penalty != 0.0 || p.frequency_penalty != 0.0;
  if (!opened.counting) return;
  if (p.repetition_penalty != 1.0) {
    for (int i = 0; i < n_prompt; ++i) count(opened, prompt[i], false);
  }
  for (int i = 0; i < n_output; ++i) count(opened, output[i], true);
}

void Sampler::close(int index) { slot(index) = Slot{}; }

void Sampler::count(Slot& slot, int32_t token, bool generated) const {
  if (token < 0 || token >= vocab_) return;
  const auto [entry, fresh] = slot.index.try_emplace(token, slot.seen.size());
  if (fresh) slot.seen.push_back({token, 0});
  slot.seen[entry->second].generated += generated;
}

int32_t Sampler::run(const SampleRow& row, Scratch& scratch) {
  float largest = kLowest;
  double log_total = 0.0;
  scratch.raw.clear();
  if (row.top >= 0) {
    largest = maximum(row.logits, vocab_, scratch);
    if (largest > kLowest) log_total = std::log(kernels_.exp_sum(row.logits, vocab_, largest, 1.0f, nullptr));
    report(row, largest, log_total, scratch);
  }
  int32_t token = row.target;
  if (token < 0) {
    Slot& owner = slot(row.slot);
    if (!owner.open) throw std::out_of_range("sampler slot " + std::to_string(row.slot) + " is not open");
    edit(owner, row, scratch);
    token = choose(owner, row.logits, scratch);
    if (token >= 0) {
      ++owner.generated;
      if (owner.counting) count(owner, token, true);
    }
  }
  if (row.top >= 0 && row.logprob != nullptr) {
    float logit = token >= 0 && token < vocab_ ? row.logits[token] : kLowest;
    for (auto saved = scratch.raw.rbegin(); saved != scratch.raw.rend(); ++saved) {
      if (saved->first == token) logit = saved->second;  // ends with the earliest: the raw one
    }
    *row.logprob = logit > kLowest ? static_cast<float>(double{logit} - largest - log_total) : kLowest;
  }
  return token;
}

// Step 1, in place. Padding is not touched: nothing after this looks past valid_vocab.
void Sampler::edit(const Slot& slot, const SampleRow& row, Scratch& scratch) const {
  const SlotParams& params = slot.params;
  float* const logits = row.logits;
  const auto save = [&](int32_t id) {
    if (row.top >= 0) scratch.raw.emplace_back(id, logits[id]);
  };
  for (const auto& [id, bias] : params.logit_bias) {
    if (id < 0 || id >= vocab_) continue;
    save(id);
    logits[id] += bias;
  }
  if (slot.generated < params.suppress_until) {
    for (const int32_t id : params.suppress) {
      if (id >= 0 && id < vocab_) logits[id] = kLowest;
    }
  }
  if (row.mask != nullptr) {
    for (int start = 0; start < vocab_; start += 32) {
      const uint32_t allowed = row.mask[start / 32];
      if (allowed == ~uint32_t{0}) continue;
      const int end = std::min(start + 32, vocab_);
      for (int id = start; id < end; ++id) {
        if ((allowed >> (id - start) & 1) == 0) logits[id] = kLowest;
      }
    }
  }
  if (!slot.counting) return;
  const float penalty = static_cast<float>(params.repetition_penalty);
  for (const Seen& seen : slot.seen) {
    save(seen.id);
    float logit = std::min(logits[seen.id], FLT_MAX);
    if (penalty != 1.0f) logit = logit > 0.0f ? logit / penalty : logit * penalty;
    if (seen.generated > 0) {
      logit -= static_cast<float>(params.presence_penalty + params.frequency_penalty * seen.generated);
    }
    logits[seen.id] = logit;
  }
}

// The largest logit, with the maxima of all blocks in `scratch.maxima`. Turns +inf into the largest float.
float Sampler::maximum(float* logits, int n, Scratch& scratch) const {
  scratch.maxima.resize((n + kSampleBlock - 1) / kSampleBlock);
  kernels_.block_maxima(logits, n, scratch.maxima.data());
  float largest = *std::max_element(scratch.maxima.begin(), scratch.maxima.end());
  if (largest > FLT_MAX) {
    for (int i = 0; i < n; ++i) {
      if (logits[i] > FLT_MAX) logits[i] = FLT_MAX;
    }
    for (float& block : scratch.maxima) block = std::min(block, FLT_MAX);
    largest = FLT_MAX;
  }
  return largest;
}

// Steps 2 to 8.
int32_t Sampler::choose(const Slot& slot, float* logits, Scratch& scratch) const {
  const SlotParams& params = slot.params;
  const float largest = maximum(logits, valid_vocab_, scratch);
  if (largest == kLowest) return -1;
  if (params.greedy || params.top_k == 1 || params.top_p <= 0.0) {
    size_t block = 0;
    while (scratch.maxima[block] != largest) ++block;
    int32_t id = static_cast<int32_t>(block) * kSampleBlock;
    while (logits[id] != largest) ++id;
    return id;
  }
  auto& candidates = scratch.candidates;
  const double u = uniform(params.seed, static_cast<uint64_t>(slot.generated));
  double total;
  if (params.top_k > 0 && params.top_k < valid_vocab_) {
    keep_top_k(logits, params.top_k, scratch);
    total = weigh(largest, params.temperature, scratch);
    if (params.top_p < 1.0) {
      const Crossing end = cross(candidates, params.top_p * kTopPSlack * total, false);
      candidates.resize(end.index + 1);
      total = end.sum;
    }
  } else if (params.top_p >= 1.0 && params.min_p > 0.0) {
    // A little more than min_p asks for; the exact test follows.
    const double distance = params.temperature * (std::log(params.min_p) - 1e-4);
    gather(logits, static_cast<float>(largest + distance - 1e-5 * std::abs(largest)), scratch);
    total = weigh(largest, params.temperature, scratch);
  } else {
    total = keep_mass(logits, params, largest, params.top_p < 1.0 ? params.top_p : u, scratch);
    if (params.top_p < 1.0) {
      const Crossing end = cross(candidates, params.top_p * kTopPSlack * total, false);
      candidates.resize(end.index + 1);
      total = end.sum;
    }
  }
  if (params.min_p > 0.0) {
    const auto dropped = std::remove_if(candidates.begin(), candidates.end(),
                                        [&](const Candidate& c) { return double{c.weight} < params.min_p; });
    if (dropped != candidates.end()) {
      candidates.erase(dropped, candidates.end());
      total = 0.0;
      for (const Candidate& c : candidates) total += c.weight;
    }
  }
  return candidates[cross(candidates, u * total, true).index].id;
}

// The k first tokens of the order, in no order. The k-th largest block maximum bounds the k-th largest logit
// from below, so only blocks that reach it are read.
void Sampler::keep_top_k(const float* logits, int k, Scratch& scratch) const {
  auto& candidates = scratch.candidates;
  float threshold = kLowest;
  if (static_cast<size_t>(k) <= scratch.maxima.size()) {
    scratch.values.assign(scratch.maxima.begin(), scratch.maxima.end());
    std::nth_element(scratch.values.begin(), scratch.values.begin() + (k - 1), scratch.values.end(),
                     std::greater<float>());
    threshold = scratch.values[k - 1];
  }
  gather(logits, threshold, scratch);
  if (candidates.size() > static_cast<size_t>(k)) {
    std::nth_element(candidates.begin(), candidates.begin() + k, candidates.end(), before);
    candidates.resize(k);
  }
}

// Candidates, weighed, that hold at least `share` of the weight of all tokens; returns the weight of all.
double Sampler::keep_mass(const float* logits, const SlotParams& params, float largest, double share,
                          Scratch& scratch) const {
  const double total =
      kernels_.exp_sum(logits, valid_vocab_, largest, static_cast<float>(params.temperature), nullptr);
  const double need = share * total * (1.0 + 1e-6);  // a margin for the rounding of `total`
  for (const double depth : {3.0, 6.0, 12.0}) {
    gather(logits, static_cast<float>(largest - depth * params.temperature), scratch);
    if (weigh(largest, params.temperature, scratch) >= need) return total;
  }
  gather(logits, kLowest, scratch);
  weigh(largest, params.temperature, scratch);
  return total;
}

// Every token with a logit of at least `threshold`, except removed ones. Needs the block maxima.
void Sampler::gather(const float* logits, float threshold, Scratch& scratch) const {
  auto& candidates = scratch.candidates;
  candidates.clear();
  for (size_t block = 0; block < scratch.maxima.size(); ++block) {
    if (!(scratch.maxima[block] >= threshold) || scratch.maxima[block] == kLowest) continue;
    const int start = static_cast<int>(block) * kSampleBlock,
              end = std::min(start + kSampleBlock, valid_vocab_);
    for (int id = start; id < end; ++id) {
      if (logits[id] >= threshold && logits[id] > kLowest) candidates.push_back({logits[id], id, 0.0f});
    }
  }
}

// Fills in the candidates' weights and returns their sum.
double Sampler::weigh(float largest, double temperature, Scratch& scratch) const {
  auto& candidates = scratch.candidates;
  const int n = static_cast<int>(candidates.size());
  scratch.values.resize(n);
  scratch.weights.resize(n);
  for (int i = 0; i < n; ++i) scratch.values[i] = candidates[i].logit;
  kernels_.exp_sum(scratch.values.data(), n, largest, static_cast<float>(temperature),
                   scratch.weights.data());
  double sum = 0.0;
  for (int i = 0; i < n; ++i) sum += candidates[i].weight = scratch.weights[i];
  return sum;
}

// The alternatives of a row, from raw logits.
void Sampler::report(const SampleRow& row, float largest, double log_total, Scratch& scratch) const {
  const int wanted = std::min(row.top, valid_vocab_);
  auto& candidates = scratch.candidates;
  candidates.clear();
  if (wanted > 0) {
    scratch.maxima.resize((valid_vocab_ + kSampleBlock - 1) / kSampleBlock);
    kernels_.block_maxima(row.logits, valid_vocab_, scratch.maxima.data());
    keep_top_k(row.logits, wanted, scratch);
    std::sort(candidates.begin(), candidates.end(), before);
  }
  for (int i = 0; i < row.top; ++i) {
    const bool known = static_cast<size_t>(i) < candidates.size();
    row.top_ids[i] = known ? candidates[i].id : -1;
    row.top_logprobs[i] =
        known ? static_cast<float>(double{candidates[i].logit} - largest - log_total) : kLowest;
  }
}

}  // namespace toque
