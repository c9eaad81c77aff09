// Norms with more than one input.
#include "opapi/op.h"

using softnpu::write;

// x = x1 + x2, rounded to its type; y = x / rms(x), rounded, times gamma. A bfloat16 sum is normed before it is
// rounded.
ACLNN_OP(aclnnAddRmsNorm, const aclTensor* x1, const aclTensor* x2, const aclTensor* gamma, double epsilon,
         aclTensor* y, aclTensor* rstd, aclTensor* x) {
  TORCH_CHECK(x1->sizes() == x2->sizes() && x1->scalar_type() == x2->scalar_type(), "aclnnAddRmsNorm: x1 ", x1->sizes(),
              " ", x1->scalar_type(), " and x2 ", x2->sizes(), " ", x2->scalar_type(), " differ");
  TORCH_CHECK(x1->dim() >= gamma->dim() && x1->sizes().slice(x1->dim() - gamma->dim()) == gamma->sizes(),
              "aclnnAddRmsNorm: gamma ", gamma->sizes(), " does not fit x1 ", x1->sizes());
  ACLNN_RUN(y, rstd, x) {
    std::vector<int64_t> dims;
    for (int64_t d = x1->dim() - gamma->dim(); d < x1->dim(); ++d) dims.push_back(d);
    const auto type = x1->scalar_type();
    const auto sum = type == at::kBFloat16 ? x1->to(at::kFloat) + x2->to(at::kFloat) : (*x1 + *x2).to(at::kFloat);
    const auto scale = at::rsqrt(sum.square().mean(dims, true) + epsilon);
    const auto normed = (sum * scale).to(type).to(at::kFloat);
    write(y, normed * gamma->to(at::kFloat));
    write(rstd, scale.reshape(rstd->sizes()));
    write(x, sum);
  };
}

// y = x / rms(x) * (1 + gamma)
ACLNN_OP(aclnnGemmaRmsNorm, const aclTensor* x, const aclTensor* gamma, double epsilon, aclTensor* y, aclTensor* rstd) {
  TORCH_CHECK(x->dim() >= gamma->dim() && x->sizes().slice(x->dim() - gamma->dim()) == gamma->sizes(),
              "aclnnGemmaRmsNorm: gamma ", gamma->sizes(), " does not fit x ", x->sizes());
  ACLNN_RUN(y, rstd) {
    std::vector<int64_t> dims;
    for (int64_t d = x->dim() - gamma->dim(); d < x->dim(); ++d) dims.push_back(d);
    const auto wide = x->to(at::kFloat);
    const auto scale = at::rsqrt(wide.square().mean(dims, true) + epsilon);
    write(y, wide * scale * (1 + gamma->to(at::kFloat)));
    write(rstd, scale.reshape(rstd->sizes()));
  };
}
