// The processor's peak, for benchmarks/map_layer.py (ctypes): spin() of one instruction
// set on many threads.
#include <atomic>
#include <cstdint>
#include <cstring>

#include "cpu/pool.h"

namespace kvgraft::bench {

#define KVGRAFT_SET(name, rows, vectors, lanes) float spin_##name(int64_t steps);
#include "sets.inc"
#undef KVGRAFT_SET

namespace {

struct Set {
  const char* name;
  double flop;  // of a step
  float (*spin)(int64_t steps);
};

const Set sets[] = {
#define KVGRAFT_SET(name, rows, vectors, lanes) \
  {#name, 2.0 * (rows) * (vectors) * (lanes), spin_##name},
#include "sets.inc"
#undef KVGRAFT_SET
};

}  // namespace

// Runs `tasks` times `steps` steps on `threads` threads. Returns the floating-point
// operations done, 0 if there is no such instruction set.
extern "C" double kvgraft_peak(const char* isa, int tasks, int64_t steps, int threads) {
  for (const Set& set : sets) {
    if (std::strcmp(set.name, isa) != 0) continue;
    cpu::set_num_threads(threads);
    std::atomic<int> lost{0};
    cpu::parallel_for(tasks, [&](int64_t) {
      if (!(set.spin(steps) > 0)) ++lost;
    });
    return lost ? 0 : set.flop * tasks * static_cast<double>(steps);
  }
  return 0;
}

}  // namespace kvgraft::bench
