// The inner loops for vectors of any width, in the vector extension that GCC
// and Clang share. Each kernel_*.cpp instantiates Kernel for one instruction
// set and adds what the extension has no word for.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/half.h"
#include "cpu/isa.h"

#ifdef KVGRAFT_NO_UNROLL  // under sanitizers, which take minutes for long code
#define KVGRAFT_UNROLL
#elif defined(__clang__)
#define KVGRAFT_UNROLL _Pragma("unroll")
#else
#define KVGRAFT_UNROLL _Pragma("GCC unroll 32")
#endif
#define KVGRAFT_INLINE __attribute__((always_inline)) static inline

namespace kvgraft::cpu {
namespace {

// A struct of its own: GCC 12 drops the attribute from an alias inside the
// template that uses it.
template <class T, int kLanes>
struct VectorOf {
  using type [[gnu::vector_size(sizeof(T) * kLanes)]] = T;
};

template <int kLanes>
struct Vectors {
  static constexpr int lanes = kLanes;
  using F = typename VectorOf<float, kLanes>::type;
  using U = typename VectorOf<uint32_t, kLanes>::type;
  using I = typename VectorOf<int32_t, kLanes>::type;
  using H = typename VectorOf<uint16_t, kLanes>::type;

  template <class V, class T>
  KVGRAFT_INLINE V read(const T* at) {
    V v;
    __builtin_memcpy(&v, at, sizeof v);
    return v;
  }

  template <class V, class T>
  KVGRAFT_INLINE void write(T* at, V v) {
    __builtin_memcpy(at, &v, sizeof v);
  }

  KVGRAFT_INLINE F splat(float x) { return x - F{}; }
  KVGRAFT_INLINE U splat(uint32_t x) { return x - U{}; }
  KVGRAFT_INLINE F clamp(F x, float limit) {  // NaN passes
    x = x > splat(limit) ? splat(limit) : x;
    return x < splat(-limit) ? splat(-limit) : x;
  }

  // The functions of half.h, on vectors.
  KVGRAFT_INLINE F widen_half(H bits) {
    const U h = __builtin_convertvector(bits, U);
    const U sign = (h & 0x8000) << 16;
    const U rest = (h & 0x7fff) << 13;
    const F scaled = (F)rest * splat(0x1p112f);
    const U special = rest | 0x7f800000;
    return (F)(sign | ((h & 0x7c00) == 0x7c00 ? special : (U)scaled));
  }

  KVGRAFT_INLINE H narrow_half(F x) {
    const U bits = (U)x;
    const U sign = bits >> 16 & 0x8000;
    U mag = bits & 0x7fffffff;
    const U small = (U)((F)mag + splat(0.5f)) - 0x3f000000;
    const U nan = mag > 0x7f800000 ? splat(uint32_t{0x7e00}) : splat(uint32_t{0});
    mag = mag > 0x477fe000 ? splat(uint32_t{0x477fe000}) : mag;  // 65504
    const U usual = (mag - 0x38000000 + 0xfff + (mag >> 13 & 1)) >> 13;
    const U half = nan != 0 ? nan : mag < 0x38800000 ? small : usual;
    return __builtin_convertvector(sign | half, H);
  }

  KVGRAFT_INLINE F widen_bfloat(H bits) { return (F)(__builtin_convertvector(bits, U) << 16); }

  KVGRAFT_INLINE H narrow_bfloat(F x) {
    const U nan = (U)x | 0x400000;
    const U bits = (U)clamp(x, bits_float(0x7f7f0000));
    const U rounded = bits + 0x7fff + (bits >> 16 & 1);
    const U chosen = (U)x << 1 > 0xff000000 ? nan : rounded;
    return __builtin_convertvector(chosen >> 16, H);
  }

  // to[i][lane] = from[lane][i] for `count` words of kLanes columns; rows of `to`
  // lie `to_stride` apart.
  KVGRAFT_INLINE void transpose_words(const uint32_t* from, int64_t column_stride,
                                      int64_t word_stride, int count, uint32_t* to, int to_stride) {
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < count; ++i) {
        to[i * to_stride + lane] = from[lane * column_stride + i * word_stride];
      }
    }
  }

  // to[d][r] = from[r][d] for kRows rows, which lie `stride` apart, and the first
  // `interleaved` of their columns.
  static constexpr int interleaved = 4;

  template <int kRows>
  KVGRAFT_INLINE void interleave(const float* from, int stride, float* to) {
    for (int d = 0; d < interleaved; ++d) {
      for (int r = 0; r < kRows; ++r) to[d * kRows + r] = from[r * stride + d];
    }
  }

