// Rotary position embedding.
#include "opapi/rotary.h"

#include "opapi/check.h"

// x * cos + turned(x) * sin; what is turned together are the halves of a head (mode 0), or neighbours (mode 1).
ACLNN_OP(aclnnRotaryPositionEmbedding, const aclTensor* x, const aclTensor* cos, const aclTensor* sin, int64_t mode,
         aclTensor* out) {
  const char* op = "npu_rotary_mul";
  EMULATED(mode == 0 || mode == 1, op, "rotary_mode", mode);
  TORCH_CHECK(x->dim() == 4 && cos->dim() == 4 && cos->sizes() == sin->sizes(), op, ": input ", x->sizes(), ", r1 ",
              cos->sizes(), ", r2 ", sin->sizes(), " must have 4 dimensions, and r1 and r2 the same sizes");
  TORCH_CHECK(x->size(3) % 2 == 0 && cos->size(3) == x->size(3), op, ": input ", x->sizes(), " and r1 ", cos->sizes(),
              " must have the same, even last dimension");
  ACLNN_RUN(out) {
    const auto wide = x->to(at::kFloat);
    const auto pairs = mode == 0 ? wide.unflatten(-1, {2, -1}) : wide.unflatten(-1, {-1, 2});
    const int64_t dim = mode == 0 ? -2 : -1;
    const auto turned = at::stack({-pairs.select(dim, 1), pairs.select(dim, 0)}, dim).flatten(-2);
    softnpu::write(out, wide * cos->to(at::kFloat) + turned * sin->to(at::kFloat));
  };
}

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
