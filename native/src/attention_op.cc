#include "attention_op.h"

#include <algorithm>
#include <cstring>

namespace toque {
namespace {

constexpr float kNothingSeen = -1e30f;
constexpr int kChunkTiles = kChunkTokens / kTileTokens;

}  // namespace

// One worker's memory while it attends; rows are those of one unit.
struct AttentionOp::Scratch {
  float* head;       // [head_dim] one head on its way
  float* queries;    // [rows] prepared queries
  float* scores;     // [rows][256]
  float* chunk_out;  // [rows][head_dim], and the chunk's maximum and sum
  float* chunk_maximum;
  float* chunk_sum;
  float* out;  // [rows][head_dim], and the running maximum and sum
  float* maximum;
  float* sum;
  int* first;  // [rows] what each row sees of the chunk
  int* last;
};

AttentionOp::AttentionOp(std::string label, Plan& plan, const StepKernels& kernels, AttentionSpec spec,
                         Rows q, Rows k, Rows v, RowSink out)
    : Op(std::move(label)),
      plan_(plan),
      kernels_(kernels),
      spec_(std::move(spec)),
      q_(q),
      k_(k),
      v_(v),
      out_(std::move(out)),
      layer_(plan.kv().layer(spec_.layer)),
      kv_(kernels.kv[static_cast<int>(layer_.type)]),
      schedule_(plan.attention_schedule(
          {layer_.heads, spec_.heads / layer_.heads, layer_.head_dim, spec_.window, spec_.causal})),
      group_(spec_.heads / layer_.heads) {
  plan.need_scratch(scratch_floats());
  if (spec_.rope) plan.use(spec_.rope);
}

size_t AttentionOp::scratch_floats() const {
  const size_t rows = schedule_.max_rows(), dim = layer_.head_dim;
  return rows * (3 * dim + kChunkTokens) + dim + 6 * round_up(rows, 16);
}

AttentionOp::Scratch AttentionOp::carve(float* memory) const {
  const size_t rows = schedule_.max_rows(), dim = layer_.head_dim, few = round_up(rows, 16);
  const auto take = [&memory](size_t floats) { return std::exchange(memory, memory + floats); };
  Scratch s;
  s.scores = take(rows * kChunkTokens);
  s.queries = take(rows * dim);  // at most four bytes an element
  s.chunk_out = take(rows * dim);
  s.out = take(rows * dim);
  s.head = take(dim);
  s.chunk_maximum = take(few);
  s.chunk_sum = take(few);
  s.maximum = take(few);
  s.sum = take(few);
  s.first = reinterpret_cast<int*>(take(few));
  s.last = reinterpret_cast<int*>(take(few));
  return s;
}

void AttentionOp::prepare(const StepInput&, int threads) {
  const auto size = [](const auto& list) { return static_cast<int>(list.size()); };
  writes_.reset(size(schedule_.writes()), 2 * threads);
  units_.reset(size(schedule_.units()), 8 * threads);  // small claims: the first units are the heaviest
  folds_.reset(size(schedule_.folds()), 2 * threads);
}

void AttentionOp::run(const StepInput& step, Worker& worker) {
  const Scratch scratch = carve(worker.scratch);
  if (!schedule_.one_token_each()) {
    for (auto range = writes_.claim(); !range.empty(); range = writes_.claim()) {
      for (int i = range.begin; i < range.end; ++i) {
        const KvWrite& write = schedule_.writes()[i];
        for (int token = write.token_begin; token < write.token_end; ++token) {
          for (int head = 0; head < layer_.heads; ++head)
            write_head(step, write.sequence, token, head, scratch.head);
        }
      }
    }
    worker.pool.barrier();
  }
  for (auto range = units_.claim(); !range.empty(); range = units_.claim()) {
    for (int i = range.begin; i < range.end; ++i) {
      const AttentionUnit& unit = schedule_.units()[i];
      if (schedule_.one_token_each() && unit.chunk_end * kChunkTokens >= step.context[unit.sequence]) {
        write_head(step, unit.sequence, unit.token_begin, unit.head, scratch.head);
      }
      attend(step, unit, i + 1 < range.end ? &schedule_.units()[i + 1] : nullptr, scratch);
    }
  }
  if (schedule_.folds().empty()) return;
  worker.pool.barrier();
  for (auto range = folds_.claim(); !range.empty(); range = folds_.claim()) {
    for (int i = range.begin; i < range.end; ++i) fold(step, schedule_.folds()[i], scratch);
  }
}

uint8_t* AttentionOp::kv_tile(const StepInput& step, int sequence, int position, int head) const {
  const int block = step.blocks(sequence)[position / kBlockTokens];
  const int tile = position % kBlockTokens / kTileTokens;
  return plan_.kv().head(block, layer_, head) + layer_.tile_bytes * tile;
}

// One head of q or k, normalized and rotated as the model asks.
const float* AttentionOp::prepare_head(const float* x, const std::vector<float>& norm, int position,
                                       float* scratch) const {
  const int dim = layer_.head_dim;
  if (!norm.empty()) {
    kernels_.rms_norm(x, norm.data(), dim, dim, spec_.norm_eps, scratch);
    x = scratch;
  }
  if (spec_.rope) {
    kernels_.rotate(x, spec_.rope->cos(position), spec_.rope->sin(position), spec_.rope->half(), dim,
                    scratch);
    x = scratch;
  }
  return x;
}

void AttentionOp::write_head(const StepInput& step, int sequence, int token, int head, float* scratch) const {
  const int position = step.positions[token];
  const size_t column = static_cast<size_t>(head) * layer_.head_dim;
  const float* key = prepare_head(k_.row(token) + column, spec_.k_norm, position, scratch);
  kv_.store_kv(kv_tile(step, sequence, position, head), position % kTileTokens, key, v_.row(token) + column,
               layer_.head_dim);
}

// The tiles of a chunk up to the last token that the unit sees; returns how many tokens that are.
int AttentionOp::gather_tiles(const StepInput& step, const AttentionUnit& unit, int chunk,
                              const uint8_t** tiles) const {
  const int begin = chunk * kChunkTokens;
  const int seen = schedule_.last_seen(step.positions[unit.token_end - 1], step.context[unit.sequence]);
  const int tokens = std::min(seen - begin, kChunkTokens);
  for (int tile = 0; tile * kTileTokens < tokens; ++tile) {
    tiles[tile] = kv_tile(step, unit.sequence, begin + tile * kTileTokens, unit.head);
  }
  return tokens;
}

// Row r of a unit is query head r % group of token r / group.
void AttentionOp::load_queries(const StepInput& step, const AttentionUnit& unit, const Scratch& s) const {
  const int dim = layer_.head_dim;
  const size_t bytes = kv_.query_bytes(dim);
  auto* out = reinterpret_cast<uint8_t*>(s.queries);
  for (int token = unit.token_begin; token < unit.token_end; ++token) {
    for (int g = 0; g < group_; ++g, out += bytes) {
      const float* x = q_.row(token) + static_cast<size_t>(unit.head * group_ + g) * dim;
      kv_.prepare_query(prepare_head(x, spec_.q_norm, step.positions[token], s.head), dim, spec_.scale, out);
    }
  }
}

void AttentionOp::attend(const StepInput& step, const AttentionUnit& unit, const AttentionUnit* next,
                         const Scratch& s) const {
  const int dim = layer_.head_dim, rows = (unit.token_end - unit.token_begin) * group_;
  const int context = step.context[unit.sequence];
  load_queries(step, unit, s);
  std::fill_n(s.maximum, rows, kNothingSeen);
  std::fill_n(s.sum, rows, 0.0f);
  std::fill_n(s.out, static_cast<size_t>(rows) * dim, 0.0f);

  const uint8_t* tiles[2][kChunkTiles];
  int tokens[2];
  tokens[0] = gather_tiles(step, unit, unit.chunk_begin, tiles[0]);
  for (int chunk = unit.chunk_begin, turn = 0; chunk < unit.chunk_end; ++chunk, turn ^= 1) {
    // What comes after this chunk is fetched while it is worked on.
    tokens[turn ^ 1] = 0;
    if (chunk + 1 < unit.chunk_end) {
      tokens[turn ^ 1] = gather_tiles(step, unit, chunk + 1, tiles[turn ^ 1]);
    } else if (next != nullptr) {
      tokens[turn ^ 1] = gather_tiles(step, *next, next->chunk_begin, tiles[turn ^ 1]);
    }
    const int base = chunk * kChunkTokens;
    for (int r = 0; r < rows; ++r) {
      const int position = step.positions[unit.token_begin + r / group_];
      s.first[r] = std::clamp(schedule_.first_seen(position) - base, 0, kChunkTokens);
      s.last[r] = std::clamp(schedule_.last_seen(position, context) - base, 0, kChunkTokens);
    }
    const auto tile_count = [](int n) { return (n + kTileTokens - 1) / kTileTokens; };
    kv_.attend({.queries = s.queries,
                .rows = rows,
                .head_dim = dim,
                .tiles = tiles[turn],
                .n_tiles = tile_count(tokens[turn]),
                .n_tokens = tokens[turn],
                .next = tiles[turn ^ 1],
                .n_next = tile_count(tokens[turn ^ 1]),
                .first = s.first,
                .last = s.last,
                .softcap = spec_.softcap,
                .scores = s.scores,
                .maximum = s.chunk_maximum,
                .sum = s.chunk_sum,
                .out = s.chunk_out});
    if (unit.partial < 0) {
      for (int r = 0; r < rows; ++r) {
        kernels_.merge(s.maximum + r, s.sum + r, s.out + static_cast<size_t>(r) * dim, s.chunk_maximum[r],
                       s.chunk_sum[r], s.chunk_out + static_cast<size_t>(r) * dim, dim);
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    if (unit.partial < 0) {
      emit(step, unit, r, s.sum[r], s.out + static_cast<size_t>(r) * dim);
      continue;
    }
    float* partial = schedule_.partial(unit.partial + r);
    std::memcpy(partial, s.chunk_out + static_cast<size_t>(r) * dim, sizeof(float) * dim);
    partial[dim] = s.chunk_maximum[r];
    partial[dim + 1] = s.chunk_sum[r];
  }
}

void AttentionOp::fold(const StepInput& step, const AttentionUnit& unit, const Scratch& s) const {
  const int dim = layer_.head_dim, rows = (unit.token_end - unit.token_begin) * group_;
  for (int r = 0; r < rows; ++r) {
    float maximum = kNothingSeen, sum = 0.0f;
    std::fill_n(s.out, dim, 0.0f);
    for (int chunk = unit.chunk_begin; chunk < unit.chunk_end; ++chunk) {
      const float* partial = schedule_.partial(unit.partial + (chunk - unit.chunk_begin) * rows + r);
      kernels_.merge(&maximum, &sum, s.out, partial[dim], partial[dim + 1], partial, dim);
    }
    emit(step, unit, r, sum, s.out);
  }
}

void AttentionOp::emit(const StepInput& step, const AttentionUnit& unit, int row, float sum,
                       float* out) const {
  const int dim = layer_.head_dim;
  const int token = unit.token_begin + row / group_;
  const int column = (unit.head * group_ + row % group_) * dim;
  float* y = out_.rows ? out_.rows.row(token) + column : out;
  kernels_.scale(out, 1.0f / sum, dim, y);
  if (out_.act) kernels_.pack_columns(out_.act.view(step, 0), token, column, y, dim);
}

}  // namespace toque
