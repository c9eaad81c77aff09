// The last step of an MoE layer in the init_routing family, and rows regrouped by expert after an all-to-all.
#include "opapi/check.h"

using softnpu::optional;
using softnpu::write;

namespace softnpu {
namespace {

struct Finalize {
  at::Tensor x, row_idx, skip1, skip2, bias, scales, experts;
  int64_t mode, k;
  const aclTensor* out;

  void check(const char* op) const;
  void run(const char* op) const;
};

void Finalize::check(const char* op) const {
  TORCH_CHECK(mode >= 0 && mode <= 3, op, ": drop_pad_mode = ", mode);
  TORCH_CHECK(x.numel() > 0 && (x.dim() == 2 || x.dim() == 3) && x.is_floating_point(), op, ": expanded_permuted_rows ",
              x.sizes(), " of ", x.scalar_type(), "; an empty one is not allowed");
  TORCH_CHECK(skip1.defined() || !skip2.defined(), op, ": skip2 without skip1");
  TORCH_CHECK(!bias.defined() || experts.defined(), op, ": bias without export_for_source_row");
  for (const at::Tensor& t : {skip1, skip2, bias}) {
    TORCH_CHECK(!t.defined() || t.scalar_type() == x.scalar_type(), op, ": skip1, skip2 and bias must be ",
                x.scalar_type());
  }
  TORCH_CHECK(!scales.defined() || scales.scalar_type() == x.scalar_type() ||
                  (x.scalar_type() == at::kBFloat16 && scales.scalar_type() == at::kFloat),
              op, ": scales are ", scales.scalar_type(), " for ", x.scalar_type());
  TORCH_CHECK(k >= 1 && row_idx.numel() == out->size(0) * k, op, ": expanded_src_to_dst_row ", row_idx.sizes(),
              " does not fit ", out->size(0), " tokens with ", k, " experts each");
}

// In float: skip1 + skip2 + sum over k of scales[t, k] * (row + bias of its expert); a row that was dropped adds
// nothing.
void Finalize::run(const char* op) const {
  const auto rows = x.flatten(0, -2);
  const int64_t tokens = out->size(0);
  const bool padded = mode == 1 || mode == 3;
  check_values(op, "expanded_src_to_dst_row", row_idx, padded ? -1 : 0,
               padded ? rows.size(0) - 1 : row_idx.numel() - 1);
  auto from = row_idx.to(at::kLong);
  from = mode < 2 ? from.view({k, tokens}).t() : from.view({tokens, k});
  const auto present = from.ge(0).logical_and(from.lt(rows.size(0)));
  if (bias.defined()) check_values(op, "export_for_source_row", experts, 0, bias.size(0) - 1);
  auto sum = at::zeros({tokens, rows.size(1)});
  if (skip1.defined()) sum += skip1;
  if (skip2.defined()) sum += skip2;
  for (int64_t column = 0; column < k; ++column) {
    const auto t = present.select(1, column).nonzero().squeeze(-1);
    auto part = rows.index_select(0, from.select(1, column).index_select(0, t)).to(at::kFloat);
    if (bias.defined()) {
      part = part + bias.index_select(0, experts.select(1, column).index_select(0, t).to(at::kLong));
    }
    if (scales.defined()) part = part * scales.select(1, column).index_select(0, t).to(at::kFloat).unsqueeze(1);
    sum.index_add_(0, t, part);
  }
  write(out, sum);
}

}  // namespace
}  // namespace softnpu

ACLNN_OP(aclnnMoeFinalizeRoutingV4, const aclTensor* expanded_x, const aclTensor* expanded_row_idx,
         const aclTensor* skip1, const aclTensor* skip2, const aclTensor* bias, const aclTensor* scales,
         const aclTensor* expert_idx, const aclTensor* x, const aclTensor* alpha_1, const aclTensor* alpha_2,
         const aclTensor* v, int64_t drop_pad_mode, const aclIntArray* zero_range, const aclIntArray* copy_range,
         const aclIntArray* constant_range, int64_t k, aclTensor* out) {
  constexpr const char* op = "aclnnMoeFinalizeRoutingV4";
  EMULATED(x == nullptr && alpha_1 == nullptr && alpha_2 == nullptr && v == nullptr, op, "x, alpha or v", "(not null)");
  EMULATED(zero_range == nullptr && copy_range == nullptr && constant_range == nullptr, op, "an expert range",
           "(not null)");
  TORCH_CHECK(scales == nullptr || k <= 1 || scales->size(1) == k, op, ": k = ", k, " with scales ", scales->sizes());
  const softnpu::Finalize call{*expanded_x,
                               *expanded_row_idx,
                               optional(skip1),
                               optional(skip2),
                               optional(bias),
                               optional(scales),
                               optional(expert_idx),
                               drop_pad_mode,
                               scales == nullptr ? k : scales->size(1),
                               out};
  call.check(op);
  ACLNN_RUN(out) { call.run(op); };
}

// tokens come by source rank, then by expert ([N, E] counts); they leave by expert, then by rank. index[i] is where row
// i was.
ACLNN_OP(aclnnMoeReRouting, const aclTensor* tokens, const aclTensor* counts, const aclTensor* scales, int64_t num_type,
         int64_t idx_type, aclTensor* permuted, aclTensor* permuted_scales, aclTensor* index, aclTensor* expert_num) {
  constexpr const char* op = "aclnnMoeReRouting";
  EMULATED(num_type == 1, op, "expert_token_num_type", num_type);
  EMULATED(idx_type == 0, op, "idx_type", idx_type);
  TORCH_CHECK(tokens->dim() == 2 && counts->dim() == 2, op, ": tokens ", tokens->sizes(),
              " and expert_token_num_per_rank ", counts->sizes(), " must have two dimensions");
  TORCH_CHECK(scales == nullptr || scales->sizes() == tokens->sizes().slice(0, 1), op, ": per_token_scales ",
              scales->sizes(), " do not fit tokens ", tokens->sizes());
  ACLNN_RUN(permuted, permuted_scales, index, expert_num) {
    const auto sizes = counts->to(at::kLong);
    softnpu::check_values(op, "expert_token_num_per_rank", sizes, 0, tokens->size(0));
    TORCH_CHECK(sizes.sum().item<int64_t>() == tokens->size(0), op, ": expert_token_num_per_rank adds up to ",
                sizes.sum().item<int64_t>(), ", there are ", tokens->size(0), " tokens");
    const auto experts = at::arange(sizes.size(1)).expand_as(sizes).flatten();
    const auto expert_of = at::repeat_interleave(experts, sizes.flatten());
    const auto order = std::get<1>(expert_of.sort(/*stable=*/true, 0, false));
    write(permuted, tokens->index_select(0, order));
    if (scales != nullptr) write(permuted_scales, scales->index_select(0, order));
    write(index, order);
    write(expert_num, sizes.sum(0));
  };
}
