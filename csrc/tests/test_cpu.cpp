// The CPU kernels against a loop in double, and the threads they share.
//
//   test_cpu [number of random jobs, default 300]
//
// Buffers are exactly as large as what is read and written, so that a sanitizer
// sees every step beyond.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cpu/kernel.h"
#include "cpu/map_layer.h"
#include "cpu/pool.h"

using namespace kvgraft;
using namespace kvgraft::cpu;

namespace {

int failures = 0;

#define CHECK(condition, ...)                                     \
  do {                                                            \
    if (!(condition)) {                                           \
      ++failures;                                                 \
      std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                   \
      std::printf("\n");                                          \
    }                                                             \
  } while (0)

// Widths that no file instantiates, or that this processor may lack: the same
// template, compiled to whatever vectors there are.
const Isa portable[] = {
    Kernel<Vectors<8>, 3, 1>::isa("portable 8"),
    Kernel<Vectors<16>, 2, 2>::isa("portable 16"),
};

// --- arrays of any type and layout ---------------------------------------

struct Array {
  Type type;
  std::vector<char> bytes;
  std::vector<int> shape;
  std::vector<int64_t> strides;
  int64_t base = 0;  // of element 0, for negative strides

  const char* data() const { return bytes.data() + base * (type == Type::f32 ? 4 : 2); }

