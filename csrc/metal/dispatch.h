// What eval_gpu decides: which source layers share a dispatch, which kernel, which
// variant of it, what it is told, and how many threadgroups there are. Neither
// Metal nor MLX is needed to decide, so it is tested where neither is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "metal/params.h"

namespace kvgraft::metal {

// Values of the function constants; the same numbers stand in map_layer.metal.
enum ElementType { kF32, kF16, kBF16, kAbsent };
enum RopeKind { kNone, kSplit, kInterleaved };

constexpr int kMaxRows = 16;    // tokens up to which the rows kernel runs
constexpr int kMaxPlan = 1024;  // entries of a head plan: setBytes takes 4 KB

// Strides count elements.

struct Source {  // [batch, heads, tokens, dim]
  ElementType type;
  int heads;
  int dim;
  int64_t strides[4];
  uint64_t address;
  int strip;  // index into Call::tables, -1 for none
};

struct Table {
  int pairs;
  bool traditional;
  MapTable strides;
};

struct Call {
  int batch;
  int tokens;
  int heads;  // of the target
  int out_dim;
  ElementType out_type;
  std::vector<Source> sources;
  int bits;  // 0: not quantised
  int group_size;
  ElementType weight_type;    // of scales when quantised
  int64_t weight_strides[3];  // [heads, in, out], in words of `in` when quantised
  uint64_t weight_address;
  int64_t scale_strides[3];  // [heads, group, out]
  int64_t bias_strides[3];
  ElementType offset_type;  // of the map's bias
  int64_t offset_strides[2];
  std::vector<Table> tables;
  int rotate;      // index into tables, -1 for none
  int plan_width;  // source heads per target head; 0: all, no plan
};

struct Tile {
  int tokens;
  int columns;  // 0 in the rows kernel
};

// Function constants, in the order of their numbers.
struct Constants {
  int source_type, weight_type, bits, bias_type, out_type, strip, rotate;
  bool plan, wide_source, wide_weight, resume, finish;
};

struct Dispatch {
  std::string kernel;
  Constants constants;
  MapParams params;
  std::vector<int> members;  // source layers bound
  int grid[3];               // threadgroups
  int threads;               // of one
};

// The tile for a call: spans x span octets of the result's columns.
Tile choose_tile(int64_t tokens, int64_t spans, int span, int cores);

// One dispatch after the other; more than one hand on the sum in a scratch array
// of float32 [batch, heads, octets, tokens, 8].
std::vector<Dispatch> plan_dispatches(const Call& call, int cores,
                                      int max_sources = KVGRAFT_MAX_SOURCES,
                                      const Tile* tile = nullptr);

// Tells the variants of a kernel apart.
std::string variant_name(const std::string& kernel, const Constants& constants);

// GPU cores of the smallest chip whose architecture has this name ("applegpu_g13s"):
// how many tiles keep it busy.
int core_count(const std::string& architecture);

// Whether MLX's own matmul uses matrix units that simdgroup_matrix does not reach,
// so that plain operations are faster than the kernels here. What MLX itself asks,
// besides for macOS 26.2.
bool has_matrix_units(const std::string& architecture, int generation);

// Why the kernels do not take a call, empty if they do.
std::string refusal(int group_size, int64_t plan_entries);

}  // namespace kvgraft::metal
