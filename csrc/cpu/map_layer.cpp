// How a job is cut up: into tasks for threads, and each task into pieces that
// stay in the cache while the inner loops (kernel.h) work on them.
//
// A task is a block of tokens and a few target heads that read the same source
// heads. It goes through the input axis in chunks. For each chunk it packs the
// tokens' features, with the source's rotation taken off, as float32 (a: tokens
// x chunk); widens the weights of one panel of columns at a time (b: chunk x
// panel); and adds a * b to the task's result (c: tokens x columns), which it
// finishes at the end. Nothing is larger than that, however long the context.
#include "cpu/map_layer.h"

#include <algorithm>
#include <map>
#include <memory>
#include <new>
#include <vector>

#include "cpu/half.h"
#include "cpu/pool.h"

namespace kvgraft::cpu {

namespace {

// Sizes for second-level caches of 512 KiB and first-level ones of 32. `b` has
// to stay in the first level (256 x 16 floats are 16 KiB) while `a` streams by
// from the second (336 x 256 floats are 336 KiB). `c` is touched once a chunk. More
// tokens would need less widening still, but more memory, and give fewer tasks.
constexpr int kChunk = 256;    // features; a longer head is one chunk
constexpr int kTokens = 336;   // per task; a multiple of every Isa::rows
constexpr int kColumns = 512;  // per task
constexpr int kGroup = 128;    // columns whose weights are widened together
constexpr int kPad = 16;       // keeps rows off multiples of 4 KiB
// From this many tiles of tokens on it pays to widen weights once for all.
constexpr int kWidenTiles = 4;

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

size_t size_of(Type type) {
  return type == Type::f32 ? 4 : 2;
}

const char* offset(const void* data, Type type, int64_t elements) {
  return static_cast<const char*>(data) + elements * static_cast<int64_t>(size_of(type));
}

void* offset(void* data, Type type, int64_t elements) {
  return static_cast<char*>(data) + elements * static_cast<int64_t>(size_of(type));
}

float load(const void* data, Type type, int64_t at) {
  switch (type) {
    case Type::f32:
      return static_cast<const float*>(data)[at];
    case Type::f16:
      return to_float(static_cast<const Half*>(data)[at]);
    default:
      return to_float(static_cast<const Bfloat*>(data)[at]);
  }
}

// One source head: features [in, in + dim) of a target head.
struct Segment {
  int source;
  int head;
  int dim;
  int in;
};

// Segments [begin, end), features [in, in + count).
struct Chunk {
  int begin;
  int end;
  int in;
  int count;
};

// Target heads that read the same source heads.
struct Bundle {
  std::vector<int> heads;
  std::vector<Segment> segments;
  std::vector<Chunk> chunks;
};

struct Task {
  int bundle;
  int first_head;  // index into Bundle::heads
  int heads;
  int batch;
  int first_token;
  int tokens;
};

// The working memory of one thread, kept for its next task.
class Scratch {
 public:
  float* get(size_t floats) {
    if (floats > size_) {
      data_.reset();
      data_.reset(static_cast<float*>(::operator new(floats * sizeof(float), kAlign)));
      size_ = floats;
    }
    return data_.get();
  }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(float* p) const { ::operator delete(p, kAlign); }
  };
  std::unique_ptr<float, Free> data_;
  size_t size_ = 0;
};

// The tasks of a job, and how each is run.
class Schedule {
 public:
  Schedule(const Job& job, const Isa& isa) : job_(job), isa_(isa) {
    make_bundles();
    make_bias();
    padded_ = static_cast<int>(ceil_div(job.out_dim, isa.columns)) * isa.columns;
    group_columns_ = std::min(padded_, std::max(kGroup / isa.columns, 1) * isa.columns);
    groups_ = static_cast<int>(ceil_div(job.out_dim, group_columns_));
    make_tasks();
    for (const Bundle& bundle : bundles_) {
      for (const Chunk& chunk : bundle.chunks) longest_ = std::max(longest_, chunk.count);
    }
    for (const Source& source : job.sources) widest_ = std::max(widest_, source.dim);
    for (const Task& task : tasks_) {
      most_tokens_ = std::max(most_tokens_, task.tokens);
      most_heads_ = std::max(most_heads_, task.heads);
    }
  }

  void run() {
    parallel_for(static_cast<int64_t>(tasks_.size()), [this](int64_t i) { run_task(tasks_[i]); });
  }

 private:
  void make_bundles() {
    std::map<std::vector<int>, int> by_mapping;
    for (int h = 0; h < job_.heads; ++h) {
      std::vector<int> group;
      if (!job_.head_mapping.empty()) {
        const auto row = job_.head_mapping.begin() + static_cast<int64_t>(h) * job_.mapping_width;
        group.assign(row, row + job_.mapping_width);
      }
      const auto [place, is_new] = by_mapping.emplace(group, static_cast<int>(bundles_.size()));
      if (is_new) bundles_.push_back(make_bundle(group));
      bundles_[place->second].heads.push_back(h);
    }
  }

