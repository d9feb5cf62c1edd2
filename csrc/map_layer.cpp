#include "map_layer.h"

#include <mlx/ops.h>
#include <mlx/transforms.h>

#include <algorithm>
#include <stdexcept>

#include "cpu/map_layer.h"
#include "metal/dispatch.h"

namespace kvgraft {

namespace {

// Tables without those given twice: source layers of one model mostly share one.
struct TableList {
  std::vector<mx::array> arrays;  // cos, sin, cos, sin ...
  std::vector<bool> traditional;

  int add(const std::optional<RopeTable>& table, const mx::Stream& stream) {
    if (!table || table->cos.shape(-1) == 0) return -1;
    for (size_t i = 0; i < traditional.size(); ++i) {
      if (ids[2 * i] == table->cos.id() && ids[2 * i + 1] == table->sin.id() &&
          traditional[i] == table->traditional) {
        return static_cast<int>(i);
      }
    }
    ids.push_back(table->cos.id());
    ids.push_back(table->sin.id());
    arrays.push_back(mx::astype(table->cos, mx::float32, stream));
    arrays.push_back(mx::astype(table->sin, mx::float32, stream));
    traditional.push_back(table->traditional);
    return static_cast<int>(traditional.size()) - 1;
  }

 private:
  std::vector<std::uintptr_t> ids;
};

mx::Shape result_shape(const mx::array& source, int heads, int out) {
  auto shape = source.shape();
  shape[shape.size() - 3] = heads;
  shape.back() = out;
  return shape;
}

// Takes apart the inputs of a MapLayer node again.
MapLayerArgs to_args(const MapLayerSpec& spec, const std::vector<mx::array>& inputs) {
  const auto table = [&](int i) -> std::optional<RopeTable> {
    if (i < 0) return std::nullopt;
    const int at = spec.tables_at() + 2 * i;
    return RopeTable{.cos = inputs[at], .sin = inputs[at + 1], .traditional = spec.traditional[i]};
  };
  MapLayerArgs args{.sources = {inputs.begin(), inputs.begin() + spec.sources},
                    .weight = {.data = inputs[spec.weight_at()]},
                    .bias = std::nullopt,
                    .heads = std::nullopt,
                    .strip = {},
                    .rotate = table(spec.rotate),
                    .dtype = spec.dtype};
  if (spec.bits) {
    args.weight.scales = inputs[spec.scales_at()];
    args.weight.biases = inputs[spec.scales_at() + 1];
    args.weight.group_size = spec.group_size;
    args.weight.bits = spec.bits;
  }
  if (spec.bias) args.bias = inputs[spec.bias_at()];
  if (!spec.head_mapping.empty()) {
    args.heads.emplace();
    for (auto at = spec.head_mapping.begin(); at != spec.head_mapping.end();
         at += spec.mapping_width) {
      args.heads->emplace_back(at, at + spec.mapping_width);
    }
  }
  for (int i : spec.strip) args.strip.push_back(table(i));
  return args;
}

using Function = std::function<std::vector<mx::array>(const std::vector<mx::array>&)>;

std::vector<mx::array> pick(const std::vector<mx::array>& arrays, const std::vector<int>& indices) {
  std::vector<mx::array> chosen;
  for (int i : indices) chosen.push_back(arrays[i]);
  return chosen;
}

// The composed operation as a function of the inputs `argnums`; the others are fixed.
Function composed_function(const MapLayerSpec& spec, const mx::Stream& stream,
                           const std::vector<mx::array>& inputs, const std::vector<int>& argnums) {
  for (int i : argnums) {
    if (spec.bits && i == spec.weight_at()) {
      throw std::invalid_argument(
          "[map_layer] The packed integers of quantised weights have no gradient (their scales and "
          "biases have). Differentiate with respect to dequantised weights.");
    }
  }
  return [spec, stream, inputs, argnums](const std::vector<mx::array>& chosen) {
    auto all = inputs;
    for (size_t i = 0; i < argnums.size(); ++i) all[argnums[i]] = chosen[i];
    return std::vector<mx::array>{map_layer_composed(to_args(spec, all), stream)};
  };
}

}  // namespace

bool MapLayer::use_fallback(const MapLayerArgs& args, const mx::Stream& s) {
  // Without features there is nothing to multiply; the kernels take one at least.
  if (args.weight.heads() && args.weight.in_dim() == 0) return true;
  if (s.device == mx::Device::cpu) return false;
  int64_t entries = 0;
  if (args.heads) {
    for (const auto& group : *args.heads) entries += static_cast<int64_t>(group.size());
  }
  return !metal_status().empty() || !metal::has_kernel(args.weight.group_size, entries);
}

mx::array map_layer(const MapLayerArgs& args, mx::StreamOrDevice s) {
  args.check();
  const auto stream = mx::to_stream(s);
  if (MapLayer::use_fallback(args, stream)) return map_layer_composed(args, stream);
  // Throws here rather than in the evaluation if KVGRAFT_CPU_ISA is wrong.
  if (stream.device == mx::Device::cpu) cpu::current_isa();

  const auto& first = args.sources[0];
  const int heads = args.weight.heads();
  const mx::Dtype dtype = args.dtype.value_or(first.dtype());
  std::vector<mx::array> inputs = args.sources;
  inputs.push_back(args.weight.data);
  if (args.weight.bits) {
    inputs.push_back(*args.weight.scales);
    inputs.push_back(*args.weight.biases);
  }
  if (args.bias) inputs.push_back(*args.bias);
  MapLayerSpec spec{.sources = static_cast<int>(args.sources.size()),
                    .group_size = args.weight.bits ? args.weight.group_size : 0,
                    .bits = args.weight.bits,
                    .bias = args.bias.has_value(),
                    .head_mapping = {},
                    .mapping_width = 0,
                    .traditional = {},
                    .strip = {},
                    .rotate = -1,
                    .dtype = dtype};
  if (args.heads && heads) {
    spec.mapping_width = static_cast<int>(args.heads->front().size());
    for (const auto& group : *args.heads) {
      spec.head_mapping.insert(spec.head_mapping.end(), group.begin(), group.end());
    }
  }
  TableList tables;
  for (size_t i = 0; i < args.sources.size(); ++i) {
    spec.strip.push_back(args.strip.empty() ? -1 : tables.add(args.strip[i], stream));
  }
  spec.rotate = tables.add(args.rotate, stream);
  spec.traditional = tables.traditional;
  inputs.insert(inputs.end(), tables.arrays.begin(), tables.arrays.end());
  return mx::array(result_shape(first, heads, args.weight.out_dim()), dtype,
                   std::make_shared<MapLayer>(stream, std::move(spec)), std::move(inputs));
}

#ifndef KVGRAFT_METAL

std::string metal_status() {
  return "kvgraft was built without Metal";
}

void MapLayer::eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) {
  throw std::runtime_error("[map_layer] This build has no GPU kernel.");
}

