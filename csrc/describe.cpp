#include "describe.h"

#include <stdexcept>

namespace kvgraft {

namespace {

Type type_of(const mx::array& x) {
  if (x.dtype() == mx::float32) return Type::f32;
  if (x.dtype() == mx::float16) return Type::f16;
  if (x.dtype() == mx::bfloat16) return Type::bf16;
  throw std::runtime_error("[map_layer] Unexpected dtype.");
}

void copy_strides(const mx::array& x, int64_t (&strides)[3]) {
  strides[0] = x.ndim() == 3 ? x.strides(0) : 0;
  strides[1] = x.strides(-2);
  strides[2] = x.strides(-1);
}

WeightStrides weight_strides(const mx::array& x, bool out_first) {
  return {.head = x.strides(0),
          .in = x.strides(out_first ? 2 : 1),
          .out = x.strides(out_first ? 1 : 2)};
}

Weight describe_weight(const MapLayerSpec& spec, const std::vector<mx::array>& inputs) {
  const auto& w = inputs[spec.weight_at()];
  if (!spec.bits) {
    return {.data = w.data<char>(), .type = type_of(w), .strides = weight_strides(w, false)};
  }
  const auto& scales = inputs[spec.scales_at()];
  const auto& biases = inputs[spec.scales_at() + 1];
  return {.data = w.data<char>(),
          .type = type_of(scales),
          .bits = spec.bits,
          .group_size = spec.group_size,
          .strides = weight_strides(w, true),
          .scales = scales.data<char>(),
          .biases = biases.data<char>(),
          .scale_strides = weight_strides(scales, true),
          .bias_strides = weight_strides(biases, true)};
}

}  // namespace

Job describe(const MapLayerSpec& spec, const std::vector<mx::array>& inputs, mx::array& out) {
  const bool batched = out.ndim() == 4;
  const auto& w = inputs[spec.weight_at()];
  Job job{.batch = batched ? out.shape(0) : 1,
          .tokens = out.shape(-2),
          .heads = out.shape(-3),
          .in_dim = spec.bits ? w.shape(2) * 32 / spec.bits : w.shape(1),
          .out_dim = out.shape(-1),
          .sources = {},
          .tables = {},
          .rotate = spec.rotate,
          .head_mapping = spec.head_mapping,
          .mapping_width = spec.mapping_width,
          .weight = describe_weight(spec, inputs),
          .bias = {},
          .out = out.data<char>(),
          .out_type = type_of(out)};
  for (int i = 0; i < spec.sources; ++i) {
    const auto& x = inputs[i];
    job.sources.push_back({.data = x.data<char>(),
                           .type = type_of(x),
                           .heads = x.shape(-3),
                           .dim = x.shape(-1),
                           .batch_stride = batched ? x.strides(0) : 0,
                           .head_stride = x.strides(-3),
                           .token_stride = x.strides(-2),
                           .dim_stride = x.strides(-1),
                           .strip = spec.strip[i]});
  }
  if (spec.bias) {
    const auto& bias = inputs[spec.bias_at()];
    job.bias = {.data = bias.data<char>(),
                .type = type_of(bias),
                .head_stride = bias.strides(0),
                .out_stride = bias.strides(1)};
  }
  for (size_t i = 0; i < spec.traditional.size(); ++i) {
    const auto& cos = inputs[spec.tables_at() + 2 * i];
    const auto& sin = inputs[spec.tables_at() + 2 * i + 1];
    Table table{.cos = cos.data<float>(),
                .sin = sin.data<float>(),
                .pairs = cos.shape(-1),
                .traditional = spec.traditional[i]};
    copy_strides(cos, table.cos_strides);
    copy_strides(sin, table.sin_strides);
    job.tables.push_back(table);
  }
  return job;
}

}  // namespace kvgraft