  // As many steps of a full tile as are multiplied better than by what the compiler
  // makes of the loop: acc[r] += a[k][r] * b[k] for k < the number returned.
  template <int kRows, int kVectors>
  KVGRAFT_INLINE int steps(int, const float*, const float*, F (&)[kRows][kVectors]) {
    return 0;
  }

  // The even and the odd members of 2 * kLanes values, and back.
  KVGRAFT_INLINE void unzip(F a, F b, F& even, F& odd) {
    float both[2 * kLanes], evens[kLanes], odds[kLanes];
    write(both, a);
    write(both + kLanes, b);
    KVGRAFT_UNROLL
    for (int i = 0; i < kLanes; ++i) {
      evens[i] = both[2 * i];
      odds[i] = both[2 * i + 1];
    }
    even = read<F>(evens);
    odd = read<F>(odds);
  }

  KVGRAFT_INLINE void zip(F even, F odd, F& a, F& b) {
    float both[2 * kLanes];
    KVGRAFT_UNROLL
    for (int i = 0; i < kLanes; ++i) {
      both[2 * i] = even[i];
      both[2 * i + 1] = odd[i];
    }
    a = read<F>(both);
    b = read<F>(both + kLanes);
  }
};

// S: Vectors<lanes>, or what derives from it to do some of it better.
// kRows x (kVectors * lanes) is the tile held in registers.
template <class S, int kRows, int kVectors>
struct Kernel {
  static constexpr int L = S::lanes;
  static constexpr int rows = kRows;
  static constexpr int columns = kVectors * L;
  using F = typename S::F;
  using U = typename S::U;
  using I = typename S::I;
  using H = typename S::H;

  KVGRAFT_INLINE F load(const float* at) { return S::template read<F>(at); }
  KVGRAFT_INLINE F load(const Half* at) { return S::widen_half(S::template read<H>(at)); }
  KVGRAFT_INLINE F load(const Bfloat* at) { return S::widen_bfloat(S::template read<H>(at)); }
  KVGRAFT_INLINE void store(float* at, F x) { S::write(at, x); }
  KVGRAFT_INLINE void store(Half* at, F x) { S::write(at, S::narrow_half(x)); }
  KVGRAFT_INLINE void store(Bfloat* at, F x) { S::write(at, S::narrow_bfloat(x)); }

  // --- rows of keys and values -------------------------------------------

  // y = rotate(x + bias); cosines and sines are contiguous. `bias` may be null
  // only if !kBias.
  template <bool kBias, class In, class Out>
  KVGRAFT_INLINE void turn(const In* x, const float* bias, Out* y, int dim, int pairs,
                           bool traditional, const float* cos, const float* sin) {
    const auto get = [&](int i) __attribute__((always_inline)) {
      if constexpr (kBias) return load(x + i) + load(bias + i);
      return load(x + i);
    };
    const auto get_one = [&](int i) __attribute__((always_inline)) {
      if constexpr (kBias) return to_float(x[i]) + bias[i];
      return to_float(x[i]);
    };
    int i = 0;
    if (traditional) {
      for (; i + L <= pairs; i += L) {
        F a, b, p, q;
        S::unzip(get(2 * i), get(2 * i + L), a, b);
        const F c = load(cos + i), s = load(sin + i);
        S::zip(a * c - b * s, a * s + b * c, p, q);
        store(y + 2 * i, p);
        store(y + 2 * i + L, q);
      }
      for (; i < pairs; ++i) {
        const float a = get_one(2 * i), b = get_one(2 * i + 1);
        narrow(a * cos[i] - b * sin[i], y + 2 * i);
        narrow(a * sin[i] + b * cos[i], y + 2 * i + 1);
      }
    } else {
      for (; i + L <= pairs; i += L) {
        const F a = get(i), b = get(i + pairs);
        const F c = load(cos + i), s = load(sin + i);
        store(y + i, a * c - b * s);
        store(y + i + pairs, a * s + b * c);
      }
      for (; i < pairs; ++i) {
        const float a = get_one(i), b = get_one(i + pairs);
        narrow(a * cos[i] - b * sin[i], y + i);
        narrow(a * sin[i] + b * cos[i], y + i + pairs);
      }
    }
    for (i = 2 * pairs; i + L <= dim; i += L) store(y + i, get(i));
    for (; i < dim; ++i) narrow(get_one(i), y + i);
  }

  // A row of a table, copied to `temp` if its elements do not lie together.
  KVGRAFT_INLINE const float* table_row(const float* row, int64_t stride, int pairs, float* temp) {
    if (stride == 1) return row;
    for (int i = 0; i < pairs; ++i) temp[i] = row[i * stride];
    return temp;
  }

