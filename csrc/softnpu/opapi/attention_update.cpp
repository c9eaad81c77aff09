// What stands around MLA's attention: joining partial results, and the projection after it.
#include "opapi/check.h"

using softnpu::optional;
using softnpu::write;

// Attention over parts of the keys, with each part's lse, to attention over all:
// lse = log sum exp(lse_i), out = sum out_i exp(lse_i - lse). A part that saw no key (lse = inf) counts nothing.
ACLNN_OP(aclnnAttentionUpdate, const aclTensorList* lse, const aclTensorList* parts, int64_t update_type,
         aclTensor* out, aclTensor* lse_out) {
  TORCH_CHECK(!parts->empty() && lse->size() == parts->size(), "aclnnAttentionUpdate: ", lse->size(), " lse for ",
              parts->size(), " parts");
  EMULATED(update_type == 0 || update_type == 1, "npu_attention_update", "update_type", update_type);
  for (size_t i = 0; i < lse->size(); ++i) {
    TORCH_CHECK(lse->at(i)->scalar_type() == at::kFloat && lse->at(i)->dim() == 1 && parts->at(i)->dim() == 2 &&
                    parts->at(i)->size(0) == lse->at(i)->size(0),
                "aclnnAttentionUpdate: lse ", lse->at(i)->sizes(), " ", lse->at(i)->scalar_type(), " and local_out ",
                parts->at(i)->sizes(), " must be [N] of float and [N, D]");
  }
  ACLNN_RUN(out, lse_out) {
    const auto scores = at::stack(lse->tensors());  // [parts, N]
    const auto seen = scores.masked_fill(scores.isposinf(), -std::numeric_limits<double>::infinity());
    const auto all = seen.logsumexp(0);
    const auto weights = (seen - all).exp().nan_to_num(0).unsqueeze(-1);  // no part has seen a key: 0
    write(out, (at::stack(parts->tensors()).to(at::kFloat) * weights).sum(0));
    if (update_type == 1) write(lse_out, all);
  };
}

// [B, M, K] @ [B, K, N] -> [M, B, N], each operand permuted first.
ACLNN_OP(aclnnTransposeBatchMatMul, const aclTensor* x1, const aclTensor* x2, const aclTensor* bias,
         const aclTensor* scale, const aclIntArray* perm1, const aclIntArray* perm2, const aclIntArray* perm_out,
         int8_t precision, int32_t split, aclTensor* out) {
  const char* op = "npu_transpose_batchmatmul";
  EMULATED(bias == nullptr, op, "bias", "a tensor");
  EMULATED(scale == nullptr, op, "scale", "a tensor");
  // 0: as the types say; 1: float may be computed with less. Both are met. 2 and 3 ask for less with float.
  EMULATED(precision <= 1 || x1->scalar_type() != at::kFloat, op, "cube_math_type with float32",
           static_cast<int>(precision));
  EMULATED(split == 1, op, "batch_split_factor", split);
  EMULATED((*perm_out == std::vector<int64_t>{1, 0, 2}), op, "perm_y", *perm_out);
  TORCH_CHECK(x1->dim() == 3 && x2->dim() == 3, "aclnnTransposeBatchMatMul: input ", x1->sizes(), " and weight ",
              x2->sizes(), " must have 3 dimensions");
  ACLNN_RUN(out) {
    const auto left = x1->to(at::kFloat).permute(*perm1), right = x2->to(at::kFloat).permute(*perm2);
    write(out, at::bmm(left, right).permute(*perm_out));
  };
}
