// What the shim asks of the runtime (runtime.cpp). C ABI, so that code from
// Apple's compiler can be linked against it too.
#pragma once

// Calls may neither be merged, nor duplicated, nor moved across branches:
// optimisers may do all three to code they believe has no barriers in it.
#define EMULATOR_SYNC __attribute__((convergent, noduplicate, noinline))

extern "C" {

struct ThreadContext {
  unsigned thread[3];  // thread_position_in_threadgroup
  unsigned group[3];   // threadgroup_position_in_grid
  unsigned index;      // thread_index_in_threadgroup
  unsigned lane;       // thread_index_in_simdgroup
  unsigned simdgroup;  // simdgroup_index_in_threadgroup
};

// flags: mem_flags. site: where in the source, so that different barriers are
// told apart.
EMULATOR_SYNC void emulator_barrier(unsigned flags, unsigned site);
EMULATOR_SYNC void emulator_simdgroup_barrier(unsigned flags, unsigned site);
// All lanes of the simdgroup must come here with the same two words.
EMULATOR_SYNC void emulator_uniform(unsigned long a, unsigned long b, unsigned kind);
// d = a * b + c on 8x8 matrices, two adjacent elements of a row a lane.
EMULATOR_SYNC void emulator_multiply(const float* a, const float* b, const float* c, float* d);
// The sum of the values of all lanes up to this one.
EMULATOR_SYNC float emulator_prefix_sum(float value);
// simdgroup_load and simdgroup_store as Apple's compiler emits them: a lane's two
// elements, unwatched.
EMULATOR_SYNC void emulator_air_load(const float* from, unsigned long ld, bool transpose, float* m);
EMULATOR_SYNC void emulator_air_store(const float* m, float* to, unsigned long ld, bool transpose);
// A threadgroup array: the same memory for the n-th call of every thread.
// It is aligned as its elements need and no better, as Metal may place it.
void* emulator_threadgroup_array(unsigned long size, unsigned long alignment);
unsigned emulator_lane();
void emulator_fail(const char* what);
}

// Where in an 8x8 matrix a lane's two elements lie: the layout that MLX's
// kernels rely on. Nothing in our kernels depends on it.
inline unsigned emulator_row(unsigned lane) { return (lane / 4 & 4) + lane / 2 % 4; }
inline unsigned emulator_column(unsigned lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }

// Where in memory element i of a lane lies, in a matrix whose rows are ld elements
// apart.
inline unsigned long emulator_element(unsigned lane, unsigned i, unsigned long ld,
                                      bool transpose = false) {
  const unsigned long row = emulator_row(lane), column = emulator_column(lane) + i;
  return transpose ? column * ld + row : row * ld + column;
}