  // kRows rows of `dim` -> [dim][kRows]: what a step of the product needs lies together,
  // at one address, and is read in one sweep.
  KVGRAFT_INLINE void interleave(const float* from, int dim, float* to) {
    int d = 0;
    for (; d + S::interleaved <= dim; d += S::interleaved) {
      S::template interleave<kRows>(from + d, dim, to + d * kRows);
    }
    for (; d < dim; ++d) {
      for (int r = 0; r < kRows; ++r) to[d * kRows + r] = from[r * dim + d];
    }
  }

  template <class In>
  static void pack_rows(const PackArgs& p) {
    const Rotation& r = p.rotation;
    float* const rows = p.temp;
    float* const cosines = rows + kRows * p.dim;
    float* const sines = cosines + p.dim;
    In* const gathered = reinterpret_cast<In*>(sines + p.dim);
    for (int t = 0; t < p.tokens; ++t) {
      const In* x = static_cast<const In*>(p.source) + t * p.token_stride;
      if (p.dim_stride != 1) {
        for (int i = 0; i < p.dim; ++i) gathered[i] = x[i * p.dim_stride];
        x = gathered;
      }
      const float* cos = nullptr;
      const float* sin = nullptr;
      if (r.pairs) {
        cos = table_row(r.cos + t * r.cos_token, r.cos_pair, r.pairs, cosines);
        sin = table_row(r.sin + t * r.sin_token, r.sin_pair, r.pairs, sines);
      }
      const int row = t % kRows;
      turn<false>(x, nullptr, rows + row * p.dim, p.dim, r.pairs, r.traditional, cos, sin);
      // Rows that are left over from the tile before stand where there are no more tokens;
      // nobody looks at them.
      if (row + 1 == kRows || t + 1 == p.tokens) {
        interleave(rows, p.dim, p.out + t / kRows * p.tile_stride);
      }
    }
  }

  static void pack(const PackArgs& p) {
    switch (p.type) {
      case Type::f32:
        return pack_rows<float>(p);
      case Type::f16:
        return pack_rows<Half>(p);
      default:
        return pack_rows<Bfloat>(p);
    }
  }

  template <class Out>
  static void finish_rows(const FinishArgs& f) {
    const Rotation& r = f.rotation;
    for (int t = 0; t < f.tokens; ++t) {
      const float* c = f.c + t * f.c_stride;
      Out* y = static_cast<Out*>(f.out) + static_cast<int64_t>(t) * f.dim;
      const float* cos = nullptr;
      const float* sin = nullptr;
      if (r.pairs) {
        cos = table_row(r.cos + t * r.cos_token, r.cos_pair, r.pairs, f.temp);
        sin = table_row(r.sin + t * r.sin_token, r.sin_pair, r.pairs, f.temp + f.dim);
      }
      if (f.bias) {
        turn<true>(c, f.bias, y, f.dim, r.pairs, r.traditional, cos, sin);
      } else {
        turn<false>(c, f.bias, y, f.dim, r.pairs, r.traditional, cos, sin);
      }
    }
  }

  static void finish(const FinishArgs& f) {
    switch (f.type) {
      case Type::f32:
        return finish_rows<float>(f);
      case Type::f16:
        return finish_rows<Half>(f);
      default:
        return finish_rows<Bfloat>(f);
    }
  }

  // --- weights -----------------------------------------------------------

