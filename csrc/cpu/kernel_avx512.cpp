// x86-64 with AVX-512 F, BW, DQ and VL. Compiled with those flags; see
// CMakeLists.txt.
#include "cpu/kernel_x86.h"

namespace kvgraft::cpu {
namespace {

struct Avx512 : Vectors<16> {
  KVGRAFT_INLINE F widen_half(H bits) { return (F)_mm512_cvtph_ps((__m256i)bits); }

  KVGRAFT_INLINE H narrow_half(F x) {
    return (H)_mm512_cvtps_ph((__m512)clamp(x, 65504.0f), _MM_FROUND_TO_NEAREST_INT);
  }

  static constexpr int interleaved = 8;

  template <int kRows>
  KVGRAFT_INLINE void interleave(const float* from, int stride, float* to) {
    static_assert(kRows % 4 == 0);
    KVGRAFT_UNROLL
    for (int r = 0; r < kRows; r += 4) {
      __m256 four[4];
      transpose_4x8(from + r * stride, stride, four);
      KVGRAFT_UNROLL
      for (int i = 0; i < 4; ++i) {
        _mm_storeu_ps(to + i * kRows + r, _mm256_castps256_ps128(four[i]));
        _mm_storeu_ps(to + (i + 4) * kRows + r, _mm256_extractf128_ps(four[i], 1));
      }
    }
  }

  KVGRAFT_INLINE void unzip(F a, F b, F& even, F& odd) {
    const I pick = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    even = (F)_mm512_permutex2var_ps((__m512)a, (__m512i)pick, (__m512)b);
    odd = (F)_mm512_permutex2var_ps((__m512)a, (__m512i)(pick + 1), (__m512)b);
  }

  KVGRAFT_INLINE void zip(F even, F odd, F& a, F& b) {
    const I pick = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    a = (F)_mm512_permutex2var_ps((__m512)even, (__m512i)pick, (__m512)odd);
    b = (F)_mm512_permutex2var_ps((__m512)even, (__m512i)(pick + 8), (__m512)odd);
  }

  KVGRAFT_INLINE void transpose_words(const uint32_t* from, int64_t column_stride,
                                      int64_t word_stride, int count, uint32_t* to, int to_stride) {
    if (count != 8 || word_stride != 1) {
      return Vectors<16>::transpose_words(from, column_stride, word_stride, count, to, to_stride);
    }
    transpose_8x8(from, column_stride, to, to_stride);
    transpose_8x8(from + 8 * column_stride, column_stride, to + 8, to_stride);
  }
};

}  // namespace

// 24 accumulators, 2 for the weights; the token is broadcast from memory.
constinit const Isa avx512_isa = Kernel<Avx512, 12, 2>::isa("avx512");

}  // namespace kvgraft::cpu
