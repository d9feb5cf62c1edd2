// MapLayer on MLX's CPU device: the arrays' description goes to the stream's thread.
#include <mlx/allocator.h>
#include <mlx/backend/cpu/encoder.h>

#include "cpu/map_layer.h"
#include "describe.h"

namespace kvgraft {

void MapLayer::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto& out = outputs[0];
  out.set_data(mx::allocator::malloc(out.nbytes()));
  if (out.size() == 0) return;
  auto& encoder = mx::cpu::get_command_encoder(stream());
  for (const auto& input : inputs) encoder.set_input_array(input);
  encoder.set_output_array(out);
  // Runs later, on the stream's thread. Raw pointers are enough: MLX keeps the
  // buffers of a primitive's inputs and outputs until its tasks have run.
  encoder.dispatch([job = describe(spec_, inputs, out), isa = &cpu::current_isa()] {
    cpu::map_layer(job, *isa);
  });
}

}  // namespace kvgraft