  Bundle make_bundle(const std::vector<int>& group) const {
    Bundle bundle;
    int in = 0;
    for (int s = 0; s < static_cast<int>(job_.sources.size()); ++s) {
      const Source& source = job_.sources[s];
      const int count = job_.head_mapping.empty() ? source.heads : job_.mapping_width;
      for (int g = 0; g < count; ++g, in += source.dim) {
        bundle.segments.push_back({.source = s,
                                   .head = job_.head_mapping.empty() ? g : group[g],
                                   .dim = source.dim,
                                   .in = in});
      }
    }
    for (int i = 0; i < static_cast<int>(bundle.segments.size()); ++i) {
      const Segment& segment = bundle.segments[i];
      if (!bundle.chunks.empty() && bundle.chunks.back().count + segment.dim <= kChunk) {
        bundle.chunks.back().end = i + 1;
        bundle.chunks.back().count += segment.dim;
      } else {
        bundle.chunks.push_back({.begin = i, .end = i + 1, .in = segment.in, .count = segment.dim});
      }
    }
    return bundle;
  }

  void make_bias() {
    const Bias& bias = job_.bias;
    if (!bias.data) return;
    bias_.reserve(static_cast<size_t>(job_.heads) * job_.out_dim);
    for (int h = 0; h < job_.heads; ++h) {
      for (int o = 0; o < job_.out_dim; ++o) {
        bias_.push_back(load(bias.data, bias.type, h * bias.head_stride + o * bias.out_stride));
      }
    }
  }

  void make_tasks() {
    const int threads = num_threads();
    const int tiles = static_cast<int>(ceil_div(job_.tokens, isa_.rows));
    // Heads per task: as many as the columns allow, shared out evenly; fewer
    // when there are too few tokens to give every thread a block of them.
    int64_t blocks = ceil_div(job_.tokens, kTokens);
    const int most = std::max(1, kColumns / padded_);
    int64_t units = 0;
    const auto per_task = [&](const Bundle& bundle, int limit) {
      const int heads = static_cast<int>(bundle.heads.size());
      return static_cast<int>(ceil_div(heads, ceil_div(heads, limit)));
    };
    int limit = most;
    for (;; limit = (limit + 1) / 2) {
      units = 0;
      for (const Bundle& bundle : bundles_) {
        units += ceil_div(static_cast<int64_t>(bundle.heads.size()), per_task(bundle, limit));
      }
      if (limit == 1 || tiles > kWidenTiles || units * job_.batch >= 2 * threads) break;
    }
    units *= job_.batch;
    // A few tasks more, where that lets all threads end together.
    if (tiles > kWidenTiles && units * blocks < 8 * threads) {
      const int64_t even = ceil_div(units * blocks, threads) * threads;
      blocks = std::min<int64_t>(std::max<int64_t>(ceil_div(even, units), blocks),
                                 ceil_div(tiles, kWidenTiles));
    }
    // All tokens of some heads before the next heads: their weights are the
    // larger part of what the tasks share.
    for (int b = 0; b < static_cast<int>(bundles_.size()); ++b) {
      const int heads = static_cast<int>(bundles_[b].heads.size());
      const int step = per_task(bundles_[b], limit);
      for (int h = 0; h < heads; h += step) {
        for (int batch = 0; batch < job_.batch; ++batch) {
          for (int64_t block = 0; block < blocks; ++block) {
            const int first = static_cast<int>(tiles * block / blocks) * isa_.rows;
            const int last = static_cast<int>(tiles * (block + 1) / blocks) * isa_.rows;
            const int tokens = std::min(last, job_.tokens) - first;
            if (tokens <= 0) continue;
            tasks_.push_back({.bundle = b,
                              .first_head = h,
                              .heads = std::min(step, heads - h),
                              .batch = batch,
                              .first_token = first,
                              .tokens = tokens});
          }
        }
      }
    }
  }

  Rotation rotation(int table, int batch, int token) const {
    if (table < 0) return {};
    const Table& t = job_.tables[table];
    return {.pairs = t.pairs,
            .traditional = t.traditional,
            .cos = t.cos + batch * t.cos_strides[0] + token * t.cos_strides[1],
            .sin = t.sin + batch * t.sin_strides[0] + token * t.sin_strides[1],
            .cos_token = t.cos_strides[1],
            .cos_pair = t.cos_strides[2],
            .sin_token = t.sin_strides[1],
            .sin_pair = t.sin_strides[2]};
  }

  // The memory that a task works in.
  struct Buffers {
    float* a;
    float* b;
    float* c;
    float* temp;
    int64_t c_stride;
  };

