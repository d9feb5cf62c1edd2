// float16 and bfloat16 in plain C++, for code that runs on any processor.
//
// Everything is static: these functions are compiled for several instruction
// sets, and a shared symbol could be the copy an older processor cannot run.
#pragma once

#include <cstdint>

namespace kvgraft::cpu {

struct Half {
  uint16_t bits;
};

struct Bfloat {
  uint16_t bits;
};

static inline uint32_t float_bits(float x) {
  return __builtin_bit_cast(uint32_t, x);
}
static inline float bits_float(uint32_t x) {
  return __builtin_bit_cast(float, x);
}

static inline float to_float(float x) {
  return x;
}

static inline float to_float(Half h) {
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000) << 16;
  const uint32_t rest = static_cast<uint32_t>(h.bits & 0x7fff) << 13;
  if ((h.bits & 0x7c00) == 0x7c00) return bits_float(sign | 0x7f800000 | rest);
  // Scaling by 2^112 moves the exponent and makes subnormals right as well.
  return bits_float(sign | float_bits(bits_float(rest) * 0x1p112f));
}

static inline float to_float(Bfloat b) {
  return bits_float(static_cast<uint32_t>(b.bits) << 16);
}

// Rounded to nearest even. What lies beyond the range becomes the largest
// finite value; NaN stays NaN.
static inline void narrow(float x, float* out) {
  *out = x;
}

static inline void narrow(float x, Half* out) {
  const uint32_t bits = float_bits(x);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t mag = bits & 0x7fffffff;
  uint32_t half;
  if (mag > 0x7f800000) {
    half = 0x7e00;
  } else if (mag >= 0x477ff000) {  // 65520 and up would round to infinity
    half = 0x7bff;
  } else if (mag < 0x38800000) {  // below 2^-14, where halves are subnormal
    // Adding 0.5 leaves the rounded multiple of 2^-24 in the low mantissa bits.
    half = float_bits(bits_float(mag) + 0.5f) - 0x3f000000;
  } else {
    half = (mag - 0x38000000 + 0xfff + (mag >> 13 & 1)) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | half);
}

static inline void narrow(float x, Bfloat* out) {
  const uint32_t bits = float_bits(x);
  const uint32_t mag = bits & 0x7fffffff;
  uint32_t value;
  if (mag > 0x7f800000) {
    value = bits >> 16 | 0x40;
  } else if (mag >= 0x7f7f8000) {
    value = (bits >> 16 & 0x8000) | 0x7f7f;
  } else {
    value = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  out->bits = static_cast<uint16_t>(value);
}

}  // namespace kvgraft::cpu
