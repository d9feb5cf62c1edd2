// What one map_layer call computes, in plain memory, for both back ends.
#pragma once

#include <vector>

#include "operands.h"

namespace kvgraft {

struct Job {
  int batch = 1;
  int tokens = 0;
  int heads = 0;    // of the target
  int in_dim = 0;   // features per target head
  int out_dim = 0;  // head_dim of the target
  std::vector<Source> sources;
  std::vector<Table> tables;
  int rotate = -1;  // index into tables, -1 for none
  // heads x mapping_width source heads; empty when every target head is fed by all
  // of them.
  std::vector<int> head_mapping;
  int mapping_width = 0;
  Weight weight;
  Bias bias;
  void* out = nullptr;  // [batch, heads, tokens, out], contiguous
  Type out_type = Type::f32;
};

}  // namespace kvgraft
