#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace toque {

namespace {

struct BlockType {
  const char* name;
  Format format;
  int values;  // per block
  size_t bytes;
};

constexpr BlockType kTypes[] = {
    {"F32", Format::kF32, 1, 4},        {"F16", Format::kF16, 1, 2},
    {"BF16", Format::kBF16, 1, 2},      {"Q4_0", Format::kW4, 32, 18},
    {"Q4_1", Format::kW4A, 32, 20},     {"Q5_0", Format::kW5, 32, 22},
    {"Q5_1", Format::kW5A, 32, 24},     {"Q8_0", Format::kW8, 32, 34},
    {"Q4_K", Format::kW4A, 256, 144},   {"Q5_K", Format::kW5A, 256, 176},
    {"Q6_K", Format::kW6, 256, 210},    {"IQ4_NL", Format::kIQ4, 32, 18},
    {"IQ4_XS", Format::kIQ4, 256, 136}, {"MXFP4", Format::kMX4, 32, 17},
    {"Q2_K", Format::kW2A, 256, 84},    {"Q3_K", Format::kW3, 256, 110},
    {"F8_E4M3", Format::kF8, 32, 36},   {"F8_E4M3_32", Format::kF8Short, 32, 36},
};

const BlockType& block_type(const std::string& name) {
  for (const BlockType& type : kTypes) {
    if (name == type.name) return type;
  }
  std::string known;
  for (const BlockType& type : kTypes) known += (known.empty() ? "" : ", ") + std::string(type.name);
  throw std::invalid_argument("weight type " + name + " has no packed format; known: " + known);
}

uint16_t read_u16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

float from_bits(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

uint32_t to_bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

float f16_to_f32(uint16_t h) {
  uint32_t sign = (h & 0x8000u) << 16, magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00) return from_bits(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
  if (magnitude >= 0x400) return from_bits(sign | ((magnitude << 13) + 0x38000000u));
  return from_bits(sign | to_bits(static_cast<float>(magnitude) * 5.9604644775390625e-8f));
}

uint16_t f32_to_f16(float f) {  // to nearest even
  uint32_t bits = to_bits(f), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 0x38800000) {  // subnormal: let the float adder round to a multiple of 2^-24
    return static_cast<uint16_t>(sign | (to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
}

// 32 weights of one row on their way into a packed block: unsigned codes in order of k, and the scale and min
// of each 16 (a format with one scale per 32 uses the first).
struct RowBlock {
  alignas(32) uint8_t codes[32];
  uint16_t scales[2], mins[2];
};

void read_q4(const uint8_t* nibbles, RowBlock& out) {
  for (int i = 0; i < 16; ++i) {
    out.codes[i] = nibbles[i] & 15;
    out.codes[16 + i] = nibbles[i] >> 4;
  }
}

void read_q5(const uint8_t* high_bits, const uint8_t* nibbles, RowBlock& out) {
  uint32_t high;
  std::memcpy(&high, high_bits, 4);
  for (int i = 0; i < 16; ++i) {
    out.codes[i] = static_cast<uint8_t>((nibbles[i] & 15) | (high >> i & 1) << 4);
    out.codes[16 + i] = static_cast<uint8_t>(nibbles[i] >> 4 | (high >> (16 + i) & 1) << 4);
  }
}

void read_q8_0(const uint8_t* block, RowBlock& out) {
  out.scales[0] = read_u16(block);
  for (int i = 0; i < 32; ++i) out.codes[i] = static_cast<uint8_t>(block[2 + i] ^ 0x80);
}

// Scale and min of sub-block `j` (0..7), six bits each, of the 12 bytes that Q4_K and Q5_K share.
void k_scale_min(const uint8_t* q, int j, int& scale, int& min) {
  if (j < 4) {
    scale = q[j] & 63;
    min = q[j + 4] & 63;
  } else {
    scale = (q[j + 4] & 15) | (q[j - 4] >> 6) << 4;
    min = q[j + 4] >> 4 | (q[j] >> 6) << 4;
  }
}

void k_scales(const uint8_t* block, int j, RowBlock& out) {
  int scale, min;
  k_scale_min(block + 4, j, scale, min);
  out.scales[0] = f32_to_f16(f16_to_f32(read_u16(block)) * static_cast<float>(scale));
  out.mins[0] = f32_to_f16(-f16_to_f32(read_u16(block + 2)) * static_cast<float>(min));
}

void read_q4_k(const uint8_t* block, int j, RowBlock& out) {
  k_scales(block, j, out);
  const uint8_t* q = block + 16 + 32 * (j / 2);
  const int shift = j % 2 * 4;
  for (int i = 0; i < 32; ++i) out.codes[i] = q[i] >> shift & 15;
}

void read_q5_k(const uint8_t* block, int j, RowBlock& out) {
  k_scales(block, j, out);
  const uint8_t *high = block + 16, *q = block + 48 + 32 * (j / 2);
  const int shift = j % 2 * 4;
  for (int i = 0; i < 32; ++i) {
    out.codes[i] = static_cast<uint8_t>((q[i] >> shift & 15) | (high[i] >> j & 1) << 4);
  }
}

void read_q6_k(const uint8_t* block, int j, RowBlock& out) {
  // Two halves of 128; in each, four runs of 32: low nibbles of ql[0..31], ql[32..63], then their high
  // nibbles.
  const int half = j / 4, run = j % 4;
  const uint8_t *ql = block + 64 * half + 32 * (run % 2), *qh = block + 128 + 32 * half;
  const int8_t* sub_scales = reinterpret_cast<const int8_t*>(block + 192 + 8 * half + 2 * run);
  const float d = f16_to_f32(read_u16(block + 208));
  for (int i = 0; i < 2; ++i) out.scales[i] = f32_to_f16(d * static_cast<float>(sub_scales[i]));
  for (int i = 0; i < 32; ++i) {
    out.codes[i] = static_cast<uint8_t>((ql[i] >> (run / 2 * 4) & 15) | (qh[i] >> (2 * run) & 3) << 4);
  }
}

void read_q2_k(const uint8_t* block, int j, RowBlock& out) {
  const float d = f16_to_f32(read_u16(block + 80)), d_min = f16_to_f32(read_u16(block + 82));
  for (int i = 0; i < 2; ++i) {
    const uint8_t both = block[2 * j + i];
    out.scales[i] = f32_to_f16(d * static_cast<float>(both & 15));
    out.mins[i] = f32_to_f16(-d_min * static_cast<float>(both >> 4));
  }
  const uint8_t* q = block + 16 + 32 * (j / 4);
  for (int i = 0; i < 32; ++i) out.codes[i] = q[i] >> (2 * (j % 4)) & 3;
}

// 8 sub-blocks of 32, as in Q2_K; a mask of 32 bytes, bit j for sub-block j, adds 4; scales of 16 have six
// bits: low nibbles of bytes 0..7 then high nibbles, and the upper two bits of all in bytes 8..11.
void read_q3_k(const uint8_t* block, int j, RowBlock& out) {
  const uint8_t *mask = block, *q = block + 32 + 32 * (j / 4), *packed = block + 96;
  const float d = f16_to_f32(read_u16(block + 108));
  for (int i = 0; i < 2; ++i) {
    const int n = 2 * j + i, low = packed[n % 8] >> (n / 8 * 4) & 15,
              high = packed[8 + n % 4] >> (n / 4 * 2) & 3;
    out.scales[i] = f32_to_f16(d * static_cast<float>((low | high << 4) - 32));
  }
  for (int i = 0; i < 32; ++i) {
    out.codes[i] = static_cast<uint8_t>((q[i] >> (2 * (j % 4)) & 3) | (mask[i] >> j & 1) << 2);
  }
}

void read_iq4_xs(const uint8_t* block, int j, RowBlock& out) {
  const int low = block[4 + j / 2] >> (j % 2 * 4) & 15, high = read_u16(block + 2) >> (2 * j) & 3;
  out.scales[0] = f32_to_f16(f16_to_f32(read_u16(block)) * static_cast<float>((low | high << 4) - 32));
  read_q4(block + 8 + 16 * j, out);
}

// The scale is a power of two, e8m0, and halved because the table's values are doubled.
void read_mxfp4(const uint8_t* block, RowBlock& out) {
  out.scales[0] = f32_to_f16(std::ldexp(1.0f, static_cast<int>(block[0]) - 128));
  read_q4(block + 1, out);
}

// Weights 32 * block .. 32 * block + 31 of a source row.
void read_block(const BlockType& type, const uint8_t* row, int block, RowBlock& out) {
  const uint8_t* p = row + static_cast<size_t>(block / (type.values / 32)) * type.bytes;
  const int sub = block % (type.values / 32);
  switch (type.format) {
    case Format::kW4:
      out.scales[0] = read_u16(p);
      return read_q4(p + 2, out);
    case Format::kW4A:
      if (type.values == 256) return read_q4_k(p, sub, out);
      out.scales[0] = read_u16(p);
      out.mins[0] = read_u16(p + 2);
      return read_q4(p + 4, out);
    case Format::kW5:
      out.scales[0] = read_u16(p);
      return read_q5(p + 2, p + 6, out);
    case Format::kW5A:
      if (type.values == 256) return read_q5_k(p, sub, out);
      out.scales[0] = read_u16(p);
      out.mins[0] = read_u16(p + 2);
      return read_q5(p + 4, p + 8, out);
    case Format::kW6:
      return read_q6_k(p, sub, out);
    case Format::kW3:
      return read_q3_k(p, sub, out);
    case Format::kW2A:
      return read_q2_k(p, sub, out);
    case Format::kIQ4:
      if (type.values == 256) return read_iq4_xs(p, sub, out);
      out.scales[0] = read_u16(p);
      return read_q4(p + 2, out);
    case Format::kMX4:
      return read_mxfp4(p, out);
    default:
      return read_q8_0(p, out);
  }
}

// Row `row` of a packed block: eight quads of codes to their planes.
void write_codes(int bits, const uint8_t* codes, uint8_t* block, int row) {
  uint32_t quads[8];
  std::memcpy(quads, codes, 32);
  auto* planes = reinterpret_cast<uint32_t*>(block) + row;  // dword `row` of each 64-byte plane
  if (bits == 8) {
    for (int j = 0; j < 8; ++j) planes[16 * j] = quads[j];
    return;
  }
  if (bits <= 3) {
    for (int j = 0; j < 8; ++j) {
      planes[16 * (j / 4)] |= (quads[j] & 0x03030303u) << 2 * (j % 4);
      if (bits == 3) planes[32] |= (quads[j] >> 2 & 0x01010101u) << j;
    }
    return;
  }
  constexpr uint32_t kNibbles = 0x0f0f0f0f;
  for (int j = 0; j < 4; ++j) planes[16 * j] = (quads[2 * j] & kNibbles) | (quads[2 * j + 1] & kNibbles) << 4;
  if (bits == 5) {
    uint32_t plane = 0;
    for (int j = 0; j < 8; ++j) plane |= (quads[j] >> 4 & 0x01010101u) << j;
    planes[64] = plane;
  } else if (bits == 6) {
    for (int half = 0; half < 2; ++half) {
      uint32_t plane = 0;
      for (int j = 0; j < 4; ++j) plane |= (quads[4 * half + j] >> 4 & 0x03030303u) << 2 * j;
      planes[64 + 16 * half] = plane;
    }
  }
}

void pack_integer_tile(const BlockType& type, const uint8_t* const (&rows)[kTileRows], int cols,
                       uint8_t* tile) {
  const Format format = type.format;
  const FormatShape shape = format_shape(format);
  const int groups = kGroup / shape.group;  // per block
  RowBlock values{};
  for (int block = 0; block < cols / kGroup; ++block) {
    uint8_t* record = tile + static_cast<size_t>(block / 2) * record_bytes(format);
    auto* scales = reinterpret_cast<uint16_t*>(record) + (block % 2) * groups * kTileRows;
    auto* mins = reinterpret_cast<uint16_t*>(record + scale_bytes(format)) + (block % 2) * groups * kTileRows;
    uint8_t* codes = record + codes_offset(format) + (block % 2) * block_bytes(format);
    for (int row = 0; row < kTileRows && rows[row] != nullptr; ++row) {
      read_block(type, rows[row], block, values);
      for (int g = 0; g < groups; ++g) {
        scales[g * kTileRows + row] = values.scales[g];
        if (shape.asymmetric) mins[g * kTileRows + row] = values.mins[g];
      }
      write_codes(shape.bits, values.codes, codes, row);
    }
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
        pack_integer_tile(type, rows, source.cols, tile);
    }
  }
}

}  // namespace toque
