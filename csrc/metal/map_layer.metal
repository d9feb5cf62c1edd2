// The keys or values of one target layer from those of its source layers, as
// kvgraft.ops.reference.map_layer defines them: take the source's RoPE off, multiply
// by the weights, add the bias, put the target's RoPE on. All arithmetic is
// float32.
//
// Octets. The sum over input features has no order, and neither have the columns
// of the result. So both heads of the source and of the target are walked in
// octets: eight dims that hold four whole RoPE pairs, wherever the pairs lie in
// the head. A tile of octets then never needs another tile to rotate, whatever
// the head_dim, the kind of RoPE or the part of the head that it turns.
//
// Threadgroup memory holds float32: the stripped keys would lose bits in any
// narrower type, and simdgroup_matrix is only needed in its float form.
//
// docs/metal.md explains the tiles, the loop order and what was tested how.
// ASCII only: Metal takes the source as an ASCII string.

#include <metal_stdlib>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>

#ifndef KVGRAFT_EMBEDDED  // the host pastes this file's text in instead
#include "params.h"
#endif

using namespace metal;

// Element types, kinds of RoPE.
constant constexpr int kF32 = 0;
constant constexpr int kF16 = 1;
constant constexpr int kBF16 = 2;
constant constexpr int kAbsent = 3;  // no bias
constant constexpr int kNone = 0;
constant constexpr int kSplit = 1;        // pairs are (i, i + pairs)
constant constexpr int kInterleaved = 2;  // pairs are (2i, 2i + 1)

// Fixed when the pipeline is made; branches on them cost nothing.
constant int kSourceType [[function_constant(0)]];
constant int kWeightType [[function_constant(1)]];  // of scales when quantised
constant int kBits [[function_constant(2)]];        // 0: not quantised
constant int kBiasType [[function_constant(3)]];
constant int kOutType [[function_constant(4)]];
constant int kStrip [[function_constant(5)]];
constant int kRotate [[function_constant(6)]];
constant bool kPlan [[function_constant(7)]];  // a head plan, not all source heads
// Octets of a source are two runs of four adjacent, aligned values.
constant bool kWideSource [[function_constant(8)]];
// The same of the target's octets in plain weights; in quantised weights, four
// inputs lie in one word.
constant bool kWideWeight [[function_constant(9)]];
// More source layers than one dispatch takes: the sum goes on in `partial`.
constant bool kResume [[function_constant(10)]];
constant bool kFinish [[function_constant(11)]];

struct Octet {
  float4 lo;  // slots 0 to 3
  float4 hi;  // slots 4 to 7
};

struct Buffers {
  const device uchar* weight;
  const device uchar* scales;
  const device uchar* biases;
  const device uchar* offset;
  const device float* strip_cos;
  const device float* strip_sin;
  const device float* rotate_cos;
  const device float* rotate_sin;
  device float* partial;
  device uchar* out;
  const device int* plan;
};

float read_one(const device uchar* data, int type, long at) {
  if (type == kF16) return float(((const device half*)data)[at]);
  if (type == kBF16) return float(((const device bfloat*)data)[at]);
  return ((const device float*)data)[at];
}

float4 read_four(const device uchar* data, int type, long at) {
  if (type == kF16) {
    const half4 v = *(const device half4*)((const device half*)data + at);
    return float4(v);
  }
  if (type == kBF16) {
    const bfloat4 v = *(const device bfloat4*)((const device bfloat*)data + at);
    return float4(float(v.x), float(v.y), float(v.z), float(v.w));
  }
  return *(const device float4*)((const device float*)data + at);
}

// Beyond the range of the type lies its largest value; NaN stays (clamp() would
// lose it).
void write_one(device uchar* data, int type, long at, float value) {
  if (type == kF32) {
    ((device float*)data)[at] = value;
    return;
  }
  const float limit = type == kF16 ? 65504.0f : 3.3895313892515355e38f;
  value = value > limit ? limit : value;
  value = value < -limit ? -limit : value;
  if (type == kF16) {
    ((device half*)data)[at] = half(value);
  } else {
    ((device bfloat*)data)[at] = bfloat(value);
  }
}

