// map_layer: the keys (or values) of one target layer from those of the source
// layers, as one MLX operation. See kvgraft.ops.reference.map_layer for what it
// computes.
#pragma once

#include <mlx/array.h>
#include <mlx/primitives.h>
#include <mlx/utils.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace kvgraft {

namespace mx = mlx::core;

// Cosines and sines, [N, pairs] or [B, N, pairs] float32.
struct RopeTable {
  mx::array cos;
  mx::array sin;
  bool traditional;
};

// [H, in, D] values; or, with group_size, MLX affine groups along the input
// axis: packed [H, D, in * bits / 32], scales and biases [H, D, in / group].
struct WeightArrays {
  mx::array data;
  std::optional<mx::array> scales = std::nullopt;
  std::optional<mx::array> biases = std::nullopt;
  int group_size = 0;
  int bits = 0;

  int heads() const { return data.shape(0); }
  int out_dim() const { return data.shape(bits ? 1 : 2); }
  int64_t in_dim() const {
    return bits ? static_cast<int64_t>(data.shape(2)) * 32 / bits : data.shape(1);
  }
};

// For each target head, the source heads that feed it.
using HeadMapping = std::vector<std::vector<int>>;

struct MapLayerArgs {
  std::vector<mx::array> sources;  // [H, N, D] or [B, H, N, D]
  WeightArrays weight;
  std::optional<mx::array> bias;                // [H, D]
  std::optional<HeadMapping> heads;             // none: all source heads feed each
  std::vector<std::optional<RopeTable>> strip;  // empty, or one per source
  std::optional<RopeTable> rotate;
  std::optional<mx::Dtype> dtype;  // default: that of the first source

  // Throws std::invalid_argument when the arguments do not fit together.
  void check() const;
};

// By a kernel, or else composed. Both throw what check() throws.
mx::array map_layer(const MapLayerArgs& args, mx::StreamOrDevice s = {});

// The same from MLX's own operations, on any device.
mx::array map_layer_composed(const MapLayerArgs& args, mx::StreamOrDevice s = {});

// What a MapLayer node knows beside its input arrays.
//
// The inputs are, in this order: sources; weight, and its scales and biases
// when quantised; bias if there is one; then cos and sin of each table.
struct MapLayerSpec {
  int sources;
  int group_size;  // 0: not quantised
  int bits;
  bool bias;
  std::vector<int> head_mapping;  // heads x mapping_width, empty if all feed each
  int mapping_width;
  std::vector<bool> traditional;  // per table
  std::vector<int> strip;         // table of each source, -1 for none
  int rotate;                     // table of the result, -1 for none
  mx::Dtype dtype;

  int weight_at() const { return sources; }
  int scales_at() const { return sources + 1; }  // and biases after it
  int bias_at() const { return sources + (group_size ? 3 : 1); }
  int tables_at() const { return bias_at() + bias; }
};

// Gradients, jvp and vmap are those of the composed operation, so a result under vmap
// comes from MLX's own operations.
class MapLayer : public mx::Primitive {
 public:
  MapLayer(mx::Stream stream, MapLayerSpec spec) : mx::Primitive(stream), spec_(std::move(spec)) {}

  // Whether map_layer is composed rather than a node of this kind.
  static bool use_fallback(const MapLayerArgs& args, const mx::Stream& s);

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

  std::vector<mx::array> jvp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& tangents,
                             const std::vector<int>& argnums) override;
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums,
                             const std::vector<mx::array>& outputs) override;
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override;

  DEFINE_NAME(MapLayer)
  bool is_equivalent(const mx::Primitive& other) const override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;

  // What tells two nodes apart, as MLX's own primitives give it. mx.export_function
  // serialises the kinds of primitives in a table within libmlx 0.32.4, which has no
  // place for others: export map_layer composed.
  auto state() const {
    const auto& s = spec_;
    return std::make_tuple(s.sources, s.group_size, s.bits, s.bias, s.head_mapping, s.mapping_width,
                           s.traditional, s.strip, s.rotate, s.dtype);
  }

 private:
  MapLayerSpec spec_;
};

// Why the Metal kernels are not used here at all; empty if they are.
std::string metal_status();

}  // namespace kvgraft
