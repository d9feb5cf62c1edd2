// What one map_layer call computes, in plain memory. No MLX types: the kernels
// build, run and are sanitised without MLX.
#pragma once

#include <cstdint>
#include <vector>

namespace kvgraft::cpu {

enum class Type : uint8_t { f32, f16, bf16 };

// All strides count elements, not bytes, and may be zero or negative.

// Keys or values of one source layer, [batch, heads, tokens, dim].
struct Source {
  const void* data;
  Type type;
  int heads;
  int dim;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t token_stride;
  int64_t dim_stride;
  int strip;  // index into Job::tables, -1 for none
};

// Cosines and sines, [batch, tokens, pairs]. They rotate the first 2 * pairs
// dimensions of a head.
struct Table {
  const float* cos;
  const float* sin;
  int pairs;
  bool traditional;  // pairs are (2i, 2i + 1) rather than (i, i + pairs)
  int64_t cos_strides[3];
  int64_t sin_strides[3];
};

// [heads, in, out] values, or MLX affine groups along the input axis.
struct Weight {
  const void* data;  // of `type`, or packed uint32 [heads, out, in * bits / 32]
  Type type;         // of data; of scales and biases when quantised
  int bits;          // 0 when not quantised, else 4 or 8
  int group_size;
  int64_t head_stride;
  int64_t in_stride;  // of packed words when quantised
  int64_t out_stride;
  const void* scales;  // [heads, out, in / group_size], biases likewise
  const void* biases;
  int64_t scale_strides[3];
  int64_t bias_strides[3];
};

struct Job {
  int batch;
  int tokens;
  int heads;    // of the target
  int in_dim;   // features per target head
  int out_dim;  // head_dim of the target
  std::vector<Source> sources;
  std::vector<Table> tables;
  int rotate;  // index into tables, -1 for none
  // heads x plan_width source heads; empty when every target head is fed by all
  // of them.
  std::vector<int> plan;
  int plan_width;
  Weight weight;
  const void* bias;  // [heads, out], nullptr for none
  Type bias_type;
  int64_t bias_strides[2];
  void* out;  // [batch, heads, tokens, out], contiguous
  Type out_type;
};

// Computes the whole job on the calling thread and the pool's.
void map_layer_plain(const Job& job);

}  // namespace kvgraft::cpu