// The dim of a head that sits in a slot of an octet. May be past the end of the
// head in its last octet.
int dim_of(int octet, int slot, int pairs, int kind) {
  const int pair = 4 * octet + (slot & 3);
  const int member = slot >> 2;
  if (kind != kSplit || 4 * octet >= pairs) return 8 * octet + slot;
  return pair < pairs ? pair + member * pairs : 2 * pair + member;
}

// The cosines and sines of an octet's four pairs; pairs beyond the table stand
// still.
Octet read_turns(
    const device float* cos_table,
    const device float* sin_table,
    constant MapTable& table,
    int pairs,
    int batch,
    int token,
    int octet) {
  Octet turns = {float4(1.0f), float4(0.0f)};
  const device float* c = cos_table + batch * table.cos_strides[0] + token * table.cos_strides[1];
  const device float* s = sin_table + batch * table.sin_strides[0] + token * table.sin_strides[1];
  for (int i = 0; i < 4; ++i) {
    const int pair = 4 * octet + i;
    if (pair < pairs) {
      turns.lo[i] = c[pair * table.cos_strides[2]];
      turns.hi[i] = s[pair * table.sin_strides[2]];
    }
  }
  return turns;
}

// Rotates the pairs of an octet. Slots i and i + 4 are a pair, or 2i and 2i + 1
// when interleaved.
Octet turn(Octet x, Octet turns, int kind) {
  const float4 cosine = turns.lo;
  const float4 sine = turns.hi;
  float4 a = x.lo;
  float4 b = x.hi;
  if (kind == kInterleaved) {
    a = float4(x.lo.x, x.lo.z, x.hi.x, x.hi.z);
    b = float4(x.lo.y, x.lo.w, x.hi.y, x.hi.w);
  }
  const float4 p = a * cosine - b * sine;
  const float4 q = a * sine + b * cosine;
  Octet out = {p, q};
  if (kind == kInterleaved) {
    out.lo = float4(p.x, q.x, p.y, q.y);
    out.hi = float4(p.z, q.z, p.w, q.w);
  }
  return out;
}

// An octet of one token's source head, RoPE still on. `at`: dim 0 of that head.
Octet read_source(const device uchar* data, constant MapParams& p, long stride, long at, int octet) {
  Octet x = {float4(0.0f), float4(0.0f)};
  if (kWideSource) {
    x.lo = read_four(data, kSourceType, at + dim_of(octet, 0, p.strip_pairs, kStrip));
    x.hi = read_four(data, kSourceType, at + dim_of(octet, 4, p.strip_pairs, kStrip));
    return x;
  }
  for (int slot = 0; slot < 8; ++slot) {
    const int dim = dim_of(octet, slot, p.strip_pairs, kStrip);
    if (dim < p.source_dim) {
      const float value = read_one(data, kSourceType, at + dim * stride);
      if (slot < 4) {
        x.lo[slot] = value;
      } else {
        x.hi[slot - 4] = value;
      }
    }
  }
  return x;
}

// Four weights of one output column, inputs `in` to `in + 3`, out of the groups
// of one word.
float4 dequantize(thread const Buffers& b, constant MapParams& p, int head, int in, int out) {
  const device uint* words = (const device uint*)b.weight;
  const int group = in >> p.group_shift;
  const uint word = words
      [head * p.weight_strides[0] + in * kBits / 32 * p.weight_strides[1] +
       out * p.weight_strides[2]];
  const uint bits = word >> uint(in * kBits % 32);
  const uint mask = (1u << uint(kBits)) - 1u;
  const float scale = read_one(
      b.scales,
      kWeightType,
      head * p.scale_strides[0] + group * p.scale_strides[1] + out * p.scale_strides[2]);
  const float bias = read_one(
      b.biases,
      kWeightType,
      head * p.bias_strides[0] + group * p.bias_strides[1] + out * p.bias_strides[2]);
  // Where the caller wants the first value only, the others may be none of its
  // group, or shifted out of the word.
  const float4 steps = float4(
      float(bits & mask),
      float(bits >> uint(kBits) & mask),
      float(bits >> uint(2 * kBits) & mask),
      float(bits >> uint(3 * kBits) & mask));
  return steps * scale + bias;
}

