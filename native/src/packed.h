// Packed weights: the "tile16" layout.
//
// A matrix of `rows` outputs x `cols` inputs is a row of tiles, each holding 16 outputs and all of K as one
// contiguous stream, so that a kernel reads memory strictly forward. Integer formats cut K into records of
// 64:
//
//   record = [f16 scale x 16 rows] per group, [f16 min x 16 rows] per group (asymmetric formats), block 0,
//   block 1 block  = codes of 16 rows x 32 k
//
// Codes are unsigned. One dword of a code plane belongs to one row and holds four consecutive k (a "quad"):
// the order of the four-way dot product instructions. Quad j of a block (k = 4j..4j+3) lies in
//
//   nibble planes (4, 5, 6 bits)   4 x 64 bytes: byte (j / 2) * 64 + row * 4 + i, low nibble for even j, high
//                                  nibble for odd j
//   bit plane (5 at 256, 3 at 128) 64 bytes: bit j of byte row * 4 + i
//   2-bit planes (2, 3; 6 at 256)   2 x 64 bytes: bits 2 (j % 4) of byte (j / 4) * 64 + row * 4 + i
//   byte planes (8)                8 x 64 bytes: byte j * 64 + row * 4 + i
//
// The 4-bit codes of IQ4 and MX4 are places in a table of 16 values (code_table), which stands for the code:
// everywhere else "code" means the value found there.
//
// A weight is scale * (code - zero) in symmetric formats and scale * code + min in asymmetric ones. In W8Z,
// whose zero is each group's own, the place of the mins is taken by -zero, a whole number, which f16 holds
// exactly to 2048. Where K is 32 more than a multiple of 64, the second block of the last record is zero and
// never read. Rows beyond `rows` are zero.
//
// Float formats keep their element type: bf16 as [K / 2][16][2] (odd K padded with zero), f16 and f32 as
// [K][16]. FP8 (e4m3) has records of 128 k, or of 32 (f8_span): 16 float scales, then bytes [128][16] or
// [32][16]; a scale is 2^8 times the weights' own, because a byte is read as the f16 of the same bits, whose
// exponent's bias is 8 more.
//
// Only plain data and force-inlined functions here: this header is compiled for several instruction sets at
// once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace toque {

constexpr int kTileRows = 16;
constexpr int kRecord = 64;  // k per record
constexpr int kGroup = 32;   // k per block, and per activation scale

enum class Format : uint8_t {
  kF32,
  kF16,
  kBF16,
  kW4,
  kW4A,
  kW5,
  kW5A,
  kW6,
  kW8,
  kW8Z,
  kIQ4,
  kMX4,
  kW2A,
  kW3,
  kF8,
  kF8Short
};

struct PackedMatrix {
  Format format;
  int32_t rows, cols;
  size_t tile_bytes;    // a multiple of 64
  const uint8_t* data;  // 64-byte aligned; at least kReadAhead bytes are readable after the last tile
};

constexpr size_t kReadAhead = 4096;

struct FormatShape {
  int bits;         // of a code as it is stored; 16 or 32 for float formats
  int group;        // k per scale; 0 for float formats
  bool asymmetric;  // mins (or zeros) lie beside the scales
  int code_bits;    // of a code as it is multiplied: more than `bits` where a table stands between
};

#define TOQUE_CONSTEXPR static constexpr inline __attribute__((always_inline))

TOQUE_CONSTEXPR FormatShape format_shape(Format format) {
  switch (format) {
    case Format::kF32:
      return {32, 0, false, 32};
    case Format::kF16:
      return {16, 0, false, 16};
    case Format::kBF16:
      return {16, 0, false, 16};
    case Format::kW4:
      return {4, 32, false, 4};
    case Format::kW4A:
      return {4, 32, true, 4};
    case Format::kW5:
      return {5, 32, false, 5};
    case Format::kW5A:
      return {5, 32, true, 5};
    case Format::kW6:
      return {6, 16, false, 6};
    case Format::kW8:
      return {8, 32, false, 8};
    case Format::kW8Z:
      return {8, 32, true, 8};
    case Format::kIQ4:
      return {4, 32, false, 8};
    case Format::kMX4:
      return {4, 32, false, 5};
    case Format::kW2A:
      return {2, 16, true, 2};
    case Format::kW3:
      return {3, 16, false, 3};
    case Format::kF8:
    case Format::kF8Short:
      return {8, 0, false, 8};
  }
  return {0, 0, false, 0};
}

TOQUE_CONSTEXPR bool is_integer(Format format) { return format_shape(format).group != 0; }
// Subtracted from every code of a symmetric format.
TOQUE_CONSTEXPR int zero_point(Format format) { return 1 << (format_shape(format).code_bits - 1); }
// Whether -zero stands where other asymmetric formats have a min.
TOQUE_CONSTEXPR bool has_zeros(Format format) { return format == Format::kW8Z; }
TOQUE_CONSTEXPR bool has_table(Format format) {
  return format_shape(format).code_bits != format_shape(format).bits;
}
TOQUE_CONSTEXPR size_t block_bytes(Format format) {
  int bits = format_shape(format).bits;
  return bits == 8 ? 512 : bits <= 3 ? 64 * (size_t)bits : 256 + 64 * (bits - 4);
}
// Bytes of the scales of one record, and of its mins where it has any.
TOQUE_CONSTEXPR size_t scale_bytes(Format format) {
  return (size_t)(kRecord / format_shape(format).group) * 32;
}
TOQUE_CONSTEXPR size_t codes_offset(Format format) {
  return scale_bytes(format) * (format_shape(format).asymmetric ? 2 : 1);
}
TOQUE_CONSTEXPR size_t record_bytes(Format format) { return codes_offset(format) + 2 * block_bytes(format); }
TOQUE_CONSTEXPR bool is_f8(Format format) { return format == Format::kF8 || format == Format::kF8Short; }
// k per record of FP8, which share a scale.
TOQUE_CONSTEXPR int f8_span(Format format) { return format == Format::kF8 ? 128 : 32; }
TOQUE_CONSTEXPR size_t f8_record_bytes(Format format) { return 64 + (size_t)f8_span(format) * kTileRows; }
TOQUE_CONSTEXPR size_t tile_bytes(Format format, int cols) {
  switch (format) {
    case Format::kF32:
      return (size_t)cols * 64;
    case Format::kF16:
      return ((size_t)cols * 32 + 63) / 64 * 64;
    case Format::kBF16:
      return ((size_t)cols + 1) / 2 * 64;
    case Format::kF8:
    case Format::kF8Short:
      return ((size_t)cols + f8_span(format) - 1) / f8_span(format) * f8_record_bytes(format);
    default:
      return ((size_t)cols + kRecord - 1) / kRecord * record_bytes(format);
  }
}
TOQUE_CONSTEXPR int tile_count(int rows) { return (rows + kTileRows - 1) / kTileRows; }
TOQUE_CONSTEXPR size_t packed_bytes(Format format, int rows, int cols) {
  return (size_t)tile_count(rows) * tile_bytes(format, cols);
}

}  // namespace toque
