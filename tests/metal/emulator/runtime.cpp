// Runs Metal kernels on the CPU, one threadgroup at a time and one fiber per
// thread, and watches every memory access that the kernel's code makes.
//
// clang's thread sanitizer instruments the accesses; the __tsan_* and __ubsan_*
// functions it calls are ours, below. What they find:
//   races      per byte, in threadgroup and device memory: who wrote it and who
//              read it last, and in which epoch. A barrier starts a new epoch of
//              the address spaces named in its flags. Two accesses of different
//              threads in one epoch, one of them a write, are a race whatever
//              the order was in which they happened to run.
//   bounds     an access outside the buffers, threadgroup arrays and own stack.
//   unset      reads of threadgroup or output bytes that nobody wrote.
//   divergence threads of a group at different barriers, lanes of a simdgroup
//              at different matrix operations.
#include "runtime.h"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <xmmintrin.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr int kMaxThreads = 1024;
constexpr size_t kStack = 64 * 1024;
constexpr size_t kArena = 128 * 1024;
constexpr size_t kRedzone = 256;
constexpr size_t kThreadgroupLimit = 32 * 1024;
constexpr uint32_t kNobody = ~0u;

enum Kind : int { kThreadgroupMemory, kDeviceMemory, kElsewhere };

}  // namespace

extern "C" {

struct EmulatorBuffer {
  char* at;
  uint64_t size;
  uint32_t readable;  // holds data from the start
  uint32_t writable;
  uint64_t start;     // byte that the kernel's pointer points to
};

struct EmulatorLaunch {
  uint32_t grid[3];  // threadgroups
  uint32_t threads;  // of a threadgroup
  uint32_t limit;    // max_total_threads_per_threadgroup
  uint32_t buffers;
  EmulatorBuffer* buffer;
  uint64_t seed;     // of the order of threads and threadgroups; 0: ascending
  uint32_t preempt;  // switch threads at one in so many accesses; 0: at barriers only
  uint32_t checks;   // 0: run only
  uint64_t image[2];  // address range of the kernel's own constants
  // Results.
  uint64_t threadgroup_bytes, barriers, multiplications;
  uint64_t read_bytes[31], written_bytes[31];  // by buffer
  uint64_t threadgroup_read, threadgroup_written;
  uint32_t reports;
  char report[8192];
};
}

namespace {

using Kernel = void (*)(const ThreadContext*, void* const*);

struct Byte {
  uint32_t writer = kNobody, write_epoch = 0;
  uint32_t reader = kNobody, read_epoch = 0;
  uint32_t other_reader = kNobody;  // a second one in the same epoch
  uint16_t write_step = 0, read_step = 0;  // epochs of the simdgroup
  uint32_t group = 0;  // threadgroup memory: whose contents these are
  bool set = false;
};

enum class State : uint8_t { running, at_barrier, at_simdgroup, done };

struct Fiber {
  void* stack_pointer;
  char* stack;
  State state;
  ThreadContext context;
  uint32_t id;  // unique over the launch
  unsigned site, flags;
  unsigned long word[2];
  unsigned arrays;  // threadgroup arrays asked for
};

struct Simdgroup {
  uint16_t step[2];
  float slots[2][32][4];
  unsigned generation;
};

struct Array {
  size_t at, size;
};

EmulatorLaunch* launch;
Kernel kernel;
void* bound[31];
Fiber fibers[kMaxThreads];
Simdgroup simdgroups[kMaxThreads / 32];
int threads, current = -1;
void* scheduler_stack;
char* arena;
size_t arena_top;
std::vector<Array> arrays;
std::vector<Byte> arena_bytes;
std::vector<std::vector<Byte>> buffer_bytes;
uint32_t epoch[2], group_count;
uint64_t random_state;
jmp_buf stop;
bool running;

uint64_t next_random() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  return random_state ^= random_state << 17;
}

