// What eval_gpu decides: which source layers share a dispatch, which kernel, which
// variant of it, its parameters, and how many threadgroups there are. Neither
// Metal nor MLX is needed to decide, so it is tested where neither is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "job.h"
#include "metal/params.h"

namespace kvgraft::metal {

// Values of the function constants, beside those of Type; the same numbers stand in
// map_layer.metal.
constexpr int kAbsent = 3;  // the type of a bias that is not there
enum RopeKind { kNone, kSplit, kInterleaved };

constexpr int kMaxRows = 16;       // tokens up to which the rows kernel runs
constexpr int kMaxMapping = 1024;  // entries of a head mapping: setBytes takes 4 KB

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
std::vector<Dispatch> plan_dispatches(const Job& job, int cores,
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

// Whether the kernels take weights in groups of this size (0: not quantised) and a head
// mapping of that many entries.
constexpr bool has_kernel(int group_size, int64_t mapping_entries) {
  return (group_size & (group_size - 1)) == 0 && mapping_entries <= kMaxMapping;
}

}  // namespace kvgraft::metal
