#include "finite.h"

#include <cstdint>
#include <stdexcept>

namespace kvgraft {

namespace {

// NaN and infinity have all bits of the exponent set, and nothing else does.
template <class T, T kExponent>
bool run_finite(const T* x, int64_t count, int64_t stride) {
  constexpr int64_t kBlock = 4096;  // scanned without branches, then tested
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = begin + kBlock < count ? begin + kBlock : count;
    T special = 0;
    if (stride == 1) {
      for (int64_t i = begin; i < end; ++i) special |= (x[i] & kExponent) == kExponent;
    } else {
      for (int64_t i = begin; i < end; ++i) special |= (x[i * stride] & kExponent) == kExponent;
    }
    if (special) return false;
  }
  return true;
}

template <class T, T kExponent>
bool axes_finite(const mx::array& x, const T* at, int axis) {
  if (axis == static_cast<int>(x.ndim()) - 1) {
    return run_finite<T, kExponent>(at, x.shape(axis), x.strides(axis));
  }
  for (int i = 0; i < x.shape(axis); ++i) {
    if (!axes_finite<T, kExponent>(x, at + i * x.strides(axis), axis + 1)) return false;
  }
  return true;
}

template <class T, T kExponent>
bool finite(const mx::array& x) {
  const T* data = x.data<T>();
  const auto& flags = x.flags();
  if (x.ndim() == 0 || flags.row_contiguous || (flags.contiguous && x.data_size() == x.size())) {
    return run_finite<T, kExponent>(data, static_cast<int64_t>(x.size()), 1);
  }
  return axes_finite<T, kExponent>(x, data, 0);
}

}  // namespace

bool all_finite(mx::array x) {
  if (x.dtype() != mx::float32 && x.dtype() != mx::float16 && x.dtype() != mx::bfloat16) {
    throw std::invalid_argument("[all_finite] Takes float32, float16 or bfloat16 arrays.");
  }
  x.eval();
  x.wait();
  if (x.size() == 0) return true;
  if (x.dtype() == mx::float32) return finite<uint32_t, 0x7f800000>(x);
  if (x.dtype() == mx::float16) return finite<uint16_t, 0x7c00>(x);
  return finite<uint16_t, 0x7f80>(x);
}

}  // namespace kvgraft