// The weights from an octet of inputs to one output. `row`: the input feature
// that is dim 0 of the octet's source head.
Octet read_weights(
    thread const Buffers& b, constant MapParams& p, int head, int row, int octet, int out) {
  Octet w = {float4(0.0f), float4(0.0f)};
  if (kBits != 0 && kWideWeight) {
    w.lo = dequantize(b, p, head, row + dim_of(octet, 0, p.strip_pairs, kStrip), out);
    w.hi = dequantize(b, p, head, row + dim_of(octet, 4, p.strip_pairs, kStrip), out);
    return w;
  }
  for (int slot = 0; slot < 8; ++slot) {
    const int dim = dim_of(octet, slot, p.strip_pairs, kStrip);
    if (dim < p.source_dim) {
      const int in = row + dim;
      const float value = kBits != 0
          ? dequantize(b, p, head, in, out).x
          : read_one(
                b.weight,
                kWeightType,
                head * p.weight_strides[0] + in * p.weight_strides[1] + out * p.weight_strides[2]);
      if (slot < 4) {
        w.lo[slot] = value;
      } else {
        w.hi[slot - 4] = value;
      }
    }
  }
  return w;
}

// Takes an octet of sums to the result, or to `partial` if more layers follow.
// `octet` counts over all heads of the target.
void finish(
    thread const Buffers& b, constant MapParams& p, Octet y, int batch, int token, int octet) {
  const int per_head = (p.out_dim + 7) / 8;
  const int head = octet / per_head;
  const int within = octet % per_head;
  if (kResume || !kFinish) {
    device float4* partial = (device float4*)b.partial +
        2 * ((long(batch) * p.heads * per_head + octet) * p.tokens + token);
    if (kResume) {
      y.lo += partial[0];
      y.hi += partial[1];
    }
    if (!kFinish) {
      partial[0] = y.lo;
      partial[1] = y.hi;
      return;
    }
  }
  if (kBiasType != kAbsent) {
    for (int slot = 0; slot < 8; ++slot) {
      const int dim = dim_of(within, slot, p.rotate_pairs, kRotate);
      if (dim < p.out_dim) {
        const float bias =
            read_one(b.offset, kBiasType, head * p.offset_strides[0] + dim * p.offset_strides[1]);
        if (slot < 4) {
          y.lo[slot] += bias;
        } else {
          y.hi[slot - 4] += bias;
        }
      }
    }
  }
  if (kRotate != kNone && 4 * within < p.rotate_pairs) {
    y = turn(
        y,
        read_turns(b.rotate_cos, b.rotate_sin, p.rotate, p.rotate_pairs, batch, token, within),
        kRotate);
  }
  const long row = ((long(batch) * p.heads + head) * p.tokens + token) * p.out_dim;
  for (int slot = 0; slot < 8; ++slot) {
    const int dim = dim_of(within, slot, p.rotate_pairs, kRotate);
    if (dim < p.out_dim) {
      write_one(b.out, kOutType, row + dim, slot < 4 ? y.lo[slot] : y.hi[slot - 4]);
    }
  }
}

// Reads an octet of a source head and takes its RoPE off.
Octet read_stripped(
    const device uchar* data,
    constant MapParams& p,
    int layer,
    int source_head,
    int batch,
    int token,
    int octet,
    Octet turns) {
  constant MapSource& s = p.layers[layer];
  const long at =
      batch * s.batch_stride + source_head * s.head_stride + token * s.token_stride;
  const Octet x = read_source(data, p, s.dim_stride, at, octet);
  if (kStrip == kNone || 4 * octet >= p.strip_pairs) return x;
  return turn(x, turns, kStrip);
}

