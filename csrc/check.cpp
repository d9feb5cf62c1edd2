// Whether the arguments of map_layer fit together.
#include <sstream>
#include <stdexcept>

#include "map_layer.h"

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

void check_weight(const WeightArrays& w) {
  if (w.data.ndim() != 3) fail("weight must have 3 axes, got " + text(w.data.shape()) + ".");
  if (!w.bits) {
    if (!is_cache_type(w.data.dtype())) fail("weight must be float32, float16 or bfloat16.");
    return;
  }
  if (w.bits != 4 && w.bits != 8) fail("quantised weights have 4 or 8 bits.");
  if (w.group_size <= 0 || w.group_size % (32 / w.bits)) fail("bad group_size.");
  if (w.data.dtype() != mx::uint32) fail("quantised weights are packed in uint32.");
  if (!w.scales || !w.biases) fail("quantised weights need scales and biases.");
  if (w.in_dim() % w.group_size) fail("in_dim is not a multiple of group_size.");
  const mx::Shape groups{w.heads(), w.out_dim(), static_cast<int>(w.in_dim() / w.group_size)};
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

}  // namespace

// The Python layer raises the same with more words; this guards memory.
void MapLayerArgs::check() const {
  if (sources.empty()) fail("no source layers given.");
  const auto& first = sources[0];
  if (first.ndim() != 3 && first.ndim() != 4) fail("sources must have 3 or 4 axes.");
  for (const auto& s : sources) {
    if (!is_cache_type(s.dtype())) fail("sources must be float32, float16 or bfloat16.");
    if (s.ndim() != first.ndim() || s.shape(-2) != first.shape(-2) ||
        (s.ndim() == 4 && s.shape(0) != first.shape(0))) {
      fail("sources differ in batch or tokens.");
    }
  }
  check_weight(weight);
  const int count = weight.heads();
  const int out = weight.out_dim();
  size_t width = 0;
  if (heads) {
    if (heads->size() != static_cast<size_t>(count)) fail("head mapping of the wrong length.");
    width = count ? heads->front().size() : 0;
    for (const auto& group : *heads) {
      if (group.size() != width) fail("the head mapping's groups differ in length.");
      for (int g : group) {
        for (const auto& s : sources) {
          if (g < 0 || g >= s.shape(-3)) fail("the head mapping names a head a source lacks.");
        }
      }
    }
  }
  int64_t in = 0;
  for (const auto& s : sources) {
    in += static_cast<int64_t>(heads ? width : s.shape(-3)) * s.shape(-1);
  }
  if (count && in != weight.in_dim()) {
    fail("sources give " + std::to_string(in) + " features, weights take " +
         std::to_string(weight.in_dim()) + ".");
  }
  if (bias) {
    if (bias->shape() != mx::Shape{count, out}) fail("bias must be [heads, out].");
    if (!is_cache_type(bias->dtype())) fail("bias must be float32, float16 or bfloat16.");
  }
  if (!strip.empty() && strip.size() != sources.size()) {
    fail("one strip table per source is needed.");
  }
  for (size_t i = 0; i < strip.size(); ++i) {
    if (strip[i]) check_table(*strip[i], sources[i].shape(-1), first);
  }
  if (rotate) check_table(*rotate, out, first);
  if (dtype && !is_cache_type(*dtype)) {
    fail("dtype must be float32, float16 or bfloat16.");
  }
}

}  // namespace kvgraft
