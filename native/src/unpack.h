// Codes of packed integer weights (packed.h) as unsigned bytes in registers, or one by one.
#pragma once

#include "packed.h"
#include "simd.h"

namespace toque::TOQUE_ISA {

// Quad J (0..7) of one block: 16 rows x 4 k. `codes` points at the block.
template <Format F, int J>
TOQUE_INLINE u8x64 unpack_quad(const uint8_t* codes) {
  constexpr int kBits = format_shape(F).bits;
  if constexpr (kBits == 8) {
    return load_bytes(codes + 64 * J);
  } else {
    u8x64 low = load_bytes(codes + 64 * (J / 2));
    if constexpr (J % 2 == 1) low = shift_words<-4>(low);
    low = low & broadcast_byte(15);
    if constexpr (kBits == 5) {
      u8x64 bit = shift_words<4 - J>(load_bytes(codes + 256)) & broadcast_byte(16);
      return low | bit;
    } else if constexpr (kBits == 6) {
      u8x64 bits = shift_words<4 - 2 * (J % 4)>(load_bytes(codes + 256 + 64 * (J / 4))) & broadcast_byte(48);
      return low | bits;
    } else {
      return low;
    }
  }
}

// The same for a quad known at run time only.
template <Format F>
TOQUE_INLINE u8x64 unpack_quad_at(const uint8_t* codes, int j) {
  constexpr int kBits = format_shape(F).bits;
  if constexpr (kBits == 8) {
    return load_bytes(codes + 64 * j);
  } else {
    u8x64 low = shift_words_right(load_bytes(codes + 64 * (j / 2)), 4 * (j % 2)) & broadcast_byte(15);
    if constexpr (kBits == 5) {
      u8x64 bit = shift_words_right(load_bytes(codes + 256), j) & broadcast_byte(1);
      return low | shift_words<4>(bit);
    } else if constexpr (kBits == 6) {
      u8x64 bits = shift_words_right(load_bytes(codes + 256 + 64 * (j / 4)), 2 * (j % 4)) & broadcast_byte(3);
      return low | shift_words<4>(bits);
    } else {
      return low;
    }
  }
}

// Code k (0..31) of row `row` of one block.
template <Format F>
TOQUE_INLINE int code_at(const uint8_t* codes, int row, int k) {
  constexpr int kBits = format_shape(F).bits;
  const int quad = k / 4, byte = row * 4 + k % 4;
  if constexpr (kBits == 8) return codes[quad * 64 + byte];
  int code = codes[quad / 2 * 64 + byte] >> (quad % 2 * 4) & 15;
  if constexpr (kBits == 5) code |= (codes[256 + byte] >> quad & 1) << 4;
  if constexpr (kBits == 6) code |= (codes[256 + quad / 4 * 64 + byte] >> (quad % 4 * 2) & 3) << 4;
  return code;
}

}  // namespace toque::TOQUE_ISA
