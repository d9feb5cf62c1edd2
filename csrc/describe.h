// From MLX's arrays to a Job: the one place where the two meet.
#pragma once

#include <vector>

#include "job.h"
#include "map_layer.h"

namespace kvgraft {

// Describes the evaluated inputs of a MapLayer node, and its allocated output.
// Holds raw pointers into both.
Job describe(const MapLayerSpec& spec, const std::vector<mx::array>& inputs, mx::array& out);

}  // namespace kvgraft
