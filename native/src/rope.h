// Rotary embedding's angles.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace toque {

// cos and sin of every position up to the largest one seen, computed in double precision when first needed.
class RopeTable {
 public:
  RopeTable(std::vector<double> inverse_frequencies, double scale)
      : inverse_frequencies_(std::move(inverse_frequencies)), scale_(scale) {}

  int half() const { return static_cast<int>(inverse_frequencies_.size()); }
  void cover(int position);
  const float* cos(int position) const { return values_.data() + static_cast<size_t>(position) * 2 * half(); }
  const float* sin(int position) const { return cos(position) + half(); }

 private:
  std::vector<double> inverse_frequencies_;
  double scale_;
  std::vector<float> values_;
};

}  // namespace toque
