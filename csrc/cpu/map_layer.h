// map_layer on CPUs. No MLX types: it builds, runs and is sanitised without MLX.
#pragma once

#include <string>
#include <vector>

#include "cpu/isa.h"
#include "job.h"

namespace kvgraft::cpu {

// Computes the whole job, on the calling thread and the pool's.
void map_layer(const Job& job, const Isa& isa);

// The instruction sets that this build has and this processor runs, best first.
std::vector<std::string> isa_names();

// The one in use: the best, or the one that KVGRAFT_CPU_ISA or use_isa names.
// Both throw std::invalid_argument for a set that is not in isa_names().
const Isa& current_isa();
void use_isa(const std::string& name);

}  // namespace kvgraft::cpu
