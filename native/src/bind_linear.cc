// Python bindings of packed weights and of single kernels. The engine calls kernels through plans; the
// bindings of single calls here exist for tests and benchmarks.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "arena.h"
#include "bindings.h"
#include "kernels.h"
#include "pack.h"

namespace toque {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Bytes2D = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Float1D = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Float2D = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Int32s = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Int64s = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Runs body(first, last) over [0, count) in `threads` even parts, on fresh threads. For load time and tests;
// steps run on the plan's own pool.
template <typename Body>
void split(int count, int threads, Body&& body) {
  threads = std::clamp(threads, 1, std::max(count, 1));
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) {
    others.emplace_back([=, &body] {
      body(static_cast<int>(int64_t{count} * i / threads),
           static_cast<int>(int64_t{count} * (i + 1) / threads));
    });
  }
  body(0, count / threads);
  for (std::thread& other : others) other.join();
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> new_array(size_t rows, size_t cols) {
  auto* data = new float[std::max<size_t>(rows * cols, 1)]();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return {data, {rows, cols}, owner};
}

size_t packed_size(const std::string& type, int rows, int cols) {
  source_row_bytes(type, cols);  // checks both
  return packed_bytes(packed_format(type), rows, cols);
}

PackedMatrix pack(Arena& arena, const std::string& type, Bytes2D raw, int cols,
                  std::optional<Int64s> row_order, int threads) {
  const size_t row_bytes = source_row_bytes(type, cols);
  if (raw.shape(1) != row_bytes) {
    throw std::invalid_argument(type + " rows of " + std::to_string(cols) + " values have " +
                                std::to_string(row_bytes) + " bytes, not " + std::to_string(raw.shape(1)));
  }
  const int rows = static_cast<int>(row_order ? row_order->shape(0) : raw.shape(0));
  if (row_order) {
    for (int i = 0; i < rows; ++i) {
      const int64_t row = row_order->data()[i];
      if (row < 0 || static_cast<size_t>(row) >= raw.shape(0)) {
        throw std::out_of_range("row_order[" + std::to_string(i) + "] is " + std::to_string(row) + ", of " +
                                std::to_string(raw.shape(0)) + " rows");
      }
    }
  }
  const Format format = packed_format(type);
  uint8_t* data = arena.allocate(packed_bytes(format, rows, cols));
  PackedMatrix packed{format, rows, cols, tile_bytes(format, cols), data};
  SourceMatrix source{type, raw.data(), row_bytes, rows, cols, row_order ? row_order->data() : nullptr};
  nb::gil_scoped_release release;
  split(tile_count(rows), threads,
        [&](int first, int last) { pack_tiles(source, packed, data, first, last); });
  return packed;
}

// Packed activations with the memory they live in.
struct OwnedAct {
  Act act;
  std::unique_ptr<Arena> memory;

  OwnedAct(const KernelTable& table, ActKind kind, int tokens, int width) {
    if (kind == ActKind::kI8 && width % kGroup) {
      throw std::invalid_argument("int8 activations need a width that is a multiple of 32, not " +
                                  std::to_string(width));
    }
    const size_t codes = act_code_bytes(kind, tokens, width),
                 scales = act_scale_count(kind, tokens, width) * 4,
                 peaks = act_peak_bytes(kind, tokens, width);
    memory = std::make_unique<Arena>(codes + scales + peaks + 192);
    act = {kind, tokens, width, table.tile_max, memory->allocate(codes), nullptr, nullptr};
    act.scales = reinterpret_cast<float*>(memory->allocate(scales));
    act.peaks = memory->allocate(peaks);
  }

  float at(int token, int k) const {
    const ActSlot slot = act_slot(act, token);
    const size_t T = static_cast<size_t>(slot.size), t = static_cast<size_t>(slot.t);
    const size_t i = static_cast<size_t>(k);
    if (act.kind == ActKind::kF32) return reinterpret_cast<const float*>(slot.codes)[i * T + t];
    if (act.kind == ActKind::kBF16) {
      uint32_t bits = reinterpret_cast<const uint16_t*>(slot.codes)[(i / 2 * T + t) * 2 + i % 2] << 16;
      float value;
      std::memcpy(&value, &bits, 4);
      return value;
    }
    const auto code = reinterpret_cast<const int8_t*>(slot.codes)[(i / 4 * T + t) * 4 + i % 4];
    int value = code;
    const size_t at = i / kGroup * T + t;
    if (slot.peaks[at] == i % kGroup / 4 + 1) {
      Peak peak;
      std::memcpy(&peak, slot.peaks + T * static_cast<size_t>(peak_flags(act.width)) + at * sizeof(Peak),
                  sizeof peak);
      value += kPeakStep * peak.high[i % 4];
    }
    return slot.scales[(i / kGroup * kScaleFields + kScale) * T + t] * static_cast<float>(value);
  }

