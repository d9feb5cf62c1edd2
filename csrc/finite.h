// Whether all elements of an array are numbers, without any memory of its own.
#pragma once

#include <mlx/array.h>

namespace kvgraft {

namespace mx = mlx::core;

// `x` is float32, float16 or bfloat16, of any layout. Evaluates it, and reads it
// on the calling thread, which can see it on every device. Throws
// std::invalid_argument for another dtype.
bool all_finite(mx::array x);

}  // namespace kvgraft
