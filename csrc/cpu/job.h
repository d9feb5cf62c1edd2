// What one map_layer call computes, in plain memory. No MLX types: the kernels
// build, run and are sanitised without MLX.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/isa.h"

namespace kvgraft::cpu {

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
  bool traditional;
  int64_t cos_strides[3];
  int64_t sin_strides[3];
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

// Computes the whole job, on the calling thread and the pool's.
void map_layer(const Job& job, const Isa& isa);

// What map_layer can at most reach: `tasks` times `steps` steps of multiplying and
// adding in registers, on as many threads as it uses. Returns the operations done.
double spin(int tasks, int64_t steps, const Isa& isa);

// The instruction sets that this build has and this processor runs, best first.
std::vector<std::string> isa_names();

// The one in use: the best, or the one that KVGRAFT_CPU_ISA or use_isa names.
// Both throw std::invalid_argument for a set that is not in isa_names().
const Isa& current_isa();
void use_isa(const std::string& name);

}  // namespace kvgraft::cpu
