// Sources, tables and weights as they lie in memory: what the CPU kernels and the
// Metal host code both work from. describe.h fills it in from MLX's arrays.
//
// No MLX types, so that kernels and dispatch decisions build, run and are tested
// without MLX; and no standard containers or algorithms, since the files compiled
// for one instruction set include this (see cpu/isa.h).
#pragma once

#include <cstdint>

namespace kvgraft {

// The same numbers stand in metal/map_layer.metal.
enum class Type : uint8_t { f32, f16, bf16 };

// All strides count elements, not bytes, and may be zero or negative.

// Keys or values of one source layer, [batch, heads, tokens, dim].
struct Source {
  const void* data = nullptr;
  Type type = Type::f32;
  int heads = 0;
  int dim = 0;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t token_stride = 0;
  int64_t dim_stride = 0;
  int strip = -1;  // index into Job::tables, -1 for none
};

// Cosines and sines, [batch, tokens, pairs]. They rotate the first 2 * pairs
// dimensions of a head.
struct Table {
  const float* cos = nullptr;
  const float* sin = nullptr;
  int pairs = 0;
  bool traditional = false;  // pairs are (2i, 2i + 1) rather than (i, i + pairs)
  int64_t cos_strides[3] = {};
  int64_t sin_strides[3] = {};
};

// Of [heads, in, out], whichever of the last two comes first in memory.
struct WeightStrides {
  int64_t head = 0;
  int64_t in = 0;
  int64_t out = 0;
};

// [heads, in, out] values, or MLX affine groups along the input axis.
struct Weight {
  const void* data = nullptr;  // of `type`; when quantised uint32 of 32 / bits inputs each
  Type type = Type::f32;       // of data; of scales and biases when quantised
  int bits = 0;                // 0 when not quantised, else 4 or 8
  int group_size = 0;
  WeightStrides strides = {};    // `in` steps over words when quantised
  const void* scales = nullptr;  // of a group of inputs, biases likewise
  const void* biases = nullptr;
  WeightStrides scale_strides = {};  // `in` steps over groups
  WeightStrides bias_strides = {};
};

// What is added to a head's result, [heads, out].
struct Bias {
  const void* data = nullptr;  // nullptr for none
  Type type = Type::f32;
  int64_t head_stride = 0;
  int64_t out_stride = 0;
};

}  // namespace kvgraft