void report(const void* at, const char* format, ...) {
  ++launch->reports;
  const size_t used = strlen(launch->report);
  if (used + 512 > sizeof(launch->report)) return;
  char* out = launch->report + used;
  va_list list;
  va_start(list, format);
  out += vsnprintf(out, 300, format, list);
  va_end(list);
  if (current >= 0) {
    const auto& c = fibers[current].context;
    out += sprintf(out, " [threadgroup (%u, %u, %u), thread %u]", c.group[0], c.group[1],
                   c.group[2], c.index);
  }
  if (at) out += sprintf(out, " pc=%p", at);
  strcpy(out, "\n");
}

[[noreturn]] void give_up() { longjmp(stop, 1); }

extern "C" void emulator_switch(void** save, void* load);
__asm__(R"(
.text
.globl emulator_switch
.type emulator_switch,@function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

void to_scheduler() { emulator_switch(&fibers[current].stack_pointer, scheduler_stack); }

void fiber_main() {
  kernel(&fibers[current].context, bound);
  fibers[current].state = State::done;
  to_scheduler();
  abort();
}

Kind locate(uintptr_t a, size_t n, Byte*& bytes, int& buffer) {
  const auto base = reinterpret_cast<uintptr_t>(arena);
  if (a >= base && a < base + kArena) {
    for (const auto& x : arrays) {
      if (a - base >= x.at && a - base + n <= x.at + x.size) {
        bytes = &arena_bytes[a - base];
        return kThreadgroupMemory;
      }
    }
    return kElsewhere;
  }
  for (uint32_t i = 0; i < launch->buffers; ++i) {
    const auto from = reinterpret_cast<uintptr_t>(launch->buffer[i].at);
    if (from && a >= from && a + n <= from + launch->buffer[i].size) {
      bytes = buffer_bytes[i].data() + (a - from);
      buffer = i;
      return kDeviceMemory;
    }
  }
  return kElsewhere;
}

[[noreturn]] void out_of_bounds(uintptr_t a, size_t n, bool write, const void* at) {
  const char* verb = write ? "write" : "read";
  for (uint32_t i = 0; i < launch->buffers; ++i) {
    const auto from = reinterpret_cast<intptr_t>(launch->buffer[i].at);
    const intptr_t offset = static_cast<intptr_t>(a) - from;
    const auto size = static_cast<intptr_t>(launch->buffer[i].size);
    if (from && offset > -(1 << 20) && offset < size + (1 << 20)) {
      report(at, "OUT-OF-BOUNDS %s of %zu bytes at byte %ld of buffer(%u), size %ld", verb, n,
             static_cast<long>(offset), i, static_cast<long>(size));
      give_up();
    }
  }
  report(at, "OUT-OF-BOUNDS %s of %zu bytes at no buffer or threadgroup array", verb, n);
  give_up();
}

void check(const void* pointer, size_t n, bool write, const void* at) {
  if (!running || current < 0) return;
  const auto a = reinterpret_cast<uintptr_t>(pointer);
  Fiber& f = fibers[current];
  const auto stack = reinterpret_cast<uintptr_t>(f.stack);
  if (a >= stack && a < stack + kStack) return;
  const auto contexts = reinterpret_cast<uintptr_t>(fibers);
  if (a >= contexts && a < contexts + sizeof(fibers)) return;
  const auto table = reinterpret_cast<uintptr_t>(bound);
  if (a >= table && a < table + sizeof(bound)) return;
  Byte* bytes = nullptr;
  int buffer = -1;
  const Kind kind = locate(a, n, bytes, buffer);
  if (kind == kElsewhere) {
    const auto base = reinterpret_cast<uintptr_t>(arena);  // may adjoin the image
    const bool shared = a >= base && a < base + kArena;
    if (!shared && a >= launch->image[0] && a < launch->image[1]) return;
    if (launch->checks) out_of_bounds(a, n, write, at);
    return;
  }
  if (kind == kThreadgroupMemory) {
    (write ? launch->threadgroup_written : launch->threadgroup_read) += n;
  } else {
    (write ? launch->written_bytes : launch->read_bytes)[buffer] += n;
  }
  if (!launch->checks) return;
  if (kind == kDeviceMemory && write && !launch->buffer[buffer].writable) {
    report(at, "WRITE to the input buffer(%d)", buffer);
    give_up();
  }
  const char* space = kind == kThreadgroupMemory ? "threadgroup" : "device";
  const uint16_t step = simdgroups[f.context.simdgroup].step[kind];
  const auto ordered = [&](uint32_t other, uint32_t its_epoch, uint16_t its_step) {
    if (other == kNobody || other == f.id) return true;
    if (other / kMaxThreads != f.id / kMaxThreads) return false;  // another threadgroup
    if (its_epoch != epoch[kind]) return true;
    return other / 32 == f.id / 32 && its_step != step;
  };
  for (size_t i = 0; i < n; ++i) {
    Byte& b = bytes[i];
    if (kind == kThreadgroupMemory && b.group != group_count) {
      b = Byte{};
      b.group = group_count;
    }
    const char* race = nullptr;
    if (!ordered(b.writer, b.write_epoch, b.write_step)) {
      race = write ? "write-after-write" : "read-after-write";
    } else if (write && (!ordered(b.reader, b.read_epoch, b.read_step) ||
                         !ordered(b.other_reader, b.read_epoch, b.read_step))) {
      race = "write-after-read";
    }
    if (race) {
      report(at, "RACE: %s %s without a barrier between", space, race);
      give_up();
    }
    if (write) {
      b.writer = f.id;
      b.write_epoch = epoch[kind];
      b.write_step = step;
      b.set = true;
      continue;
    }
    if (!b.set) {
      report(at, "UNINITIALISED %s read", space);
      give_up();
    }
    if (b.reader == kNobody || b.read_epoch != epoch[kind]) {
      b.reader = f.id;
      b.read_epoch = epoch[kind];
      b.read_step = step;
      b.other_reader = kNobody;
    } else if (b.reader != f.id) {
      b.other_reader = f.id;
    }
  }
  if (launch->preempt && next_random() % launch->preempt == 0) to_scheduler();
}

void wait_simdgroup(unsigned site, unsigned long a, unsigned long b) {
  Fiber& f = fibers[current];
  f.site = site;
  f.word[0] = a;
  f.word[1] = b;
  f.state = State::at_simdgroup;
  to_scheduler();
}

constexpr unsigned kSimdBarrier = 1u << 31;

void run_ready() {
  int order[kMaxThreads], ready = 0;
  for (int i = 0; i < threads; ++i) {
    if (fibers[i].state == State::running) order[ready++] = i;
  }
  if (launch->seed) {
    for (int i = ready - 1; i > 0; --i) std::swap(order[i], order[next_random() % (i + 1)]);
  }
  for (int i = 0; i < ready; ++i) {
    current = order[i];
    emulator_switch(&scheduler_stack, fibers[current].stack_pointer);
    current = -1;
  }
}

// Lets simdgroups go on whose lanes have all arrived at the same operation.
bool release_simdgroups() {
  bool released = false;
  for (int first = 0; first < threads; first += 32) {
    const int end = std::min(threads, first + 32);
    int waiting = 0, left = 0;
    for (int i = first; i < end; ++i) {
      waiting += fibers[i].state == State::at_simdgroup;
      left += fibers[i].state == State::done || fibers[i].state == State::at_barrier;
    }
    if (!waiting || waiting + left < end - first) continue;
    for (int i = first; i < end; ++i) {
      const Fiber &f = fibers[i], &g = fibers[first];
      if (f.state != g.state || f.site != g.site || f.word[0] != g.word[0] ||
          f.word[1] != g.word[1]) {
        current = i;
        report(nullptr, "DIVERGENCE: lanes of a simdgroup at different operations or arguments");
        give_up();
      }
    }
    Simdgroup& s = simdgroups[first / 32];
    if (fibers[first].site & kSimdBarrier) {
      if (fibers[first].flags & 2) ++s.step[kThreadgroupMemory];
      if (fibers[first].flags & 1) ++s.step[kDeviceMemory];
    }
    ++s.generation;
    for (int i = first; i < end; ++i) fibers[i].state = State::running;
    released = true;
  }
  return released;
}

void run_group(uint32_t number) {
  for (int i = 0; i < threads; ++i) {
    Fiber& f = fibers[i];
    f.state = State::running;
    f.id = number * kMaxThreads + i;
    f.arrays = 0;
    auto** top = reinterpret_cast<void**>(f.stack + kStack);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(fiber_main);
    for (int k = 0; k < 6; ++k) *--top = nullptr;
    f.stack_pointer = top;
  }
  memset(simdgroups, 0, sizeof(simdgroups));
  arrays.clear();
  arena_top = kRedzone;
  ++group_count;
  ++epoch[0];
  ++epoch[1];
  for (;;) {
    run_ready();
    const bool released = release_simdgroups();
    int done = 0, waiting = 0, ready = 0, last = 0;
    for (int i = 0; i < threads; ++i) {
      done += fibers[i].state == State::done;
      ready += fibers[i].state == State::running;
      if (fibers[i].state == State::at_barrier) {
        ++waiting;
        last = i;
      }
    }
    if (done == threads) return;
    if (ready || released) continue;
    current = last;
    if (waiting < threads) {
      report(nullptr, "DIVERGENCE: %d of %d threads at a barrier, %d have returned", waiting,
             threads, done);
      give_up();
    }
    for (int i = 0; i < threads; ++i) {
      if (fibers[i].site != fibers[0].site || fibers[i].flags != fibers[0].flags) {
        report(nullptr, "DIVERGENCE: threads at different barriers, lines %u and %u",
               fibers[0].site, fibers[i].site);
        give_up();
      }
    }
    ++launch->barriers;
    if (fibers[0].flags & 2) ++epoch[kThreadgroupMemory];
    if (fibers[0].flags & 1) ++epoch[kDeviceMemory];
    for (int i = 0; i < threads; ++i) fibers[i].state = State::running;
  }
}

void on_fault(int, siginfo_t* info, void* context) {
  if (!running) _exit(139);
  const auto* machine = static_cast<ucontext_t*>(context);
  report(reinterpret_cast<void*>(machine->uc_mcontext.gregs[REG_RIP] + 1),
         "OUT-OF-BOUNDS: fault at %p (guard page, or a misaligned vector)", info->si_addr);
  longjmp(stop, 1);
}

}  // namespace