  nb::ndarray<nb::numpy, float, nb::ndim<2>> to_numpy() const {
    auto out = new_array(static_cast<size_t>(act.tokens), static_cast<size_t>(act.width));
    for (int m = 0; m < act.tokens; ++m) {
      for (int k = 0; k < act.width; ++k) out.data()[static_cast<size_t>(m) * act.width + k] = at(m, k);
    }
    return out;
  }
};

OwnedAct pack_rows(const KernelTable& table, Float2D x, ActKind kind) {
  OwnedAct packed(table, kind, static_cast<int>(x.shape(0)), static_cast<int>(x.shape(1)));
  if (x.shape(0)) table.pack_rows(packed.act, x.data(), packed.act.width, 0, packed.act.tokens);
  return packed;
}

Activation activation_named(const std::string& name) {
  if (name.empty()) return Activation::kNone;
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "gelu") return Activation::kGelu;
  throw std::invalid_argument("activation must be silu, gelu_tanh, gelu or empty, not " + name);
}

const float* checked_bias(const std::optional<Float1D>& bias, const PackedMatrix& weight, const char* name) {
  if (!bias) return nullptr;
  if (static_cast<int>(bias->shape(0)) != weight.rows) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(bias->shape(0)) +
                                " values for " + std::to_string(weight.rows) + " rows");
  }
  return bias->data();
}

// One linear over float rows x, all epilogues. `to_act` sends the result through packed activations (the
// input of the next linear, which takes `next`'s kind) and returns what they hold. `chunk` units at a time,
// to test splits.
nb::ndarray<nb::numpy, float, nb::ndim<2>> linear(const std::string& isa, const PackedMatrix& weight,
                                                  Float2D x, std::optional<Float1D> bias,
                                                  std::optional<Float2D> residual, const PackedMatrix* up,
                                                  std::optional<Float1D> up_bias,
                                                  const std::string& activation, bool activated, bool to_act,
                                                  int chunk) {
  const KernelTable& table = kernel_table(isa.c_str());
  if (static_cast<int>(x.shape(1)) != weight.cols) {
    throw std::invalid_argument("x has " + std::to_string(x.shape(1)) + " columns, the weight " +
                                std::to_string(weight.cols));
  }
  const int tokens = static_cast<int>(x.shape(0));
  OwnedAct in = pack_rows(table, x, table.act_kind(weight.format));
  auto out = new_array(x.shape(0), static_cast<size_t>(weight.rows));
  LinearArgs args{};
  args.in = in.act;
  args.weight = weight;
  args.bias = checked_bias(bias, weight, "bias");
  args.activation = activation_named(activation);
  args.out = out.data();
  args.out_stride = weight.rows;
  args.epilogue = activated ? Epilogue::kActivate : Epilogue::kStore;
  if (up != nullptr) {
    if (up->rows != weight.rows || up->cols != weight.cols || table.act_kind(up->format) != in.act.kind) {
      throw std::invalid_argument("up must have the gate's shape and kind of activations");
    }
    args.epilogue = Epilogue::kGated;
    args.up = *up;
    args.up_bias = checked_bias(up_bias, *up, "up_bias");
  }
  if (residual) {
    if (residual->shape(0) != x.shape(0) || static_cast<int>(residual->shape(1)) != weight.rows) {
      throw std::invalid_argument("residual must have the output's shape");
    }
    std::copy_n(residual->data(), residual->size(), out.data());
    args.epilogue = Epilogue::kAdd;
  }
  std::optional<OwnedAct> next;
  if (to_act) {
    next.emplace(table, weight.rows % kGroup ? ActKind::kF32 : ActKind::kI8, tokens, weight.rows);
    args.out_act = next->act;
  }
  const int units = table.linear_units(args);
  if (chunk <= 0) chunk = units;
  for (int unit = 0; unit < units; unit += chunk) table.linear(args, unit, std::min(unit + chunk, units));
  return next ? next->to_numpy() : out;
}

