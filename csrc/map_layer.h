// map_layer: the keys (or values) of one target layer from those of the source
// layers, as one MLX operation. See kvgraft.ops.reference.map_layer for what it
// computes.
#pragma once

#include <mlx/array.h>
#include <mlx/primitives.h>
#include <mlx/utils.h>

#include <optional>
#include <string>
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
struct Weight {
  mx::array data;
  std::optional<mx::array> scales = std::nullopt;
  std::optional<mx::array> biases = std::nullopt;
  int group_size = 0;
  int bits = 0;
};

// For each target head, the source heads that feed it.
using HeadPlan = std::vector<std::vector<int>>;

struct MapLayerArgs {
  std::vector<mx::array> sources;  // [H, N, D] or [B, H, N, D]
  Weight weight;
  std::optional<mx::array> bias;                // [H, D]
  std::optional<HeadPlan> heads;                // none: all source heads feed each
  std::vector<std::optional<RopeTable>> strip;  // empty, or one per source
  std::optional<RopeTable> rotate;
  std::optional<mx::Dtype> dtype;  // default: that of the first source
};

// How a call runs: by a kernel, or by MLX operations put together.
enum class Path { cpu_kernel, metal_kernel, composed };

Path choose_path(const MapLayerArgs& args, const mx::Stream& stream);

// Throws std::invalid_argument when the arguments do not fit together.
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
  std::vector<int> plan;  // heads x plan_width, empty for the full plan
  int plan_width;
  std::vector<bool> traditional;  // per table
  std::vector<int> strip;         // table of each source, -1 for none
  int rotate;                     // table of the result, -1 for none
  mx::Dtype dtype;

  int weight_at() const { return sources; }
  int scales_at() const { return sources + 1; }  // and biases after it
  int bias_at() const { return sources + (group_size ? 3 : 1); }
  int tables_at() const { return bias_at() + bias; }

  bool operator==(const MapLayerSpec& other) const = default;
};

class MapLayer : public mx::Primitive {
 public:
  MapLayer(mx::Stream stream, MapLayerSpec spec) : mx::Primitive(stream), spec_(std::move(spec)) {}

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

  const char* name() const override { return "MapLayer"; }
  bool is_equivalent(const mx::Primitive& other) const override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;

  const MapLayerSpec& spec() const { return spec_; }

 private:
  MapLayerSpec spec_;
};

// Whether the Metal kernel takes this call. False where kvgraft was built
// without Metal.
bool metal_takes(const MapLayerArgs& args, const mx::Stream& stream);

// Why the Metal kernels are not used here at all; empty if they are.
std::string metal_status();

}  // namespace kvgraft
