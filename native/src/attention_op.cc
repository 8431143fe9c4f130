#include "attention_op.h"

#include <algorithm>
#include <cstring>

namespace toque {
namespace {

constexpr float kNothingSeen = -1e30f;
constexpr int kChunkTiles = kChunkTokens / kTileTokens;

}  // namespace

// One chunk that some or all members of a unit attend, in the blocks of the first of them.
struct AttentionOp::Piece {
  int member_begin, member_end;
  int row, rows;  // of the unit
  int chunk;
};

// One worker's memory while it attends; rows are those of one unit, or of one piece of it.
struct AttentionOp::Scratch {
  float* head;       // [head_dim] one head on its way
  float* queries;    // [rows] prepared queries
  float* scores;     // [rows][256] of a piece
  float* chunk_out;  // [rows][head_dim] of a piece, and its maximum and sum
  float* chunk_maximum;
  float* chunk_sum;
  float* out;  // [rows][head_dim], and the running maximum and sum
  float* maximum;
  float* sum;
  int* first;  // [rows] what each row of a piece sees of the chunk
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
  // A claim is made while the last unit of the one before is under way, so that its first unit is fetched,
  // too.
  int fetched = 0;
  for (auto range = units_.claim(), following = range; !range.empty(); range = following) {
    for (int i = range.begin; i < range.end; ++i) {
      const bool last = i + 1 == range.end;
      if (last) following = units_.claim();
      const AttentionUnit* next =
          last && following.empty() ? nullptr : &schedule_.units()[last ? following.begin : i + 1];
      const AttentionUnit& unit = schedule_.units()[i];
      if (schedule_.one_token_each()) write_members(step, unit, scratch.head);
      fetched = attend(step, unit, next, fetched, scratch);
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

AttentionOp::Piece AttentionOp::first_piece(const AttentionUnit& unit) const {
  Piece piece{unit.member_begin, unit.member_end, 0, 0, unit.chunk_begin};
  for (int m = unit.member_begin; m < unit.member_end; ++m)
    piece.rows += schedule_.members()[m].tokens() * group_;
  return piece;
}

// The unit's next piece: the rest of what all its members attend, then the rest of each. False: there is
// none.
bool AttentionOp::advance(const AttentionUnit& unit, Piece& piece) const {
  const auto& members = schedule_.members();
  ++piece.chunk;
  if (piece.chunk < unit.chunk_end) return true;
  if (unit.partial >= 0) return false;
  int member = piece.member_begin, row = piece.row;
  if (piece.chunk > unit.chunk_end && piece.chunk >= members[member].chunk_end) {
    row += piece.rows;
    ++member;
    piece.chunk = unit.chunk_end;
  }
  for (; member < unit.member_end; ++member) {
    const int rows = members[member].tokens() * group_;
    if (piece.chunk < members[member].chunk_end) {
      piece = {member, member + 1, row, rows, piece.chunk};
      return true;
    }
    row += rows;
    piece.chunk = unit.chunk_end;
  }
  return false;
}

// The tiles of a chunk up to the last token that one of the piece's rows sees; returns how many tokens that
// is.
int AttentionOp::gather_tiles(const StepInput& step, const AttentionUnit& unit, const Piece& piece,
                              const uint8_t** tiles) const {
  const int begin = piece.chunk * kChunkTokens;
  // What several attend together is a whole chunk; what one attends alone, its last token sees most of.
  const AttentionMember& last = schedule_.members()[piece.member_end - 1];
  const int seen = schedule_.last_seen(step.positions[last.token_end - 1], step.context[last.sequence]);
  const int tokens = std::min(seen - begin, kChunkTokens);
  const int sequence = schedule_.members()[piece.member_begin].sequence;
  for (int tile = 0; tile * kTileTokens < tokens; ++tile) {
    tiles[tile] = kv_tile(step, sequence, begin + tile * kTileTokens, unit.head);
  }
  return tokens;
}

// A unit's rows: member by member, token by token, each with the query heads that share the kv head.
void AttentionOp::load_queries(const StepInput& step, const AttentionUnit& unit, const Scratch& s) const {
  const int dim = layer_.head_dim;
  const size_t bytes = kv_.query_bytes(dim);
  auto* out = reinterpret_cast<uint8_t*>(s.queries);
  for (int m = unit.member_begin; m < unit.member_end; ++m) {
    const AttentionMember& member = schedule_.members()[m];
    for (int token = member.token_begin; token < member.token_end; ++token) {
      for (int g = 0; g < group_; ++g, out += bytes) {
        const float* x = q_.row(token) + static_cast<size_t>(unit.head * group_ + g) * dim;
        kv_.prepare_query(prepare_head(x, spec_.q_norm, step.positions[token], s.head), dim, spec_.scale,
                          out);
      }
    }
  }
}

// What each row of a piece sees of its chunk.
void AttentionOp::look(const StepInput& step, const Piece& piece, const Scratch& s) const {
  const int base = piece.chunk * kChunkTokens;
  for (int m = piece.member_begin, r = 0; m < piece.member_end; ++m) {
    const AttentionMember& member = schedule_.members()[m];
    for (int token = member.token_begin; token < member.token_end; ++token) {
      const int position = step.positions[token];
      const int last = schedule_.last_seen(position, step.context[member.sequence]);
      for (int g = 0; g < group_; ++g, ++r) {
        s.first[r] = std::clamp(schedule_.first_seen(position) - base, 0, kChunkTokens);
        s.last[r] = std::clamp(last - base, 0, kChunkTokens);
      }
    }
  }
}

// `fetched` and the result: so many tiles of the unit's first chunk, and of the next one's, have been
// fetched.
int AttentionOp::attend(const StepInput& step, const AttentionUnit& unit, const AttentionUnit* next,
                        int fetched, const Scratch& s) const {
  const int dim = layer_.head_dim;
  const auto row_of = [dim](float* rows, int r) { return rows + static_cast<size_t>(r) * dim; };
  Piece piece = first_piece(unit), following = piece;
  const int rows = piece.rows;
  load_queries(step, unit, s);
  std::fill_n(s.maximum, rows, kNothingSeen);
  std::fill_n(s.sum, rows, 0.0f);
  std::fill_n(s.out, static_cast<size_t>(rows) * dim, 0.0f);

  const uint8_t* tiles[2][kChunkTiles];
  int tokens[2];
  tokens[0] = gather_tiles(step, unit, piece, tiles[0]);
  bool more = true;
  for (int turn = 0; more; turn ^= 1, piece = following) {
    // What comes after this piece is fetched while it is worked on.
    more = advance(unit, following);
    tokens[turn ^ 1] = 0;
    if (more) {
      tokens[turn ^ 1] = gather_tiles(step, unit, following, tiles[turn ^ 1]);
    } else if (next != nullptr) {
      tokens[turn ^ 1] = gather_tiles(step, *next, first_piece(*next), tiles[turn ^ 1]);
    }
    look(step, piece, s);
    const auto tile_count = [](int n) { return (n + kTileTokens - 1) / kTileTokens; };
    kv_.attend({.queries = reinterpret_cast<const uint8_t*>(s.queries) + kv_.query_bytes(dim) * piece.row,
                .rows = piece.rows,
                .head_dim = dim,
                .tiles = tiles[turn],
                .n_tiles = tile_count(tokens[turn]),
                .n_tokens = tokens[turn],
                .next = tiles[turn ^ 1],
                .n_next = tile_count(tokens[turn ^ 1]),
                .n_fetched = fetched,
                .first = s.first,
                .last = s.last,
                .softcap = spec_.softcap,
                .scores = s.scores,
                .maximum = s.chunk_maximum,
                .sum = s.chunk_sum,
                .out = s.chunk_out});
    fetched = std::min(tile_count(tokens[0]), tile_count(tokens[1]));
    if (unit.partial >= 0) break;
    for (int r = 0, row = piece.row; r < piece.rows; ++r, ++row) {
      kernels_.merge(s.maximum + row, s.sum + row, row_of(s.out, row), s.chunk_maximum[r], s.chunk_sum[r],
                     row_of(s.chunk_out, r), dim);
    }
  }
  if (unit.partial >= 0) {
    for (int r = 0; r < rows; ++r) {
      float* partial = schedule_.partial(unit.partial + r);
      std::memcpy(partial, row_of(s.chunk_out, r), sizeof(float) * dim);
      partial[dim] = s.chunk_maximum[r];
      partial[dim + 1] = s.chunk_sum[r];
    }
    return fetched;
  }
  for (int m = unit.member_begin, row = 0; m < unit.member_end; ++m) {
    const AttentionMember& member = schedule_.members()[m];
    for (int token = member.token_begin; token < member.token_end; ++token) {
      for (int g = 0; g < group_; ++g, ++row)
        emit(step, token, unit.head * group_ + g, s.sum[row], row_of(s.out, row));
    }
  }
  return fetched;
}

// Of members with one token each, those whose last chunk is this unit's.
void AttentionOp::write_members(const StepInput& step, const AttentionUnit& unit, float* scratch) const {
  for (int m = unit.member_begin; m < unit.member_end; ++m) {
    const AttentionMember& member = schedule_.members()[m];
    if (unit.partial < 0 || unit.chunk_end >= member.chunk_end)
      write_head(step, member.sequence, member.token_begin, unit.head, scratch);
  }
}

void AttentionOp::fold(const StepInput& step, const AttentionFold& fold, const Scratch& s) const {
  const AttentionMember& member = schedule_.members()[fold.member];
  const int dim = layer_.head_dim, rows = member.tokens() * group_;
  for (int r = 0; r < rows; ++r) {
    float maximum = kNothingSeen, sum = 0.0f;
    std::fill_n(s.out, dim, 0.0f);
    const auto merge = [&](int row) {
      const float* partial = schedule_.partial(row);
      kernels_.merge(&maximum, &sum, s.out, partial[dim], partial[dim + 1], partial, dim);
    };
    for (int chunk = fold.chunk_begin; chunk < fold.chunk_end; ++chunk)
      merge(fold.together + (chunk - fold.chunk_begin) * fold.together_stride + r);
    for (int chunk = fold.chunk_end; chunk < member.chunk_end; ++chunk)
      merge(fold.alone + (chunk - fold.chunk_end) * rows + r);
    emit(step, member.token_begin + r / group_, fold.head * group_ + r % group_, sum, s.out);
  }
}

void AttentionOp::emit(const StepInput& step, int token, int head, float sum, float* out) const {
  const int dim = layer_.head_dim, column = head * dim;
  float* y = out_.rows ? out_.rows.row(token) + column : out;
  kernels_.scale(out, 1.0f / sum, dim, y);
  if (out_.act) kernels_.pack_columns(out_.act.view(step, 0), token, column, y, dim);
}

}  // namespace toque
