// map_layer put together from MLX's own operations: what runs where there is no kernel,
// and what the kernels' gradients and vmap are made of.
#include <mlx/ops.h>

#include "map_layer.h"

namespace kvgraft {

namespace {

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

}  // namespace

mx::array map_layer_composed(const MapLayerArgs& args, mx::StreamOrDevice s) {
  args.check();
  const auto stream = mx::to_stream(s);
  const auto& w = args.weight;
  const int heads = w.heads();
  const int out = w.out_dim();
  const int in = static_cast<int>(w.in_dim());
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

}  // namespace kvgraft
