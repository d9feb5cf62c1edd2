#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/half.h"
#include "cpu/job.h"
#include "cpu/pool.h"

namespace kvgraft::cpu {

namespace {

constexpr int kTokens = 32;  // tokens per task

float load(const void* data, Type type, int64_t at) {
  switch (type) {
    case Type::f32:
      return static_cast<const float*>(data)[at];
    case Type::f16:
      return half_to_float(static_cast<const uint16_t*>(data)[at]);
    default:
      return bfloat_to_float(static_cast<const uint16_t*>(data)[at]);
  }
}

void store(void* data, Type type, int64_t at, float value) {
  switch (type) {
    case Type::f32:
      static_cast<float*>(data)[at] = value;
      break;
    case Type::f16:
      static_cast<uint16_t*>(data)[at] = float_to_half(value);
      break;
    default:
      static_cast<uint16_t*>(data)[at] = float_to_bfloat(value);
  }
}

// Rotates one head of one token in place.
void rotate(float* x, const Table& table, int64_t batch, int64_t token) {
  const float* cos = table.cos + batch * table.cos_strides[0] + token * table.cos_strides[1];
  const float* sin = table.sin + batch * table.sin_strides[0] + token * table.sin_strides[1];
  for (int i = 0; i < table.pairs; ++i) {
    const int first = table.traditional ? 2 * i : i;
    const int second = table.traditional ? first + 1 : i + table.pairs;
    const float c = cos[i * table.cos_strides[2]];
    const float s = sin[i * table.sin_strides[2]];
    const float a = x[first];
    const float b = x[second];
    x[first] = a * c - b * s;
    x[second] = a * s + b * c;
  }
}

// Row `in` of a target head's weights.
void weight_row(const Weight& w, int head, int64_t in, int out_dim, float* row) {
  if (!w.bits) {
    const int64_t at = head * w.head_stride + in * w.in_stride;
    for (int o = 0; o < out_dim; ++o) row[o] = load(w.data, w.type, at + o * w.out_stride);
    return;
  }
  const int per_word = 32 / w.bits;
  const int64_t group = in / w.group_size;
  const auto* words = static_cast<const uint32_t*>(w.data);
  for (int o = 0; o < out_dim; ++o) {
    const uint32_t word =
        words[head * w.head_stride + o * w.out_stride + in / per_word * w.in_stride];
    const uint32_t q = word >> (in % per_word * w.bits) & ((1u << w.bits) - 1);
    const auto at = [&](const int64_t(&strides)[3]) {
      return head * strides[0] + o * strides[1] + group * strides[2];
    };
    row[o] = static_cast<float>(q) * load(w.scales, w.type, at(w.scale_strides)) +
             load(w.biases, w.type, at(w.bias_strides));
  }
}

void map_block(const Job& job, int64_t batch, int head, int first, int count) {
  const int out_dim = job.out_dim;
  std::vector<float> acc(static_cast<size_t>(count) * out_dim, 0.0f);
  std::vector<float> row(out_dim);
  std::vector<float> x;
  int64_t in = 0;
  for (const Source& source : job.sources) {
    const int dim = source.dim;
    x.resize(static_cast<size_t>(count) * dim);
    const int width = job.plan.empty() ? source.heads : job.plan_width;
    for (int g = 0; g < width; ++g) {
      const int from = job.plan.empty() ? g : job.plan[head * job.plan_width + g];
      for (int t = 0; t < count; ++t) {
        const int64_t at = batch * source.batch_stride + from * source.head_stride +
                           (first + t) * source.token_stride;
        for (int d = 0; d < dim; ++d) {
          x[t * dim + d] = load(source.data, source.type, at + d * source.dim_stride);
        }
        if (source.strip >= 0) rotate(&x[t * dim], job.tables[source.strip], batch, first + t);
      }
      for (int d = 0; d < dim; ++d, ++in) {
        weight_row(job.weight, head, in, out_dim, row.data());
        for (int t = 0; t < count; ++t) {
          const float scale = x[t * dim + d];
          for (int o = 0; o < out_dim; ++o) acc[t * out_dim + o] += scale * row[o];
        }
      }
    }
  }
  for (int t = 0; t < count; ++t) {
    float* y = &acc[t * out_dim];
    if (job.bias) {
      for (int o = 0; o < out_dim; ++o) {
        y[o] += load(job.bias, job.bias_type, head * job.bias_strides[0] + o * job.bias_strides[1]);
      }
    }
    if (job.rotate >= 0) rotate(y, job.tables[job.rotate], batch, first + t);
    const int64_t at = ((batch * job.heads + head) * job.tokens + first + t) * out_dim;
    for (int o = 0; o < out_dim; ++o) store(job.out, job.out_type, at + o, y[o]);
  }
}

}  // namespace

void map_layer_plain(const Job& job) {
  const int64_t blocks = (job.tokens + kTokens - 1) / kTokens;
  parallel_for(job.batch * job.heads * blocks, [&](int64_t task) {
    const int first = static_cast<int>(task % blocks) * kTokens;
    const int head = static_cast<int>(task / blocks % job.heads);
    map_block(job, task / blocks / job.heads, head, first, std::min(kTokens, job.tokens - first));
  });
}

}  // namespace kvgraft::cpu
