// x86-64 with AVX2, FMA and F16C. Compiled with those flags; see CMakeLists.txt.
#include "cpu/kernel_x86.h"

namespace kvgraft::cpu {
namespace {

struct Avx2 : Vectors<8> {
  KVGRAFT_INLINE F widen_half(H bits) { return (F)_mm256_cvtph_ps((__m128i)bits); }

  KVGRAFT_INLINE H narrow_half(F x) {
    return (H)_mm256_cvtps_ph((__m256)clamp(x, 65504.0f), _MM_FROUND_TO_NEAREST_INT);
  }

  KVGRAFT_INLINE void unzip(F a, F b, F& even, F& odd) {
    // Shuffles work in halves of 128 bits; put the quarters in order after.
    const __m256d e = (__m256d)_mm256_shuffle_ps((__m256)a, (__m256)b, 0x88);
    const __m256d o = (__m256d)_mm256_shuffle_ps((__m256)a, (__m256)b, 0xdd);
    even = (F)_mm256_permute4x64_pd(e, 0xd8);
    odd = (F)_mm256_permute4x64_pd(o, 0xd8);
  }

  KVGRAFT_INLINE void zip(F even, F odd, F& a, F& b) {
    const __m256 low = _mm256_unpacklo_ps((__m256)even, (__m256)odd);
    const __m256 high = _mm256_unpackhi_ps((__m256)even, (__m256)odd);
    a = (F)_mm256_permute2f128_ps(low, high, 0x20);
    b = (F)_mm256_permute2f128_ps(low, high, 0x31);
  }

  KVGRAFT_INLINE void transpose_words(const uint32_t* from, int64_t column_stride,
                                      int64_t word_stride, int count, uint32_t* to, int to_stride) {
    if (count != 8 || word_stride != 1) {
      return Vectors<8>::transpose_words(from, column_stride, word_stride, count, to, to_stride);
    }
    transpose_8x8(from, column_stride, to, to_stride);
  }
};

}  // namespace

// 12 accumulators, 2 for the weights, 1 for the token: 15 of 16 registers.
constinit const Isa avx2_isa = Kernel<Avx2, 6, 2>::isa("avx2");

}  // namespace kvgraft::cpu
