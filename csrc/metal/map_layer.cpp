// MapLayer on Apple GPUs: describe the arrays, compile the kernels from the embedded
// source, dispatch. What is decided on the way is in dispatch.cpp.
#include <mlx/allocator.h>
#include <mlx/backend/metal/device.h>
#include <mlx/backend/metal/metal.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "kernel_sources.h"
#include "map_layer.h"
#include "metal/dispatch.h"

namespace kvgraft {

namespace {

using metal::Dispatch;

metal::ElementType type_of(const mx::array& x) {
  if (x.dtype() == mx::float32) return metal::kF32;
  return x.dtype() == mx::float16 ? metal::kF16 : metal::kBF16;
}

const std::string& architecture() {
  return mx::metal::device(mx::Device::gpu).get_architecture();
}

// KVGRAFT_METAL=kernel or =composed decides instead, to measure one against the
// other.
bool prefers_plain_operations() {
  static const std::string asked = [] {
    const char* text = std::getenv("KVGRAFT_METAL");
    return std::string(text ? text : "");
  }();
  if (asked == "kernel") return false;
  if (asked == "composed") return true;
  // The system is asked as MLX asks it; its own answer is not exported.
  return metal::has_matrix_units(architecture(),
                                 mx::metal::device(mx::Device::gpu).get_architecture_gen()) &&
         NS::ProcessInfo::processInfo()->isOperatingSystemAtLeastVersion({26, 2, 0});
}

int64_t plan_entries(const MapLayerArgs& args) {
  int64_t entries = 0;
  if (args.heads) {
    for (const auto& group : *args.heads) entries += static_cast<int64_t>(group.size());
  }
  return entries;
}

MTL::Library* library(mx::metal::Device& device) {
  // MLX caches a library by this name alone, for the life of the process, and
  // this text is fixed for the life of the process too.
  return device.get_library("kvgraft_map_layer", [] {
    return std::string("#define KVGRAFT_EMBEDDED\n") + params_metal + map_layer_metal;
  });
}

MTL::ComputePipelineState* pipeline(mx::metal::Device& device, const Dispatch& d) {
  const auto& c = d.constants;
  const int numbers[] = {c.source_type, c.weight_type, c.bits,  c.bias_type,
                         c.out_type,    c.strip,       c.rotate};
  const bool flags[] = {c.plan, c.wide_source, c.wide_weight, c.resume, c.finish};
  mx::metal::MTLFCList list;
  int index = 0;
  for (const int& value : numbers) {
    list.emplace_back(&value, MTL::DataType::DataTypeInt, index++);
  }
  for (const bool& value : flags) {
    list.emplace_back(&value, MTL::DataType::DataTypeBool, index++);
  }
  return device.get_kernel(d.kernel, library(device), metal::variant_name(d.kernel, c), list);
}

void table_strides(const mx::array& x, int64_t (&strides)[3]) {
  strides[0] = x.ndim() == 3 ? x.strides(0) : 0;
  strides[1] = x.strides(-2);
  strides[2] = x.strides(-1);
}

// Weights as [heads, in, out], whichever of the last two comes first in the array.
void weight_strides(const mx::array& x, bool out_first, int64_t (&strides)[3]) {
  strides[0] = x.strides(0);
  strides[1] = x.strides(out_first ? 2 : 1);
  strides[2] = x.strides(out_first ? 1 : 2);
}

uint64_t address_of(const mx::array& x) {
  return reinterpret_cast<uintptr_t>(x.data<char>());
}

metal::Call describe(const MapLayerSpec& spec, const std::vector<mx::array>& inputs,
                     const mx::array& out) {
  metal::Call call{};
  const bool batched = out.ndim() == 4;
  call.batch = batched ? out.shape(0) : 1;
  call.tokens = out.shape(-2);
  call.heads = out.shape(-3);
  call.out_dim = out.shape(-1);
  call.out_type = type_of(out);
  for (int i = 0; i < spec.sources; ++i) {
    const auto& x = inputs[i];
    call.sources.push_back(
        {type_of(x),
         x.shape(-3),
         x.shape(-1),
         {batched ? x.strides(0) : 0, x.strides(-3), x.strides(-2), x.strides(-1)},
         address_of(x),
         spec.strip[i]});
  }
  const auto& weight = inputs[spec.weight_at()];
  call.bits = spec.group_size ? spec.bits : 0;
  call.group_size = spec.group_size;
  call.weight_type = type_of(weight);
  call.weight_address = address_of(weight);
  weight_strides(weight, call.bits != 0, call.weight_strides);
  if (call.bits) {
    call.weight_type = type_of(inputs[spec.scales_at()]);
    weight_strides(inputs[spec.scales_at()], true, call.scale_strides);
    weight_strides(inputs[spec.scales_at() + 1], true, call.bias_strides);
  }
  call.offset_type = metal::kAbsent;
  if (spec.bias) {
    const auto& offset = inputs[spec.bias_at()];
    call.offset_type = type_of(offset);
    call.offset_strides[0] = offset.strides(0);
    call.offset_strides[1] = offset.strides(1);
  }
  for (size_t i = 0; i < spec.traditional.size(); ++i) {
    const auto& cos = inputs[spec.tables_at() + 2 * i];
    metal::Table table{cos.shape(-1), spec.traditional[i], {}};
    table_strides(cos, table.strides.cos_strides);
    table_strides(inputs[spec.tables_at() + 2 * i + 1], table.strides.sin_strides);
    call.tables.push_back(table);
  }
  call.rotate = spec.rotate;
  call.plan_width = spec.plan.empty() ? 0 : spec.plan_width;
  return call;
}

}  // namespace

std::string metal_status() {
  if (!mx::metal::is_available()) return "there is no Metal device";
  if (prefers_plain_operations()) {
    return "KVGRAFT_METAL asks for it, or this GPU (" + architecture() +
           ") has matrix units that MLX's own matmul uses and the kernel would not reach";
  }
  return "";
}

bool metal_takes(const MapLayerArgs& args, const mx::Stream& stream) {
  return stream.device == mx::Device::gpu && !prefers_plain_operations() &&
         metal::refusal(args.weight.bits ? args.weight.group_size : 0, plan_entries(args)).empty();
}

void MapLayer::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto& out = outputs[0];
  out.set_data(mx::allocator::malloc(out.nbytes()));
  if (out.size() == 0) return;
  auto& device = mx::metal::device(stream().device);
  auto& encoder = mx::metal::get_command_encoder(stream());

