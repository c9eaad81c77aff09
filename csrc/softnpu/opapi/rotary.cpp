// Rotary position embedding.
#include "opapi/rotary.h"

// x [B, N, S, D]; cos and sin [B or 1, N or 1, S, D].
ACLNN_OP(aclnnInterleaveRope, const aclTensor* x, const aclTensor* cos, const aclTensor* sin, aclTensor* out) {
  const char* op = "aclnnInterleaveRope";
  TORCH_CHECK(x->dim() == 4 && cos->dim() == 4 && cos->sizes() == sin->sizes(), op, ": x ", x->sizes(), ", cos ",
              cos->sizes(), ", sin ", sin->sizes(), " must have 4 dimensions, and cos and sin the same sizes");
  TORCH_CHECK(x->size(3) % 2 == 0 && cos->size(3) == x->size(3), op, ": x ", x->sizes(), " and cos ", cos->sizes(),
              " must have the same, even last dimension");
  TORCH_CHECK(cos->scalar_type() == x->scalar_type() && sin->scalar_type() == x->scalar_type(), op, ": x is ",
              x->scalar_type(), ", cos is ", cos->scalar_type());
  ACLNN_RUN(out) { softnpu::write(out, softnpu::interleave_rope(*x, *cos, *sin)); };
}
