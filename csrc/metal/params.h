// Parameters of one dispatch of the Metal kernels, read by the host and, pasted
// in front of map_layer.metal, by the kernels.
#ifndef KVGRAFT_METAL_PARAMS_H
#define KVGRAFT_METAL_PARAMS_H

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Source layers of one dispatch. Metal binds 31 buffers; the rest need 12.
#define KVGRAFT_MAX_SOURCES 16

// Strides count elements of the array they belong to.

struct MapSource {
  int64_t batch_stride;
  int64_t head_stride;
  int64_t token_stride;
  int64_t dim_stride;
  int32_t weight_row;  // the input feature that is dim 0 of this layer's first head
  int32_t padding;
};

struct MapTable {  // [batch, tokens, pairs]
  int64_t cos_strides[3];
  int64_t sin_strides[3];
};

struct MapParams {
  int32_t tokens;
  int32_t heads;       // of the target
  int32_t out_dim;     // head_dim of the target
  int32_t source_dim;  // head_dim of the sources
  int32_t sources;     // layers bound
  int32_t width;       // source heads of each layer that feed a target head
  int32_t strip_pairs;
  int32_t rotate_pairs;
  int32_t span;            // octets that one set of source heads feeds
  int32_t tiles_per_span;  // along the target's octets
  int32_t group_shift;     // a group has 1 << group_shift inputs
  int32_t padding;
  // [heads, in, out], or [heads, in in words, out] when quantised.
  int64_t weight_strides[3];
  int64_t scale_strides[3];   // [heads, group, out]
  int64_t bias_strides[3];    // of the groups, likewise
  int64_t offset_strides[2];  // of the map's bias, [heads, out]
  MapTable strip;
  MapTable rotate;
  MapSource layers[KVGRAFT_MAX_SOURCES];
};

#endif
