// Rotary position embedding, in the arithmetic of the NPU: computed in float, rounded once.
#pragma once

#include "opapi/op.h"

namespace softnpu {

// x, pairs side by side along the last dimension, is sorted (evens, then odds) and rotated in halves; cos and sin are
// broadcast. The result stays sorted.
inline at::Tensor interleave_rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const auto pairs = x.to(at::kFloat).unflatten(-1, {x.size(-1) / 2, 2});
  const auto even = pairs.select(-1, 0), odd = pairs.select(-1, 1);
  return at::cat({even, odd}, -1) * cos.to(at::kFloat) + at::cat({-odd, even}, -1) * sin.to(at::kFloat);
}

}  // namespace softnpu
