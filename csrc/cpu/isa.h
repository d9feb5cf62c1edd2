// The inner loops, compiled once per instruction set and chosen at run time.
//
// This header, operands.h and kernel.h are all that the per-set files include:
// nothing in them may be shared with other files as a weak symbol (see half.h), so there
// are no standard containers or algorithms here.
#pragma once

#include <cstdint>

#include "operands.h"

namespace kvgraft::cpu {

// Cosines and sines from the first token of a block on.
struct Rotation {
  int pairs;         // 0 rotates nothing
  bool traditional;  // pairs are (2i, 2i + 1) rather than (i, i + pairs)
  const float* cos;
  const float* sin;
  int64_t cos_token, cos_pair;  // strides
  int64_t sin_token, sin_pair;
};

// One source head of a block of tokens -> float32, rotated, in tiles of Isa::rows
// tokens: [dim][Isa::rows] each.
struct PackArgs {
  const void* source;
  Type type;
  int64_t token_stride, dim_stride;
  int dim;
  int tokens;
  Rotation rotation;
  float* out;
  int64_t tile_stride;  // from a tile to the next
  float* temp;          // (Isa::rows + 3) * dim floats
};

// Rows [in, in + count) and columns [out, out + width) of one head's weights ->
// float32 panels [count][Isa::columns], one after the other, zero beyond `width`.
struct WidenArgs {
  const Weight* weight;
  int head;
  int64_t in;
  int count;
  int out;
  int width;
  float* panels;
};

// Memory that will be read soon: `count` pieces of `bytes`.
struct Prefetch {
  const char* at;
  int64_t stride;  // in bytes
  int count;
  int bytes;
};

// c[rows][columns] (+)= a[rows][count] * b[count][columns], where a is in tiles, as `pack`
// leaves it.
struct MultiplyArgs {
  int rows;
  int count;
  const float* a;
  int64_t tile_stride;
  const void* b;
  Type b_type;       // float32 for a panel made by `widen`
  int64_t b_stride;  // Isa::columns for such a panel
  float* c;
  int64_t c_stride;
  bool first;  // c holds nothing yet
  const Prefetch* next;
  int next_count;
};

// One target head of a block of tokens: add the bias, rotate, round, write.
struct FinishArgs {
  const float* c;
  int64_t c_stride;
  const float* bias;  // nullptr for none
  int dim;
  int tokens;
  Rotation rotation;
  void* out;  // rows of `dim`
  Type type;
  float* temp;  // 2 * dim floats
};

struct Isa {
  const char* name;
  int rows;     // of the tile that `multiply` holds in registers
  int columns;  // of it, and of a panel
  void (*pack)(const PackArgs&);
  void (*widen)(const WidenArgs&);
  void (*multiply)(const MultiplyArgs&);
  void (*finish)(const FinishArgs&);
};

extern const Isa plain_isa;
extern const Isa avx2_isa;
extern const Isa avx512_isa;
extern const Isa neon_isa;

}  // namespace kvgraft::cpu
