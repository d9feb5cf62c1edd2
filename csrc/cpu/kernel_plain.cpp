// For any processor. Vectors of four are what every 64-bit one has.
#include "cpu/kernel.h"

namespace kvgraft::cpu {

constinit const Isa plain_isa = Kernel<Vectors<4>, 4, 2>::isa("plain");

}  // namespace kvgraft::cpu