#endif

// As fast::Custom does it: transforms of the composed operation. That class itself is
// not exported by libmlx, but the transforms are.

std::vector<mx::array> MapLayer::jvp(const std::vector<mx::array>& primals,
                                     const std::vector<mx::array>& tangents,
                                     const std::vector<int>& argnums) {
  const auto function = composed_function(spec_, stream(), primals, argnums);
  return mx::jvp(function, pick(primals, argnums), tangents).second;
}

std::vector<mx::array> MapLayer::vjp(const std::vector<mx::array>& primals,
                                     const std::vector<mx::array>& cotangents,
                                     const std::vector<int>& argnums,
                                     const std::vector<mx::array>&) {
  const auto function = composed_function(spec_, stream(), primals, argnums);
  return mx::vjp(function, pick(primals, argnums), cotangents).second;
}

std::pair<std::vector<mx::array>, std::vector<int>> MapLayer::vmap(
    const std::vector<mx::array>& inputs, const std::vector<int>& axes) {
  const Function function = [this](const std::vector<mx::array>& own) {
    return std::vector<mx::array>{map_layer_composed(to_args(spec_, own), stream())};
  };
  return {mx::vmap(function, axes)(inputs), {0}};
}

bool MapLayer::is_equivalent(const mx::Primitive& other) const {
  return state() == static_cast<const MapLayer&>(other).state();
}

std::vector<mx::Shape> MapLayer::output_shapes(const std::vector<mx::array>& inputs) {
  const auto& weight = inputs[spec_.weight_at()];
  return {result_shape(inputs[0], weight.shape(0), weight.shape(spec_.bits ? 1 : 2))};
}

}  // namespace kvgraft
