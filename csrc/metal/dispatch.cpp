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

RopeKind kind_of(const Call& call, int table) {
  if (table < 0) return kNone;
  return call.tables[table].traditional ? kInterleaved : kSplit;
}

int pairs_of(const Call& call, int table) {
  return table < 0 ? 0 : call.tables[table].pairs;
}

// Whether octets of a head of this size are runs of four dims that begin at
// multiples of four.
bool even_octets(int dim, RopeKind kind, int pairs) {
  return dim % 8 == 0 && (kind != kSplit || pairs % 4 == 0);
}

// Whether four adjacent values from any place that the strides lead to are
// aligned.
bool aligned(uint64_t address, ElementType type, std::initializer_list<int64_t> strides) {
  if (address % (type == kF32 ? 16 : 8)) return false;
  return std::all_of(strides.begin(), strides.end(), [](int64_t s) { return s % 4 == 0; });
}

// Source layers that one dispatch takes: alike in everything but their strides.
std::vector<std::vector<int>> group_sources(const Call& call, int max_sources) {
  struct Group {
    std::tuple<int, int, int, int> key;
    std::vector<int> members;
  };
  std::vector<Group> groups;
  for (int i = 0; i < static_cast<int>(call.sources.size()); ++i) {
    const Source& x = call.sources[i];
    const std::tuple key{static_cast<int>(x.type), x.dim, call.plan_width ? 0 : x.heads, x.strip};
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

std::vector<Dispatch> plan_dispatches(const Call& call, int cores, int max_sources,
                                      const Tile* forced) {
  const bool plan = call.plan_width != 0;
  MapParams p{};
  p.tokens = call.tokens;
  p.heads = call.heads;
  p.out_dim = call.out_dim;
  p.rotate_pairs = pairs_of(call, call.rotate);
  for (int size = call.group_size; size > 1; size /= 2) ++p.group_shift;
  const int octets = (call.out_dim + 7) / 8;
  p.span = plan ? octets : call.heads * octets;
  const int spans = plan ? call.heads : 1;
  std::copy_n(call.weight_strides, 3, p.weight_strides);
  std::copy_n(call.scale_strides, 3, p.scale_strides);
  std::copy_n(call.bias_strides, 3, p.bias_strides);
  std::copy_n(call.offset_strides, 2, p.offset_strides);
  if (call.rotate >= 0) p.rotate = call.tables[call.rotate].strides;

  // Rows of the weights: source layers in their order, whatever dispatch they are
  // in.
  std::vector<int32_t> rows;
  int32_t row = 0;
  for (const Source& x : call.sources) {
    rows.push_back(row);
    row += (plan ? call.plan_width : x.heads) * x.dim;
  }

  const bool few = forced ? forced->columns == 0 : call.tokens <= kMaxRows;
  Tile tile{call.tokens <= 1 ? 1 : call.tokens <= 4 ? 4 : kMaxRows, kRowsColumns};
  if (!few) {
    tile = forced ? *forced : choose_tile(int64_t{call.tokens} * call.batch, spans, p.span, cores);
  }
  p.tiles_per_span = static_cast<int32_t>(ceil_div(p.span, tile.columns / 8));

  std::vector<Dispatch> out;
  const auto groups = group_sources(call, std::min(max_sources, KVGRAFT_MAX_SOURCES));
  for (size_t step = 0; step < groups.size(); ++step) {
    const auto& members = groups[step];
    const Source& first = call.sources[members[0]];
    const RopeKind kind = kind_of(call, first.strip);
    p.source_dim = first.dim;
    p.sources = static_cast<int32_t>(members.size());
    p.width = plan ? call.plan_width : first.heads;
    p.strip_pairs = pairs_of(call, first.strip);
    p.strip = first.strip < 0 ? MapTable{} : call.tables[first.strip].strides;
    const bool even = even_octets(first.dim, kind, p.strip_pairs);
    bool wide_source = even;
    bool whole_words = even;
    for (int i = 0; i < KVGRAFT_MAX_SOURCES; ++i) p.layers[i] = {};
    for (int i = 0; i < p.sources; ++i) {
      const Source& x = call.sources[members[i]];
      const auto& s = x.strides;
      p.layers[i] = {s[0], s[1], s[2], s[3], rows[members[i]], 0};
      wide_source = wide_source && s[3] == 1 && aligned(x.address, x.type, {s[0], s[1], s[2]});
      whole_words = whole_words && rows[members[i]] % 8 == 0;
    }
    const auto& w = call.weight_strides;
    const bool wide_weight =
        call.bits ? whole_words
                  : even_octets(call.out_dim, kind_of(call, call.rotate), p.rotate_pairs) &&
                        w[2] == 1 && aligned(call.weight_address, call.weight_type, {w[0], w[1]});
    Dispatch d;
    d.kernel =
        few ? "map_layer_rows_" + std::to_string(tile.tokens)
            : "map_layer_tile_" + std::to_string(tile.tokens) + "x" + std::to_string(tile.columns);
    d.constants = {
        first.type, call.weight_type,           call.bits, call.offset_type, call.out_type,
        kind,       kind_of(call, call.rotate), plan,      wide_source,      wide_weight,
        step > 0,   step + 1 == groups.size()};
    d.params = p;
    d.members = members;
    d.grid[0] = p.tiles_per_span * spans;
    d.grid[1] = static_cast<int>(ceil_div(call.tokens, tile.tokens));
    d.grid[2] = call.batch;
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

std::string refusal(int group_size, int64_t plan_entries) {
  if (group_size & (group_size - 1)) return "the group size of the weights is no power of two";
  if (plan_entries > kMaxPlan) return "the head plan has more than 1024 entries";
  return "";
}

}  // namespace kvgraft::metal
