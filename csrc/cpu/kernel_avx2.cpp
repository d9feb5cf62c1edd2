// x86-64 with AVX2, FMA and F16C. Compiled with those flags; see CMakeLists.txt.
#include "cpu/kernel_x86.h"

namespace kvgraft::cpu {
namespace {

// clang-format off
// A step: %ymm12 and 13 hold the weights of 16 columns, 14 and 15 a token's feature.
#define KVGRAFT_ROW(at, x, c0, c1)                        \
  "vbroadcastss " at "(%[a]), %%ymm" x "\n\t"             \
  "vfmadd231ps %%ymm12, %%ymm" x ", %[" c0 "]\n\t"        \
  "vfmadd231ps %%ymm13, %%ymm" x ", %[" c1 "]\n\t"
#define KVGRAFT_STEP(b0, b1, a0, a1, a2, a3, a4, a5)      \
  "vmovups " b0 "(%[b]), %%ymm12\n\t"                     \
  "vmovups " b1 "(%[b]), %%ymm13\n\t"                     \
  KVGRAFT_ROW(a0, "14", "c00", "c01")                     \
  KVGRAFT_ROW(a1, "15", "c10", "c11")                     \
  KVGRAFT_ROW(a2, "14", "c20", "c21")                     \
  KVGRAFT_ROW(a3, "15", "c30", "c31")                     \
  KVGRAFT_ROW(a4, "14", "c40", "c41")                     \
  KVGRAFT_ROW(a5, "15", "c50", "c51")
// clang-format on

struct Avx2 : Vectors<8> {
#ifndef KVGRAFT_NO_UNROLL  // sanitizers don't see into it
  // Written out because the size of the loop counts: where another program runs on the
  // core's second thread, instructions are fetched more slowly than they are worked off.
  // Here every offset fits into one byte, and nothing is moved between registers. What a
  // compiler makes of the loop is a quarter larger, and was up to a fifth slower there.
  KVGRAFT_INLINE int steps(int count, const float* a, const float* b, F (&c)[6][2]) {
    int64_t quads = count / 4;
    if (!quads) return 0;
    b += 32;  // -128 to 127 bytes around it
    asm volatile(
        ".p2align 6\n"
        "1:\n\t"  //
        KVGRAFT_STEP("-128", "-96", "0", "4", "8", "12", "16", "20")
        KVGRAFT_STEP("-64", "-32", "24", "28", "32", "36", "40", "44")
        KVGRAFT_STEP("0", "32", "48", "52", "56", "60", "64", "68")
        KVGRAFT_STEP("64", "96", "72", "76", "80", "84", "88", "92")
        "add $96, %[a]\n\t"
        "sub $-256, %[b]\n\t"
        "dec %[quads]\n\t"
        "jnz 1b\n"
        : [a] "+r"(a), [b] "+r"(b), [quads] "+r"(quads), [c00] "+x"(c[0][0]), [c01] "+x"(c[0][1]),
          [c10] "+x"(c[1][0]), [c11] "+x"(c[1][1]), [c20] "+x"(c[2][0]), [c21] "+x"(c[2][1]),
          [c30] "+x"(c[3][0]), [c31] "+x"(c[3][1]), [c40] "+x"(c[4][0]), [c41] "+x"(c[4][1]),
          [c50] "+x"(c[5][0]), [c51] "+x"(c[5][1])
        :
        : "ymm12", "ymm13", "ymm14", "ymm15", "memory", "cc");
    return count / 4 * 4;
  }
#endif

  KVGRAFT_INLINE F widen_half(H bits) { return (F)_mm256_cvtph_ps((__m128i)bits); }

  KVGRAFT_INLINE H narrow_half(F x) {
    return (H)_mm256_cvtps_ph((__m256)clamp(x, 65504.0f), _MM_FROUND_TO_NEAREST_INT);
  }

  static constexpr int interleaved = 8;

  template <int kRows>
  KVGRAFT_INLINE void interleave(const float* from, int stride, float* to) {
    static_assert(kRows == 6);
    __m256 four[4];  // rows 0 to 3 of columns 0 to 3 and 4 to 7
    transpose_4x8(from, stride, four);
    const __m256 a = _mm256_loadu_ps(from + 4 * stride), b = _mm256_loadu_ps(from + 5 * stride);
    const __m256 two01 = _mm256_unpacklo_ps(a, b), two23 = _mm256_unpackhi_ps(a, b);
    const __m256 parts[6] = {
        four[0], _mm256_shuffle_ps(two01, four[1], 0x44), _mm256_shuffle_ps(four[1], two01, 0xee),
        four[2], _mm256_shuffle_ps(two23, four[3], 0x44), _mm256_shuffle_ps(four[3], two23, 0xee)};
    KVGRAFT_UNROLL
    for (int i = 0; i < 3; ++i) {
      const __m256 x = parts[2 * i], y = parts[2 * i + 1];
      _mm256_storeu_ps(to + 8 * i, _mm256_permute2f128_ps(x, y, 0x20));
      _mm256_storeu_ps(to + 24 + 8 * i, _mm256_permute2f128_ps(x, y, 0x31));
    }
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
