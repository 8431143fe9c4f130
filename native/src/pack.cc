#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#define TOQUE_INLINE static inline __attribute__((always_inline))

namespace toque {

namespace {

struct BlockType {
  const char* name;
  Format format;
  int values;  // per block
  size_t bytes;
};

constexpr BlockType kTypes[] = {
    {"F32", Format::kF32, 1, 4},
    {"F16", Format::kF16, 1, 2},
    {"BF16", Format::kBF16, 1, 2},
    {"Q4_0", Format::kW4, 32, 18},
    {"Q4_1", Format::kW4A, 32, 20},
    {"Q5_0", Format::kW5, 32, 22},
    {"Q5_1", Format::kW5A, 32, 24},
    {"Q8_0", Format::kW8, 32, 34},
    {"Q8_Z", Format::kW8Z, 32, 36},
    {"Q4_K", Format::kW4A, 256, 144},
    {"Q5_K", Format::kW5A, 256, 176},
    {"Q6_K", Format::kW6, 256, 210},
    {"IQ4_NL", Format::kIQ4, 32, 18},
    {"IQ4_XS", Format::kIQ4, 256, 136},
    {"MXFP4", Format::kMX4, 32, 17},
    {"Q2_K", Format::kW2A, 256, 84},
    {"Q3_K", Format::kW3, 256, 110},
    {"F8_E4M3", Format::kF8, 32, 36},
    {"F8_E4M3_32", Format::kF8Short, 32, 36},
};

const BlockType& block_type(const std::string& name) {
  for (const BlockType& type : kTypes) {
    if (name == type.name) return type;
  }
  std::string known;
  for (const BlockType& type : kTypes) known += (known.empty() ? "" : ", ") + std::string(type.name);
  throw std::invalid_argument("weight type " + name + " has no packed format; known: " + known);
}

TOQUE_INLINE uint16_t read_u16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

TOQUE_INLINE float from_bits(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

TOQUE_INLINE uint32_t to_bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

TOQUE_INLINE float f16_to_f32(uint16_t h) {
  uint32_t sign = (h & 0x8000u) << 16, magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00) return from_bits(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
  if (magnitude >= 0x400) return from_bits(sign | ((magnitude << 13) + 0x38000000u));
  return from_bits(sign | to_bits(static_cast<float>(magnitude) * 5.9604644775390625e-8f));
}

// To nearest even. Computes all cases and chooses, since the products of scales lie on both sides of f16's
// smallest normal number, and a mispredicted branch costs as much as the rest of a block.
TOQUE_INLINE uint16_t f32_to_f16(float f) {
  const uint32_t bits = to_bits(f), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  // Subnormal: let the float adder round to a multiple of 2^-24.
  const uint32_t small = to_bits(from_bits(std::min(magnitude, 0x38800000u)) + 0.5f) - 0x3f000000;
  const uint32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  uint32_t half = magnitude < 0x38800000 ? small : normal;
  half = magnitude >= 0x477ff000 ? 0x7c00 : half;
  half = magnitude > 0x7f800000 ? 0x7e00 : half;
  return static_cast<uint16_t>(sign | half);
}

// 32 weights of one row on their way into a packed block: unsigned codes in order of k, four to a quad, the
// first in its lowest byte (the machine is little-endian, as the files are), and the scale and min of each 16
// (a format with one scale per 32 uses the first). All readers work on whole quads.
struct RowBlock {
  uint32_t quads[8];
  uint16_t scales[2], mins[2];
};

constexpr uint32_t kBits1 = 0x01010101, kBits2 = 0x03030303, kBits4 = 0x0f0f0f0f;

TOQUE_INLINE uint32_t read_quad(const uint8_t* p, int quad) {
  uint32_t v;
  std::memcpy(&v, p + 4 * quad, 4);
  return v;
}

// The lowest four bits, each as the lowest bit of a byte.
TOQUE_INLINE uint32_t spread_bits(uint32_t bits) { return (bits & 15) * 0x00204081 & kBits1; }

TOQUE_INLINE void read_q4(const uint8_t* nibbles, RowBlock& out) {
  for (int i = 0; i < 4; ++i) {
    const uint32_t quad = read_quad(nibbles, i);
    out.quads[i] = quad & kBits4;
    out.quads[4 + i] = quad >> 4 & kBits4;
  }
}

TOQUE_INLINE void read_q5(const uint8_t* high_bits, const uint8_t* nibbles, RowBlock& out) {
  read_q4(nibbles, out);
  const uint32_t high = read_quad(high_bits, 0);
  for (int i = 0; i < 8; ++i) out.quads[i] |= spread_bits(high >> 4 * i) << 4;
}

TOQUE_INLINE void read_q8_0(const uint8_t* block, RowBlock& out) {
  out.scales[0] = read_u16(block);
  for (int i = 0; i < 8; ++i) out.quads[i] = read_quad(block + 2, i) ^ 0x80808080u;
}

// Ours, of checkpoints with 8-bit codes and zero points: scale, zero, codes as they are.
TOQUE_INLINE void read_q8_z(const uint8_t* block, RowBlock& out) {
  out.scales[0] = read_u16(block);
  out.mins[0] = read_u16(block + 2) ^ 0x8000;
  for (int i = 0; i < 8; ++i) out.quads[i] = read_quad(block + 4, i);
}

// Scale and min of sub-block `j` (0..7), six bits each, of the 12 bytes that Q4_K and Q5_K share.
TOQUE_INLINE void k_scale_min(const uint8_t* q, int j, int& scale, int& min) {
  if (j < 4) {
    scale = q[j] & 63;
    min = q[j + 4] & 63;
  } else {
    scale = (q[j + 4] & 15) | (q[j - 4] >> 6) << 4;
    min = q[j + 4] >> 4 | (q[j] >> 6) << 4;
  }
}

TOQUE_INLINE void k_scales(const uint8_t* block, int j, RowBlock& out) {
  int scale, min;
  k_scale_min(block + 4, j, scale, min);
  out.scales[0] = f32_to_f16(f16_to_f32(read_u16(block)) * static_cast<float>(scale));
  out.mins[0] = f32_to_f16(-f16_to_f32(read_u16(block + 2)) * static_cast<float>(min));
}

TOQUE_INLINE void read_q4_k(const uint8_t* block, int j, RowBlock& out) {
  k_scales(block, j, out);
  const uint8_t* q = block + 16 + 32 * (j / 2);
  const int shift = j % 2 * 4;
  for (int i = 0; i < 8; ++i) out.quads[i] = read_quad(q, i) >> shift & kBits4;
}

TOQUE_INLINE void read_q5_k(const uint8_t* block, int j, RowBlock& out) {
  k_scales(block, j, out);
  const uint8_t *high = block + 16, *q = block + 48 + 32 * (j / 2);
  const int shift = j % 2 * 4;
  for (int i = 0; i < 8; ++i) {
    out.quads[i] = (read_quad(q, i) >> shift & kBits4) | (read_quad(high, i) >> j & kBits1) << 4;
  }
}

TOQUE_INLINE void read_q6_k(const uint8_t* block, int j, RowBlock& out) {
  // Two halves of 128; in each, four runs of 32: low nibbles of ql[0..31], ql[32..63], then their high
  // nibbles.
  const int half = j / 4, run = j % 4;
  const uint8_t *ql = block + 64 * half + 32 * (run % 2), *qh = block + 128 + 32 * half;
  const int8_t* sub_scales = reinterpret_cast<const int8_t*>(block + 192 + 8 * half + 2 * run);
  const float d = f16_to_f32(read_u16(block + 208));
  for (int i = 0; i < 2; ++i) out.scales[i] = f32_to_f16(d * static_cast<float>(sub_scales[i]));
  for (int i = 0; i < 8; ++i) {
    const uint32_t high = read_quad(qh, i) >> (2 * run) & kBits2;
    out.quads[i] = (read_quad(ql, i) >> (run / 2 * 4) & kBits4) | high << 4;
  }
}

TOQUE_INLINE void read_q2_k(const uint8_t* block, int j, RowBlock& out) {
  const float d = f16_to_f32(read_u16(block + 80)), d_min = f16_to_f32(read_u16(block + 82));
  for (int i = 0; i < 2; ++i) {
    const uint8_t both = block[2 * j + i];
    out.scales[i] = f32_to_f16(d * static_cast<float>(both & 15));
    out.mins[i] = f32_to_f16(-d_min * static_cast<float>(both >> 4));
  }
  const uint8_t* q = block + 16 + 32 * (j / 4);
  for (int i = 0; i < 8; ++i) out.quads[i] = read_quad(q, i) >> (2 * (j % 4)) & kBits2;
}

// 8 sub-blocks of 32, as in Q2_K; a mask of 32 bytes, bit j for sub-block j, adds 4; scales of 16 have six
// bits: low nibbles of bytes 0..7 then high nibbles, and the upper two bits of all in bytes 8..11.
TOQUE_INLINE void read_q3_k(const uint8_t* block, int j, RowBlock& out) {
  const uint8_t *mask = block, *q = block + 32 + 32 * (j / 4), *packed = block + 96;
  const float d = f16_to_f32(read_u16(block + 108));
  for (int i = 0; i < 2; ++i) {
    const int n = 2 * j + i, low = packed[n % 8] >> (n / 8 * 4) & 15,
              high = packed[8 + n % 4] >> (n / 4 * 2) & 3;
    out.scales[i] = f32_to_f16(d * static_cast<float>((low | high << 4) - 32));
  }
  for (int i = 0; i < 8; ++i) {
    out.quads[i] = (read_quad(q, i) >> (2 * (j % 4)) & kBits2) | (read_quad(mask, i) >> j & kBits1) << 2;
  }
}

TOQUE_INLINE void read_iq4_xs(const uint8_t* block, int j, RowBlock& out) {
  const int low = block[4 + j / 2] >> (j % 2 * 4) & 15, high = read_u16(block + 2) >> (2 * j) & 3;
  out.scales[0] = f32_to_f16(f16_to_f32(read_u16(block)) * static_cast<float>((low | high << 4) - 32));
  read_q4(block + 8 + 16 * j, out);
}

// The scale is a power of two, e8m0, and halved because the table's values are doubled.
TOQUE_INLINE void read_mxfp4(const uint8_t* block, RowBlock& out) {
  out.scales[0] = f32_to_f16(std::ldexp(1.0f, static_cast<int>(block[0]) - 128));
  read_q4(block + 1, out);
}

// Weights 32 * block .. 32 * block + 31 of a source row in blocks of `values` weights and `bytes` bytes.
template <Format format, int values, size_t bytes>
TOQUE_INLINE void read_block(const uint8_t* row, int block, RowBlock& out) {
  const uint8_t* p = row + static_cast<size_t>(block / (values / 32)) * bytes;
  const int sub = block % (values / 32);
  if constexpr (values == 256) {
    if constexpr (format == Format::kW4A) read_q4_k(p, sub, out);
    if constexpr (format == Format::kW5A) read_q5_k(p, sub, out);
    if constexpr (format == Format::kW6) read_q6_k(p, sub, out);
    if constexpr (format == Format::kW3) read_q3_k(p, sub, out);
    if constexpr (format == Format::kW2A) read_q2_k(p, sub, out);
    if constexpr (format == Format::kIQ4) read_iq4_xs(p, sub, out);
  } else if constexpr (format == Format::kMX4) {
    read_mxfp4(p, out);
  } else if constexpr (format == Format::kW8) {
    read_q8_0(p, out);
  } else if constexpr (format == Format::kW8Z) {
    read_q8_z(p, out);
  } else {
    constexpr int head = format_shape(format).asymmetric ? 4 : 2;
    out.scales[0] = read_u16(p);
    if constexpr (head == 4) out.mins[0] = read_u16(p + 2);
    if constexpr (format_shape(format).bits == 5) {
      read_q5(p + head, p + head + 4, out);
    } else {
      read_q4(p + head, out);
    }
  }
}

// Row `row` of a packed block: its quads to their planes.
template <int bits>
TOQUE_INLINE void write_codes(const uint32_t (&quads)[8], uint8_t* block, int row) {
  auto* planes = reinterpret_cast<uint32_t*>(block) + row;  // dword `row` of each 64-byte plane
  if constexpr (bits == 8) {
    for (int j = 0; j < 8; ++j) planes[16 * j] = quads[j];
    return;
  }
  if constexpr (bits <= 3) {
    for (int j = 0; j < 8; ++j) {
      planes[16 * (j / 4)] |= (quads[j] & kBits2) << 2 * (j % 4);
      if (bits == 3) planes[32] |= (quads[j] >> 2 & kBits1) << j;
    }
    return;
  }
  for (int j = 0; j < 4; ++j) planes[16 * j] = (quads[2 * j] & kBits4) | (quads[2 * j + 1] & kBits4) << 4;
  if (bits == 5) {
    uint32_t plane = 0;
    for (int j = 0; j < 8; ++j) plane |= (quads[j] >> 4 & kBits1) << j;
    planes[64] = plane;
  } else if (bits == 6) {
    for (int half = 0; half < 2; ++half) {
      uint32_t plane = 0;
      for (int j = 0; j < 4; ++j) plane |= (quads[4 * half + j] >> 4 & kBits2) << 2 * j;
      planes[64 + 16 * half] = plane;
    }
  }
}

template <Format format, int values, size_t bytes>
void pack_integer_tile(const uint8_t* const (&rows)[kTileRows], int cols, uint8_t* tile) {
  constexpr FormatShape shape = format_shape(format);
  constexpr int groups = kGroup / shape.group;  // per block
  RowBlock from{};
  for (int block = 0; block < cols / kGroup; ++block) {
    uint8_t* record = tile + static_cast<size_t>(block / 2) * record_bytes(format);
    auto* scales = reinterpret_cast<uint16_t*>(record) + (block % 2) * groups * kTileRows;
    auto* mins = reinterpret_cast<uint16_t*>(record + scale_bytes(format)) + (block % 2) * groups * kTileRows;
    uint8_t* codes = record + codes_offset(format) + (block % 2) * block_bytes(format);
    for (int row = 0; row < kTileRows && rows[row] != nullptr; ++row) {
      read_block<format, values, bytes>(rows[row], block, from);
      for (int g = 0; g < groups; ++g) {
        scales[g * kTileRows + row] = from.scales[g];
        if constexpr (shape.asymmetric) mins[g * kTileRows + row] = from.mins[g];
      }
      write_codes<shape.bits>(from.quads, codes, row);
    }
  }
}

using TilePacker = void (*)(const uint8_t* const (&)[kTileRows], int, uint8_t*);

TilePacker integer_packer(const BlockType& type) {
  const bool super = type.values == 256;
  switch (type.format) {
    case Format::kW4:
      return pack_integer_tile<Format::kW4, 32, 18>;
    case Format::kW4A:
      return super ? pack_integer_tile<Format::kW4A, 256, 144> : pack_integer_tile<Format::kW4A, 32, 20>;
    case Format::kW5:
      return pack_integer_tile<Format::kW5, 32, 22>;
    case Format::kW5A:
      return super ? pack_integer_tile<Format::kW5A, 256, 176> : pack_integer_tile<Format::kW5A, 32, 24>;
    case Format::kW6:
      return pack_integer_tile<Format::kW6, 256, 210>;
    case Format::kW3:
      return pack_integer_tile<Format::kW3, 256, 110>;
    case Format::kW2A:
      return pack_integer_tile<Format::kW2A, 256, 84>;
    case Format::kIQ4:
      return super ? pack_integer_tile<Format::kIQ4, 256, 136> : pack_integer_tile<Format::kIQ4, 32, 18>;
    case Format::kMX4:
      return pack_integer_tile<Format::kMX4, 32, 17>;
    case Format::kW8Z:
      return pack_integer_tile<Format::kW8Z, 32, 36>;
    default:
      return pack_integer_tile<Format::kW8, 32, 34>;
  }
}

template <typename Element>
void pack_float_tile(const uint8_t* const (&rows)[kTileRows], int cols, uint8_t* tile, bool pairs) {
  auto* out = reinterpret_cast<Element*>(tile);
  for (int row = 0; row < kTileRows && rows[row] != nullptr; ++row) {
    for (int k = 0; k < cols; ++k) {
      Element value;
      std::memcpy(&value, rows[row] + static_cast<size_t>(k) * sizeof(Element), sizeof(Element));
      if (pairs) {
        out[static_cast<size_t>(k / 2) * 32 + 2 * row + k % 2] = value;
      } else {
        out[static_cast<size_t>(k) * 16 + row] = value;
      }
    }
  }
}

// From blocks of 32: a float scale, then bytes. A record takes the scale of its first block. A NaN among the
// bytes makes the record's scale one, since the kernels do not know the byte.
void pack_f8_tile(Format format, const uint8_t* const (&rows)[kTileRows], int cols, uint8_t* tile) {
  constexpr size_t kBlockBytes = 4 + kGroup;
  const int span = f8_span(format);
  for (int row = 0; row < kTileRows && rows[row] != nullptr; ++row) {
    for (int k = 0; k < cols; ++k) {
      const uint8_t* block = rows[row] + static_cast<size_t>(k / kGroup) * kBlockBytes;
      uint8_t* record = tile + static_cast<size_t>(k / span) * f8_record_bytes(format);
      auto* scales = reinterpret_cast<float*>(record);
      if (k % span == 0) {
        std::memcpy(scales + row, block, sizeof(float));
        scales[row] *= 256.0f;
      }
      const uint8_t code = block[4 + k % kGroup];
      if ((code & 0x7f) == 0x7f) scales[row] = std::numeric_limits<float>::quiet_NaN();
      record[64 + static_cast<size_t>(k % span) * kTileRows + row] = code;
    }
  }
}

}  // namespace

Format packed_format(const std::string& type) { return block_type(type).format; }

size_t source_row_bytes(const std::string& name, int cols) {
  const BlockType& type = block_type(name);
  if (cols % type.values) {
    throw std::invalid_argument(name + " needs a multiple of " + std::to_string(type.values) +
                                " columns, not " + std::to_string(cols));
  }
  return static_cast<size_t>(cols / type.values) * type.bytes;
}

void pack_tiles(const SourceMatrix& source, const PackedMatrix& packed, uint8_t* tiles, int first, int last) {
  const BlockType& type = block_type(source.type);
  const TilePacker pack_integers = integer_packer(type);
  for (int n = first; n < last; ++n) {
    const uint8_t* rows[kTileRows] = {};
    for (int r = 0; r < std::min(kTileRows, source.rows - n * kTileRows); ++r) {
      int64_t row = n * kTileRows + r;
      if (source.row_order != nullptr) row = source.row_order[row];
      rows[r] = source.data + static_cast<size_t>(row) * source.row_bytes;
    }
    uint8_t* tile = tiles + static_cast<size_t>(n) * packed.tile_bytes;
    switch (type.format) {
      case Format::kF32:
        pack_float_tile<uint32_t>(rows, source.cols, tile, false);
        break;
      case Format::kF16:
        pack_float_tile<uint16_t>(rows, source.cols, tile, false);
        break;
      case Format::kBF16:
        pack_float_tile<uint16_t>(rows, source.cols, tile, true);
        break;
      case Format::kF8:
      case Format::kF8Short:
        pack_f8_tile(type.format, rows, source.cols, tile);
        break;
      default:
        pack_integers(rows, source.cols, tile);
    }
  }
}

}  // namespace toque
