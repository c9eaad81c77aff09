// Filters for sampling.
#include "opapi/check.h"

#include <limits>

using softnpu::optional;

// Each row keeps its k largest logits, then of those the smallest set of the largest whose probabilities pass p (one
// at least); the others become -inf. Equal values at the k-th place stay.
ACLNN_OP(aclnnApplyTopKTopP, const aclTensor* logits, const aclTensor* p, const aclTensor* k, aclTensor* out) {
  const char* op = "npu_top_k_top_p";
  TORCH_CHECK(logits->dim() == 2, op, ": logits ", logits->sizes(), " must be [rows, vocabulary]");
  TORCH_CHECK(p != nullptr || k != nullptr, op, ": p and k are both left out");
  for (const aclTensor* limit : {p, k}) {
    TORCH_CHECK(limit == nullptr || limit->sizes() == at::IntArrayRef({logits->size(0)}), op, ": p or k is ",
                optional(limit).sizes(), " for logits ", logits->sizes());
  }
  TORCH_CHECK(p == nullptr || p->scalar_type() == logits->scalar_type(), op, ": p is ", optional(p).scalar_type(),
              ", logits are ", logits->scalar_type());
  TORCH_CHECK(k == nullptr || k->scalar_type() == at::kInt, op, ": k is ", optional(k).scalar_type(), ", not int32");
  ACLNN_RUN(out) {
    const double infinity = std::numeric_limits<double>::infinity();
    const int64_t vocabulary = logits->size(1);
    auto [sorted, order] = logits->to(at::kFloat).sort(true, 1, false);
    if (k != nullptr) {
      softnpu::check_values(op, "k", *k, 1, vocabulary);
      const auto least = sorted.gather(1, (vocabulary - k->to(at::kLong)).unsqueeze(1));
      sorted = sorted.masked_fill(sorted < least, -infinity);
    }
    if (p != nullptr) {
      auto drop = sorted.softmax(1).cumsum(1) <= (1 - p->to(at::kFloat)).unsqueeze(1);
      drop.select(1, vocabulary - 1).fill_(false);
      sorted = sorted.masked_fill(drop, -infinity);
    }
    softnpu::write(out, at::empty_like(sorted).scatter_(1, order, sorted));
  };
}
