// Arithmetic of dynamic quantisation, shared by the operators that contain it.
#pragma once

#include <utility>

#include <ATen/ATen.h>

namespace softnpu {

// Symmetric, a scale per row (the last dimension): {int8 like x, float scale of shape x.sizes()[:-1]}, with
// scale = max |row| / 127 and values rounded to nearest, ties to even. A row of zeros gives zeros and scale 0.
std::pair<at::Tensor, at::Tensor> quantize_rows(const at::Tensor& x);

}  // namespace softnpu
