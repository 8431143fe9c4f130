// Codes of packed integer weights (packed.h) as unsigned bytes in registers, or one by one.
#pragma once

#include "packed.h"
#include "simd.h"

namespace toque::TOQUE_ISA {

// The values of the 16 codes, plus the format's zero point: IQ4_NL's, and twice those of e2m1.
alignas(16) static const uint8_t kIQ4Codes[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                  129, 141, 153, 166, 181, 197, 217, 241};
alignas(16) static const uint8_t kMX4Codes[16] = {16, 17, 18, 19, 20, 22, 24, 28,
                                                  16, 15, 14, 13, 12, 10, 8,  4};
TOQUE_CONSTEXPR const uint8_t* code_table(Format format) {
  return format == Format::kIQ4 ? kIQ4Codes : kMX4Codes;
}
template <Format F>
TOQUE_INLINE u8x64 from_table(u8x64 codes) {
  if constexpr (has_table(F)) return lookup(broadcast16(code_table(F)), codes);
  return codes;
}

// Quad J (0..7) of one block: 16 rows x 4 k. `codes` points at the block.
template <Format F, int J>
TOQUE_INLINE u8x64 unpack_quad(const uint8_t* codes) {
  constexpr int kBits = format_shape(F).bits;
  if constexpr (kBits == 8) {
    return load_bytes(codes + 64 * J);
  } else if constexpr (kBits <= 3) {
    const u8x64 low = shift_words<-2 * (J % 4)>(load_bytes(codes + 64 * (J / 4))) & broadcast_byte(3);
    if constexpr (kBits == 2) return low;
    return low | (shift_words<2 - J>(load_bytes(codes + 128)) & broadcast_byte(4));
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
      return from_table<F>(low);
    }
  }
}

// The same for a quad known at run time only.
template <Format F>
TOQUE_INLINE u8x64 unpack_quad_at(const uint8_t* codes, int j) {
  constexpr int kBits = format_shape(F).bits;
  if constexpr (kBits == 8) {
    return load_bytes(codes + 64 * j);
  } else if constexpr (kBits <= 3) {
    const u8x64 low = shift_words_right(load_bytes(codes + 64 * (j / 4)), 2 * (j % 4)) & broadcast_byte(3);
    if constexpr (kBits == 2) return low;
    return low | shift_words<2>(shift_words_right(load_bytes(codes + 128), j) & broadcast_byte(1));
  } else {
    u8x64 low = shift_words_right(load_bytes(codes + 64 * (j / 2)), 4 * (j % 2)) & broadcast_byte(15);
    if constexpr (kBits == 5) {
      u8x64 bit = shift_words_right(load_bytes(codes + 256), j) & broadcast_byte(1);
      return low | shift_words<4>(bit);
    } else if constexpr (kBits == 6) {
      u8x64 bits = shift_words_right(load_bytes(codes + 256 + 64 * (j / 4)), 2 * (j % 4)) & broadcast_byte(3);
      return low | shift_words<4>(bits);
    } else {
      return from_table<F>(low);
    }
  }
}

// Code k (0..31) of row `row` of one block.
template <Format F>
TOQUE_INLINE int code_at(const uint8_t* codes, int row, int k) {
  constexpr int kBits = format_shape(F).bits;
  const int quad = k / 4, byte = row * 4 + k % 4;
  if constexpr (kBits == 8) return codes[quad * 64 + byte];
  if constexpr (kBits <= 3) {
    const int low = codes[quad / 4 * 64 + byte] >> (quad % 4 * 2) & 3;
    return kBits == 2 ? low : low | (codes[128 + byte] >> quad & 1) << 2;
  }
  int code = codes[quad / 2 * 64 + byte] >> (quad % 2 * 4) & 15;
  if constexpr (kBits == 5) code |= (codes[256 + byte] >> quad & 1) << 4;
  if constexpr (kBits == 6) code |= (codes[256 + quad / 4 * 64 + byte] >> (quad % 4 * 2) & 3) << 4;
  return has_table(F) ? code_table(F)[code] : code;
}

}  // namespace toque::TOQUE_ISA
