#include "metal/dispatch.h"

#include <algorithm>
#include <initializer_list>
#include <tuple>
#include <utility>

namespace kvgraft::metal {

namespace {

constexpr int kLargeTile = 64;
constexpr int kTileThreads = 128;
constexpr int kRowsThreads = 256;
constexpr int kRowsColumns = 32;

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

RopeKind kind_of(const Job& job, int table) {
  if (table < 0) return kNone;
  return job.tables[table].traditional ? kInterleaved : kSplit;
}

int pairs_of(const Job& job, int table) {
  return table < 0 ? 0 : job.tables[table].pairs;
}

MapTable strides_of(const Job& job, int table) {
  MapTable out{};
  if (table >= 0) {
    std::copy_n(job.tables[table].cos_strides, 3, out.cos_strides);
    std::copy_n(job.tables[table].sin_strides, 3, out.sin_strides);
  }
  return out;
}

void copy_strides(const WeightStrides& from, int64_t (&to)[3]) {
  to[0] = from.head;
  to[1] = from.in;
  to[2] = from.out;
}

// Whether octets of a head of this size are runs of four dims that begin at
// multiples of four.
bool even_octets(int dim, RopeKind kind, int pairs) {
  return dim % 8 == 0 && (kind != kSplit || pairs % 4 == 0);
}

// Whether four adjacent values from any place that the strides lead to are
// aligned.
bool aligned(const void* data, Type type, std::initializer_list<int64_t> strides) {
  if (reinterpret_cast<uintptr_t>(data) % (type == Type::f32 ? 16 : 8)) return false;
  return std::all_of(strides.begin(), strides.end(), [](int64_t s) { return s % 4 == 0; });
}

// Source layers that one dispatch takes: alike in everything but their strides.
std::vector<std::vector<int>> group_sources(const Job& job, int max_sources) {
  struct Group {
    std::tuple<int, int, int, int> key;
    std::vector<int> members;
  };
  std::vector<Group> groups;
  for (int i = 0; i < static_cast<int>(job.sources.size()); ++i) {
    const Source& x = job.sources[i];
    const std::tuple key{static_cast<int>(x.type), x.dim, job.mapping_width ? 0 : x.heads, x.strip};
    auto found = std::find_if(groups.begin(), groups.end(), [&](const Group& g) {
      return g.key == key && static_cast<int>(g.members.size()) < max_sources;
    });
    if (found == groups.end()) found = groups.insert(groups.end(), Group{key, {}});
    found->members.push_back(i);
  }
  std::vector<std::vector<int>> out;
  for (auto& group : groups) out.push_back(std::move(group.members));
  return out;
}

}  // namespace

// The largest tile of which there are at least four per core, a threadgroup for
// each of a core's schedulers; if none has as many, the smallest. In a head plan
// a tile holds columns of one head, so 64 columns are only taken where they waste
// nothing more than 32 would.
Tile choose_tile(int64_t tokens, int64_t spans, int span, int cores) {
  const int64_t wanted = int64_t{4} * cores;
  for (const Tile tile : {Tile{64, 64}, Tile{64, 32}, Tile{32, 32}}) {
    const int octets = tile.columns / 8;
    const int64_t columns = ceil_div(span, octets);
    const int64_t waste = columns * octets - span;
    if (tile.columns == kLargeTile && waste >= 4) continue;
    if (spans * columns * ceil_div(tokens, tile.tokens) >= wanted) return tile;
  }
  return {32, 32};
}

namespace {

// What all dispatches of a job have in common.
MapParams common_params(const Job& job) {
  MapParams p{};
  p.tokens = job.tokens;
  p.heads = job.heads;
  p.out_dim = job.out_dim;
  p.rotate_pairs = pairs_of(job, job.rotate);
  for (int size = job.weight.group_size; size > 1; size /= 2) ++p.group_shift;
  const int octets = (job.out_dim + 7) / 8;
  p.span = job.mapping_width ? octets : job.heads * octets;
  copy_strides(job.weight.strides, p.weight_strides);
  copy_strides(job.weight.scale_strides, p.scale_strides);
  copy_strides(job.weight.bias_strides, p.bias_strides);
  p.offset_strides[0] = job.bias.head_stride;
  p.offset_strides[1] = job.bias.out_stride;
  p.rotate = strides_of(job, job.rotate);
  return p;
}

// First row of the weights of each source layer: in their order, whatever dispatch
// they are in.
std::vector<int32_t> weight_rows(const Job& job) {
  const bool plan = job.mapping_width != 0;
  std::vector<int32_t> rows;
  int32_t row = 0;
  for (const Source& x : job.sources) {
    rows.push_back(row);
    row += (plan ? job.mapping_width : x.heads) * x.dim;
  }
  return rows;
}

}  // namespace

std::vector<Dispatch> plan_dispatches(const Job& job, int cores, int max_sources,
                                      const Tile* forced) {
  const bool plan = job.mapping_width != 0;
  MapParams p = common_params(job);
  const int spans = plan ? job.heads : 1;
  const std::vector<int32_t> rows = weight_rows(job);

  const bool few = forced ? forced->columns == 0 : job.tokens <= kMaxRows;
  Tile tile{job.tokens <= 1 ? 1 : job.tokens <= 4 ? 4 : kMaxRows, kRowsColumns};
  if (!few) {
    tile = forced ? *forced : choose_tile(int64_t{job.tokens} * job.batch, spans, p.span, cores);
  }
  p.tiles_per_span = static_cast<int32_t>(ceil_div(p.span, tile.columns / 8));

  std::vector<Dispatch> out;
  const auto groups = group_sources(job, std::min(max_sources, KVGRAFT_MAX_SOURCES));
  for (size_t step = 0; step < groups.size(); ++step) {
    const auto& members = groups[step];
    const Source& first = job.sources[members[0]];
    const RopeKind kind = kind_of(job, first.strip);
    p.source_dim = first.dim;
    p.sources = static_cast<int32_t>(members.size());
    p.width = plan ? job.mapping_width : first.heads;
    p.strip_pairs = pairs_of(job, first.strip);
    p.strip = strides_of(job, first.strip);
    const bool even = even_octets(first.dim, kind, p.strip_pairs);
    bool wide_source = even;
    bool whole_words = even;
    for (int i = 0; i < KVGRAFT_MAX_SOURCES; ++i) p.layers[i] = {};
    for (int i = 0; i < p.sources; ++i) {
      const Source& x = job.sources[members[i]];
      p.layers[i] = {.batch_stride = x.batch_stride,
                     .head_stride = x.head_stride,
                     .token_stride = x.token_stride,
                     .dim_stride = x.dim_stride,
                     .weight_row = rows[members[i]],
                     .padding = 0};
      wide_source = wide_source && x.dim_stride == 1 &&
                    aligned(x.data, x.type, {x.batch_stride, x.head_stride, x.token_stride});
      whole_words = whole_words && rows[members[i]] % 8 == 0;
    }
    const Weight& w = job.weight;
    const bool wide_weight =
        job.weight.bits
            ? whole_words
            : even_octets(job.out_dim, kind_of(job, job.rotate), p.rotate_pairs) &&
                  w.strides.out == 1 && aligned(w.data, w.type, {w.strides.head, w.strides.in});
    Dispatch d;
    d.kernel =
        few ? "map_layer_rows_" + std::to_string(tile.tokens)
            : "map_layer_tile_" + std::to_string(tile.tokens) + "x" + std::to_string(tile.columns);
    d.constants = {.source_type = static_cast<int>(first.type),
                   .weight_type = static_cast<int>(w.type),
                   .bits = w.bits,
                   .bias_type = job.bias.data ? static_cast<int>(job.bias.type) : kAbsent,
                   .out_type = static_cast<int>(job.out_type),
                   .strip = kind,
                   .rotate = kind_of(job, job.rotate),
                   .plan = plan,
                   .wide_source = wide_source,
                   .wide_weight = wide_weight,
                   .resume = step > 0,
                   .finish = step + 1 == groups.size()};
    d.params = p;
    d.members = members;
    d.grid[0] = p.tiles_per_span * spans;
    d.grid[1] = static_cast<int>(ceil_div(job.tokens, tile.tokens));
    d.grid[2] = job.batch;
    d.threads = few ? kRowsThreads : kTileThreads;
    out.push_back(std::move(d));
  }
  return out;
}

std::string variant_name(const std::string& kernel, const Constants& c) {
  std::string name = kernel;
  for (const int value :
       {c.source_type, c.weight_type, c.bits, c.bias_type, c.out_type, c.strip, c.rotate}) {
    name += '_' + std::to_string(value);
  }
  for (const bool value : {c.plan, c.wide_source, c.wide_weight, c.resume, c.finish}) {
    name += value ? "_t" : "_f";
  }
  return name;
}

int core_count(const std::string& architecture) {
  switch (architecture.empty() ? ' ' : architecture.back()) {
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

bool has_matrix_units(const std::string& architecture, int generation) {
  const bool phone = !architecture.empty() && architecture.back() == 'p';
  return generation >= (phone ? 18 : 17);
}

}  // namespace kvgraft::metal
