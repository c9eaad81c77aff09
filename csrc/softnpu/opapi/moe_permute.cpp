// Tokens sorted by expert and back.
#include "opapi/check.h"

using softnpu::write;

// sorted_indices[t * K + k] is where assignment (t, k) goes; those at or after the rows of permuted_tokens are dropped.
ACLNN_OP(aclnnMoeTokenPermute, const aclTensor* tokens, const aclTensor* indices,
         int64_t /*num_out_tokens: rows of permuted_tokens*/, bool padded_mode, aclTensor* permuted_tokens,
         aclTensor* sorted_indices) {
  constexpr const char* op = "aclnnMoeTokenPermute";
  EMULATED(!padded_mode, op, "padded_mode", "true");
  TORCH_CHECK(tokens->dim() >= 2 && (indices->dim() == 1 || indices->dim() == 2) && tokens->size(0) == indices->size(0),
              op, ": tokens ", tokens->sizes(), " and indices ", indices->sizes(), " do not fit");
  TORCH_CHECK(tokens->is_floating_point(), op, ": tokens are ", tokens->scalar_type());
  const int64_t k = indices->dim() == 1 ? 1 : indices->size(1);
  TORCH_CHECK(k <= 512, op, ": ", k, " experts per token are more than 512");
  ACLNN_RUN(permuted_tokens, sorted_indices) {
    softnpu::check_values(op, "indices", *indices, 0, (1 << 24) - 2);
    const auto order = std::get<1>(indices->flatten().sort(/*stable=*/true, 0, false));
    write(sorted_indices, at::empty_like(order).index_put({order}, at::arange(order.size(0))));
    const auto kept = order.narrow(0, 0, permuted_tokens->size(0));
    write(permuted_tokens,
          tokens->index_select(0, kept.floor_divide(std::max<int64_t>(k, 1))).view(permuted_tokens->sizes()));
  };
}

// out[t] = sum over k of probs[t, k] * permuted[sorted_indices[t * K + k]], in float. What was dropped adds nothing,
// and a row with weight 0 is not read: it may be NaN.
ACLNN_OP(aclnnMoeTokenUnpermute, const aclTensor* permuted, const aclTensor* sorted_indices, const aclTensor* probs,
         bool padded_mode, const aclIntArray* /*restore_shape: for padded_mode*/, aclTensor* out) {
  constexpr const char* op = "aclnnMoeTokenUnpermute";
  EMULATED(!padded_mode, op, "padded_mode", "true");
  const int64_t k = probs == nullptr ? 1 : probs->size(1), assignments = sorted_indices->numel();
  TORCH_CHECK(permuted->dim() == 2 && permuted->is_floating_point(), op, ": permuted_tokens ", permuted->sizes(),
              " of ", permuted->scalar_type());
  TORCH_CHECK(k >= 1 && k <= 512, op, ": ", k, " experts per token, not 1 to 512");
  TORCH_CHECK(out->size(0) * k == assignments, op, ": sorted_indices ", sorted_indices->sizes(), " do not fit ",
              out->size(0), " tokens with ", k, " experts each");
  ACLNN_RUN(out) {
    softnpu::check_values(op, "sorted_indices", *sorted_indices, 0, assignments - 1);
    const auto from = sorted_indices->to(at::kLong).view({-1, k});
    const auto weights = probs == nullptr ? at::ones({out->size(0), 1}) : probs->to(at::kFloat);
    const auto read = from.lt(permuted->size(0)).logical_and(weights.ne(0));
    auto sum = at::zeros(out->sizes());
    for (int64_t column = 0; column < k; ++column) {
      const auto tokens = read.select(1, column).nonzero().squeeze(-1);
      const auto rows = permuted->index_select(0, from.select(1, column).index_select(0, tokens)).to(at::kFloat);
      sum.index_add_(0, tokens, rows * weights.select(1, column).index_select(0, tokens).unsqueeze(1));
    }
    write(out, sum);
  };
}
