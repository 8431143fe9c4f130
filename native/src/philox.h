// Philox4x32-10, a counter-based random generator (Salmon et al., SC 2011, doi:10.1145/2063384.2063405).
#pragma once

#include <array>
#include <cstdint>

namespace toque {

inline std::array<uint32_t, 4> philox(std::array<uint32_t, 4> c, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c[0], p1 = uint64_t{0xCD9E8D57} * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ key[0], static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ key[1], static_cast<uint32_t>(p0)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return c;
}

// Number `index` of the stream of `seed`: 53 random bits as a number in [0, 1).
inline double uniform(uint64_t seed, uint64_t index) {
  const auto r = philox({static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), 0, 0},
                        {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return static_cast<double>((uint64_t{r[0]} << 32 | r[1]) >> 11) * 0x1p-53;
}

}  // namespace toque
