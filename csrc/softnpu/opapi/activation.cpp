// Activations.
#include "opapi/op.h"

// The halves a and b of x along `dim`: silu(a) * b.
ACLNN_OP(aclnnSwiGlu, const aclTensor* x, int64_t dim, aclTensor* out) {
  TORCH_CHECK(x->is_floating_point(), "aclnnSwiGlu: x is ", x->scalar_type());
  TORCH_CHECK(x->size(dim) % 2 == 0, "aclnnSwiGlu: dimension ", dim, " of x ", x->sizes(), " is not even");
  ACLNN_RUN(out) {
    const auto halves = x->to(at::kFloat).chunk(2, dim);
    softnpu::write(out, at::silu(halves[0]) * halves[1]);
  };
}
