// Which row goes to which expert, shared by the init_routing operators. Symbols: T tokens, K experts per token, E
// experts.
#pragma once

#include "opapi/check.h"

namespace softnpu {

// The assignments whose expert is in [start, end), by expert, then in their own order. n of them.
struct Routing {
  at::Tensor rows;     // [n] position in the flattened ids [T * K]
  at::Tensor experts;  // [n]
  at::Tensor counts;   // [end - start] assignments of each expert
};

Routing route(const at::Tensor& ids, int64_t start, int64_t end);

// [n] expert * capacity + place among the rows of its expert; -1 where the expert has `capacity` rows already.
at::Tensor slots(const Routing& routing, int64_t capacity);

// [T * K] the destination of each assignment; -1: it has none.
at::Tensor gather_index(const Routing& routing, const at::Tensor& destinations, int64_t assignments);

}  // namespace softnpu
