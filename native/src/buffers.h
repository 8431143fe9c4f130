// What the ops of a plan read and write: the caller's batch, float rows, and packed activations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "act.h"
#include "kv_cache.h"

namespace toque {

// The caller's arrays of one step, as `StepBatch` in backends/base.py describes them.
struct StepInput {
  int n_tokens = 0;
  int n_sequences = 0;
  int n_rows = 0;
  int table_width = 0;
  const int32_t* tokens = nullptr;
  const int32_t* positions = nullptr;
  const int32_t* starts = nullptr;
  const int32_t* context = nullptr;
  const int32_t* block_tables = nullptr;
  const int32_t* rows = nullptr;
  const struct SampleRequest* sample = nullptr;  // null: logits only

  const int32_t* blocks(int sequence) const {
    return block_tables + static_cast<size_t>(sequence) * table_width;
  }
};

// Which rows a value has: one per token of the batch, or one per row whose logits are wanted.
enum class Domain { kTokens, kRows };

inline int count(const StepInput& step, Domain domain) {
  return domain == Domain::kTokens ? step.n_tokens : step.n_rows;
}

// A float32 matrix with a row per token (or wanted row). Rows are 64-byte aligned and `stride` floats apart;
// the columns past `width` are always zero.
struct Rows {
  float* data = nullptr;
  int width = 0;
  int stride = 0;
  Domain domain = Domain::kTokens;

  explicit operator bool() const { return data != nullptr; }
  float* row(int i) const { return data + static_cast<size_t>(i) * stride; }
};

// The packed input of a linear (act.h). One that a cheap row op fills (a norm) may have a copy per worker: in
// a step of a single row every worker then fills its own, which costs less than meeting at a barrier to share
// one.
struct ActBuffer {
  ActKind kind = ActKind::kF32;
  int width = 0;
  Domain domain = Domain::kTokens;
  int tile_max = 1;
  int copies = 1;               // rows per row of the domain
  std::vector<uint8_t*> codes;  // [0] holds all rows; the others one row each
  std::vector<float*> scales;
  std::vector<uint8_t*> peaks;

  explicit operator bool() const { return !codes.empty(); }
  bool is_private(const StepInput& step) const { return codes.size() > 1 && count(step, domain) == 1; }
  Act view(const StepInput& step, int worker) const {
    const size_t i = is_private(step) ? static_cast<size_t>(worker) : 0;
    return {kind, copies * count(step, domain), width, tile_max, codes[i], scales[i], peaks[i]};
  }
};

// Where an op's rows go: float rows, packed activations, or both.
struct RowSink {
  Rows rows;
  ActBuffer act;

  bool is_private(const StepInput& step) const { return !rows && act && act.is_private(step); }
};

}  // namespace toque
