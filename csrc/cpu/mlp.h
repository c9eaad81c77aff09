// The grouped expert MLP over one plan: y = act(x W13^T + b13) W2^T + b2, weighted and summed per row.
#pragma once

#include "kernels.h"
#include "plan.h"

namespace ascend_moe::cpu {

// Weights of all local experts, [num_experts, rows, k], rows in order or repacked into panels.
struct Matrix {
  const char* data;
  int64_t rows, k;
  int item_size;
  bool packed;
  const float* bias;  // fp32 [num_experts, rows] or null
};

struct Mlp {
  const Kernels* kernels;
  Matrix w13, w2;
  int64_t hidden, inner;  // H, N
  Activation activation;
  Gate gate;
  const char* input;  // rows of `hidden` values, input_stride bytes apart
  int64_t input_stride;
  char* output;
  int64_t output_stride;
  int item_size;
};

// Bytes of scratch one pair needs; callers cut their work so that a plan stays within a fixed budget.
int64_t scratch_per_pair(const Mlp& mlp);

void run(const Mlp& mlp, const Plan& plan);

}  // namespace ascend_moe::cpu
