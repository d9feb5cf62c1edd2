#include "map_layer.h"

#include <mlx/ops.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "cpu/job.h"

namespace kvgraft {

namespace {

[[noreturn]] void fail(const std::string& what) {
  throw std::invalid_argument("[map_layer] " + what);
}

std::string text(const mx::Shape& shape) {
  std::ostringstream out;
  out << shape;
  return out.str();
}

bool is_cache_type(mx::Dtype type) {
  return type == mx::float32 || type == mx::float16 || type == mx::bfloat16;
}

int head_dim(const mx::array& source) {
  return source.shape(-1);
}
int head_count(const mx::array& source) {
  return source.shape(-3);
}

int weight_heads(const Weight& w) {
  return w.data.shape(0);
}
int weight_out(const Weight& w) {
  return w.data.shape(w.bits ? 1 : 2);
}
int64_t weight_in(const Weight& w) {
  return w.bits ? static_cast<int64_t>(w.data.shape(2)) * 32 / w.bits : w.data.shape(1);
}

void check_weight(const Weight& w) {
  if (w.data.ndim() != 3) fail("weight must have 3 axes, got " + text(w.data.shape()) + ".");
  if (!w.bits) {
    if (!is_cache_type(w.data.dtype())) fail("weight must be float32, float16 or bfloat16.");
    return;
  }
  if (w.bits != 4 && w.bits != 8) fail("quantised weights have 4 or 8 bits.");
  if (w.group_size <= 0 || w.group_size % (32 / w.bits)) fail("bad group_size.");
  if (w.data.dtype() != mx::uint32) fail("quantised weights are packed in uint32.");
  if (!w.scales || !w.biases) fail("quantised weights need scales and biases.");
  if (weight_in(w) % w.group_size) fail("in_dim is not a multiple of group_size.");
  const mx::Shape groups{weight_heads(w), weight_out(w),
                         static_cast<int>(weight_in(w) / w.group_size)};
  if (w.scales->shape() != groups || w.biases->shape() != groups) {
    fail("scales and biases must have shape " + text(groups) + ".");
  }
  if (!is_cache_type(w.scales->dtype()) || w.biases->dtype() != w.scales->dtype()) {
    fail("scales and biases must be of one float dtype.");
  }
}

void check_table(const RopeTable& table, int dim, const mx::array& source) {
  const auto& cos = table.cos;
  const bool batched = cos.ndim() == 3;
  if (cos.ndim() != 2 && !batched) fail("RoPE tables must be [N, pairs] or [B, N, pairs].");
  if (table.sin.shape() != cos.shape()) fail("cos and sin of a RoPE table differ in shape.");
  if (2 * cos.shape(-1) > dim) fail("a RoPE table rotates more dims than a head has.");
  if (cos.shape(-2) != source.shape(-2)) fail("a RoPE table covers another number of tokens.");
  if (batched && (source.ndim() == 3 || cos.shape(0) != source.shape(0))) {
    fail("a batched RoPE table needs a batch of the same size.");
  }
}

// The Python layer raises the same with more words; this guards memory.
void check(const MapLayerArgs& args) {
  if (args.sources.empty()) fail("no source layers given.");
  const auto& first = args.sources[0];
  if (first.ndim() != 3 && first.ndim() != 4) fail("sources must have 3 or 4 axes.");
  for (const auto& s : args.sources) {
    if (!is_cache_type(s.dtype())) fail("sources must be float32, float16 or bfloat16.");
    if (s.ndim() != first.ndim() || s.shape(-2) != first.shape(-2) ||
        (s.ndim() == 4 && s.shape(0) != first.shape(0))) {
      fail("sources differ in batch or tokens.");
    }
  }
  check_weight(args.weight);
  const int heads = weight_heads(args.weight);
  const int out = weight_out(args.weight);
  size_t width = 0;
  if (args.heads) {
    if (args.heads->size() != static_cast<size_t>(heads)) fail("head plan of the wrong length.");
    width = heads ? args.heads->front().size() : 0;
    for (const auto& group : *args.heads) {
      if (group.size() != width) fail("the head plan's groups differ in length.");
      for (int g : group) {
        for (const auto& s : args.sources) {
          if (g < 0 || g >= head_count(s)) fail("the head plan names a head a source lacks.");
        }
      }
    }
  }
  int64_t in = 0;
  for (const auto& s : args.sources) {
    in += static_cast<int64_t>(args.heads ? width : head_count(s)) * head_dim(s);
  }
  if (heads && in != weight_in(args.weight)) {
    fail("sources give " + std::to_string(in) + " features, weights take " +
         std::to_string(weight_in(args.weight)) + ".");
  }
  if (args.bias) {
    if (args.bias->shape() != mx::Shape{heads, out}) fail("bias must be [heads, out].");
    if (!is_cache_type(args.bias->dtype())) fail("bias must be float32, float16 or bfloat16.");
  }
  if (!args.strip.empty() && args.strip.size() != args.sources.size()) {
    fail("one strip table per source is needed.");
  }
  for (size_t i = 0; i < args.strip.size(); ++i) {
    if (args.strip[i]) check_table(*args.strip[i], head_dim(args.sources[i]), first);
  }
  if (args.rotate) check_table(*args.rotate, out, first);
  if (args.dtype && !is_cache_type(*args.dtype)) {
    fail("dtype must be float32, float16 or bfloat16.");
  }
}

// Tables without those given twice: source layers of one model mostly share one.
struct TableList {
  std::vector<mx::array> arrays;  // cos, sin, cos, sin ...
  std::vector<bool> traditional;

