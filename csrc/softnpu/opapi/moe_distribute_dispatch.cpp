// Sends every token to the ranks of its experts; rows arrive by local expert, then by source rank, then by token.
#include "opapi/collective.h"
#include "opapi/moe_distribute.h"

namespace softnpu {
namespace {

constexpr int64_t kUnquantized = 0, kDynamic = 2;

struct Dispatch {
  ExpertGroup group;
  const aclTensor *x, *expert_ids, *smooth_scales, *mask, *expert_scales;
  int64_t quant_mode, token_nums_type;
  const aclTensor *expand_x, *dynamic_scales, *assist_info, *expand_idx, *expert_token_nums, *ep_recv_counts,
      *expand_scales;

  void check(const Unused& unused) const;
  void run() const;

 private:
  at::Tensor exchange_counts(const at::Tensor& ids, const Routing& routing) const;
  std::pair<at::Tensor, at::Tensor> payload(const Routing& routing) const;
  void write_index(const Routing& routing) const;
};

void Dispatch::check(const Unused& unused) const {
  const auto& g = group;
  TORCH_CHECK(x->dim() == 2 && x->size(0) == expert_ids->size(0), g.op, ": x ", x->sizes(), " and expert_ids ",
              expert_ids->sizes(), " do not fit");
  EMULATED(x->scalar_type() == at::kHalf || x->scalar_type() == at::kBFloat16, g.op, "type of x",
           c10::toString(x->scalar_type()));
  check_call(g, unused, *expert_ids, mask, x->size(1));
  EMULATED(quant_mode == kUnquantized || quant_mode == kDynamic, g.op, "quant_mode", quant_mode);
  TORCH_CHECK(token_nums_type == 0 || token_nums_type == 1, g.op, ": expert_token_nums_type = ", token_nums_type);
  if (smooth_scales != nullptr) {
    TORCH_CHECK(quant_mode == kDynamic && g.algorithm != "hierarchy", g.op, ": scales with quant_mode = ", quant_mode,
                " and comm_alg '", g.algorithm, "'");
    TORCH_CHECK(smooth_scales->sizes() == at::IntArrayRef({g.experts, x->size(1)}), g.op, ": scales ",
                smooth_scales->sizes(), ", must be [", g.experts, ", ", x->size(1), "]");
  }
  TORCH_CHECK(expert_scales == nullptr || expert_scales->sizes() == expert_ids->sizes(), g.op,
              ": expert_scales do not fit expert_ids");
}

// Tells every rank how many rows its experts get from here: [R, E / R] rows that this rank's experts get. What all
// ranks must agree on is compared, on every rank.
at::Tensor Dispatch::exchange_counts(const at::Tensor& ids, const Routing& routing) const {
  const auto& g = group;
  const int64_t local = g.local_experts(), all_active = ids.ge(0).all().item<bool>();
  const auto common = at::tensor({g.global_bs, g.experts, ids.size(1), quant_mode, ids.size(0), all_active}, at::kLong);
  const auto counts = routing.counts.view({g.ranks, local});
  std::vector<at::Tensor> to;
  for (int64_t r = 0; r < g.ranks; ++r) to.push_back(at::cat({common, counts[r]}).unsqueeze(0));
  const auto heads = at::cat(all_to_all(g.name, to));
  const char* names[] = {"global_bs", "moe_expert_num", "K", "quant_mode"};
  for (int64_t i = 0; i < 4; ++i) {
    TORCH_CHECK(heads.select(1, i).eq(common[i]).all().item<bool>(), g.op, ": ranks differ in ", names[i], ": ",
                heads.select(1, i));
  }
  const auto tokens = heads.select(1, 4);
  TORCH_CHECK(tokens.eq(tokens[0]).all().item<bool>() || heads.select(1, 5).all().item<bool>(), g.op,
              ": ranks have different numbers of tokens, and x_active_mask leaves some out");
  return heads.narrow(1, 6, local);
}

// The rows to send, in the order of routing, and their scales (undefined without quantisation).
std::pair<at::Tensor, at::Tensor> Dispatch::payload(const Routing& routing) const {
  const auto rows = x->index_select(0, routing.rows.floor_divide(expert_ids->size(1)));
  if (quant_mode == kUnquantized) return {rows, at::Tensor()};
  auto wide = rows.to(at::kFloat);
  if (smooth_scales != nullptr) wide = wide * smooth_scales->index_select(0, routing.experts);
  if (wide.size(0) == 0) return {wide.to(at::kChar), at::empty({0})};
  const auto factor = 127 / wide.abs().amax(1);
  // A row of zeros: 0 * infinity is NaN, which the hardware casts to 0.
  const auto values = at::round(wide * factor.unsqueeze(1)).nan_to_num(0).clamp(-128, 127);
  return {values.to(at::kChar), 1 / factor};
}

// Version 1: the place of each assignment among those that this rank sends to the same expert.
void Dispatch::write_index(const Routing& routing) const {
  const auto first = routing.counts.cumsum(0) - routing.counts;
  const auto place = at::arange(routing.rows.size(0)) - first.index_select(0, routing.experts);
  expand_idx->index_copy_(0, routing.rows, place.to(at::kInt));
}

void Dispatch::run() const {
  const auto& g = group;
  const int64_t k = expert_ids->size(1);
  const auto ids = active_ids(g, *expert_ids, mask);
  const auto routing = route(ids, 0, g.experts);
  const auto counts = exchange_counts(ids, routing);  // [R, E / R]
  const auto rows = rows_by_rank(g, routing);
  const auto order = regrouped(counts);  // stored by rank, wanted by expert
  const int64_t received = order.size(0);
  TORCH_CHECK(received <= expand_x->size(0), g.op, ": ", received, " rows arrive, ", expand_x->size(0), " fit");
  const auto exchange = [&](const at::Tensor& sent) {
    return at::cat(all_to_all(g.name, sent.split_with_sizes(rows))).index_select(0, order);
  };
  const auto [values, scales] = payload(routing);
  expand_x->narrow(0, 0, received).copy_(exchange(values));
  if (scales.defined()) dynamic_scales->narrow(0, 0, received).copy_(exchange(scales));
  if (expert_scales != nullptr) {
    expand_scales->narrow(0, 0, received).copy_(exchange(expert_scales->flatten().index_select(0, routing.rows)));
  }
  const auto source = at::full_like(routing.rows, g.rank);
  const auto triples = exchange(at::stack({source, routing.rows.floor_divide(k), routing.rows.remainder(k)}, 1));
  if (assist_info != nullptr) assist_info->narrow(0, 0, 3 * received).copy_(triples.flatten());
  if (expand_idx != nullptr) write_index(routing);
  const auto per_expert = counts.sum(0);
  write(expert_token_nums, token_nums_type == 0 ? per_expert.cumsum(0) : per_expert);
  ep_recv_counts->narrow(0, 0, counts.numel()).copy_(counts.t().flatten().cumsum(0));
}

}  // namespace
}  // namespace softnpu

