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

  template <int kRows>
  KVGRAFT_INLINE void interleave(const float* from, int stride, float* to) {
    static_assert(kRows == 6 && interleaved == 4);
    float32x4_t row[kRows];
    KVGRAFT_UNROLL
    for (int r = 0; r < kRows; ++r) row[r] = vld1q_f32(from + r * stride);
    const float32x4x2_t ab = vtrnq_f32(row[0], row[1]), cd = vtrnq_f32(row[2], row[3]);
    const float32x4x2_t ef = vtrnq_f32(row[4], row[5]);
    KVGRAFT_UNROLL
    for (int i = 0; i < 2; ++i) {  // columns i and i + 2
      float* low = to + i * kRows;
      float* high = to + (i + 2) * kRows;
      vst1_f32(low, vget_low_f32(ab.val[i]));
      vst1_f32(low + 2, vget_low_f32(cd.val[i]));
      vst1_f32(low + 4, vget_low_f32(ef.val[i]));
      vst1_f32(high, vget_high_f32(ab.val[i]));
      vst1_f32(high + 2, vget_high_f32(cd.val[i]));
      vst1_f32(high + 4, vget_high_f32(ef.val[i]));
    }
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
