// The part of Metal's standard library that our kernels may use, for clang 19's
// C++. Address spaces are clang's OpenCL ones: type-checked and overloadable, yet
// plain memory to the code generator, so that sanitizers instrument it.
// What is not here does not compile, which keeps the kernels to what was checked.
#pragma once
#include "runtime.h"

#define device __attribute__((opencl_global))
#define constant const __attribute__((opencl_constant))
#define threadgroup __attribute__((opencl_local))
#define thread

typedef int int32_t;
typedef long int64_t;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;

// The compiler calls this to round to bfloat16. libgcc has it from 13 on only.
extern "C" __attribute__((weak, visibility("hidden"), no_sanitize("thread", "undefined"), used))
__bf16 __truncsfbf2(float x) {
  unsigned bits = __builtin_bit_cast(unsigned, x);
  if (x != x) bits |= 1u << 22;
  else bits += 0x7fff + (bits >> 16 & 1);
  return __builtin_bit_cast(__bf16, (unsigned short)(bits >> 16));
}

#define SHIM_VECTORS(T)                                     \
  typedef T T##2 __attribute__((ext_vector_type(2)));       \
  typedef T T##3 __attribute__((ext_vector_type(3)));       \
  typedef T T##4 __attribute__((ext_vector_type(4)));
SHIM_VECTORS(int) SHIM_VECTORS(uint) SHIM_VECTORS(half) SHIM_VECTORS(float) SHIM_VECTORS(bfloat)

namespace metal {

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

template <class T> struct shim_vector { static constexpr int size = 0; using element = T; };
template <class T, int N> struct shim_vector<vec<T, N>> { static constexpr int size = N; using element = T; };

// T4(...): the rewriter turns vector constructors into calls of this.
template <class V, class... A>
constexpr V shim_make(A... args) {
  using E = typename shim_vector<V>::element;
  constexpr int size = shim_vector<V>::size;
  V v = {};
  if constexpr (sizeof...(A) == 1 && ((shim_vector<A>::size + ...) == 0)) {
    for (int i = 0; i < size; ++i) v[i] = static_cast<E>((args, ...));
  } else {
    static_assert(((shim_vector<A>::size ? shim_vector<A>::size : 1) + ...) == size,
                  "MSL: a vector constructor has the wrong number of components");
    int at = 0;
    const auto put = [&](auto x) {
      if constexpr (shim_vector<decltype(x)>::size == 0) {
        v[at++] = static_cast<E>(x);
      } else {
        for (int k = 0; k < shim_vector<decltype(x)>::size; ++k) v[at++] = static_cast<E>(x[k]);
      }
    };
    (put(args), ...);
  }
  return v;
}

inline int min(int a, int b) { return b < a ? b : a; }
inline int max(int a, int b) { return a < b ? b : a; }
template <class T, int N>
inline T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; ++i) sum += a[i] * b[i];
  return sum;
}

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

#define SHIM_INLINE inline __attribute__((always_inline))
SHIM_INLINE void threadgroup_barrier(mem_flags f, uint line = __builtin_LINE()) {
  emulator_barrier(uint(f), line);
}
SHIM_INLINE void simdgroup_barrier(mem_flags f, uint line = __builtin_LINE()) {
  emulator_simdgroup_barrier(uint(f), line);
}

// A NaN that marks matrices nobody wrote to.
constexpr uint shim_unset = 0x7fc0deadu;
inline bool shim_is_unset(float x) { return __builtin_bit_cast(uint, x) == shim_unset; }

template <class T, int Columns, int Rows>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "MSL: only 8x8 simdgroup matrices exist");
  static_assert(__is_same(T, float), "our kernels keep to float matrices");
  // No thread_elements(): which lane holds what is not specified.
  T shim_elements[2] = {__builtin_bit_cast(float, shim_unset), __builtin_bit_cast(float, shim_unset)};
};

template <class T, int Columns, int Rows>
inline simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Columns, Rows> m;
  m.shim_elements[0] = m.shim_elements[1] = value;
  return m;
}

#define SHIM_MATRIX_MEMORY(SPACE)                                                              \
  template <class T>                                                                           \
  SHIM_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const SPACE T* from, ulong ld) { \
    emulator_uniform(ulong(from), ld, 1);                                                      \
    const uint lane = emulator_lane();                                                         \
    for (uint i = 0; i < 2; ++i) m.shim_elements[i] = from[emulator_element(lane, i, ld)];      \
  }                                                                                            \
  template <class T>                                                                           \
  SHIM_INLINE void simdgroup_store(simdgroup_matrix<T, 8, 8> m, SPACE T* to, ulong ld) {       \
    emulator_uniform(ulong(to), ld, 2);                                                        \
    if (shim_is_unset(m.shim_elements[0])) emulator_fail("UNINITIALISED matrix stored");       \
    const uint lane = emulator_lane();                                                         \
    for (uint i = 0; i < 2; ++i) to[emulator_element(lane, i, ld)] = m.shim_elements[i];        \
  }
SHIM_MATRIX_MEMORY(device)
SHIM_MATRIX_MEMORY(threadgroup)

SHIM_INLINE void simdgroup_multiply_accumulate(
    simdgroup_matrix<float, 8, 8>& d, const simdgroup_matrix<float, 8, 8>& a,
    const simdgroup_matrix<float, 8, 8>& b, const simdgroup_matrix<float, 8, 8>& c) {
  if (shim_is_unset(a.shim_elements[0]) || shim_is_unset(b.shim_elements[0])) {
    emulator_fail("UNINITIALISED matrix multiplied");
  }
  if (shim_is_unset(c.shim_elements[0])) emulator_fail("UNINITIALISED accumulator");
  emulator_multiply(a.shim_elements, b.shim_elements, c.shim_elements, d.shim_elements);
}

}  // namespace metal

// Entry points. The rewriter writes one thunk per kernel that takes the arguments
// by position.
template <class A>
SHIM_INLINE threadgroup A& shim_threadgroup() {
  return *(threadgroup A*)emulator_threadgroup_array(sizeof(A), alignof(A));
}
#define SHIM_THREADGROUP(name, ...) auto& name = shim_threadgroup<__VA_ARGS__>()

namespace shim {
struct Buffer { void* at; };
template <class T>
T argument(Buffer b) {
  if constexpr (__is_pointer(T)) return (T)b.at;
  else return *(__remove_reference_t(T)*)b.at;
}
template <class T>
T argument(const unsigned (&v)[3]) { return T{v[0], v[1], v[2]}; }
template <class T>
T argument(unsigned v) { return v; }
template <class... A, class... V>
void call(void (*kernel)(A...), const V&... values) { kernel(argument<A>(values)...); }
}  // namespace shim