#define KVGRAFT_ARGUMENTS                                   \
  device uchar* out [[buffer(0)]],                          \
  device float* partial [[buffer(1)]],                      \
  const device uchar* weight [[buffer(2)]],                 \
  const device uchar* scales [[buffer(3)]],                 \
  const device uchar* biases [[buffer(4)]],                 \
  const device uchar* offset [[buffer(5)]],                 \
  const device float* strip_cos [[buffer(6)]],              \
  const device float* strip_sin [[buffer(7)]],              \
  const device float* rotate_cos [[buffer(8)]],             \
  const device float* rotate_sin [[buffer(9)]],             \
  const device int* plan [[buffer(10)]],                    \
  constant MapParams& p [[buffer(11)]],                     \
  const device uchar* s0 [[buffer(12)]],                    \
  const device uchar* s1 [[buffer(13)]],                    \
  const device uchar* s2 [[buffer(14)]],                    \
  const device uchar* s3 [[buffer(15)]],                    \
  const device uchar* s4 [[buffer(16)]],                    \
  const device uchar* s5 [[buffer(17)]],                    \
  const device uchar* s6 [[buffer(18)]],                    \
  const device uchar* s7 [[buffer(19)]],                    \
  const device uchar* s8 [[buffer(20)]],                    \
  const device uchar* s9 [[buffer(21)]],                    \
  const device uchar* s10 [[buffer(22)]],                   \
  const device uchar* s11 [[buffer(23)]],                   \
  const device uchar* s12 [[buffer(24)]],                   \
  const device uchar* s13 [[buffer(25)]],                   \
  const device uchar* s14 [[buffer(26)]],                   \
  const device uchar* s15 [[buffer(27)]],                   \
  uint3 group [[threadgroup_position_in_grid]],             \
  uint thread_id [[thread_index_in_threadgroup]],           \
  uint simdgroup_id [[simdgroup_index_in_threadgroup]]

#define KVGRAFT_BUFFERS                                                             \
  {weight, scales, biases, offset, strip_cos, strip_sin, rotate_cos, rotate_sin, partial, out, plan}

// The buffer of a layer; the same for all threads. A chain of selects, since an
// array of pointers indexed at run time would live in memory.
#define KVGRAFT_PICK(layer)          \
  ((layer) < 8                       \
      ? ((layer) < 4                 \
            ? ((layer) < 2 ? ((layer) < 1 ? s0 : s1) : ((layer) < 3 ? s2 : s3))         \
            : ((layer) < 6 ? ((layer) < 5 ? s4 : s5) : ((layer) < 7 ? s6 : s7)))        \
      : ((layer) < 12                \
            ? ((layer) < 10 ? ((layer) < 9 ? s8 : s9) : ((layer) < 11 ? s10 : s11))     \
            : ((layer) < 14 ? ((layer) < 13 ? s12 : s13) : ((layer) < 15 ? s14 : s15))))

