// Tokens sorted by expert: versions 1 and 2. Version 3, which has expert ranges and quantisation, is in
// moe_init_routing_v3.cpp.
#include "opapi/moe_routing.h"

namespace softnpu {

Routing route(const at::Tensor& ids, int64_t start, int64_t end) {
  const auto flat = ids.flatten().to(at::kLong);
  const auto active = flat.ge(start).logical_and(flat.lt(end));
  const auto [keys, order] = at::where(active, flat, end).sort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
  const int64_t n = active.sum().item<int64_t>();
  const auto experts = keys.narrow(0, 0, n);
  return {order.narrow(0, 0, n), experts, at::bincount(experts - start, {}, end - start)};
}

at::Tensor slots(const Routing& routing, int64_t capacity) {
  const auto first = routing.counts.cumsum(0) - routing.counts;
  const auto place = at::arange(routing.rows.size(0)) - first.index_select(0, routing.experts);
  return at::where(place.lt(capacity), routing.experts * capacity + place, -1);
}

at::Tensor gather_index(const Routing& routing, const at::Tensor& destinations, int64_t assignments) {
  return at::full({assignments}, -1, at::kLong).index_put({routing.rows}, destinations);
}

}  // namespace softnpu

using softnpu::write;

// Row numbers here run down the columns: assignment (t, k) is row_idx = k * T + t.
ACLNN_OP(aclnnMoeInitRouting, const aclTensor* x, const aclTensor* row_idx, const aclTensor* expert_idx,
         int64_t active_num, aclTensor* expanded_x, aclTensor* expanded_row_idx, aclTensor* expanded_expert_idx) {
  constexpr const char* op = "aclnnMoeInitRouting";
  TORCH_CHECK(x->dim() == 2 && expert_idx->dim() == 2 && row_idx->sizes() == expert_idx->sizes() &&
                  x->size(0) == expert_idx->size(0),
              op, ": x ", x->sizes(), ", row_idx ", row_idx->sizes(), " and expert_idx ", expert_idx->sizes(),
              " do not fit");
  TORCH_CHECK(active_num >= 0, op, ": active_num = ", active_num);
  ACLNN_RUN(expanded_x, expanded_row_idx, expanded_expert_idx) {
    const int64_t assignments = expert_idx->numel();
    const auto flat_rows = row_idx->flatten().to(at::kLong);
    softnpu::check_values(op, "row_idx", flat_rows, 0, assignments - 1);
    const auto [experts, order] = expert_idx->flatten().sort(true, 0, false);
    const auto rows = flat_rows.index_select(0, order);
    write(expanded_expert_idx, experts);
    write(expanded_row_idx, at::empty({assignments}, at::kLong).index_put({rows}, at::arange(assignments)));
    const auto kept = rows.narrow(0, 0, expanded_x->size(0));
    write(expanded_x, x->index_select(0, assignments == 0 ? kept : kept.remainder(x->size(0))));
  };
}

ACLNN_OP(aclnnMoeInitRoutingV2, const aclTensor* x, const aclTensor* expert_idx, int64_t active_num, int64_t capacity,
         int64_t expert_num, int64_t drop_pad_mode, int64_t tokens_flag, bool before_capacity_flag,
         aclTensor* expanded_x, aclTensor* expanded_row_idx, aclTensor* expert_tokens,
         aclTensor* tokens_before_capacity) {
  constexpr const char* op = "aclnnMoeInitRoutingV2";
  TORCH_CHECK(x->dim() == 2 && expert_idx->dim() == 2 && x->size(0) == expert_idx->size(0), op, ": x ", x->sizes(),
              " and expert_idx ", expert_idx->sizes(), " do not fit");
  TORCH_CHECK(active_num >= 0 && capacity >= 0 && expert_num >= 0, op, ": active_num = ", active_num,
              ", expert_capacity = ", capacity, ", expert_num = ", expert_num, ": none may be negative");
  TORCH_CHECK(drop_pad_mode == 0 || drop_pad_mode == 1, op, ": drop_pad_mode = ", drop_pad_mode);
  TORCH_CHECK(tokens_flag >= 0 && tokens_flag <= 2, op, ": expert_tokens_count_or_cumsum_flag = ", tokens_flag);
  const bool drop_pad = drop_pad_mode == 1, bounded = drop_pad || tokens_flag > 0;
  TORCH_CHECK(!bounded || expert_num > 0, op, ": expert_num = 0 where experts are counted");
  TORCH_CHECK(!drop_pad || (capacity > 0 && capacity <= x->size(0)), op, ": expert_capacity = ", capacity, " of ",
              x->size(0), " rows");
  ACLNN_RUN(expanded_x, expanded_row_idx, expert_tokens, tokens_before_capacity) {
    const int64_t k = expert_idx->size(1), assignments = expert_idx->numel();
    const int64_t experts = bounded ? expert_num : (1 << 24);
    softnpu::check_values(op, "expert_idx", *expert_idx, 0, experts - 1);
    const auto routing = softnpu::route(*expert_idx, 0, experts);
    if (drop_pad) {
      const auto slots = softnpu::slots(routing, capacity);
      const auto kept = slots.ge(0);
      write(expanded_row_idx, softnpu::gather_index(routing, slots, assignments));
      const auto padded = at::zeros({expert_num * capacity, x->size(1)}, x->options());
      padded.index_copy_(0, slots.masked_select(kept),
                         x->index_select(0, routing.rows.masked_select(kept).floor_divide(k)));
      write(expanded_x, padded.view(expanded_x->sizes()));
      if (before_capacity_flag) write(tokens_before_capacity, routing.counts);
      return;
    }
    write(expanded_row_idx, softnpu::gather_index(routing, at::arange(assignments), assignments));
    write(expanded_x,
          x->index_select(0, routing.rows.narrow(0, 0, expanded_x->size(0)).floor_divide(std::max(k, int64_t{1}))));
    if (tokens_flag > 0) write(expert_tokens, tokens_flag == 1 ? routing.counts.cumsum(0) : routing.counts);
  };
}
