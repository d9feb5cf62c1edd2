// MapLayer on Apple GPUs: compile the kernels from the embedded
// source, dispatch. What is decided on the way is in dispatch.cpp.
#include <mlx/allocator.h>
#include <mlx/backend/metal/device.h>
#include <mlx/backend/metal/metal.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "describe.h"
#include "kernel_sources.h"
#include "metal/dispatch.h"

namespace kvgraft {

namespace {

using metal::Dispatch;

const std::string& architecture() {
  return mx::metal::device(mx::Device::gpu).get_architecture();
}

// Whether MLX's own operations are the faster ones on this GPU. KVGRAFT_METAL=kernel or
// =composed decides instead, to measure one against the other.
bool prefers_composed() {
  const char* text = std::getenv("KVGRAFT_METAL");
  const std::string asked = text ? text : "";
  if (asked == "kernel") return false;
  if (asked == "composed") return true;
  // The system is asked as MLX asks it; its own answer is not exported.
  return metal::has_matrix_units(architecture(),
                                 mx::metal::device(mx::Device::gpu).get_architecture_gen()) &&
         NS::ProcessInfo::processInfo()->isOperatingSystemAtLeastVersion({26, 2, 0});
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

}  // namespace

std::string metal_status() {
  static const std::string status = [] {
    if (!mx::metal::is_available()) return std::string("there is no Metal device");
    if (!prefers_composed()) return std::string();
    return "KVGRAFT_METAL asks for it, or this GPU (" + architecture() +
           ") has matrix units that MLX's own matmul uses and the kernel would not reach";
  }();
  return status;
}

void MapLayer::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto& out = outputs[0];
  out.set_data(mx::allocator::malloc(out.nbytes()));
  if (out.size() == 0) return;
  auto& device = mx::metal::device(stream().device);
  auto& encoder = mx::metal::get_command_encoder(stream());

  const auto& spec = spec_;
  const Job job = describe(spec, inputs, out);
  static const int cores = metal::core_count(architecture());
  const auto dispatches = metal::plan_dispatches(job, cores);

  const auto& weight = inputs[spec.weight_at()];
  // A buffer has to be bound even where nothing reads it.
  const mx::array& scales = job.weight.bits ? inputs[spec.scales_at()] : weight;
  const mx::array& biases = job.weight.bits ? inputs[spec.scales_at() + 1] : weight;
  const mx::array& offset = spec.bias ? inputs[spec.bias_at()] : weight;
  const auto table = [&](int index, int part) -> const mx::array& {
    return index < 0 ? weight : inputs[spec.tables_at() + 2 * index + part];
  };

  mx::array partial = out;  // bound but unused when one dispatch is enough
  if (dispatches.size() > 1) {
    const int octets = (job.out_dim + 7) / 8;
    partial = mx::array({job.batch, job.heads, octets, job.tokens, 8}, mx::float32, nullptr, {});
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
    encoder.set_vector_bytes(job.head_mapping, 10);
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