  const auto& spec = spec_;
  const auto call = describe(spec, inputs, out);
  static const int cores = metal::core_count(architecture());
  const auto dispatches = metal::plan_dispatches(call, cores);

  const auto& weight = inputs[spec.weight_at()];
  // A buffer has to be bound even where nothing reads it.
  const mx::array& scales = call.bits ? inputs[spec.scales_at()] : weight;
  const mx::array& biases = call.bits ? inputs[spec.scales_at() + 1] : weight;
  const mx::array& offset = spec.bias ? inputs[spec.bias_at()] : weight;
  const auto table = [&](int index, int part) -> const mx::array& {
    return index < 0 ? weight : inputs[spec.tables_at() + 2 * index + part];
  };

  mx::array partial = out;  // bound but unused when one dispatch is enough
  if (dispatches.size() > 1) {
    const int octets = (call.out_dim + 7) / 8;
    partial = mx::array({call.batch, call.heads, octets, call.tokens, 8}, mx::float32, nullptr, {});
    partial.set_data(mx::allocator::malloc(partial.nbytes()));
    encoder.add_temporary(partial);
  }

  for (const Dispatch& d : dispatches) {
    const int strip = spec.strip[d.members[0]];
    encoder.set_compute_pipeline_state(pipeline(device, d));
    encoder.set_output_array(out, 0);
    // Reads what the dispatch before wrote; binding it as an output orders them.
    encoder.set_output_array(partial, 1);
    encoder.set_input_array(weight, 2);
    encoder.set_input_array(scales, 3);
    encoder.set_input_array(biases, 4);
    encoder.set_input_array(offset, 5);
    encoder.set_input_array(table(strip, 0), 6);
    encoder.set_input_array(table(strip, 1), 7);
    encoder.set_input_array(table(spec.rotate, 0), 8);
    encoder.set_input_array(table(spec.rotate, 1), 9);
    encoder.set_vector_bytes(spec.plan, 10);
    encoder.set_bytes(d.params, 11);
    for (int i = 0; i < KVGRAFT_MAX_SOURCES; ++i) {
      const bool used = i < static_cast<int>(d.members.size());
      encoder.set_input_array(inputs[d.members[used ? i : 0]], 12 + i);
    }
    encoder.dispatch_threadgroups(MTL::Size::Make(d.grid[0], d.grid[1], d.grid[2]),
                                  MTL::Size::Make(d.threads, 1, 1));
  }
}

}  // namespace kvgraft