  int add(const std::optional<RopeTable>& table, const mx::Stream& stream) {
    if (!table || table->cos.shape(-1) == 0) return -1;
    for (size_t i = 0; i < traditional.size(); ++i) {
      if (ids[2 * i] == table->cos.id() && ids[2 * i + 1] == table->sin.id() &&
          traditional[i] == table->traditional) {
        return static_cast<int>(i);
      }
    }
    ids.push_back(table->cos.id());
    ids.push_back(table->sin.id());
    arrays.push_back(mx::astype(table->cos, mx::float32, stream));
    arrays.push_back(mx::astype(table->sin, mx::float32, stream));
    traditional.push_back(table->traditional);
    return static_cast<int>(traditional.size()) - 1;
  }

 private:
  std::vector<std::uintptr_t> ids;
};

mx::Shape result_shape(const mx::array& source, int heads, int out) {
  auto shape = source.shape();
  shape[shape.size() - 3] = heads;
  shape.back() = out;
  return shape;
}

mx::array slice_last(const mx::array& x, int begin, int end, int step, const mx::Stream& s) {
  mx::Shape from(x.ndim(), 0);
  mx::Shape to = x.shape();
  mx::Shape steps(x.ndim(), 1);
  from.back() = begin;
  to.back() = end;
  steps.back() = step;
  return mx::slice(x, from, to, steps, s);
}

mx::array rotate_pairs(const mx::array& input, const std::optional<RopeTable>& table,
                       const mx::Stream& s) {
  auto x = mx::astype(input, mx::float32, s);
  if (!table || table->cos.shape(-1) == 0) return x;
  auto cos = mx::astype(table->cos, mx::float32, s);
  auto sin = mx::astype(table->sin, mx::float32, s);
  if (cos.ndim() == 3) {  // one row of positions per batch entry
    cos = mx::expand_dims(cos, 1, s);
    sin = mx::expand_dims(sin, 1, s);
  }
  const int pairs = cos.shape(-1);
  const int dims = 2 * pairs;
  const int all = x.shape(-1);
  const bool traditional = table->traditional;
  auto a = traditional ? slice_last(x, 0, dims, 2, s) : slice_last(x, 0, pairs, 1, s);
  auto b = traditional ? slice_last(x, 1, dims, 2, s) : slice_last(x, pairs, dims, 1, s);
  auto p = mx::subtract(mx::multiply(a, cos, s), mx::multiply(b, sin, s), s);
  auto q = mx::add(mx::multiply(a, sin, s), mx::multiply(b, cos, s), s);
  std::vector<mx::array> parts;
  if (traditional) {
    auto shape = x.shape();
    shape.back() = dims;
    parts.push_back(mx::reshape(mx::stack({p, q}, -1, s), shape, s));
  } else {
    parts = {p, q};
  }
  if (dims < all) parts.push_back(slice_last(x, dims, all, 1, s));
  return parts.size() == 1 ? parts[0] : mx::concatenate(parts, -1, s);
}

mx::array saturate(const mx::array& x, mx::Dtype dtype, const mx::Stream& s) {
  if (dtype == mx::float32) return x;
  const float limit = static_cast<float>(mx::finfo(dtype).max);
  return mx::astype(mx::clip(x, mx::array(-limit), mx::array(limit), s), dtype, s);
}

// [..., heads, N, D] -> [..., N, heads * D]
mx::array heads_side_by_side(const mx::array& x, const mx::Stream& s) {
  auto rows = mx::swapaxes(x, -3, -2, s);
  return mx::flatten(rows, -2, -1, s);
}

// Takes apart the inputs of a MapLayer node again.
MapLayerArgs to_args(const MapLayerSpec& spec, const std::vector<mx::array>& inputs) {
  std::vector<RopeTable> tables;
  for (size_t i = 0; i < spec.traditional.size(); ++i) {
    tables.push_back({inputs[spec.tables_at() + 2 * i], inputs[spec.tables_at() + 2 * i + 1],
                      spec.traditional[i]});
  }
  auto table = [&](int i) -> std::optional<RopeTable> {
    if (i < 0) return std::nullopt;
    return tables[i];
  };
  MapLayerArgs args{{inputs.begin(), inputs.begin() + spec.sources},
                    {inputs[spec.weight_at()]},
                    std::nullopt,
                    std::nullopt,
                    {},
                    table(spec.rotate),
                    spec.dtype};
  if (spec.group_size) {
    args.weight.scales = inputs[spec.scales_at()];
    args.weight.biases = inputs[spec.scales_at() + 1];
    args.weight.group_size = spec.group_size;
    args.weight.bits = spec.bits;
  }
  if (spec.bias) args.bias = inputs[spec.bias_at()];
  if (!spec.plan.empty()) {
    args.heads.emplace();
    for (size_t at = 0; at < spec.plan.size(); at += spec.plan_width) {
      args.heads->emplace_back(spec.plan.begin() + at, spec.plan.begin() + at + spec.plan_width);
    }
  }
  for (int i : spec.strip) args.strip.push_back(table(i));
  return args;
}

}  // namespace

Path choose_path(const MapLayerArgs& args, const mx::Stream& stream) {
  if (stream.device == mx::Device::cpu) return Path::cpu_kernel;
  return metal_takes(args, stream) ? Path::metal_kernel : Path::composed;
}

mx::array map_layer(const MapLayerArgs& args, mx::StreamOrDevice s) {
  check(args);
  const auto stream = mx::to_stream(s);
  const auto& first = args.sources[0];
  const int heads = weight_heads(args.weight);
  const mx::Dtype dtype = args.dtype.value_or(first.dtype());
  // A plan that lists no heads has no features; let the general path say so.
  const bool no_features = heads && weight_in(args.weight) == 0;
  const Path path = choose_path(args, stream);
  if (no_features || path == Path::composed) return map_layer_composed(args, stream);
  // Throws here rather than in the evaluation if KVGRAFT_CPU_ISA is wrong.
  if (path == Path::cpu_kernel) cpu::current_isa();

  std::vector<mx::array> inputs = args.sources;
  inputs.push_back(args.weight.data);
  if (args.weight.bits) {
    inputs.push_back(*args.weight.scales);
    inputs.push_back(*args.weight.biases);
  }
  if (args.bias) inputs.push_back(*args.bias);
  TableList tables;
  MapLayerSpec spec{static_cast<int>(args.sources.size()),
                    args.weight.bits ? args.weight.group_size : 0,
                    args.weight.bits,
                    args.bias.has_value(),
                    {},
                    0,
                    {},
                    {},
                    -1,
                    dtype};
  if (args.heads && heads) {
    spec.plan_width = static_cast<int>(args.heads->front().size());
    for (const auto& group : *args.heads) {
      spec.plan.insert(spec.plan.end(), group.begin(), group.end());
    }
  }
  for (size_t i = 0; i < args.sources.size(); ++i) {
    spec.strip.push_back(args.strip.empty() ? -1 : tables.add(args.strip[i], stream));
  }
  spec.rotate = tables.add(args.rotate, stream);
  spec.traditional = tables.traditional;
  inputs.insert(inputs.end(), tables.arrays.begin(), tables.arrays.end());
  return mx::array(result_shape(first, heads, weight_out(args.weight)), dtype,
                   std::make_shared<MapLayer>(stream, std::move(spec)), std::move(inputs));
}

mx::array map_layer_composed(const MapLayerArgs& args, mx::StreamOrDevice s) {
  check(args);
  const auto stream = mx::to_stream(s);
  const auto& w = args.weight;
  const int heads = weight_heads(w);
  const int out = weight_out(w);
  const int in = static_cast<int>(weight_in(w));
  const mx::Dtype dtype = args.dtype.value_or(args.sources[0].dtype());

  auto weight = w.data;
  if (w.bits) {
    // In float32: rounding each weight to float16 would show in the result.
    weight = mx::dequantize(w.data, mx::astype(*w.scales, mx::float32, stream),
                            mx::astype(*w.biases, mx::float32, stream), w.group_size, w.bits,
                            "affine", std::nullopt, std::nullopt, stream);
    weight = mx::swapaxes(weight, -1, -2, stream);
  }
  weight = mx::astype(weight, mx::float32, stream);

  std::vector<mx::array> parts;
  for (size_t i = 0; i < args.sources.size(); ++i) {
    auto x =
        rotate_pairs(args.sources[i], args.strip.empty() ? std::nullopt : args.strip[i], stream);
    if (!args.heads) {
      parts.push_back(heads_side_by_side(x, stream));
      continue;
    }
    // One gather for all target heads: [..., heads, width, N, D].
    std::vector<int> flat;
    for (const auto& group : *args.heads) flat.insert(flat.end(), group.begin(), group.end());
    const int width = heads ? static_cast<int>(flat.size()) / heads : 0;
    x = mx::take(x, mx::array(flat.data(), {static_cast<int>(flat.size())}, mx::int32), -3, stream);
    x = mx::unflatten(x, -3, {heads, width}, stream);
    parts.push_back(heads_side_by_side(x, stream));
  }
  auto x = parts.size() == 1 ? parts[0] : mx::concatenate(parts, -1, stream);
  auto y = x;
  if (args.heads) {
    y = mx::matmul(x, weight, stream);
  } else {
    // All target heads at once: one wide product instead of one per head.
    auto wide = mx::reshape(mx::swapaxes(weight, 0, 1, stream), {in, heads * out}, stream);
    y = mx::unflatten(mx::matmul(x, wide, stream), -1, {heads, out}, stream);
    y = mx::swapaxes(y, -3, -2, stream);
  }
  if (args.bias) {
    auto bias = mx::astype(mx::expand_dims(*args.bias, 1, stream), mx::float32, stream);
    y = mx::add(y, bias, stream);
  }
  return saturate(rotate_pairs(y, args.rotate, stream), dtype, stream);
}

#ifndef KVGRAFT_METAL

bool metal_takes(const MapLayerArgs&, const mx::Stream&) {
  return false;
}

std::string metal_status() {
  return "kvgraft was built without Metal";
}

void MapLayer::eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) {
  throw std::runtime_error("[map_layer] This build has no GPU kernel.");
}