extern "C" {

void emulator_barrier(unsigned flags, unsigned site) {
  Fiber& f = fibers[current];
  f.site = site;
  f.flags = flags;
  f.state = State::at_barrier;
  to_scheduler();
}

void emulator_simdgroup_barrier(unsigned flags, unsigned site) {
  fibers[current].flags = flags;
  wait_simdgroup(site | kSimdBarrier, 0, 0);
}

void emulator_uniform(unsigned long a, unsigned long b, unsigned kind) {
  wait_simdgroup(kind, a, b);
}

float emulator_prefix_sum(float value) {
  Fiber& f = fibers[current];
  Simdgroup& s = simdgroups[f.context.simdgroup];
  auto& slots = s.slots[s.generation & 1];
  slots[f.context.lane][0] = value;
  wait_simdgroup(5, 0, 0);
  float sum = 0;
  for (unsigned lane = 0; lane <= f.context.lane; ++lane) sum += slots[lane][0];
  return sum;
}

void emulator_air_load(const float* from, unsigned long ld, bool transpose, float* m) {
  wait_simdgroup(1, reinterpret_cast<unsigned long>(from), ld);
  const unsigned lane = fibers[current].context.lane;
  for (unsigned i = 0; i < 2; ++i) m[i] = from[emulator_element(lane, i, ld, transpose)];
}

void emulator_air_store(const float* m, float* to, unsigned long ld, bool transpose) {
  wait_simdgroup(2, reinterpret_cast<unsigned long>(to), ld);
  const unsigned lane = fibers[current].context.lane;
  for (unsigned i = 0; i < 2; ++i) to[emulator_element(lane, i, ld, transpose)] = m[i];
}

void emulator_multiply(const float* a, const float* b, const float* c, float* d) {
  Fiber& f = fibers[current];
  Simdgroup& s = simdgroups[f.context.simdgroup];
  const unsigned lane = f.context.lane;
  auto& slots = s.slots[s.generation & 1];
  slots[lane][0] = a[0];
  slots[lane][1] = a[1];
  slots[lane][2] = b[0];
  slots[lane][3] = b[1];
  wait_simdgroup(4, 0, 0);
  if (lane == 0) ++launch->multiplications;
  static const auto* owner = [] {
    static unsigned char lanes[8][8];
    for (unsigned l = 0; l < 32; ++l) {
      for (unsigned i = 0; i < 2; ++i) lanes[emulator_row(l)][emulator_column(l) + i] = l;
    }
    return &lanes;
  }();
  const unsigned row = emulator_row(lane), column = emulator_column(lane);
  for (unsigned i = 0; i < 2; ++i) {
    float sum = c[i];
    for (unsigned k = 0; k < 8; ++k) {
      sum = __builtin_fmaf(slots[(*owner)[row][k]][k & 1],
                           slots[(*owner)[k][column + i]][2 + i], sum);
    }
    d[i] = sum;
  }
}

void* emulator_threadgroup_array(unsigned long size, unsigned long alignment) {
  const unsigned index = fibers[current].arrays++;
  if (index < arrays.size()) return arena + arrays[index].at;
  const size_t shift = alignment < 16 ? alignment : 0;
  arrays.push_back({(arena_top + 15) / 16 * 16 + shift, size});
  memset(arena + arrays.back().at, 0xff, std::min(size, kArena - arrays.back().at));
  arena_top = arrays.back().at + size + kRedzone;
  size_t used = 0;
  for (const auto& x : arrays) used = (used + 15) / 16 * 16 + x.size;
  launch->threadgroup_bytes = std::max<uint64_t>(launch->threadgroup_bytes, used);
  if (used > kThreadgroupLimit) {
    report(nullptr, "LIMIT: %zu bytes of threadgroup memory, Metal has %zu", used,
           kThreadgroupLimit);
    give_up();
  }
  return arena + arrays[index].at;
}

unsigned emulator_lane() { return fibers[current].context.lane; }

void emulator_fail(const char* what) {
  report(__builtin_return_address(0), "%s", what);
  give_up();
}

// What -fsanitize=thread calls.
#define CALLER __builtin_return_address(0)
#define ACCESS(n)                                                            \
  void __tsan_read##n(void* p) { check(p, n, false, CALLER); }               \
  void __tsan_write##n(void* p) { check(p, n, true, CALLER); }               \
  void __tsan_unaligned_read##n(void* p) { check(p, n, false, CALLER); }     \
  void __tsan_unaligned_write##n(void* p) { check(p, n, true, CALLER); }     \
  void __tsan_read_write##n(void* p) {                                       \
    check(p, n, false, CALLER);                                              \
    check(p, n, true, CALLER);                                               \
  }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read_range(void* p, unsigned long n) { check(p, n, false, CALLER); }
