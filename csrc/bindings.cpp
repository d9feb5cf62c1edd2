#include <mlx/version.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>

#include "cpu/map_layer.h"
#include "cpu/pool.h"
#include "finite.h"
#include "map_layer.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using kvgraft::MapLayerArgs;
namespace mx = mlx::core;

// (cos, sin, traditional)
using TableTuple = std::tuple<mx::array, mx::array, bool>;

std::optional<kvgraft::RopeTable> to_table(const std::optional<TableTuple>& table) {
  if (!table) return std::nullopt;
  const auto& [cos, sin, traditional] = *table;
  return kvgraft::RopeTable{.cos = cos, .sin = sin, .traditional = traditional};
}

MapLayerArgs to_args(const std::vector<mx::array>& sources, const mx::array& weight,
                     const std::optional<mx::array>& scales, const std::optional<mx::array>& biases,
                     int group_size, int bits, const std::optional<mx::array>& bias,
                     const std::optional<kvgraft::HeadMapping>& heads,
                     const std::vector<std::optional<TableTuple>>& strip,
                     const std::optional<TableTuple>& rotate,
                     const std::optional<mx::Dtype>& dtype) {
  MapLayerArgs args{.sources = sources,
                    .weight = {.data = weight,
                               .scales = scales,
                               .biases = biases,
                               .group_size = group_size,
                               .bits = bits},
                    .bias = bias,
                    .heads = heads,
                    .strip = {},
                    .rotate = to_table(rotate),
                    .dtype = dtype};
  for (const auto& table : strip) args.strip.push_back(to_table(table));
  return args;
}

// How map_layer runs: "cpu" or "metal" for a kernel.
const char* path(const MapLayerArgs& args, const mx::Stream& stream) {
  if (kvgraft::MapLayer::use_fallback(args, stream)) return "composed";
  return stream.device == mx::Device::cpu ? "cpu" : "metal";
}

// Signatures name MLX's types, so MLX's own binding has to be loaded first; and
// it has to keep its types in the same nanobind registry as this module.
void require_mlx_types() {
  nb::module_::import_("mlx.core");
  if (!nb::type<mx::array>().is_valid()) {
    throw nb::import_error(
        "kvgraft was built with a nanobind whose internals differ from those of mlx.core, so "
        "that the two cannot exchange arrays. Reinstall kvgraft with the nanobind named in its "
        "pyproject.toml: pip install --force-reinstall --no-deps --no-cache-dir kvgraft");
  }
}

}  // namespace

NB_MODULE(_ext, m) {
  require_mlx_types();

  m.def(
      "map_layer",
      [](const std::vector<mx::array>& sources, const mx::array& weight,
         const std::optional<mx::array>& scales, const std::optional<mx::array>& biases,
         int group_size, int bits, const std::optional<mx::array>& bias,
         const std::optional<kvgraft::HeadMapping>& heads,
         const std::vector<std::optional<TableTuple>>& strip,
         const std::optional<TableTuple>& rotate, const std::optional<mx::Dtype>& dtype,
         bool composed, mx::StreamOrDevice stream) {
        const auto args = to_args(sources, weight, scales, biases, group_size, bits, bias, heads,
                                  strip, rotate, dtype);
        return composed ? kvgraft::map_layer_composed(args, stream)
                        : kvgraft::map_layer(args, stream);
      },
      "sources"_a, "weight"_a, "scales"_a.none(), "biases"_a.none(), "group_size"_a, "bits"_a,
      "bias"_a.none(), "heads"_a.none(), "strip"_a, "rotate"_a.none(), "dtype"_a.none(),
      "composed"_a = false, "stream"_a = nb::none());

  m.def(
      "path",
      [](const std::vector<mx::array>& sources, const mx::array& weight,
         const std::optional<mx::array>& scales, const std::optional<mx::array>& biases,
         int group_size, int bits, const std::optional<mx::array>& bias,
         const std::optional<kvgraft::HeadMapping>& heads,
         const std::vector<std::optional<TableTuple>>& strip,
         const std::optional<TableTuple>& rotate, const std::optional<mx::Dtype>& dtype,
         mx::StreamOrDevice stream) {
        return path(to_args(sources, weight, scales, biases, group_size, bits, bias, heads, strip,
                            rotate, dtype),
                    mx::to_stream(stream));
      },
      "sources"_a, "weight"_a, "scales"_a.none(), "biases"_a.none(), "group_size"_a, "bits"_a,
      "bias"_a.none(), "heads"_a.none(), "strip"_a, "rotate"_a.none(), "dtype"_a.none(),
      "stream"_a = nb::none());

  m.def("all_finite", &kvgraft::all_finite, "x"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def("set_num_threads", &kvgraft::cpu::set_num_threads, "count"_a);
  m.def("num_threads", &kvgraft::cpu::num_threads);
  m.def("cpu_isas", &kvgraft::cpu::isa_names);
  m.def("cpu_isa", [] { return std::string(kvgraft::cpu::current_isa().name); });
  m.def("use_cpu_isa", &kvgraft::cpu::use_isa, "name"_a);
  m.def("metal_status", &kvgraft::metal_status);
}
