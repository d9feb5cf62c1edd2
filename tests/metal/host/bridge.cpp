// csrc/metal/dispatch.cpp for Python: numbers in, JSON out.
#include <cstdio>
#include <cstring>
#include <sstream>
#include <string>

#include "metal/dispatch.h"

using namespace kvgraft;
using namespace kvgraft::metal;

namespace {

class Reader {
 public:
  explicit Reader(const int64_t* at) : at_(at) {}
  template <class T>
  void operator()(T& to) {
    to = static_cast<T>(*at_++);
  }
  template <int N>
  void operator()(int64_t (&to)[N]) {
    for (auto& value : to) value = *at_++;
  }

 private:
  const int64_t* at_;
};

Job read(const int64_t* numbers) {
  Reader get(numbers);
  Job job;
  Weight& w = job.weight;
  int sources, tables, traditional, bias_type;
  int64_t address, strides[3];
  const auto pointer = [](int64_t at) { return reinterpret_cast<const void*>(at); };
  const auto weight_strides = [&]() -> WeightStrides {
    get(strides);
    return {.head = strides[0], .in = strides[1], .out = strides[2]};
  };
  get(job.batch), get(job.tokens), get(job.heads), get(job.out_dim), get(job.out_type);
  get(w.bits), get(w.group_size), get(w.type);
  w.strides = weight_strides();
  get(address);
  w.data = pointer(address);
  w.scale_strides = weight_strides();
  w.bias_strides = weight_strides();
  get(bias_type), get(job.bias.head_stride), get(job.bias.out_stride);
  if (bias_type != kAbsent) {
    job.bias.type = static_cast<Type>(bias_type);
    job.bias.data = numbers;  // only asked whether there is one
  }
  get(job.rotate), get(job.mapping_width);
  get(sources);
  for (int i = 0; i < sources; ++i) {
    Source s;
    get(s.type), get(s.heads), get(s.dim);
    get(s.batch_stride), get(s.head_stride), get(s.token_stride), get(s.dim_stride);
    get(address), get(s.strip);
    s.data = pointer(address);
    job.sources.push_back(s);
  }
  get(tables);
  for (int i = 0; i < tables; ++i) {
    Table t;
    get(t.pairs), get(traditional), get(t.cos_strides), get(t.sin_strides);
    t.traditional = traditional != 0;
    job.tables.push_back(t);
  }
  return job;
}

std::string json(const Dispatch& d) {
  std::ostringstream out;
  const Constants& c = d.constants;
  out << R"({"kernel": ")" << d.kernel << R"(", "variant": ")" << variant_name(d.kernel, c)
      << R"(", "constants": [)" << c.source_type << ", " << c.weight_type << ", " << c.bits << ", "
      << c.bias_type << ", " << c.out_type << ", " << c.strip << ", " << c.rotate << ", " << c.plan
      << ", " << c.wide_source << ", " << c.wide_weight << ", " << c.resume << ", " << c.finish
      << R"(], "grid": [)" << d.grid[0] << ", " << d.grid[1] << ", " << d.grid[2]
      << R"(], "threads": )" << d.threads << R"(, "members": [)";
  for (size_t i = 0; i < d.members.size(); ++i) out << (i ? ", " : "") << d.members[i];
  out << R"(], "params": ")";
  unsigned char bytes[sizeof(MapParams)];
  std::memcpy(bytes, &d.params, sizeof bytes);
  for (const unsigned char byte : bytes) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", byte);
    out << digits;
  }
  out << "\"}";
  return out.str();
}

}  // namespace

extern "C" {

// A null tile means that the host chooses; columns 0 forces the rows kernel.
int bridge_plan(const int64_t* call, int cores, int max_sources, const int* tile, char* out,
                size_t capacity) {
  Tile forced{};
  if (tile) forced = {tile[0], tile[1]};
  std::string text = "[";
  for (const auto& d : plan_dispatches(read(call), cores, max_sources, tile ? &forced : nullptr)) {
    text += (text.size() > 1 ? ", " : "") + json(d);
  }
  text += "]";
  if (text.size() + 1 > capacity) return 1;
  std::memcpy(out, text.c_str(), text.size() + 1);
  return 0;
}

void bridge_tile(int64_t tokens, int64_t spans, int span, int cores, int* tile) {
  const Tile chosen = choose_tile(tokens, spans, span, cores);
  tile[0] = chosen.tokens;
  tile[1] = chosen.columns;
}

int bridge_cores(const char* architecture) {
  return core_count(architecture);
}

int bridge_matrix_units(const char* architecture, int generation) {
  return has_matrix_units(architecture, generation);
}

int bridge_refuses(int group_size, int64_t entries) {
  return !has_kernel(group_size, entries);
}
}
