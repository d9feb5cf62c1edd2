// MapLayer on MLX's CPU device: describe the arrays as a Job and hand it to the
// stream's thread.
#include <mlx/allocator.h>
#include <mlx/backend/cpu/encoder.h>

#include <stdexcept>

#include "cpu/job.h"
#include "map_layer.h"

namespace kvgraft {

namespace {

cpu::Type type_of(const mx::array& x) {
  if (x.dtype() == mx::float32) return cpu::Type::f32;
  if (x.dtype() == mx::float16) return cpu::Type::f16;
  if (x.dtype() == mx::bfloat16) return cpu::Type::bf16;
  throw std::runtime_error("[map_layer] Unexpected dtype.");
}

void copy_strides(const mx::array& x, int64_t (&strides)[3]) {
  const bool batched = x.ndim() == 3;
  strides[0] = batched ? x.strides(0) : 0;
  strides[1] = x.strides(-2);
  strides[2] = x.strides(-1);
}

cpu::Job make_job(const MapLayerSpec& spec, const std::vector<mx::array>& inputs, mx::array& out) {
  cpu::Job job;
  const bool batched = out.ndim() == 4;
  job.batch = batched ? out.shape(0) : 1;
  job.heads = out.shape(-3);
  job.tokens = out.shape(-2);
  job.out_dim = out.shape(-1);
  for (int i = 0; i < spec.sources; ++i) {
    const auto& x = inputs[i];
    job.sources.push_back({x.data<char>(), type_of(x), x.shape(-3), x.shape(-1),
                           batched ? x.strides(0) : 0, x.strides(-3), x.strides(-2), x.strides(-1),
                           spec.strip[i]});
  }

  const auto& w = inputs[spec.weight_at()];
  job.weight = {};
  job.weight.data = w.data<char>();
  job.weight.bits = spec.bits;
  job.weight.group_size = spec.group_size;
  job.weight.head_stride = w.strides(0);
  job.weight.in_stride = w.strides(spec.bits ? 2 : 1);
  job.weight.out_stride = w.strides(spec.bits ? 1 : 2);
  job.in_dim = spec.bits ? w.shape(2) * 32 / spec.bits : w.shape(1);
  if (spec.bits) {
    const auto& scales = inputs[spec.scales_at()];
    const auto& biases = inputs[spec.scales_at() + 1];
    job.weight.type = type_of(scales);
    job.weight.scales = scales.data<char>();
    job.weight.biases = biases.data<char>();
    for (int i = 0; i < 3; ++i) {
      job.weight.scale_strides[i] = scales.strides(i);
      job.weight.bias_strides[i] = biases.strides(i);
    }
  } else {
    job.weight.type = type_of(w);
  }

  job.bias = nullptr;
  job.bias_type = cpu::Type::f32;
  if (spec.bias) {
    const auto& bias = inputs[spec.bias_at()];
    job.bias = bias.data<char>();
    job.bias_type = type_of(bias);
    job.bias_strides[0] = bias.strides(0);
    job.bias_strides[1] = bias.strides(1);
  }
  for (size_t i = 0; i < spec.traditional.size(); ++i) {
    const auto& cos = inputs[spec.tables_at() + 2 * i];
    const auto& sin = inputs[spec.tables_at() + 2 * i + 1];
    cpu::Table table{
        cos.data<float>(), sin.data<float>(), cos.shape(-1), spec.traditional[i], {}, {}};
    copy_strides(cos, table.cos_strides);
    copy_strides(sin, table.sin_strides);
    job.tables.push_back(table);
  }
  job.rotate = spec.rotate;
  job.plan = spec.plan;
  job.plan_width = spec.plan_width;
  job.out = out.data<char>();
  job.out_type = type_of(out);
  return job;
}

}  // namespace

void MapLayer::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto& out = outputs[0];
  out.set_data(mx::allocator::malloc(out.nbytes()));
  if (out.size() == 0) return;
  auto& encoder = mx::cpu::get_command_encoder(stream());
  for (const auto& input : inputs) encoder.set_input_array(input);
  encoder.set_output_array(out);
  // Runs later, on the stream's thread. Raw pointers are enough: MLX keeps the
  // buffers of a primitive's inputs and outputs until its tasks have run.
  encoder.dispatch([job = make_job(spec_, inputs, out), isa = &cpu::current_isa()] {
    cpu::map_layer(job, *isa);
  });
}

}  // namespace kvgraft
