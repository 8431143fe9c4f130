// Arguments that Python passes to a plan, as C++ has them.
#pragma once

#include <nanobind/ndarray.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops.h"

namespace toque {

namespace nb = nanobind;

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntTable = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bits = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Int64s = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T, size_t N>
nb::ndarray<nb::numpy, T, nb::ndim<N>> new_array(const size_t (&shape)[N]) {
  size_t size = 1;
  for (size_t extent : shape) size *= extent;
  auto* data = new T[size ? size : 1]();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T, nb::ndim<N>>(data, N, shape, owner);
}

// An order of columns that some rows of `width` are gathered by.
inline std::vector<int32_t> columns(const Int64s& order, int width) {
  std::vector<int32_t> result(order.data(), order.data() + order.shape(0));
  const bool inside = std::all_of(result.begin(), result.end(), [&](int i) { return i >= 0 && i < width; });
  if (!inside || static_cast<int>(result.size()) != width) {
    throw std::invalid_argument("an order must name " + std::to_string(width) + " columns");
  }
  return result;
}

inline std::vector<float> floats(const std::optional<Floats>& array) {
  if (!array) return {};
  return {array->data(), array->data() + array->shape(0)};
}

inline std::vector<float> floats(const std::optional<Floats>& array, size_t size, const char* name) {
  if (array && array->shape(0) != size) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(array->shape(0)) +
                                " values, not " + std::to_string(size));
  }
  return floats(array);
}

inline Activation activation_named(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "gelu") return Activation::kGelu;
  throw std::invalid_argument("activation must be silu, gelu_tanh or gelu, not " + name);
}

inline EmbedIds embed_ids_named(const std::string& name) {
  if (name == "tokens") return EmbedIds::kTokens;
  if (name == "positions") return EmbedIds::kPositions;
  if (name == "first") return EmbedIds::kFirst;
  throw std::invalid_argument("ids must be tokens, positions or first, not " + name);
}

inline Pooling pooling_named(const std::string& name) {
  if (name == "mean") return Pooling::kMean;
  if (name == "cls") return Pooling::kFirst;
  if (name == "last") return Pooling::kLast;
  throw std::invalid_argument("pooling must be mean, cls or last, not " + name);
}

}  // namespace toque