#endif

std::vector<mx::array> MapLayer::jvp(const std::vector<mx::array>&, const std::vector<mx::array>&,
                                     const std::vector<int>&) {
  throw std::invalid_argument(
      "[map_layer] has no gradient. Differentiate kvgraft.ops.reference.map_layer instead.");
}

std::vector<mx::array> MapLayer::vjp(const std::vector<mx::array>& primals,
                                     const std::vector<mx::array>& cotangents,
                                     const std::vector<int>& argnums,
                                     const std::vector<mx::array>&) {
  return jvp(primals, cotangents, argnums);
}

std::pair<std::vector<mx::array>, std::vector<int>> MapLayer::vmap(
    const std::vector<mx::array>& inputs, const std::vector<int>& axes) {
  const auto& s = stream();
  int size = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (axes[i] >= 0) size = inputs[i].shape(axes[i]);
  }
  const auto front = [&](size_t i) {  // [size, ...]
    if (axes[i] >= 0) return mx::moveaxis(inputs[i], axes[i], 0, s);
    auto shape = inputs[i].shape();
    shape.insert(shape.begin(), size);
    return mx::broadcast_to(mx::expand_dims(inputs[i], 0, s), shape, s);
  };
  const bool one_map =
      std::all_of(axes.begin() + spec_.weight_at(), axes.begin() + spec_.tables_at(),
                  [](int axis) { return axis < 0; });
  const int rank = inputs[0].ndim() - (axes[0] >= 0);  // of a source within the map

  if (!one_map) {  // different weights per entry: one node each
    std::vector<mx::array> results;
    for (int i = 0; i < size; ++i) {
      std::vector<mx::array> own;
      for (size_t j = 0; j < inputs.size(); ++j) {
        own.push_back(axes[j] < 0 ? inputs[j] : mx::take(inputs[j], i, axes[j], s));
      }
      results.push_back(map_layer(to_args(spec_, own), s));
    }
    return {{mx::stack(results, 0, s)}, {0}};
  }

  std::vector<mx::array> own = inputs;
  for (int i = 0; i < spec_.sources; ++i) {
    own[i] = front(i);
    if (rank == 4) own[i] = mx::flatten(own[i], 0, 1, s);
  }
  const int batch = rank == 4 ? own[0].shape(0) / std::max(size, 1) : 0;
  for (size_t i = spec_.tables_at(); i < inputs.size(); ++i) {
    const bool batched = inputs[i].ndim() - (axes[i] >= 0) == 3;
    if (axes[i] < 0 && !batched) continue;  // one table for all
    own[i] = front(i);
    if (rank == 4) {
      if (!batched) {
        auto shape = own[i].shape();
        shape.insert(shape.begin() + 1, batch);
        own[i] = mx::broadcast_to(mx::expand_dims(own[i], 1, s), shape, s);
      }
      own[i] = mx::flatten(own[i], 0, 1, s);
    }
  }
  auto result = map_layer(to_args(spec_, own), s);
  if (rank == 4) result = mx::unflatten(result, 0, {size, batch}, s);
  return {{result}, {0}};
}

bool MapLayer::is_equivalent(const mx::Primitive& other) const {
  return spec_ == static_cast<const MapLayer&>(other).spec_;
}

std::vector<mx::Shape> MapLayer::output_shapes(const std::vector<mx::array>& inputs) {
  const auto& weight = inputs[spec_.weight_at()];
  return {result_shape(inputs[0], weight.shape(0), weight.shape(spec_.bits ? 1 : 2))};
}

}  // namespace kvgraft
