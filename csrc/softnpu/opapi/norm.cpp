// Norms.
#include "opapi/op.h"

using softnpu::write;

// y = x / rms(x) * gamma over the trailing dimensions that gamma has; rstd = 1 / rms(x), float.
ACLNN_OP(aclnnRmsNorm, const aclTensor* x, const aclTensor* gamma, double epsilon, aclTensor* y, aclTensor* rstd) {
  TORCH_CHECK(x->dim() >= gamma->dim() && x->sizes().slice(x->dim() - gamma->dim()) == gamma->sizes(),
              "aclnnRmsNorm: gamma ", gamma->sizes(), " does not fit x ", x->sizes());
  ACLNN_RUN(y, rstd) {
    std::vector<int64_t> dims;
    for (int64_t d = x->dim() - gamma->dim(); d < x->dim(); ++d) dims.push_back(d);
    const auto wide = x->to(at::kFloat);
    const auto scale = at::rsqrt(wide.square().mean(dims, true) + epsilon);
    write(y, wide * scale * gamma->to(at::kFloat));
    write(rstd, scale.reshape(rstd->sizes()));
  };
}