  double at(std::vector<int> index) const {
    int64_t place = base;
    for (size_t i = 0; i < index.size(); ++i) place += index[i] * strides[i];
    if (type == Type::f32) return reinterpret_cast<const float*>(bytes.data())[place];
    if (type == Type::f16) return to_float(reinterpret_cast<const Half*>(bytes.data())[place]);
    return to_float(reinterpret_cast<const Bfloat*>(bytes.data())[place]);
  }
};

using Random = std::mt19937;

int pick(Random& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}

Array make_array(Random& random, Type type, std::vector<int> shape, double scale) {
  Array out{type, {}, shape, std::vector<int64_t>(shape.size()), 0};
  // Axes in any order in memory, some reversed, some padded, some broadcast.
  std::vector<size_t> order(shape.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  if (pick(random, 0, 2) == 0) std::shuffle(order.begin(), order.end(), random);
  int64_t size = 1;
  for (size_t i = order.size(); i-- > 0;) {
    const size_t axis = order[i];
    const int kind = pick(random, 0, 9);
    if (kind == 0 && shape[axis] > 1) {  // broadcast
      out.strides[axis] = 0;
      continue;
    }
    out.strides[axis] = size;
    if (kind == 1) {
      out.base += size * (shape[axis] - 1);
      out.strides[axis] = -size;
    }
    size *= shape[axis] + (kind == 2 ? 3 : 0);
  }
  out.bytes.resize(size * (type == Type::f32 ? 4 : 2));
  std::normal_distribution<float> normal(0.0f, static_cast<float>(scale));
  for (int64_t i = 0; i < size; ++i) {
    const float x = normal(random);
    if (type == Type::f32) narrow(x, reinterpret_cast<float*>(out.bytes.data()) + i);
    if (type == Type::f16) narrow(x, reinterpret_cast<Half*>(out.bytes.data()) + i);
    if (type == Type::bf16) narrow(x, reinterpret_cast<Bfloat*>(out.bytes.data()) + i);
  }
  return out;
}

Type pick_type(Random& random) {
  return static_cast<Type>(pick(random, 0, 2));
}

// --- a random job and its result ------------------------------------------

struct Problem {
  std::vector<Array> sources;
  std::vector<Array> cos, sin;
  Array weight, bias, scales, biases;
  std::vector<uint32_t> packed;
  std::vector<char> out;
  Job job;
};

void turn(std::vector<double>& x, const Problem& p, int table, int batch, int token) {
  if (table < 0) return;
  const Table& t = p.job.tables[table];
  for (int i = 0; i < t.pairs; ++i) {
    const int first = t.traditional ? 2 * i : i;
    const int second = t.traditional ? 2 * i + 1 : i + t.pairs;
    const double c = p.cos[table].at({batch, token, i});
    const double s = p.sin[table].at({batch, token, i});
    const double a = x[first], b = x[second];
    x[first] = a * c - b * s;
    x[second] = a * s + b * c;
  }
}

double weight_at(const Problem& p, int head, int in, int out) {
  const Weight& w = p.job.weight;
  if (!w.bits) return p.weight.at({head, in, out});
  const int per_word = 32 / w.bits;
  const auto* words = static_cast<const uint32_t*>(w.data);
  const uint32_t word =
      words[head * w.strides.head + out * w.strides.out + in / per_word * w.strides.in];
  const uint32_t q = word >> (in % per_word * w.bits) & ((1u << w.bits) - 1);
  const int group = in / w.group_size;
  return q * p.scales.at({head, out, group}) + p.biases.at({head, out, group});
}

std::unique_ptr<Problem> make_problem(Random& random) {
  auto p = std::make_unique<Problem>();
  Job& job = p->job;
  job = {};
  const int token_counts[] = {1, 2, 5, 7, 13, 24, 25, 63, 64, 65, 130, 257};
  job.batch = pick(random, 0, 3) ? 1 : 2;
  job.tokens = token_counts[pick(random, 0, 11)];
  job.heads = pick(random, 1, 4);
  const int dims[] = {3, 8, 24, 32, 64, 80, 128, 7, 300};
  job.out_dim = dims[pick(random, 0, job.tokens > 64 ? 5 : 8)];
  const int bits[] = {0, 0, 4, 8};
  job.weight.bits = bits[pick(random, 0, 3)];
  const int count = pick(random, 1, 4);
  const bool mapped = pick(random, 0, 1);
  const int source_heads = pick(random, 1, 4);
  int fewest = 1000;
  for (int i = 0; i < count; ++i) {
    const int heads = pick(random, 0, 2) ? source_heads : pick(random, 1, 4);
    const int dim = job.weight.bits ? 32 * pick(random, 1, 4) : dims[pick(random, 0, 8)];
    fewest = std::min(fewest, heads);
    p->sources.push_back(
        make_array(random, pick_type(random), {job.batch, heads, job.tokens, dim}, 1.0));
  }
  if (mapped) {
    job.mapping_width = pick(random, 1, fewest);
    for (int i = 0; i < job.heads * job.mapping_width; ++i) {
      job.head_mapping.push_back(pick(random, 0, fewest - 1));
    }
  }
  const int tables = pick(random, 0, 3);
  for (int i = 0; i < tables; ++i) {
    // The last may be for the result, the others for the sources.
    int most = job.out_dim;
    for (const Array& s : p->sources) most = std::min(most, s.shape[3]);
    const int pairs = pick(random, 1, std::max(1, most / 2));
    p->cos.push_back(make_array(random, Type::f32, {job.batch, job.tokens, pairs}, 1.0));
    p->sin.push_back(make_array(random, Type::f32, {job.batch, job.tokens, pairs}, 1.0));
  }
  const auto fits = [&](int table, int dim) {
    return table >= 0 && 2 * p->cos[table].shape[2] <= dim ? table : -1;
  };
  for (int i = 0; i < tables; ++i) {
    const Array &c = p->cos[i], &s = p->sin[i];
    job.tables.push_back({.cos = reinterpret_cast<const float*>(c.data()),
                          .sin = reinterpret_cast<const float*>(s.data()),
                          .pairs = c.shape[2],
                          .traditional = pick(random, 0, 1) == 1,
                          .cos_strides = {c.strides[0], c.strides[1], c.strides[2]},
                          .sin_strides = {s.strides[0], s.strides[1], s.strides[2]}});
  }
  for (const Array& s : p->sources) {
    const int width = mapped ? job.mapping_width : s.shape[1];
    job.in_dim += width * s.shape[3];
    job.sources.push_back({.data = s.data(),
                           .type = s.type,
                           .heads = s.shape[1],
                           .dim = s.shape[3],
                           .batch_stride = s.strides[0],
                           .head_stride = s.strides[1],
                           .token_stride = s.strides[2],
                           .dim_stride = s.strides[3],
                           .strip = fits(pick(random, 0, tables) - 1, s.shape[3])});
  }
  job.rotate = fits(pick(random, 0, tables) - 1, job.out_dim);
  const double scale = 1 / std::sqrt(static_cast<double>(job.in_dim));
  Weight& w = job.weight;
  if (w.bits) {
    const int groups[] = {32, 64, 128};
    do {
      w.group_size = groups[pick(random, 0, 2)];
    } while (job.in_dim % w.group_size);
    const int words = job.in_dim * w.bits / 32;
    p->packed.resize(static_cast<size_t>(job.heads) * job.out_dim * words);
    for (auto& word : p->packed) word = random();
    const std::vector<int> shape{job.heads, job.out_dim, job.in_dim / w.group_size};
    w.type = pick_type(random);
    p->scales = make_array(random, w.type, shape, scale / (1 << w.bits));
    p->biases = make_array(random, w.type, shape, scale);
    w.data = p->packed.data();
    if (pick(random, 0, 3)) {
      w.strides.in = 1;
      w.strides.out = words;
      w.strides.head = static_cast<int64_t>(words) * job.out_dim;
    } else {
      w.strides.out = 1;
      w.strides.in = job.out_dim;
      w.strides.head = static_cast<int64_t>(words) * job.out_dim;
    }
    w.scales = p->scales.data();
    w.biases = p->biases.data();
    const auto strides = [](const Array& groups) -> WeightStrides {
      return {.head = groups.strides[0], .in = groups.strides[2], .out = groups.strides[1]};
    };
    w.scale_strides = strides(p->scales);
    w.bias_strides = strides(p->biases);
  } else {
    w.type = pick_type(random);
    p->weight = make_array(random, w.type, {job.heads, job.in_dim, job.out_dim}, scale);
    w.data = p->weight.data();
    const auto& strides = p->weight.strides;
    w.strides = {.head = strides[0], .in = strides[1], .out = strides[2]};
  }
  if (pick(random, 0, 2)) {
    const Type type = pick_type(random);
    p->bias = make_array(random, type, {job.heads, job.out_dim}, 1.0);
    job.bias = {.data = p->bias.data(),
                .type = type,
                .head_stride = p->bias.strides[0],
                .out_stride = p->bias.strides[1]};
  }
  job.out_type = pick_type(random);
  const size_t size = static_cast<size_t>(job.batch) * job.heads * job.tokens * job.out_dim;
  p->out.assign(size * (job.out_type == Type::f32 ? 4 : 2), 0x55);
  job.out = p->out.data();
  return p;
}

// NMSE of the job's result against double.
double error(const Problem& p) {
  const Job& job = p.job;
  double wrong = 0, total = 0;
  size_t place = 0;
  std::vector<double> weights(static_cast<size_t>(job.in_dim) * job.out_dim);
  for (int head = 0; head < job.heads; ++head) {
    for (int i = 0; i < job.in_dim; ++i) {
      for (int o = 0; o < job.out_dim; ++o) {
        weights[static_cast<size_t>(i) * job.out_dim + o] = weight_at(p, head, i, o);
      }
    }
    for (int batch = 0; batch < job.batch; ++batch) {
      for (int t = 0; t < job.tokens; ++t) {
        std::vector<double> y(job.out_dim, 0.0);
        int in = 0;
        for (size_t s = 0; s < job.sources.size(); ++s) {
          const Source& source = job.sources[s];
          const int width = job.head_mapping.empty() ? source.heads : job.mapping_width;
          for (int g = 0; g < width; ++g) {
            const int from =
                job.head_mapping.empty() ? g : job.head_mapping[head * job.mapping_width + g];
            std::vector<double> x(source.dim);
            for (int d = 0; d < source.dim; ++d) x[d] = p.sources[s].at({batch, from, t, d});
            turn(x, p, source.strip, batch, t);
            for (int d = 0; d < source.dim; ++d, ++in) {
              const double* row = &weights[static_cast<size_t>(in) * job.out_dim];
              for (int o = 0; o < job.out_dim; ++o) y[o] += x[d] * row[o];
            }
          }
        }
        if (job.bias.data) {
          for (int o = 0; o < job.out_dim; ++o) y[o] += p.bias.at({head, o});
        }
        turn(y, p, job.rotate, batch, t);
        place = ((static_cast<size_t>(batch) * job.heads + head) * job.tokens + t) * job.out_dim;
        for (int o = 0; o < job.out_dim; ++o, ++place) {
          double got;
          if (job.out_type == Type::f32) {
            got = reinterpret_cast<const float*>(p.out.data())[place];
          } else if (job.out_type == Type::f16) {
            got = to_float(reinterpret_cast<const Half*>(p.out.data())[place]);
          } else {
            got = to_float(reinterpret_cast<const Bfloat*>(p.out.data())[place]);
          }
          wrong += (got - y[o]) * (got - y[o]);
          total += y[o] * y[o];
        }
      }
    }
  }
  return total > 0 ? wrong / total : wrong;
}

std::vector<const Isa*> all_isas() {
  std::vector<const Isa*> isas;
  for (const std::string& name : isa_names()) {
    use_isa(name);
    isas.push_back(&current_isa());
  }
  for (const Isa& isa : portable) isas.push_back(&isa);
  return isas;
}

void test_random_jobs(int count) {
  // Half a unit in the last place, squared: a few equal values may all be that
  // far off.
  const double limit[] = {1e-12, 0x1p-22 * 1.01, 0x1p-16 * 1.01};
  const auto isas = all_isas();
  for (int i = 0; i < count; ++i) {
    Random random(i);
    auto problem = make_problem(random);
    const Isa& isa = *isas[i % isas.size()];
    set_num_threads(1 + i % 3);
    map_layer(problem->job, isa);
    const double e = error(*problem);
    CHECK(e < limit[static_cast<int>(problem->job.out_type)], "job %d on %s: NMSE %g", i, isa.name,
          e);
  }
  set_num_threads(0);
}

// --- conversions -----------------------------------------------------------

template <class T>
void test_conversions(const Isa& isa, Type type, uint32_t infinity) {
  // Every value of the type, as a row of keys and back.
  std::vector<uint16_t> all(65536);
  for (uint32_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  const int count = static_cast<int>(all.size());
  const size_t rows = isa.rows;
  std::vector<float> tile(rows * all.size()), temp((rows + 3) * all.size());
  isa.pack({all.data(), type, count, 1, count, 1, {}, tile.data(), 0, temp.data()});
  std::vector<float> wide(all.size());
  for (size_t i = 0; i < wide.size(); ++i) wide[i] = tile[i * rows];
  std::vector<uint16_t> back(all.size());
  isa.finish({wide.data(), count, nullptr, count, 1, {}, back.data(), type, temp.data()});
  for (uint32_t i = 0; i < all.size(); ++i) {
    const uint32_t magnitude = i & 0x7fff;
    const float want = to_float(T{static_cast<uint16_t>(i)});
    CHECK(float_bits(wide[i]) == float_bits(want) || (std::isnan(wide[i]) && std::isnan(want)),
          "%s widens %04x to %g", isa.name, i, wide[i]);
    if (magnitude > infinity) {
      CHECK((back[i] & 0x7fff) > infinity, "%s makes NaN %04x %04x", isa.name, i, back[i]);
    } else {
      const uint32_t finite = magnitude == infinity ? i - 1 : i;
      CHECK(back[i] == finite, "%s brings %04x back as %04x", isa.name, i, back[i]);
    }
  }
  // Between two neighbours, and beyond the largest.
  std::vector<float> between;
  std::vector<uint16_t> want;
  for (uint32_t i = 0; i + 1 < infinity; ++i) {
    const double low = to_float(T{static_cast<uint16_t>(i)});
    const double high = to_float(T{static_cast<uint16_t>(i + 1)});
    const float middle = static_cast<float>((low + high) / 2);
    for (const float x : {std::nextafter(middle, 0.0f), middle, std::nextafter(middle, 1e38f)}) {
      for (const float sign : {1.0f, -1.0f}) {
        between.push_back(sign * x);
        const bool up = x > middle || (x == middle && i % 2);
        want.push_back(static_cast<uint16_t>((i + up) | (sign < 0 ? 0x8000 : 0)));
      }
    }
  }
  for (const float x : {65519.0f, 65520.0f, 1e6f, 3.4e38f, INFINITY}) {
    if (type == Type::bf16 && x < 1e38f) continue;
    between.push_back(x);
    want.push_back(static_cast<uint16_t>(infinity - 1));
  }
  std::vector<uint16_t> got(between.size());
  const int n = static_cast<int>(between.size());
  isa.finish({between.data(), n, nullptr, n, 1, {}, got.data(), type, temp.data()});
  for (int i = 0; i < n; ++i) {
    CHECK(got[i] == want[i], "%s rounds %a to %04x, not %04x", isa.name, between[i], got[i],
          want[i]);
  }
}

// --- threads ---------------------------------------------------------------

void test_every_task_runs_once() {
  for (const int threads : {1, 2, 3, 8}) {
    set_num_threads(threads);
    for (const int count : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> runs(count);
      parallel_for(count, [&](int64_t i) { ++runs[i]; });
      for (int i = 0; i < count; ++i) CHECK(runs[i] == 1, "task %d of %d", i, count);
    }
  }
  set_num_threads(0);
}

void test_errors_arrive_and_the_pool_goes_on() {
  set_num_threads(3);
  for (int round = 0; round < 50; ++round) {
    std::string what;
    try {
      parallel_for(100, [&](int64_t i) {
        if (i == round) throw std::runtime_error("task " + std::to_string(i));
      });
    } catch (const std::runtime_error& error) {
      what = error.what();
    }
    CHECK(what == "task " + std::to_string(round), "got '%s'", what.c_str());
    std::atomic<int> done{0};
    parallel_for(20, [&](int64_t) { ++done; });
    CHECK(done == 20, "%d of 20 after an error", done.load());
  }
  set_num_threads(0);
}

void nap(int microseconds) {
  std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

void test_callers_share_the_limit() {
  set_num_threads(4);
  for (const int callers : {1, 2, 4}) {
    std::atomic<int> now{0}, most{0}, done{0};
    std::atomic<bool> settled{false};
    std::vector<std::thread> threads;
    for (int c = 0; c < callers; ++c) {
      threads.emplace_back([&] {
        for (int round = 0; round < 20; ++round) {
          parallel_for(16, [&](int64_t) {
            const int here = ++now;
            int seen = most;
            while (settled && here > seen && !most.compare_exchange_weak(seen, here)) {
            }
            nap(200);
            --now;
            ++done;
          });
          // A helper that began before a caller came finishes its task first.
          if (round == 2) settled = true;
        }
      });
    }
    for (auto& t : threads) t.join();
    CHECK(done == callers * 20 * 16, "%d tasks", done.load());
    // One more for each caller that starts while helpers are at a task.
    CHECK(most <= 4 + callers - 1, "%d at once with %d callers", most.load(), callers);
    CHECK(most >= std::min(4, callers + 1), "%d at once with %d callers", most.load(), callers);
  }
  set_num_threads(0);
}

void test_helpers_come_back_when_a_caller_leaves() {
  set_num_threads(2);
  std::atomic<bool> stop{false};
  std::thread other([&] {
    parallel_for(1, [&](int64_t) {
      while (!stop) nap(100);
    });
  });
  nap(5000);
  // The other caller holds the second place; let it go in the middle.
  std::atomic<int> now{0}, most{0};
  parallel_for(60, [&](int64_t i) {
    const int here = ++now;
    int seen = most;
    while (here > seen && !most.compare_exchange_weak(seen, here)) {
    }
    if (i == 10) stop = true;
    nap(1000);
    --now;
  });
  other.join();
  CHECK(most == 2, "%d at once", most.load());
  set_num_threads(0);
}

void test_idle_threads_sleep() {
  set_num_threads(4);
  parallel_for(64, [](int64_t) { nap(100); });
  const std::clock_t before = std::clock();
  nap(300000);
  const double used = static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC;
  CHECK(used < 0.03, "%.3f s of processor time in 0.3 s of idling", used);
  set_num_threads(0);
}

void test_jobs_from_several_threads() {
  const auto isas = all_isas();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&isas, i] {
      for (int j = 0; j < 6; ++j) {
        Random random(1000 + 10 * i + j);
        auto problem = make_problem(random);
        map_layer(problem->job, *isas[j % isas.size()]);
        const double e = error(*problem);
        CHECK(e < 0x1p-16 * 1.01, "job %d of thread %d: NMSE %g", j, i, e);
      }
    });
  }
  for (int round = 0; round < 50; ++round) {  // the limit may change meanwhile
    set_num_threads(1 + round % 4);
    nap(500);
  }
  for (auto& t : threads) t.join();
  set_num_threads(0);
}

}  // namespace

int main(int argc, char** argv) {
  for (const Isa* isa : all_isas()) {
    test_conversions<Half>(*isa, Type::f16, 0x7c00);
    test_conversions<Bfloat>(*isa, Type::bf16, 0x7f80);
  }
  test_every_task_runs_once();
  test_errors_arrive_and_the_pool_goes_on();
  test_callers_share_the_limit();
  test_helpers_come_back_when_a_caller_leaves();
  test_idle_threads_sleep();
  test_random_jobs(argc > 1 ? std::atoi(argv[1]) : 300);
  test_jobs_from_several_threads();
  std::string names;
  for (const Isa* isa : all_isas()) names += std::string(names.empty() ? "" : ", ") + isa->name;
  if (failures) {
    std::printf("%d failures\n", failures);
    return 1;
  }
  std::printf("ok: %s\n", names.c_str());
}
