// Arguments of grouped matmul, and what they must be. Symbols: M rows, K inner, N columns, E groups.
#pragma once

#include "opapi/op.h"

namespace softnpu::grouped_matmul {

struct Arguments {
  const char* op;
  std::vector<at::Tensor> x, weight, bias, scale, per_token_scale, out;
  int64_t activation;
};

// Matrices that the weights hold: one tensor [E, K, N] holds E.
size_t count_weights(const Arguments& arguments);

// Types, sizes and numbers of tensors, as the documentation of Atlas A2 and A3 wants them.
void check(const Arguments& arguments);

}  // namespace softnpu::grouped_matmul
