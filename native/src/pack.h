// From the blocks of a model file to packed weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "packed.h"

namespace toque {

// A matrix as a file holds it: `rows` rows of `row_bytes` bytes each, in GGML's block format `type`.
struct SourceMatrix {
  std::string type;  // "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K",
                     // "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4",
                     // and "F8_E4M3" and "F8_E4M3_32" of our own (formats/e4m3.py), whose scales are those of
                     // 128 and of 32 values, and "Q8_Z" (formats/schemes/integers.py)
  const uint8_t* data;
  size_t row_bytes;
  int rows, cols;
  const int64_t* row_order;  // source row of each packed row, or null
};

// The packed format a GGML type becomes. Throws std::invalid_argument for a type that has none.
Format packed_format(const std::string& type);

// Bytes of one row of `cols` values. Throws std::invalid_argument when cols is not a whole number of blocks.
size_t source_row_bytes(const std::string& type, int cols);

// Fills tiles [first, last) of `packed` (its data is written through `tiles`). Q4_0, Q4_1, Q5_0, Q5_1, Q8_0,
// Q8_Z and the float types are exact, and IQ4_NL; K-quants and IQ4_XS round the product of their two scales
// to f16, MXFP4 its scale where f16 has no such power of two. Ranges may run on several threads.
void pack_tiles(const SourceMatrix& source, const PackedMatrix& packed, uint8_t* tiles, int first, int last);

}  // namespace toque
