#include "rope.h"

#include <cmath>

namespace toque {

void RopeTable::cover(int position) {
  const size_t row = 2 * inverse_frequencies_.size();
  if (row == 0) return;
  size_t next = values_.size() / row;
  if (next > static_cast<size_t>(position)) return;
  // A few positions more than asked for, so that a decoding sequence does not come back for each token.
  const size_t end = (static_cast<size_t>(position) / 256 + 1) * 256;
  values_.resize(end * row);
  for (; next < end; ++next) {
    float* out = values_.data() + next * row;
    for (size_t i = 0; i < row / 2; ++i) {
      const double angle = static_cast<double>(next) * inverse_frequencies_[i];
      out[i] = static_cast<float>(std::cos(angle) * scale_);
      out[row / 2 + i] = static_cast<float>(std::sin(angle) * scale_);
    }
  }
}

}  // namespace toque
