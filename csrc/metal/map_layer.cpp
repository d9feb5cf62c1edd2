// MapLayer on Apple GPUs: group the source layers, pick a kernel, compile it from
// the embedded source, dispatch.
#include <mlx/allocator.h>
#include <mlx/backend/metal/device.h>

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "kernel_sources.h"
#include "map_layer.h"
#include "metal/params.h"

namespace kvgraft {

namespace {

// Values of the function constants; the same numbers stand in map_layer.metal.
enum ElementType { kF32, kF16, kBF16, kAbsent };
enum RopeKind { kNone, kSplit, kInterleaved };

// setBytes takes 4 KB.
constexpr size_t kMaxPlan = 1024;
constexpr int kMaxRows = 16;  // tokens up to which the rows kernel runs

int type_of(const mx::array& x) {
  if (x.dtype() == mx::float32) return kF32;
  return x.dtype() == mx::float16 ? kF16 : kBF16;
}

// From here on MLX's own matmul uses matrix units that simdgroup_matrix does not
// reach, and plain operations are faster than this kernel. MLX asks the same of
// the architecture's name, and for macOS 26.2 besides, but does not export it.
bool has_matrix_units() {
  auto& device = mx::metal::device(mx::Device::gpu);
  const auto& name = device.get_architecture();
  const bool phone = !name.empty() && name.back() == 'p';
  if (device.get_architecture_gen() < (phone ? 18 : 17)) return false;
  return NS::ProcessInfo::processInfo()->isOperatingSystemAtLeastVersion({26, 2, 0});
}

// GPU cores of the smallest chip with this name: how many tiles keep it busy.
int core_count() {
  const auto& name = mx::metal::device(mx::Device::gpu).get_architecture();
  switch (name.empty() ? ' ' : name.back()) {
    case 'p':
      return 5;
    case 's':  // Max
      return 30;
    case 'd':  // Ultra
      return 60;
    default:  // base and Pro
      return 8;
  }
}

struct Tile {
  int tokens;
  int columns;
};

// The largest tile of which there are at least four per core, a threadgroup for
// each of a core's schedulers; if none has as many, the smallest. In a head plan
// a tile holds columns of one head, so 64 columns are only taken where they waste
// nothing more than 32 would.
Tile choose_tile(int64_t tokens, int64_t spans, int span) {
  static const int wanted = 4 * core_count();
  for (const Tile tile : {Tile{64, 64}, Tile{64, 32}, Tile{32, 32}}) {
    const int octets = tile.columns / 8;
    const int64_t columns = (span + octets - 1) / octets;
    const int64_t waste = columns * octets - span;
    if (octets == 8 && waste >= 4) continue;
    if (spans * columns * ((tokens + tile.tokens - 1) / tile.tokens) >= wanted) return tile;
  }
  return {32, 32};
}

MTL::Library* library(mx::metal::Device& device) {
  // MLX caches a library by this name alone, for the life of the process, and
  // this text is fixed for the life of the process too.
  return device.get_library("kvgraft_map_layer", [] {
    return std::string("#define KVGRAFT_EMBEDDED\n") + params_metal + map_layer_metal;
  });
}

struct Constants {
  int source_type, weight_type, bits, bias_type, out_type, strip, rotate;
  bool plan, wide_source, wide_weight, resume, finish;
};

MTL::ComputePipelineState* pipeline(mx::metal::Device& device, const std::string& name,
                                    const Constants& c) {
  const int numbers[] = {c.source_type, c.weight_type, c.bits,  c.bias_type,
                         c.out_type,    c.strip,       c.rotate};
  const bool flags[] = {c.plan, c.wide_source, c.wide_weight, c.resume, c.finish};
  mx::metal::MTLFCList list;
  std::string hash = name;
  int index = 0;
  for (const int& value : numbers) {
    list.emplace_back(&value, MTL::DataType::DataTypeInt, index++);
    hash += '_' + std::to_string(value);
  }
  for (const bool& value : flags) {
    list.emplace_back(&value, MTL::DataType::DataTypeBool, index++);
    hash += value ? "_t" : "_f";
  }
  return device.get_kernel(name, library(device), hash, list);
}

RopeKind kind_of(const MapLayerSpec& spec, int table) {
  if (table < 0) return kNone;
  return spec.traditional[table] ? kInterleaved : kSplit;
}

void set_table(const mx::array& x, int64_t (&strides)[3]) {
  strides[0] = x.ndim() == 3 ? x.strides(0) : 0;
  strides[1] = x.strides(-2);
  strides[2] = x.strides(-1);
}

// Whether octets of a head of this size are runs of four dims that begin at
// multiples of four.
bool even_octets(int dim, RopeKind kind, int pairs) {
  return dim % 8 == 0 && (kind != kSplit || pairs % 4 == 0);
}

// Whether four adjacent values from any place that the strides lead to are
// aligned.
bool aligned(const mx::array& x, std::initializer_list<int64_t> strides) {
  if (reinterpret_cast<uintptr_t>(x.data<char>()) % (4 * x.itemsize())) return false;
  return std::all_of(strides.begin(), strides.end(), [](int64_t s) { return s % 4 == 0; });
}

// Source layers that one dispatch takes: alike in everything but their strides.
std::vector<std::vector<int>> group_sources(const MapLayerSpec& spec,
                                            const std::vector<mx::array>& inputs) {
  struct Group {
    std::tuple<int, int, int, int> key;
    std::vector<int> members;
  };
  std::vector<Group> groups;
  for (int i = 0; i < spec.sources; ++i) {
    const auto& x = inputs[i];
    const std::tuple key{type_of(x), x.shape(-1), spec.plan.empty() ? x.shape(-3) : 0,
                         spec.strip[i]};
    auto found = std::find_if(groups.begin(), groups.end(), [&](const Group& g) {
      return g.key == key && g.members.size() < KVGRAFT_MAX_SOURCES;
    });
    if (found == groups.end()) found = groups.insert(groups.end(), Group{key, {}});
    found->members.push_back(i);
  }
  std::vector<std::vector<int>> out;
  for (auto& group : groups) out.push_back(std::move(group.members));
  return out;
}

}  // namespace

bool metal_takes(const MapLayerArgs& args, const mx::Stream& stream) {
  if (stream.device != mx::Device::gpu || has_matrix_units()) return false;
  const auto group = static_cast<unsigned>(args.weight.group_size);
  if (args.weight.bits && !std::has_single_bit(group)) return false;
  size_t plan = 0;
  if (args.heads) {
    for (const auto& group : *args.heads) plan += group.size();
  }
  return plan <= kMaxPlan;
}

void MapLayer::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto& out = outputs[0];
  out.set_data(mx::allocator::malloc(out.nbytes()));
  if (out.size() == 0) return;
  auto& device = mx::metal::device(stream().device);
  auto& encoder = mx::metal::get_command_encoder(stream());

