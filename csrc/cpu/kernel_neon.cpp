// 64-bit Arm.
#include <arm_neon.h>

#include "cpu/kernel.h"

namespace kvgraft::cpu {
namespace {

struct Neon : Vectors<4> {
  KVGRAFT_INLINE F widen_half(H bits) {
    return (F)vcvt_f32_f16(vreinterpret_f16_u16((uint16x4_t)bits));
  }

  KVGRAFT_INLINE H narrow_half(F x) {
    return (H)vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)clamp(x, 65504.0f)));
  }

  KVGRAFT_INLINE void unzip(F a, F b, F& even, F& odd) {
    even = (F)vuzp1q_f32((float32x4_t)a, (float32x4_t)b);
    odd = (F)vuzp2q_f32((float32x4_t)a, (float32x4_t)b);
  }

  KVGRAFT_INLINE void zip(F even, F odd, F& a, F& b) {
    a = (F)vzip1q_f32((float32x4_t)even, (float32x4_t)odd);
    b = (F)vzip2q_f32((float32x4_t)even, (float32x4_t)odd);
  }
};

}  // namespace

// 24 accumulators, 4 for the weights and the rest for tokens: 32 registers. 16
// columns divide every usual head_dim, 12 do not.
constinit const Isa neon_isa = Kernel<Neon, 6, 4>::isa("neon");

}  // namespace kvgraft::cpu
