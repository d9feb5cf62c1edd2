// Multiplies and adds in registers and nothing else: the most that this instruction set
// can do. Compiled once per set (see CMakeLists.txt), with as many accumulators as the
// tile of its kernel has.
#include "cpu/kernel.h"

namespace kvgraft::bench {

using S = kvgraft::cpu::Vectors<KVGRAFT_LANES>;

// One step is KVGRAFT_ROWS x KVGRAFT_VECTORS vectors. Returns their sum, so that it is
// computed.
float KVGRAFT_SPIN(int64_t steps) {
  S::F acc[KVGRAFT_ROWS][KVGRAFT_VECTORS];
  KVGRAFT_UNROLL
  for (int r = 0; r < KVGRAFT_ROWS; ++r) {
    KVGRAFT_UNROLL
    for (int v = 0; v < KVGRAFT_VECTORS; ++v) {
      acc[r][v] = S::splat(static_cast<float>(r * KVGRAFT_VECTORS + v));
    }
  }
  // Read at run time: a compiler that knows them finds accumulators that stay as they
  // are, and leaves those out.
  volatile float shrink = 0.999f, grow = 0.001f;
  const S::F x = S::splat(float{shrink}), y = S::splat(float{grow});
  for (int64_t i = 0; i < steps; ++i) {
    KVGRAFT_UNROLL
    for (int r = 0; r < KVGRAFT_ROWS; ++r) {
      KVGRAFT_UNROLL
      for (int v = 0; v < KVGRAFT_VECTORS; ++v) acc[r][v] = acc[r][v] * x + y;
    }
  }
  S::F sum{};
  for (int r = 0; r < KVGRAFT_ROWS; ++r) {
    for (int v = 0; v < KVGRAFT_VECTORS; ++v) sum += acc[r][v];
  }
  float total = 0;
  for (int i = 0; i < KVGRAFT_LANES; ++i) total += sum[i];
  return total;
}

}  // namespace kvgraft::bench
