// What the x86 kernels share. Like kernel.h, it leaves no symbols behind.
#pragma once

#include <immintrin.h>

#include "cpu/kernel.h"

namespace kvgraft::cpu {
namespace {

// to[i][lane] = from[lane][i] for eight words of eight columns.
KVGRAFT_INLINE void transpose_8x8(const uint32_t* from, int64_t column_stride, uint32_t* to,
                                  int to_stride) {
  float* out = reinterpret_cast<float*>(to);
  // Pairs of 32 bits, then of 64, then of 128.
  __m256 a[8], b[8];
  KVGRAFT_UNROLL
  for (int i = 0; i < 8; ++i)
    a[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(from + i * column_stride));
  KVGRAFT_UNROLL
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  KVGRAFT_UNROLL
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
  KVGRAFT_UNROLL
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(out + i * to_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_storeu_ps(out + (i + 4) * to_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
}

// Eight columns of four rows: columns i and i + 4 in the halves of to[i].
KVGRAFT_INLINE void transpose_4x8(const float* from, int stride, __m256 (&to)[4]) {
  const __m256 a = _mm256_loadu_ps(from), b = _mm256_loadu_ps(from + stride);
  const __m256 c = _mm256_loadu_ps(from + 2 * stride), d = _mm256_loadu_ps(from + 3 * stride);
  const __m256 ab0 = _mm256_unpacklo_ps(a, b), ab2 = _mm256_unpackhi_ps(a, b);
  const __m256 cd0 = _mm256_unpacklo_ps(c, d), cd2 = _mm256_unpackhi_ps(c, d);
  to[0] = _mm256_shuffle_ps(ab0, cd0, 0x44);
  to[1] = _mm256_shuffle_ps(ab0, cd0, 0xee);
  to[2] = _mm256_shuffle_ps(ab2, cd2, 0x44);
  to[3] = _mm256_shuffle_ps(ab2, cd2, 0xee);
}

}  // namespace
}  // namespace kvgraft::cpu
