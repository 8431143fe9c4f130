// A model's step as a list of ops with their buffers bound once, replayed by a team of threads.
//
// Python lowers a fused graph into a Plan when the model is loaded. A step then is one call: it checks the
// batch, prepares the ops on the calling thread, and enters one parallel region in which every worker walks
// the list. Ops share out their work through WorkQueues and meet at barriers; nothing is allocated, locked or
// looked up by name.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention_schedule.h"
#include "buffers.h"
#include "kv_cache.h"
#include "memory.h"
#include "pool.h"
#include "rope.h"

namespace toque {

// What a worker owns during a region.
struct Worker {
  int id;
  Pool& pool;
  float* scratch;  // as much as the ops asked for, its own
};

class Op {
 public:
  explicit Op(std::string label) : label_(std::move(label)) {}
  virtual ~Op() = default;
  Op(const Op&) = delete;
  Op& operator=(const Op&) = delete;

  // On the calling thread, before the region.
  virtual void prepare(const StepInput& step, int threads) = 0;
  // On every worker. Results may be read by others after the next barrier.
  virtual void run(const StepInput& step, Worker& worker) = 0;
  // True when no other worker reads what this op makes in this step, so that no barrier has to follow.
  virtual bool is_private(const StepInput&) const { return false; }

  const std::string& label() const { return label_; }

 private:
  std::string label_;
};

struct OpTime {
  std::string label;
  double seconds;
};

class Plan {
 public:
  Plan(std::shared_ptr<Pool> pool, int max_tokens, int max_rows, int max_sequences);

  Pool& pool() { return *pool_; }
  KvCache& kv() { return kv_; }
  int threads() const { return pool_->size(); }
  int max_count(Domain domain) const { return domain == Domain::kTokens ? max_tokens_ : max_rows_; }

  // A new buffer; it lives as long as the plan.
  Rows rows(int width, Domain domain, int copies = 1);
  // `per_worker`: see ActBuffer.
  ActBuffer act(ActKind kind, int width, Domain domain, int tile_max, bool per_worker, int copies = 1);
  // Every worker gets at least this much scratch.
  void need_scratch(size_t floats);

  // The schedule that all attention ops of this shape share.
  AttentionSchedule& attention_schedule(AttentionSchedule::Shape shape);
  // Tables that must cover the positions of every step.
  void use(std::shared_ptr<RopeTable> rope) { ropes_.push_back(std::move(rope)); }
  void add(std::unique_ptr<Op> op) { ops_.push_back(std::move(op)); }

  // Throws std::invalid_argument when an index of the batch is out of range: a wrong block or token id must
  // never become a wild read. Nothing has happened then.
  void step(const StepInput& step);

  // Wall time of each op since profiling was switched on, as seen by worker 0 (its barrier included).
  void set_profiling(bool on);
  std::vector<OpTime> profile() const;
  // Of the last step, for each kind of attention layer.
  std::vector<AttentionWork> attention_work() const;

  int vocab_limit = 0;              // ids the embedding table has
  int position_limit = 0x7fffffff;  // positions that a model has learned
  bool pools = false;               // steps want one row per sequence

 private:
  uint8_t* memory(size_t bytes);
  void check(const StepInput& step) const;
  void replay(const StepInput& step, int worker);

  std::shared_ptr<Pool> pool_;
  const int max_tokens_, max_rows_, max_sequences_;
  KvCache kv_;
  std::vector<Mapping> memory_;
  std::vector<std::unique_ptr<Op>> ops_;
  std::vector<std::shared_ptr<RopeTable>> ropes_;
  std::vector<std::unique_ptr<AttentionSchedule>> schedules_;
  size_t scratch_floats_ = 4096;
  std::vector<Mapping> scratch_;
  bool profiling_ = false;
  std::vector<double> seconds_;
};

}  // namespace toque