  const auto& spec = spec_;
  const auto& weight = inputs[spec.weight_at()];
  const bool batched = out.ndim() == 4;
  const int batch = batched ? out.shape(0) : 1;
  const int tokens = out.shape(-2);
  const auto table = [&](int index, int part) -> const mx::array& {
    // A buffer has to be bound even where nothing reads it.
    return index < 0 ? weight : inputs[spec.tables_at() + 2 * index + part];
  };
  const auto pairs_of = [&](int index) { return index < 0 ? 0 : table(index, 0).shape(-1); };

  MapParams p{};
  p.tokens = tokens;
  p.heads = out.shape(-3);
  p.out_dim = out.shape(-1);
  p.rotate_pairs = pairs_of(spec.rotate);
  p.group_shift = std::countr_zero(static_cast<unsigned>(std::max(spec.group_size, 1)));
  const int octets = (p.out_dim + 7) / 8;
  p.span = spec.plan.empty() ? p.heads * octets : octets;
  const int spans = spec.plan.empty() ? 1 : p.heads;
  const int bits = spec.group_size ? spec.bits : 0;
  const auto set_strides = [](const mx::array& x, bool out_first, int64_t(&strides)[3]) {
    strides[0] = x.strides(0);
    strides[1] = x.strides(out_first ? 2 : 1);
    strides[2] = x.strides(out_first ? 1 : 2);
  };
  set_strides(weight, bits != 0, p.weight_strides);
  const mx::array& scales = bits ? inputs[spec.scales_at()] : weight;
  const mx::array& biases = bits ? inputs[spec.scales_at() + 1] : weight;
  if (bits) {
    set_strides(scales, true, p.scale_strides);
    set_strides(biases, true, p.bias_strides);
  }
  const mx::array& offset = spec.bias ? inputs[spec.bias_at()] : weight;
  if (spec.bias) {
    p.offset_strides[0] = offset.strides(0);
    p.offset_strides[1] = offset.strides(1);
  }
  if (spec.rotate >= 0) {
    set_table(table(spec.rotate, 0), p.rotate.cos_strides);
    set_table(table(spec.rotate, 1), p.rotate.sin_strides);
  }