// Seconds per pass over `weights` in order (several, so that together they exceed the caches), best of
// `repeats`.
double time_linear(const std::string& isa, const std::vector<const PackedMatrix*>& weights, Float2D x,
                   int threads, int repeats, bool gated) {
  const KernelTable& table = kernel_table(isa.c_str());
  const PackedMatrix& first = *weights.at(0);
  OwnedAct in = pack_rows(table, x, table.act_kind(first.format));
  std::vector<float> out(x.shape(0) * static_cast<size_t>(first.rows));
  OwnedAct next(table, ActKind::kI8, static_cast<int>(x.shape(0)), (first.rows + 31) / 32 * 32);
  std::vector<LinearArgs> calls;
  for (size_t i = 0; i < weights.size(); i += gated ? 2 : 1) {
    LinearArgs args{};
    args.in = in.act;
    args.weight = *weights[i];
    args.out = out.data();
    args.out_stride = first.rows;
    if (gated) {
      args.epilogue = Epilogue::kGated;
      args.activation = Activation::kSilu;
      args.up = *weights.at(i + 1);
      args.out_act = next.act;
    }
    calls.push_back(args);
  }
  nb::gil_scoped_release release;
  const int units = table.linear_units(calls[0]), parts = std::max(threads, 1);
  double best = 1e30;
  std::atomic<int> arrived{0};
  auto meet = [&](int round) {
    arrived.fetch_add(1);
    // Gives the core away: whoever waits for a preempted thread on a busy machine may be what keeps it
    // waiting.
    while (arrived.load(std::memory_order_acquire) < round * parts) std::this_thread::yield();
  };
  split(parts, parts, [&](int part, int) {
    int round = 0;
    for (int repeat = 0; repeat < repeats; ++repeat) {
      // Before the barrier: a thread preempted just after it would start its clock late, with the others at
      // work.
      auto start = std::chrono::steady_clock::now();
      meet(++round);
      for (const LinearArgs& args : calls) {
        table.linear(args, static_cast<int>(int64_t{units} * part / parts),
                     static_cast<int>(int64_t{units} * (part + 1) / parts));
        if (parts > 1) meet(++round);
      }
      std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      if (part == 0) best = std::min(best, took.count());
    }
  });
  return best;
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> embed(const std::string& isa, const PackedMatrix& table_weight,
                                                 Int32s ids, float scale) {
  for (size_t i = 0; i < ids.shape(0); ++i) {
    if (ids.data()[i] < 0 || ids.data()[i] >= table_weight.rows) {
      throw std::out_of_range("row " + std::to_string(ids.data()[i]) + " of " +
                              std::to_string(table_weight.rows));
    }
  }
  auto out = new_array(ids.shape(0), static_cast<size_t>(table_weight.cols));
  kernel_table(isa.c_str())
      .embed_rows(table_weight, ids.data(), scale, out.data(), table_weight.cols, 0,
                  static_cast<int>(ids.shape(0)));
  return out;
}

const char* format_name(Format format) {
  constexpr const char* kNames[] = {"f32", "f16", "bf16", "w4", "w4a", "w5", "w5a", "w6", "w8"};
  return kNames[static_cast<int>(format)];
}

}  // namespace

void bind_linear(nb::module_& m) {
  m.def(
      "isas",
      [] {
        const KernelTable* tables[kMaxTables];
        std::vector<std::string> names;
        for (int i = 0, n = supported_tables(tables); i < n; ++i) names.emplace_back(tables[i]->name);
        return names;
      },
      "Instruction sets this build has and this machine runs, best first.");
  m.def(
      "resolve_isa", [](const std::string& isa) { return std::string(kernel_table(isa.c_str()).name); },
      "isa"_a = "",
      "The instruction set that `isa` (or TOQUE_ISA, or the best) selects. ValueError when it cannot run "
      "here.");
  m.def("tile_max", [](const std::string& isa) { return kernel_table(isa.c_str()).tile_max; }, "isa"_a = "");

  nb::class_<Arena>(m, "Arena", "Memory for packed weights, on huge pages where possible.")
      .def(nb::init<size_t>(), "bytes"_a)
      .def_prop_ro("used", &Arena::used)
      .def_prop_ro("capacity", &Arena::capacity);

  nb::class_<PackedMatrix>(m, "PackedMatrix", "A weight matrix in the tile16 layout, inside an Arena.")
      .def_prop_ro("format", [](const PackedMatrix& w) { return format_name(w.format); })
      .def_ro("rows", &PackedMatrix::rows)
      .def_ro("cols", &PackedMatrix::cols)
      .def_prop_ro("nbytes", [](const PackedMatrix& w) { return packed_bytes(w.format, w.rows, w.cols); });

  m.def("packed_size", &packed_size, "dtype"_a, "rows"_a, "cols"_a,
        "Bytes a matrix of this GGML type takes once packed (a multiple of 64). ValueError when it has no "
        "packed form.");
  m.def("pack", &pack, "arena"_a, "dtype"_a, "raw"_a, "cols"_a, "row_order"_a.none() = nb::none(),
        "threads"_a = 1, nb::keep_alive<0, 1>(),
        "Pack raw rows (uint8[rows, bytes]) of a GGML type into the arena.");

  m.def("linear", &linear, "isa"_a, "weight"_a, "x"_a, nb::kw_only(), "bias"_a.none() = nb::none(),
        "residual"_a.none() = nb::none(), "up"_a.none() = nb::none(), "up_bias"_a.none() = nb::none(),
        "activation"_a = "", "activated"_a = false, "to_act"_a = false, "chunk"_a = 0);
  m.def("time_linear", &time_linear, "isa"_a, "weights"_a, "x"_a, "threads"_a = 1, "repeats"_a = 5,
        "gated"_a = false);
  m.def("embed", &embed, "isa"_a, "weight"_a, "ids"_a, "scale"_a = 1.0f);
  m.def(
      "quantize",
      [](const std::string& isa, Float2D x) {
        return pack_rows(kernel_table(isa.c_str()), x, ActKind::kI8).to_numpy();
      },
      "isa"_a, "x"_a, "What the int8 packed activations of x stand for.");
}

}  // namespace toque
