// Which experts a token goes to, and with which weight. Equal scores: the lower expert first.
#include "opapi/check.h"

using softnpu::write;

namespace softnpu {
namespace {

std::pair<at::Tensor, at::Tensor> top_k(const at::Tensor& scores, int64_t k) {
  const auto [values, experts] = scores.sort(/*stable=*/true, -1, /*descending=*/true);
  return {values.narrow(-1, 0, k), experts.narrow(-1, 0, k)};
}

// Scores with those outside the k_group best of group_count groups at -inf. A group counts as its best score (mode 0),
// or as the sum of its two best (mode 1).
at::Tensor best_groups(const at::Tensor& scores, int64_t k_group, int64_t group_count, int64_t mode) {
  const auto grouped = scores.unflatten(1, {group_count, scores.size(1) / group_count});
  const auto worth = mode == 0 ? grouped.amax(-1) : top_k(grouped, 2).first.sum(-1);
  const auto outside = at::ones_like(worth, at::kBool).scatter_(1, top_k(worth, k_group).second, false);
  return grouped.masked_fill(outside.unsqueeze(-1), -std::numeric_limits<double>::infinity()).flatten(1);
}

// Rows that are finished get expert number E, which is none.
at::Tensor unless_finished(const at::Tensor& experts, const at::Tensor& finished, int64_t none) {
  return finished.defined() ? experts.masked_fill(finished.unsqueeze(-1), none) : experts;
}

void check_softmax(const char* op, const aclTensor* x, const aclTensor* finished, int64_t k) {
  TORCH_CHECK((x->dim() == 2 || x->dim() == 3) && x->is_floating_point(), op, ": x ", x->sizes(), " of ",
              x->scalar_type());
  TORCH_CHECK(k >= 0 && k <= x->size(-1) && k <= 1024, op, ": k = ", k, " of ", x->size(-1), " experts");
  TORCH_CHECK(finished == nullptr ||
                  (finished->scalar_type() == at::kBool && finished->sizes() == x->sizes().slice(0, x->dim() - 1)),
              op, ": finished does not fit x ", x->sizes());
}

}  // namespace
}  // namespace softnpu

ACLNN_OP(aclnnMoeGatingTopK, const aclTensor* x, const aclTensor* bias, int64_t k, int64_t k_group, int64_t group_count,
         int64_t group_select_mode, int64_t renorm, int64_t norm_type, bool out_flag, double routed_scaling_factor,
         double eps, aclTensor* y, aclTensor* expert_idx, aclTensor* out) {
  constexpr const char* op = "aclnnMoeGatingTopK";
  TORCH_CHECK(x->dim() == 2 && x->numel() > 0 && x->is_floating_point(), op, ": x ", x->sizes(), " of ",
              x->scalar_type(), "; an empty one is not allowed");
  const int64_t experts = x->size(1);
  TORCH_CHECK(bias == nullptr || (bias->sizes() == at::IntArrayRef{experts} && bias->scalar_type() == x->scalar_type()),
              op, ": bias does not fit x");
  TORCH_CHECK(group_count > 0 && experts % group_count == 0, op, ": group_count = ", group_count, " of ", experts,
              " experts");
  const int64_t group = experts / group_count;
  TORCH_CHECK((group + 31) / 32 * 32 * group_count <= 2048, op, ": ", experts, " experts in ", group_count,
              " groups, each counted up to a multiple of 32, are more than 2048");
  TORCH_CHECK(k_group >= 1 && k_group <= group_count, op, ": k_group = ", k_group, " of ", group_count);
  TORCH_CHECK(k >= 1 && k <= group * k_group, op, ": k = ", k, " of ", group * k_group, " experts");
  TORCH_CHECK(group_select_mode == 0 || group_select_mode == 1, op, ": group_select_mode = ", group_select_mode);
  TORCH_CHECK(group > group_select_mode, op, ": group_select_mode = 1 with groups of one expert");
  TORCH_CHECK(renorm == 0 || renorm == 1, op, ": renorm = ", renorm);
  EMULATED(norm_type == 0 || norm_type == 1, op, "norm_type", norm_type);
  ACLNN_RUN(y, expert_idx, out) {
    const auto wide = x->to(at::kFloat);
    const auto norm = norm_type == 0 ? wide.softmax(-1) : wide.sigmoid();
    auto scores = bias == nullptr ? norm : norm + bias->to(at::kFloat);
    if (group_count > 1) scores = softnpu::best_groups(scores, k_group, group_count, group_select_mode);
    const auto chosen = softnpu::top_k(scores, k).second;
    auto weights = norm.gather(1, chosen);
    if (norm_type == 1 || renorm == 1) weights = weights / (weights.sum(-1, true) + eps);
    write(y, weights * routed_scaling_factor);
    write(expert_idx, chosen);
    if (out_flag) write(out, norm);
  };
}

ACLNN_OP(aclnnMoeGatingTopKSoftmax, const aclTensor* x, const aclTensor* finished, int64_t k, aclTensor* y,
         aclTensor* expert_idx, aclTensor* row_idx) {
  softnpu::check_softmax("aclnnMoeGatingTopKSoftmax", x, finished, k);
  ACLNN_RUN(y, expert_idx, row_idx) {
    const auto [weights, experts] = softnpu::top_k(x->to(at::kFloat).softmax(-1), k);
    write(y, weights);
    write(expert_idx, softnpu::unless_finished(experts, softnpu::optional(finished), x->size(-1)));
    // Row numbers run down the columns, as init_routing (version 1) wants them.
    write(row_idx, at::arange(y->numel()).view({k, -1}).t().reshape(y->sizes()));
  };
}

ACLNN_OP(aclnnMoeGatingTopKSoftmaxV2, const aclTensor* x, const aclTensor* finished, int64_t k, int64_t renorm,
         bool softmax_flag, aclTensor* y, aclTensor* expert_idx, aclTensor* softmax_result) {
  softnpu::check_softmax("aclnnMoeGatingTopKSoftmaxV2", x, finished, k);
  TORCH_CHECK(renorm == 0 || renorm == 1, "aclnnMoeGatingTopKSoftmaxV2: renorm = ", renorm);
  ACLNN_RUN(y, expert_idx, softmax_result) {
    const auto wide = x->to(at::kFloat);
    const auto scores = renorm == 0 ? wide.softmax(-1) : wide;
    const auto [best, experts] = softnpu::top_k(scores, k);
    write(y, renorm == 0 ? best : best.softmax(-1));
    write(expert_idx, softnpu::unless_finished(experts, softnpu::optional(finished), x->size(-1)));
    if (renorm == 0 && softmax_flag) write(softmax_result, scores);
  };
}