  // Rows of the weights: source layers in their order, whatever dispatch they
  // are in.
  std::vector<int32_t> rows;
  int32_t row = 0;
  for (int i = 0; i < spec.sources; ++i) {
    rows.push_back(row);
    const int width = spec.plan.empty() ? inputs[i].shape(-3) : spec.plan_width;
    row += width * inputs[i].shape(-1);
  }

  const bool few = tokens <= kMaxRows;
  const Tile tile = few ? Tile{tokens <= 1   ? 1
                               : tokens <= 4 ? 4
                                             : 16,
                               32}
                        : choose_tile(int64_t{tokens} * batch, spans, p.span);
  const std::string name =
      few ? "map_layer_rows_" + std::to_string(tile.tokens)
          : "map_layer_tile_" + std::to_string(tile.tokens) + "x" + std::to_string(tile.columns);
  const int tile_octets = tile.columns / 8;
  p.tiles_per_span = (p.span + tile_octets - 1) / tile_octets;
  const auto grid = MTL::Size::Make(static_cast<size_t>(p.tiles_per_span) * spans,
                                    (tokens + tile.tokens - 1) / tile.tokens, batch);
  const auto threads = MTL::Size::Make(few ? 256 : 128, 1, 1);

  const auto groups = group_sources(spec, inputs);
  mx::array partial = out;  // bound but unused when one dispatch is enough
  if (groups.size() > 1) {
    partial = mx::array({batch, p.heads, octets, tokens, 8}, mx::float32, nullptr, {});
    partial.set_data(mx::allocator::malloc(partial.nbytes()));
    encoder.add_temporary(partial);
  }

  for (size_t step = 0; step < groups.size(); ++step) {
    const auto& members = groups[step];
    const auto& first = inputs[members[0]];
    const int strip = spec.strip[members[0]];
    const RopeKind kind = kind_of(spec, strip);
    p.source_dim = first.shape(-1);
    p.sources = static_cast<int>(members.size());
    p.width = spec.plan.empty() ? first.shape(-3) : spec.plan_width;
    p.strip_pairs = pairs_of(strip);
    if (strip >= 0) {
      set_table(table(strip, 0), p.strip.cos_strides);
      set_table(table(strip, 1), p.strip.sin_strides);
    }
    const bool even = even_octets(p.source_dim, kind, p.strip_pairs);
    bool wide_source = even;
    bool whole_words = even;
    for (int i = 0; i < p.sources; ++i) {
      const auto& x = inputs[members[i]];
      auto& layer = p.layers[i];
      layer = {batched ? x.strides(0) : 0,
               x.strides(-3),
               x.strides(-2),
               x.strides(-1),
               rows[members[i]],
               0};
      wide_source = wide_source && layer.dim_stride == 1 &&
                    aligned(x, {layer.batch_stride, layer.head_stride, layer.token_stride});
      whole_words = whole_words && layer.weight_row % 8 == 0;
    }
    const bool wide_weight =
        bits ? whole_words
             : even_octets(p.out_dim, kind_of(spec, spec.rotate), p.rotate_pairs) &&
                   p.weight_strides[2] == 1 &&
                   aligned(weight, {p.weight_strides[0], p.weight_strides[1]});
    const Constants constants{type_of(first),
                              type_of(bits ? scales : weight),
                              bits,
                              spec.bias ? type_of(offset) : static_cast<int>(kAbsent),
                              type_of(out),
                              kind,
                              kind_of(spec, spec.rotate),
                              !spec.plan.empty(),
                              wide_source,
                              wide_weight,
                              step > 0,
                              step + 1 == groups.size()};

    encoder.set_compute_pipeline_state(pipeline(device, name, constants));
    encoder.set_output_array(out, 0);
    // Reads what the dispatch before wrote; binding it as an output orders them.
    encoder.set_output_array(partial, 1);
    encoder.set_input_array(weight, 2);
    encoder.set_input_array(scales, 3);
    encoder.set_input_array(biases, 4);
    encoder.set_input_array(offset, 5);
    encoder.set_input_array(table(strip, 0), 6);
    encoder.set_input_array(table(strip, 1), 7);
    encoder.set_input_array(table(spec.rotate, 0), 8);
    encoder.set_input_array(table(spec.rotate, 1), 9);
    encoder.set_vector_bytes(spec.plan, 10);
    encoder.set_bytes(p, 11);
    for (int i = 0; i < KVGRAFT_MAX_SOURCES; ++i) {
      encoder.set_input_array(inputs[members[i < p.sources ? i : 0]], 12 + i);
    }
    encoder.dispatch_threadgroups(grid, threads);
  }
}

}  // namespace kvgraft
