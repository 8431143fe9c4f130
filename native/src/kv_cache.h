// The paged key/value cache.
//
// A block holds 32 consecutive tokens of one sequence for every layer and head of the model:
//
//   block = layer 0 | layer 1 | ...        layer = head 0 | head 1 | ...      head = tile | tile
//   tile  = 16 tokens of one head: K with the tokens innermost, then V with the dims innermost
//
// K lies transposed so that one vector holds 16 tokens' scores in the making: both products of attention read
// contiguous vectors, broadcast the query or the probability, and never sum across lanes. A number has 16
// bits, in a format that is the instruction set's own (attention_kernels.cc): an integer code, with a scale
// per token, or bf16 where there is a dot product for it; or it is a code of 8 bits (attention_int8.cc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory.h"

namespace toque {

constexpr int kBlockTokens = 32;
constexpr int kTileTokens = 16;
constexpr int kChunkTokens = 256;  // attention's unit of work along a context, counted from position 0

enum class KvType { k16Bit, kInt8 };

struct KvLayer {
  int heads;
  int head_dim;   // a multiple of 2
  size_t offset;  // of this layer within a block
  KvType type;
  size_t tile_bytes;  // see KvKernels

  size_t head_bytes() const { return tile_bytes * (kBlockTokens / kTileTokens); }
};

class KvCache {
 public:
  // Layers are added first, then the cache is allocated once.
  int add_layer(int heads, int head_dim, KvType type, size_t tile_bytes) {
    layers_.push_back({heads, head_dim, block_bytes_, type, tile_bytes});
    block_bytes_ += round_up(layers_.back().head_bytes() * heads, 64);
    return static_cast<int>(layers_.size()) - 1;
  }

  void allocate(int blocks) {
    blocks_ = blocks;
    memory_ = Mapping(block_bytes_ * static_cast<size_t>(blocks));
  }

  const KvLayer& layer(int index) const { return layers_[static_cast<size_t>(index)]; }
  int layers() const { return static_cast<int>(layers_.size()); }
  size_t block_bytes() const { return block_bytes_; }
  int blocks() const { return blocks_; }

  // The two tiles of one head in one block.
  uint8_t* head(int block, const KvLayer& layer, int head) const {
    return memory_.data() + static_cast<size_t>(block) * block_bytes_ + layer.offset +
           layer.head_bytes() * head;
  }

 private:
  std::vector<KvLayer> layers_;
  size_t block_bytes_ = 0;
  int blocks_ = 0;
  Mapping memory_;
};

}  // namespace toque