// A tile of BM tokens x BN columns of the result, by four simdgroups in two rows
// of two.
//
// The outermost loop goes over octets within a head, the inner ones over source
// layers and heads: the cosines and sines of a thread's tokens and pairs are the
// same for all of them, so they are read once and stay in registers.
template <int BM, int BN>
[[kernel, max_total_threads_per_threadgroup(128)]] void map_layer_tile(KVGRAFT_ARGUMENTS) {
  constexpr int THREADS = 128;
  constexpr int OCTETS = 4;  // of the inputs, a step
  constexpr int BK = 8 * OCTETS;
  constexpr int TM = BM / 16;  // fragments of a simdgroup
  constexpr int TN = BN / 16;
  constexpr int LDA = BK + 4;  // rows padded by 16 bytes, against bank conflicts
  constexpr int LDB = BN + 4;
  constexpr int TURNS = BM * OCTETS / THREADS;
  constexpr int LOADS = BM * LDA + BK * LDB;
  constexpr int SUMS = BM * LDB;
  // float4, so that vectors in it are aligned.
  threadgroup float4 vectors[(LOADS > SUMS ? LOADS : SUMS) / 4];
  threadgroup float* memory = (threadgroup float*)vectors;
  threadgroup float* xs = memory;
  threadgroup float* ws = memory + BM * LDA;

  const Buffers b = KVGRAFT_BUFFERS;
  const int id = int(thread_id);
  const int batch = int(group.z);
  const int token0 = int(group.y) * BM;
  const int per_head = (p.out_dim + 7) / 8;
  const int span = int(group.x) / p.tiles_per_span;
  const int octet0 = span * p.span + (int(group.x) % p.tiles_per_span) * (BN / 8);
  const int octet_end = (span + 1) * p.span;
  const int head0 = octet0 / per_head;
  const int row0 = int(simdgroup_id) / 2 * (BM / 2);
  const int col0 = int(simdgroup_id) % 2 * (BN / 2);

  simdgroup_matrix<float, 8, 8> sums[TM][TN];
#pragma clang loop unroll(full)
  for (int i = 0; i < TM; ++i) {
#pragma clang loop unroll(full)
    for (int j = 0; j < TN; ++j) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }

  // A thread fetches weights of the same columns in every step. Which they are
  // takes divisions, so that is worked out once: one octet of outputs if they are
  // read as vectors, else one output for each task.
  constexpr int COLUMNS = BN * OCTETS / THREADS;
  const int own_octet = octet0 + id % (BN / 8);
  const int own_head = own_octet / per_head;
  const int own_lo = dim_of(own_octet % per_head, 0, p.rotate_pairs, kRotate);
  const int own_hi = dim_of(own_octet % per_head, 4, p.rotate_pairs, kRotate);
  int column_head[COLUMNS];
  int column_dim[COLUMNS];  // past the end of the head where there is no column
#pragma clang loop unroll(full)
  for (int i = 0; i < COLUMNS; ++i) {
    const int t = id + i * THREADS;
    const int column = kBits != 0 ? t / OCTETS : t % BN;
    const int octet = octet0 + column / 8;
    column_head[i] = octet / per_head;
    column_dim[i] = octet < octet_end
        ? dim_of(octet % per_head, column % 8, p.rotate_pairs, kRotate)
        : p.out_dim;
  }

  const int source_octets = (p.source_dim + 7) / 8;
  for (int first = 0; first < source_octets; first += OCTETS) {
    const int octets = min(OCTETS, source_octets - first);
    Octet turns[TURNS];
#pragma clang loop unroll(full)
    for (int i = 0; i < TURNS; ++i) {
      turns[i] = {float4(1.0f), float4(0.0f)};
      const int token = token0 + (id + i * THREADS) / OCTETS;
      const int octet = first + (id + i * THREADS) % OCTETS;
      if (kStrip != kNone && token < p.tokens) {
        turns[i] = read_turns(
            b.strip_cos, b.strip_sin, p.strip, p.strip_pairs, batch, token, octet);
      }
    }
    for (int layer = 0; layer < p.sources; ++layer) {
      const device uchar* source = KVGRAFT_PICK(layer);
      for (int g = 0; g < p.width; ++g) {
        const int source_head = kPlan ? b.plan[head0 * p.width + g] : g;
        const int row = p.layers[layer].weight_row + g * p.source_dim;
        threadgroup_barrier(mem_flags::mem_threadgroup);  // the last step has read

#pragma clang loop unroll(full)
        for (int i = 0; i < TURNS; ++i) {
          const int r = (id + i * THREADS) / OCTETS;
          const int o = (id + i * THREADS) % OCTETS;
          if (o < octets) {
            Octet x = {float4(0.0f), float4(0.0f)};
            if (token0 + r < p.tokens) {
              x = read_stripped(
                  source, p, layer, source_head, batch, token0 + r, first + o, turns[i]);
            }
            *(threadgroup float4*)(xs + r * LDA + 8 * o) = x.lo;
            *(threadgroup float4*)(xs + r * LDA + 8 * o + 4) = x.hi;
          }
        }

        if (kBits == 0 && kWideWeight) {
          // One input a task, eight outputs.
          const int j = id % (BN / 8);
#pragma clang loop unroll(full)
          for (int k = id / (BN / 8); k < BK; k += THREADS / (BN / 8)) {
            const int dim = dim_of(first + k / 8, k % 8, p.strip_pairs, kStrip);
            Octet w = {float4(0.0f), float4(0.0f)};
            if (k < 8 * octets && dim < p.source_dim && own_octet < octet_end) {
              const long at = own_head * p.weight_strides[0] + (row + dim) * p.weight_strides[1];
              w.lo = read_four(b.weight, kWeightType, at + own_lo);
              w.hi = read_four(b.weight, kWeightType, at + own_hi);
            }
            *(threadgroup float4*)(ws + k * LDB + 8 * j) = w.lo;
            *(threadgroup float4*)(ws + k * LDB + 8 * j + 4) = w.hi;
          }
        } else {
          // One output a task, eight inputs. Neighbours in a simdgroup take
          // what lies side by side in memory.
#pragma clang loop unroll(full)
          for (int i = 0; i < COLUMNS; ++i) {
            const int t = id + i * THREADS;
            const int column = kBits != 0 ? t / OCTETS : t % BN;
            const int o = kBits != 0 ? t % OCTETS : t / BN;
            Octet w = {float4(0.0f), float4(0.0f)};
            if (o < octets && column_dim[i] < p.out_dim) {
              w = read_weights(b, p, column_head[i], row, first + o, column_dim[i]);
            }
#pragma clang loop unroll(full)
            for (int slot = 0; slot < 8; ++slot) {
              ws[(8 * o + slot) * LDB + column] = slot < 4 ? w.lo[slot] : w.hi[slot - 4];
            }
          }
        }

        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int o = 0; o < octets; ++o) {
          simdgroup_matrix<float, 8, 8> x[TM];
          simdgroup_matrix<float, 8, 8> w[TN];
#pragma clang loop unroll(full)
          for (int i = 0; i < TM; ++i) {
            simdgroup_load(x[i], xs + (row0 + 8 * i) * LDA + 8 * o, LDA);
          }
#pragma clang loop unroll(full)
          for (int j = 0; j < TN; ++j) {
            simdgroup_load(w[j], ws + 8 * o * LDB + col0 + 8 * j, LDB);
          }
#pragma clang loop unroll(full)
          for (int i = 0; i < TM; ++i) {
#pragma clang loop unroll(full)
            for (int j = 0; j < TN; ++j) {
              simdgroup_multiply_accumulate(sums[i][j], x[i], w[j], sums[i][j]);
            }
          }
        }
      }
    }
  }

  // Which thread holds which element of a fragment is not specified, so the sums
  // go through threadgroup memory.
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
  for (int i = 0; i < TM; ++i) {
#pragma clang loop unroll(full)
    for (int j = 0; j < TN; ++j) {
      simdgroup_store(sums[i][j], memory + (row0 + 8 * i) * LDB + col0 + 8 * j, LDB);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int t = id; t < BM * BN / 8; t += THREADS) {
    const int r = t / (BN / 8);
    const int j = t % (BN / 8);
    if (token0 + r < p.tokens && octet0 + j < octet_end) {
      const Octet y = {
          *(threadgroup float4*)(memory + r * LDB + 8 * j),
          *(threadgroup float4*)(memory + r * LDB + 8 * j + 4)};
      finish(b, p, y, batch, token0 + r, octet0 + j);
    }
  }
}