void __tsan_write_range(void* p, unsigned long n) { check(p, n, true, CALLER); }
void* __tsan_memcpy(void* to, const void* from, unsigned long n) {
  check(from, n, false, CALLER);
  check(to, n, true, CALLER);
  return memcpy(to, from, n);
}
void* __tsan_memset(void* to, int value, unsigned long n) {
  check(to, n, true, CALLER);
  return memset(to, value, n);
}

// What -fsanitize=undefined calls.
struct Place {
  const char* file;
  uint32_t line, column;
};
#define UNDEFINED(name)                                                                      \
  void __ubsan_handle_##name(Place* p) {                                                     \
    report(nullptr, "UNDEFINED: %s at %s:%u", #name, p->file ? p->file : "?", p->line);      \
    give_up();                                                                               \
  }                                                                                          \
  void __ubsan_handle_##name##_abort(Place* p) { __ubsan_handle_##name(p); }
UNDEFINED(type_mismatch_v1)
UNDEFINED(alignment_assumption)
UNDEFINED(add_overflow)
UNDEFINED(sub_overflow)
UNDEFINED(mul_overflow)
UNDEFINED(negate_overflow)
UNDEFINED(divrem_overflow)
UNDEFINED(shift_out_of_bounds)
UNDEFINED(out_of_bounds)
UNDEFINED(builtin_unreachable)
UNDEFINED(missing_return)
UNDEFINED(float_cast_overflow)
UNDEFINED(load_invalid_value)
UNDEFINED(pointer_overflow)
UNDEFINED(nonnull_arg)