ACLNN_OP(aclnnMoeDistributeDispatch, const aclTensor* x, const aclTensor* expert_ids, const aclTensor* scales,
         const aclTensor* mask, const aclTensor* expert_scales, const char* group_ep, int64_t ep_world_size,
         int64_t ep_rank, int64_t experts, const char* /*group_tp*/, int64_t tp_world_size,
         int64_t /*tp_rank_id: no TP*/, int64_t expert_shard_type, int64_t shared_experts, int64_t shared_expert_ranks,
         int64_t quant_mode, int64_t global_bs, int64_t token_nums_type, aclTensor* expand_x, aclTensor* dynamic_scales,
         aclTensor* expand_idx, aclTensor* expert_token_nums, aclTensor* ep_recv_counts, aclTensor* tp_recv_counts,
         aclTensor* expand_scales) {
  const softnpu::Dispatch call{
      {"aclnnMoeDistributeDispatch", softnpu::text(group_ep), ep_world_size, ep_rank, experts, global_bs, ""},
      x,
      expert_ids,
      scales,
      mask,
      expert_scales,
      quant_mode,
      token_nums_type,
      expand_x,
      dynamic_scales,
      nullptr,
      expand_idx,
      expert_token_nums,
      ep_recv_counts,
      expand_scales};
  call.check({tp_world_size, expert_shard_type, shared_experts, shared_expert_ranks, 0, 0, 0});
  ACLNN_RUN(expand_x, dynamic_scales, expand_idx, expert_token_nums, ep_recv_counts, tp_recv_counts, expand_scales) {
    call.run();
  };
}

ACLNN_OP(aclnnMoeDistributeDispatchV4, const aclTensor* x, const aclTensor* expert_ids, const aclTensor* scales,
         const aclTensor* mask, const aclTensor* expert_scales, const aclTensor* elastic_info,
         const aclTensor* performance_info, const char* group_ep, int64_t ep_world_size, int64_t ep_rank,
         int64_t experts, const char* /*group_tp*/, int64_t tp_world_size, int64_t /*tp_rank_id: no TP*/,
         int64_t expert_shard_type, int64_t shared_experts, int64_t shared_expert_ranks, int64_t quant_mode,
         int64_t global_bs, int64_t token_nums_type, const char* algorithm, int64_t zero_experts, int64_t copy_experts,
         int64_t const_experts, aclTensor* expand_x, aclTensor* dynamic_scales, aclTensor* assist_info,
         aclTensor* expert_token_nums, aclTensor* ep_recv_counts, aclTensor* tp_recv_counts, aclTensor* expand_scales) {
  constexpr const char* op = "aclnnMoeDistributeDispatchV4";
  EMULATED(elastic_info == nullptr, op, "elastic_info", "(not null)");
  EMULATED(performance_info == nullptr, op, "performance_info", "(not null)");
  const softnpu::Dispatch call{
      {op, softnpu::text(group_ep), ep_world_size, ep_rank, experts, global_bs, softnpu::text(algorithm)},
      x,
      expert_ids,
      scales,
      mask,
      expert_scales,
      quant_mode,
      token_nums_type,
      expand_x,
      dynamic_scales,
      assist_info,
      nullptr,
      expert_token_nums,
      ep_recv_counts,
      expand_scales};
  call.check({tp_world_size, expert_shard_type, shared_experts, shared_expert_ranks, zero_experts, copy_experts,
              const_experts});
  ACLNN_RUN(expand_x, dynamic_scales, assist_info, expert_token_nums, ep_recv_counts, tp_recv_counts, expand_scales) {
    call.run();
  };
}