  Buffers buffers() const {
    static thread_local Scratch scratch;
    const int64_t c_stride = most_heads_ * padded_ + kPad;
    const size_t b_size = static_cast<size_t>(longest_) * group_columns_;
    const size_t a_size =
        static_cast<size_t>(ceil_div(most_tokens_, isa_.rows)) * isa_.rows * longest_;
    const size_t c_size = most_tokens_ * c_stride;
    const size_t temp_size = std::max<size_t>((isa_.rows + 3) * static_cast<size_t>(widest_),
                                              2 * static_cast<size_t>(job_.out_dim));
    float* b = scratch.get(b_size + a_size + c_size + temp_size);
    float* a = b + b_size;
    float* c = a + a_size;
    return {.a = a, .b = b, .c = c, .temp = c + c_size, .c_stride = c_stride};
  }

  void pack(const Task& task, const Bundle& bundle, const Chunk& chunk, const Buffers& memory) {
    for (int i = chunk.begin; i < chunk.end; ++i) {
      const Segment& segment = bundle.segments[i];
      const Source& source = job_.sources[segment.source];
      const int64_t at = task.batch * source.batch_stride + segment.head * source.head_stride +
                         task.first_token * source.token_stride;
      isa_.pack({.source = offset(source.data, source.type, at),
                 .type = source.type,
                 .token_stride = source.token_stride,
                 .dim_stride = source.dim_stride,
                 .dim = segment.dim,
                 .tokens = task.tokens,
                 .rotation = rotation(source.strip, task.batch, task.first_token),
                 .out = memory.a + static_cast<int64_t>(segment.in - chunk.in) * isa_.rows,
                 .tile_stride = static_cast<int64_t>(chunk.count) * isa_.rows,
                 .temp = memory.temp});
    }
  }

  // Where weights lie: part `part` of `parts` of columns [out, out + width) of a
  // chunk.
  Prefetch weight_memory(int head, int out, int width, const Chunk& chunk, int part,
                         int parts) const {
    const Weight& w = job_.weight;
    const WeightStrides& by = w.strides;
    const int pieces = w.bits ? width : chunk.count;
    const int from = pieces * part / parts;
    const int until = pieces * (part + 1) / parts;
    if (w.bits) {
      const auto* words = static_cast<const uint32_t*>(w.data) + head * by.head +
                          (out + from) * by.out + chunk.in * w.bits / 32 * by.in;
      return {.at = reinterpret_cast<const char*>(words),
              .stride = by.out * 4,
              .count = by.in == 1 ? until - from : 0,
              .bytes = chunk.count * w.bits / 8};
    }
    const int64_t size = static_cast<int64_t>(size_of(w.type));
    const int64_t at = head * by.head + (chunk.in + from) * by.in + out * by.out;
    return {.at = offset(w.data, w.type, at),
            .stride = by.in * size,
            .count = by.out == 1 ? until - from : 0,
            .bytes = static_cast<int>(width * size)};
  }

  // Where one source head's rows lie, those of tokens [from, until) of a task.
  Prefetch source_memory(const Task& task, const Segment& segment, int from, int until) const {
    const Source& source = job_.sources[segment.source];
    const int64_t size = static_cast<int64_t>(size_of(source.type));
    const int64_t at = task.batch * source.batch_stride + segment.head * source.head_stride +
                       (task.first_token + from) * source.token_stride;
    return {.at = offset(source.data, source.type, at),
            .stride = source.token_stride * size,
            .count = source.dim_stride == 1 ? until - from : 0,
            .bytes = static_cast<int>(source.dim * size)};
  }

  // Columns of one target head that are widened together.
  struct Group {
    int head;   // within the task
    int out;    // first column
    int width;  // columns that the head has there
  };

  Group group(int index) const {
    const int out = index % groups_ * group_columns_;
    return {
        .head = index / groups_, .out = out, .width = std::min(group_columns_, job_.out_dim - out)};
  }

  void run_task(const Task& task) {
    const Bundle& bundle = bundles_[task.bundle];
    const Buffers memory = buffers();
    const int groups = task.heads * groups_;
    std::vector<Prefetch> next;
    for (size_t n = 0; n < bundle.chunks.size(); ++n) {
      const Chunk* following = n + 1 < bundle.chunks.size() ? &bundle.chunks[n + 1] : nullptr;
      pack(task, bundle, bundle.chunks[n], memory);
      for (int i = 0; i < groups; ++i) {
        multiply(task, bundle, bundle.chunks[n], following, i, memory, next);
      }
    }
    finish(task, bundle, memory);
  }