// Returns 0 when the launch ran to its end; see `reports` for what was found.
int emulator_run(Kernel entry, EmulatorLaunch* l) {
  launch = l;
  kernel = entry;
  current = -1;
  if (!arena) {
    char* stacks = static_cast<char*>(mmap(nullptr, (kStack + 4096) * kMaxThreads,
                                           PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    for (int i = 0; i < kMaxThreads; ++i) {
      char* guard = stacks + (kStack + 4096) * i;
      mprotect(guard, 4096, PROT_NONE);
      fibers[i].stack = guard + 4096;
    }
    arena = static_cast<char*>(mmap(nullptr, kArena, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    arena_bytes.resize(kArena);
  }
  if (l->threads == 0 || l->threads > l->limit || l->threads % 32) {
    report(nullptr, "LIMIT: %u threads in a threadgroup, at most %u", l->threads, l->limit);
    return 1;
  }
  threads = l->threads;
  random_state = l->seed * 0x9e3779b97f4a7c15ull + 0x1234567;
  buffer_bytes.assign(l->buffers, {});
  memset(bound, 0, sizeof(bound));
  for (uint32_t i = 0; i < l->buffers; ++i) {
    bound[i] = l->buffer[i].at ? l->buffer[i].at + l->buffer[i].start : nullptr;
    Byte b;
    b.set = l->buffer[i].readable;
    if (l->checks && l->buffer[i].at) buffer_bytes[i].assign(l->buffer[i].size, b);
  }
  const uint32_t groups = l->grid[0] * l->grid[1] * l->grid[2];
  std::vector<uint32_t> order(groups);
  for (uint32_t i = 0; i < groups; ++i) order[i] = i;
  if (l->seed) {
    for (uint32_t i = groups; i > 1; --i) std::swap(order[i - 1], order[next_random() % i]);
  }
  static char signal_stack[65536];
  stack_t stack{}, old_stack{};
  stack.ss_sp = signal_stack;
  stack.ss_size = sizeof(signal_stack);
  sigaltstack(&stack, &old_stack);
  struct sigaction action{}, old_segv{}, old_bus{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, &old_segv);
  sigaction(SIGBUS, &action, &old_bus);
  // Apple's compiler marks kernels "denorms disabled".
  const unsigned modes = _mm_getcsr();
  _mm_setcsr(modes | 0x8040);
  volatile int failed = 0;
  running = true;
  if (setjmp(stop) == 0) {
    for (const uint32_t number : order) {
      for (int i = 0; i < threads; ++i) {
        auto& c = fibers[i].context;
        c = {{static_cast<unsigned>(i), 0, 0},
             {number % l->grid[0], number / l->grid[0] % l->grid[1],
              number / l->grid[0] / l->grid[1]},
             static_cast<unsigned>(i),
             static_cast<unsigned>(i % 32),
             static_cast<unsigned>(i / 32)};
      }
      run_group(number);
    }
  } else {
    failed = 1;
  }
  running = false;
  current = -1;
  _mm_setcsr(modes);
  sigaction(SIGSEGV, &old_segv, nullptr);
  sigaction(SIGBUS, &old_bus, nullptr);
  sigaltstack(&old_stack, nullptr);
  return failed;
}

// Bytes of a buffer that the last launch did not write.
uint64_t emulator_unwritten(uint32_t buffer) {
  const auto& bytes = buffer_bytes[buffer];
  return std::count_if(bytes.begin(), bytes.end(),
                       [](const Byte& b) { return b.writer == kNobody; });
}
}