  // kPanels panels side by side, so that memory is read in whole lines.
  template <int kPanels, class T>
  KVGRAFT_INLINE void widen_rows(const T* row, int64_t stride, int count, float* to) {
    for (int k = 0; k < count; ++k, row += stride, to += columns) {
      KVGRAFT_UNROLL
      for (int p = 0; p < kPanels; ++p) {
        KVGRAFT_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          const int at = v * L;
          store(to + static_cast<int64_t>(p) * count * columns + at, load(row + p * columns + at));
        }
      }
    }
  }

  template <class T>
  static void widen_plain(const WidenArgs& a) {
    const Weight& w = *a.weight;
    const T* from = static_cast<const T*>(w.data) + a.head * w.strides.head + a.in * w.strides.in +
                    a.out * w.strides.out;
    const int64_t size = static_cast<int64_t>(a.count) * columns;
    int out = 0;
    if (w.strides.out == 1) {
      for (; out + 4 * columns <= a.width; out += 4 * columns) {
        widen_rows<4>(from + out, w.strides.in, a.count, a.panels + out / columns * size);
      }
      for (; out + columns <= a.width; out += columns) {
        widen_rows<1>(from + out, w.strides.in, a.count, a.panels + out / columns * size);
      }
    }
    for (; out < a.width; out += columns) {
      const int width = a.width - out < columns ? a.width - out : columns;
      const T* row = from + out * w.strides.out;
      float* to = a.panels + out / columns * size;
      for (int k = 0; k < a.count; ++k, row += w.strides.in, to += columns) {
        for (int o = 0; o < width; ++o) to[o] = to_float(row[o * w.strides.out]);
        for (int o = width; o < columns; ++o) to[o] = 0.0f;
      }
    }
  }

  // Scales (or biases) of one group, for the panel's columns.
  template <class T>
  KVGRAFT_INLINE void group_values(const void* data, const WeightStrides& strides,
                                   const WidenArgs& a, int64_t group, float* to) {
    const T* at = static_cast<const T*>(data) + a.head * strides.head + a.out * strides.out +
                  group * strides.in;
    for (int o = 0; o < a.width; ++o) to[o] = to_float(at[o * strides.out]);
  }

  // `count` input rows out of one word per column, from its lowest bits up.
  template <int kBits>
  KVGRAFT_INLINE void unpack_rows(const uint32_t* word, int count, const float* scale,
                                  const float* shift, float* to) {
    KVGRAFT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      U packed = S::template read<U>(word + v * L);
      const F s = load(scale + v * L), b = load(shift + v * L);
      KVGRAFT_UNROLL
      for (int j = 0; j < count; ++j) {
        const I q = (I)(packed & ((1u << kBits) - 1));
        store(to + j * columns + v * L, __builtin_convertvector(q, F) * s + b);
        packed >>= kBits;
      }
    }
  }

  template <class T, int kBits>
  static void widen_affine(const WidenArgs& a) {
    constexpr int kPerWord = 32 / kBits;
    constexpr int kWords = 8;  // transposed at a time: half a cache line per column
    const Weight& w = *a.weight;
    const uint32_t* base =
        static_cast<const uint32_t*>(w.data) + a.head * w.strides.head + a.out * w.strides.out;
    float scale[columns] = {};
    float shift[columns] = {};
    uint32_t words[kWords][columns] = {};
    float* to = a.panels;
    int64_t k = a.in;
    const int64_t end = a.in + a.count;
    int64_t group_end = 0;
    while (k < end) {
      if (k >= group_end) {
        const int64_t group = k / w.group_size;
        group_values<T>(w.scales, w.scale_strides, a, group, scale);
        group_values<T>(w.biases, w.bias_strides, a, group, shift);
        group_end = (group + 1) * w.group_size;
      }
      const int64_t stop = end < group_end ? end : group_end;
      const int64_t first = k / kPerWord;
      const int64_t last = (stop + kPerWord - 1) / kPerWord;
      const int count = static_cast<int>(last - first < kWords ? last - first : kWords);
      const uint32_t* from = base + first * w.strides.in;
      if (a.width == columns) {
        KVGRAFT_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          S::transpose_words(from + v * L * w.strides.out, w.strides.out, w.strides.in, count,
                             words[0] + v * L, columns);
        }
      } else {
        for (int o = 0; o < a.width; ++o) {
          for (int i = 0; i < count; ++i) {
            words[i][o] = from[o * w.strides.out + i * w.strides.in];
          }
        }
      }
      for (int i = 0; i < count; ++i) {
        const int skip = static_cast<int>(k % kPerWord);
        if (skip == 0 && stop - k >= kPerWord) {
          unpack_rows<kBits>(words[i], kPerWord, scale, shift, to);
          to += kPerWord * columns;
          k += kPerWord;
        } else {  // the chunk begins or ends within a word
          const int64_t here = kPerWord - skip;
          const int left = static_cast<int>(stop - k < here ? stop - k : here);
          for (int o = 0; o < columns; ++o) words[i][o] >>= skip * kBits;
          unpack_rows<kBits>(words[i], left, scale, shift, to);
          to += left * columns;
          k += left;
        }
      }
    }
  }

  template <class T>
  static void widen_typed(WidenArgs a) {
    if (!a.weight->bits) return widen_plain<T>(a);
    const int end = a.out + a.width;
    for (; a.out < end; a.out += columns, a.panels += static_cast<int64_t>(a.count) * columns) {
      a.width = end - a.out < columns ? end - a.out : columns;
      a.weight->bits == 4 ? widen_affine<T, 4>(a) : widen_affine<T, 8>(a);
    }
  }

  static void widen(const WidenArgs& a) {
    switch (a.weight->type) {
      case Type::f32:
        return widen_typed<float>(a);
      case Type::f16:
        return widen_typed<Half>(a);
      default:
        return widen_typed<Bfloat>(a);
    }
  }

  // --- the product -------------------------------------------------------

  // kStride: of b, where it is known when compiling; else 0.
  template <int R, int kStride, class B>
  __attribute__((noinline)) static void tile(int count, const float* a, const B* b,
                                             int64_t b_stride, float* c, int64_t c_stride,
                                             bool first) {
    constexpr int kSteps = 8;
    const int64_t stride = kStride ? kStride : b_stride;
    F acc[R][kVectors] = {};
    int k = 0;
    if constexpr (R == kRows && kStride == columns && std::is_same_v<B, float>) {
      k = S::steps(count, a, b, acc);
      a += k * kRows;
      b += k * columns;
    }
    const auto step = [&](const float* x, const B* from) __attribute__((always_inline)) {
      F values[kVectors];
      KVGRAFT_UNROLL
      for (int v = 0; v < kVectors; ++v) values[v] = load(from + v * L);
      KVGRAFT_UNROLL
      for (int r = 0; r < R; ++r) {
        const F token = S::splat(x[r]);
        KVGRAFT_UNROLL
        for (int v = 0; v < kVectors; ++v) acc[r][v] += token * values[v];
      }
    };
    for (; k + kSteps <= count; k += kSteps, a += kSteps * kRows) {
      KVGRAFT_UNROLL
      for (int u = 0; u < kSteps; ++u) {
        if constexpr (kStride) {
          step(a + u * kRows, b + u * stride);
        } else {
          __builtin_prefetch(b + 64 * stride);  // in place, so it comes from far away
          step(a + u * kRows, b);
          b += stride;
          asm("" : "+r"(b));  // one address, not one for each step
        }
      }
      if constexpr (kStride != 0) b += kSteps * stride;
    }
    for (; k < count; ++k, a += kRows, b += stride) step(a, b);
    KVGRAFT_UNROLL
    for (int r = 0; r < R; ++r) {
      KVGRAFT_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        float* to = c + r * c_stride + v * L;
        store(to, first ? acc[r][v] : acc[r][v] + load(to));
      }
    }
  }

  // A tile of `r` <= R rows.
  template <int R, int kStride, class B>
  static void short_tile(int r, int count, const float* a, const B* b, int64_t b_stride, float* c,
                         int64_t c_stride, bool first) {
    if constexpr (R > 1) {
      if (r < R) {
        return short_tile<R - 1, kStride>(r, count, a, b, b_stride, c, c_stride, first);
      }
    }
    tile<R, kStride>(count, a, b, b_stride, c, c_stride, first);
  }

  template <int kStride, class B>
  static void multiply_typed(const MultiplyArgs& m) {
    const B* b = static_cast<const B*>(m.b);
    const int tiles = (m.rows + kRows - 1) / kRows;
    const Prefetch* next = m.next;
    const Prefetch* const next_end = next + m.next_count;
    int pieces = 0;  // to fetch while a tile is computed
    for (const Prefetch* n = next; n != next_end; ++n) pieces += n->count;
    pieces = (pieces + tiles - 1) / tiles;
    int at = 0;
    for (int t = 0; t < tiles; ++t) {
      for (int left = pieces; left && next != next_end; --left) {
        const char* piece = next->at + at * next->stride;
        for (int byte = 0; byte < next->bytes; byte += 64) __builtin_prefetch(piece + byte, 0, 2);
        if (++at >= next->count) {
          at = 0;
          ++next;
        }
      }
      const float* a = m.a + t * m.tile_stride;
      float* c = m.c + t * kRows * m.c_stride;
      const int r = m.rows - t * kRows;
      for (int i = kRows; i < 2 * kRows && i < r; ++i) {
        __builtin_prefetch(c + i * m.c_stride, 1);
      }
      if (r >= kRows) {
        tile<kRows, kStride>(m.count, a, b, m.b_stride, c, m.c_stride, m.first);
      } else {
        short_tile<kRows - 1, kStride>(r, m.count, a, b, m.b_stride, c, m.c_stride, m.first);
      }
    }
  }

  static void multiply(const MultiplyArgs& m) {
    switch (m.b_type) {
      case Type::f32:
        return m.b_stride == columns ? multiply_typed<columns, float>(m)
                                     : multiply_typed<0, float>(m);
      case Type::f16:
        return multiply_typed<0, Half>(m);
      default:
        return multiply_typed<0, Bfloat>(m);
    }
  }

  static constexpr Isa isa(const char* name) {
    return {.name = name,
            .rows = rows,
            .columns = columns,
            .pack = pack,
            .widen = widen,
            .multiply = multiply,
            .finish = finish};
  }
};

}  // namespace
}  // namespace kvgraft::cpu
