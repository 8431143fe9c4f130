// The kernels of a step besides the matrix products, one table per instruction set.
//
// All work on single rows or tiles and know nothing of threads. Every reduction runs in an order that depends
// on the row's own length only, so a row's result is the same bits wherever and with whomever it is computed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace toque {

// One 256-token chunk of one sequence and kv head, against the query rows that share that head.
struct AttendChunk {
  const void* queries;  // [rows] prepared by prepare_query, `query_bytes` apart
  int rows;
  int head_dim;                 // a multiple of 16
  const uint8_t* const* tiles;  // the chunk's 16-token tiles
  int n_tiles;
  int n_tokens;  // tokens of the chunk that some row sees; nothing after them is read as numbers
  const uint8_t* const* next;  // tiles to prefetch for the call that follows
  int n_next;
  int n_fetched;     // so many of the tiles were the last call's next
  const int* first;  // [rows] row r sees tokens first[r] <= t < last[r] of the chunk
  const int* last;
  float softcap;   // 0: none
  float* scores;   // [rows][256] scratch
  float* maximum;  // [rows] result: the largest score, ...
  float* sum;      // [rows] ... the sum of exp(score - maximum)
  float* out;      // [rows][head_dim] ... and of exp(score - maximum) * v
};

// What depends on how the cache stores its numbers.
struct KvKernels {
  size_t (*tile_bytes)(int head_dim);  // a multiple of 64
  // Writes the key and value of one token into place `slot` of its tile.
  void (*store_kv)(uint8_t* tile, int slot, const float* k, const float* v, int head_dim);
  size_t (*query_bytes)(int head_dim);
  void (*prepare_query)(const float* q, int head_dim, float scale, void* prepared);
  void (*attend)(const AttendChunk& chunk);
};

struct StepKernels {
  // y = x / rms(x) * gain over each run of `group` elements; gain has `group` elements. x may be y.
  void (*rms_norm)(const float* x, const float* gain, int width, int group, float eps, float* y);
  void (*layer_norm)(const float* x, const float* gain, const float* bias, int width, float eps, float* y);
  void (*add)(const float* a, const float* b, int n, float* y);
  void (*scale)(const float* x, float by, int n, float* y);
  void (*softcap)(const float* x, float cap, int n, float* y);
  void (*activate)(Activation act, const float* x, int n, float* y);
  void (*activate_mul)(Activation act, const float* gate, const float* up, int n, float* y);
  int (*argmax)(const float* x, int n);  // the first of the largest
  // Columns [column, column + n) of one token into packed activations; for kI8 both are multiples of 32.
  void (*pack_columns)(const Act& act, int token, int column, const float* x, int n);

  // Rotates the first 2 * half elements of one head: (x1, x2) -> (x1 cos - x2 sin, x1 sin + x2 cos). x may be
  // y.
  void (*rotate)(const float* x, const float* cos, const float* sin, int half, int head_dim, float* y);

  KvKernels kv[2];  // by KvType
  // Folds one chunk's (maximum, sum, out) into a row's running values. Chunks come in order of position.
  void (*merge)(float* maximum, float* sum, float* out, float chunk_maximum, float chunk_sum,
                const float* chunk_out, int head_dim);
};

}  // namespace toque