// Up to ROWS tokens: too few to fill a tile, so that reading the weights is all
// the work. A threadgroup makes four octets of the result; a thread sums every
// eighth octet of the inputs for one column and all tokens.
template <int ROWS>
[[kernel, max_total_threads_per_threadgroup(256)]] void map_layer_rows(KVGRAFT_ARGUMENTS) {
  constexpr int THREADS = 256;
  constexpr int COLUMNS = 32;
  constexpr int LANES = THREADS / COLUMNS;  // that share a column
  constexpr int OCTETS = 16;                // of the inputs, a step
  threadgroup float4 x_vectors[ROWS * 2 * OCTETS];
  threadgroup float4 sum_vectors[LANES * ROWS * COLUMNS / 4];
  threadgroup float* xs = (threadgroup float*)x_vectors;
  threadgroup float* sums = (threadgroup float*)sum_vectors;

  const Buffers b = KVGRAFT_BUFFERS;
  const int id = int(thread_id);
  const int batch = int(group.z);
  const int token0 = int(group.y) * ROWS;
  const int per_head = (p.out_dim + 7) / 8;
  const int span = int(group.x) / p.tiles_per_span;
  const int octet0 = span * p.span + (int(group.x) % p.tiles_per_span) * (COLUMNS / 8);
  const int octet_end = (span + 1) * p.span;
  const int head0 = octet0 / per_head;
  // A simdgroup reads along what lies side by side: outputs in plain weights,
  // inputs in quantised ones.
  const int column = kBits != 0 ? id / LANES : id % COLUMNS;
  const int lane = kBits != 0 ? id % LANES : id / COLUMNS;
  const int octet = octet0 + column / 8;
  const int head = octet / per_head;
  const int out_dim = dim_of(octet % per_head, column % 8, p.rotate_pairs, kRotate);
  const bool has_column = octet < octet_end && out_dim < p.out_dim;

  float sum[ROWS];
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) sum[r] = 0.0f;

  const int source_octets = (p.source_dim + 7) / 8;
  for (int layer = 0; layer < p.sources; ++layer) {
    const device uchar* source = KVGRAFT_PICK(layer);
    for (int g = 0; g < p.width; ++g) {
      const int source_head = kPlan ? b.plan[head0 * p.width + g] : g;
      const int row = p.layers[layer].weight_row + g * p.source_dim;
      for (int first = 0; first < source_octets; first += OCTETS) {
        const int octets = min(OCTETS, source_octets - first);
        threadgroup_barrier(mem_flags::mem_threadgroup);  // the last step has read
        for (int t = id; t < ROWS * OCTETS; t += THREADS) {
          const int r = t / OCTETS;
          const int o = t % OCTETS;
          const int token = token0 + r;
          if (o < octets) {
            Octet x = {float4(0.0f), float4(0.0f)};
            if (token < p.tokens) {
              Octet turns = {float4(1.0f), float4(0.0f)};
              if (kStrip != kNone) {
                turns = read_turns(
                    b.strip_cos, b.strip_sin, p.strip, p.strip_pairs, batch, token, first + o);
              }
              x = read_stripped(source, p, layer, source_head, batch, token, first + o, turns);
            }
            *(threadgroup float4*)(xs + (r * OCTETS + o) * 8) = x.lo;
            *(threadgroup float4*)(xs + (r * OCTETS + o) * 8 + 4) = x.hi;
          }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (has_column) {
          for (int o = lane; o < octets; o += LANES) {
            const Octet w = read_weights(b, p, head, row, first + o, out_dim);
#pragma clang loop unroll(full)
            for (int r = 0; r < ROWS; ++r) {
              const float4 lo = *(threadgroup float4*)(xs + (r * OCTETS + o) * 8);
              const float4 hi = *(threadgroup float4*)(xs + (r * OCTETS + o) * 8 + 4);
              sum[r] += dot(lo, w.lo) + dot(hi, w.hi);
            }
          }
        }
      }
    }
  }

#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS; ++r) sums[(lane * ROWS + r) * COLUMNS + column] = sum[r];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int t = id; t < ROWS * COLUMNS / 8; t += THREADS) {
    const int r = t / (COLUMNS / 8);
    const int j = t % (COLUMNS / 8);
    if (token0 + r < p.tokens && octet0 + j < octet_end) {
      Octet y = {float4(0.0f), float4(0.0f)};
      for (int i = 0; i < LANES; ++i) {
        y.lo += *(threadgroup float4*)(sums + (i * ROWS + r) * COLUMNS + 8 * j);
        y.hi += *(threadgroup float4*)(sums + (i * ROWS + r) * COLUMNS + 8 * j + 4);
      }
      finish(b, p, y, batch, token0 + r, octet0 + j);
    }
  }
}

#define KVGRAFT_TILE(BM, BN)                                          \
  template [[host_name("map_layer_tile_" #BM "x" #BN)]] [[kernel]]    \
  decltype(map_layer_tile<BM, BN>) map_layer_tile<BM, BN>;
#define KVGRAFT_ROWS(ROWS)                                            \
  template [[host_name("map_layer_rows_" #ROWS)]] [[kernel]]          \
  decltype(map_layer_rows<ROWS>) map_layer_rows<ROWS>;

KVGRAFT_TILE(64, 64)
KVGRAFT_TILE(64, 32)
KVGRAFT_TILE(32, 64)
KVGRAFT_TILE(32, 32)
KVGRAFT_ROWS(1)
KVGRAFT_ROWS(4)
KVGRAFT_ROWS(16)