  // Adds one chunk's product with the weights of group `index` to the task's result.
  // `next` is working memory.
  void multiply(const Task& task, const Bundle& bundle, const Chunk& chunk, const Chunk* following,
                int index, const Buffers& memory, std::vector<Prefetch>& next) {
    const Weight& w = job_.weight;
    const bool few = ceil_div(task.tokens, isa_.rows) < kWidenTiles;
    // For a few tokens weights are used where they are, if they lie as a panel
    // does. For many they are copied even if they are float32: rows far apart
    // share too few sets of the first-level cache.
    const bool in_place = few && !w.bits && w.strides.out == 1;
    const Group g = group(index);
    const int head = bundle.heads[task.first_head + g.head];
    const int panels = static_cast<int>(ceil_div(g.width, isa_.columns));
    const int whole = in_place ? g.width / isa_.columns : 0;  // panels used where they are
    if (whole < panels) {
      const int out = whole * isa_.columns;
      isa_.widen({.weight = &w,
                  .head = head,
                  .in = chunk.in,
                  .count = chunk.count,
                  .out = g.out + out,
                  .width = g.width - out,
                  .panels = memory.b + static_cast<int64_t>(out) * chunk.count});
    }
    for (int p = 0; p < panels; ++p) {
      const int out = p * isa_.columns;
      MultiplyArgs m{.rows = task.tokens,
                     .count = chunk.count,
                     .a = memory.a,
                     .tile_stride = static_cast<int64_t>(chunk.count) * isa_.rows,
                     .b = memory.b + static_cast<int64_t>(out) * chunk.count,
                     .b_type = Type::f32,
                     .b_stride = isa_.columns,
                     .c = memory.c + static_cast<int64_t>(g.head) * padded_ + g.out + out,
                     .c_stride = memory.c_stride,
                     .first = chunk.in == 0,
                     .next = nullptr,
                     .next_count = 0};
      if (p < whole) {
        m.b = offset(w.data, w.type, head * w.strides.head + chunk.in * w.strides.in + g.out + out);
        m.b_type = w.type;
        m.b_stride = w.strides.in;
      }
      if (!few) {
        find_next(task, bundle, chunk, following, index, p, panels, next);
        m.next = next.data();
        m.next_count = static_cast<int>(next.size());
      }
      isa_.multiply(m);
    }
  }

  // What to prefetch while panel `panel` of group `index` is multiplied.
  void find_next(const Task& task, const Bundle& bundle, const Chunk& chunk, const Chunk* following,
                 int index, int panel, int panels, std::vector<Prefetch>& next) const {
    next.clear();
    const bool wraps = index + 1 == task.heads * groups_;
    if (!wraps || following) {  // this panel's share of the next group's weights
      const Group n = group(wraps ? 0 : index + 1);
      next.push_back(weight_memory(bundle.heads[task.first_head + n.head], n.out, n.width,
                                   wraps ? *following : chunk, panel, panels));
    }
    if (following) {  // this panel's share of the next chunk's tokens
      const int64_t part = static_cast<int64_t>(index) * group_columns_ / isa_.columns + panel;
      const int64_t parts = static_cast<int64_t>(task.heads) * padded_ / isa_.columns;
      const int from = static_cast<int>(task.tokens * part / parts);
      const int until = static_cast<int>(task.tokens * (part + 1) / parts);
      for (int s = following->begin; from < until && s < following->end; ++s) {
        next.push_back(source_memory(task, bundle.segments[s], from, until));
      }
    }
  }

  void finish(const Task& task, const Bundle& bundle, const Buffers& memory) {
    for (int i = 0; i < task.heads; ++i) {
      const int head = bundle.heads[task.first_head + i];
      const int64_t row =
          (static_cast<int64_t>(task.batch) * job_.heads + head) * job_.tokens + task.first_token;
      isa_.finish(
          {.c = memory.c + static_cast<int64_t>(i) * padded_,
           .c_stride = memory.c_stride,
           .bias = bias_.empty() ? nullptr : &bias_[static_cast<size_t>(head) * job_.out_dim],
           .dim = job_.out_dim,
           .tokens = task.tokens,
           .rotation = rotation(job_.rotate, task.batch, task.first_token),
           .out = offset(job_.out, job_.out_type, row * job_.out_dim),
           .type = job_.out_type,
           .temp = memory.temp});
    }
  }

  const Job& job_;
  const Isa& isa_;
  std::vector<Bundle> bundles_;
  std::vector<Task> tasks_;
  std::vector<float> bias_;  // float32 [heads, out]
  int padded_ = 0;           // out_dim in whole panels
  int group_columns_ = 0;
  int groups_ = 0;       // per head
  int longest_ = 0;      // chunk
  int widest_ = 0;       // source head
  int most_tokens_ = 0;  // per task
  int most_heads_ = 0;
};

}  // namespace

void map_layer(const Job& job, const Isa& isa) {
  Schedule(job, isa).run();
}

}  // namespace kvgraft::cpu
