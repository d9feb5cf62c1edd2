// float16 and bfloat16 in plain C++, for code that runs on any processor.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace kvgraft::cpu {

inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t rest = static_cast<uint32_t>(h & 0x7fff) << 13;
  if ((h & 0x7c00) == 0x7c00) return std::bit_cast<float>(sign | 0x7f800000 | rest);
  // Scaling by 2^112 moves the exponent and makes subnormals right as well.
  return std::bit_cast<float>(sign |
                              std::bit_cast<uint32_t>(std::bit_cast<float>(rest) * 0x1p112f));
}

inline float bfloat_to_float(uint16_t b) {
  return std::bit_cast<float>(static_cast<uint32_t>(b) << 16);
}

// Round to nearest even; beyond the range becomes the largest finite value; NaN
// stays NaN.
inline uint16_t float_to_half(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t mag = bits & 0x7fffffff;
  if (mag > 0x7f800000) return sign | 0x7e00;
  if (mag >= 0x477ff000) return sign | 0x7bff;  // 65520 and up would round to inf
  if (mag < 0x38800000) {                       // below 2^-14: subnormal
    // Adding 0.5 leaves the rounded multiple of 2^-24 in the low mantissa bits.
    const float shifted = std::bit_cast<float>(mag) + 0.5f;
    return sign | static_cast<uint16_t>(std::bit_cast<uint32_t>(shifted) - 0x3f000000);
  }
  const uint32_t rounded = mag - 0x38000000 + 0xfff + (mag >> 13 & 1);
  return sign | static_cast<uint16_t>(rounded >> 13);
}

inline uint16_t float_to_bfloat(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t mag = bits & 0x7fffffff;
  if (mag > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  if (mag >= 0x7f7f8000) return static_cast<uint16_t>((bits >> 16 & 0x8000) | 0x7f7f);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace kvgraft::cpu
