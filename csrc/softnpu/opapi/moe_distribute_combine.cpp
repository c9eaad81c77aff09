// Sends the experts' rows back the way that dispatch brought them, and adds up each token's, weighted.
#include "opapi/collective.h"
#include "opapi/moe_distribute.h"

namespace softnpu {
namespace {

struct Combine {
  ExpertGroup group;
  const aclTensor *expand_x, *expert_ids, *assist_info, *expand_idx, *ep_send_counts, *expert_scales, *expand_scales,
      *mask, *out;

  void check(const Unused& unused) const;
  void run() const;

 private:
  at::Tensor send_counts() const;
  at::Tensor rows_to_send(const at::Tensor& order) const;
  void check_index(const Routing& routing) const;
  void check_assist(const at::Tensor& counts) const;
};

void Combine::check(const Unused& unused) const {
  const auto& g = group;
  EMULATED(expand_x->scalar_type() == at::kHalf || expand_x->scalar_type() == at::kBFloat16, g.op, "type of expand_x",
           c10::toString(expand_x->scalar_type()));
  TORCH_CHECK(expand_x->dim() == 2, g.op, ": expand_x ", expand_x->sizes());
  check_call(g, unused, *expert_ids, mask, expand_x->size(1));
  TORCH_CHECK(expert_scales != nullptr && expert_scales->sizes() == expert_ids->sizes() &&
                  expert_scales->scalar_type() == at::kFloat,
              g.op, ": expert_scales must be float ", expert_ids->sizes());
  TORCH_CHECK(expand_scales == nullptr || (expand_scales->dim() == 1 && expand_scales->scalar_type() == at::kFloat &&
                                           expand_scales->size(0) == expand_x->size(0)),
              g.op, ": expand_scales must be float [", expand_x->size(0), "], as dispatch returned them");
}

// dispatch's ep_recv_counts: [E / R, R] rows of each local expert from each rank, out of running sums.
at::Tensor Combine::send_counts() const {
  const auto& g = group;
  const auto ends = ep_send_counts->narrow(0, 0, g.experts).to(at::kLong);
  const auto counts = at::diff(ends, 1, 0, at::zeros({1}, at::kLong));
  check_values(g.op, "ep_send_counts, which dispatch returned as ep_recv_counts,", counts, 0, expand_x->size(0));
  TORCH_CHECK(ends[-1].item<int64_t>() <= expand_x->size(0), g.op, ": ep_send_counts end at ", ends[-1].item<int64_t>(),
              ", expand_x has ", expand_x->size(0), " rows");
  return counts.view({g.local_experts(), g.ranks});
}

// With a hierarchy, rows are weighted where they are computed.
at::Tensor Combine::rows_to_send(const at::Tensor& order) const {
  const auto rows = expand_x->index_select(0, order);
  if (expand_scales == nullptr) return rows;
  return rows.to(at::kFloat) * expand_scales->index_select(0, order).unsqueeze(1);
}

void Combine::check_index(const Routing& routing) const {
  const auto first = routing.counts.cumsum(0) - routing.counts;
  const auto place = at::arange(routing.rows.size(0)) - first.index_select(0, routing.experts);
  TORCH_CHECK(expand_idx->index_select(0, routing.rows).to(at::kLong).equal(place), group.op,
              ": expand_idx is not what dispatch returned for these expert_ids");
}

void Combine::check_assist(const at::Tensor& counts) const {
  const auto sources = at::arange(group.ranks).expand({group.local_experts(), group.ranks}).flatten();
  const auto wanted = at::repeat_interleave(sources, counts.flatten());
  const auto triples = assist_info->narrow(0, 0, 3 * wanted.size(0)).view({-1, 3});
  TORCH_CHECK(triples.select(1, 0).to(at::kLong).equal(wanted), group.op,
              ": assist_info_for_combine is not what dispatch returned with these ep_send_counts");
}

void Combine::run() const {
  const auto& g = group;
  const auto ids = active_ids(g, *expert_ids, mask);
  const auto routing = route(ids, 0, g.experts);
  const auto counts = send_counts();
  if (expand_idx != nullptr) check_index(routing);
  if (assist_info != nullptr) check_assist(counts);
  const auto rows = counts.sum(0);
  const std::vector<int64_t> per_rank(rows.data_ptr<int64_t>(), rows.data_ptr<int64_t>() + g.ranks);
  const auto back = all_to_all(g.name, rows_to_send(regrouped(counts)).split_with_sizes(per_rank));
  const auto wanted = rows_by_rank(g, routing);
  for (int64_t r = 0; r < g.ranks; ++r) {
    TORCH_CHECK(back[r].size(0) == wanted[r], g.op, ": ", back[r].size(0), " rows came back from rank ", r, ", ",
                wanted[r], " went there");
  }
  auto weighted_rows = at::cat(back).to(at::kFloat);
  if (expand_scales == nullptr) weighted_rows *= expert_scales->flatten().index_select(0, routing.rows).unsqueeze(1);
  const int64_t k = ids.size(1), hidden = expand_x->size(1);
  const auto weighted =
      at::zeros({ids.numel(), hidden}).index_copy(0, routing.rows, weighted_rows).view({-1, k, hidden});
  // Tokens that went nowhere are not written.
  const auto tokens = ids.ge(0).any(1).nonzero().squeeze(-1);
  out->index_copy_(0, tokens, weighted.sum(1).index_select(0, tokens).to(out->scalar_type()));
}

void refuse(const char* op, const aclTensor* expected_null, const char* name) {
  EMULATED(expected_null == nullptr, op, name, "(not null)");
}

void refuse_modes(const char* op, int64_t out_dtype, int64_t comm_quant_mode, int64_t group_list_type) {
  TORCH_CHECK(out_dtype == 0, op, ": out_dtype = ", out_dtype);
  EMULATED(comm_quant_mode == 0, op, "comm_quant_mode", comm_quant_mode);
  TORCH_CHECK(group_list_type == 0, op, ": group_list_type = ", group_list_type);
}

}  // namespace
}  // namespace softnpu

ACLNN_OP(aclnnMoeDistributeCombine, const aclTensor* expand_x, const aclTensor* expert_ids, const aclTensor* expand_idx,
         const aclTensor* ep_send_counts, const aclTensor* expert_scales, const aclTensor* /*tp_send_counts: no TP*/,
         const aclTensor* mask, const aclTensor* activation_scale, const aclTensor* weight_scale,
         const aclTensor* group_list, const aclTensor* expand_scales, const char* group_ep, int64_t ep_world_size,
         int64_t ep_rank, int64_t experts, const char* /*group_tp*/, int64_t tp_world_size,
         int64_t /*tp_rank_id: no TP*/, int64_t expert_shard_type, int64_t shared_experts, int64_t shared_expert_ranks,
         int64_t global_bs, int64_t out_dtype, int64_t comm_quant_mode, int64_t group_list_type, aclTensor* out) {
  constexpr const char* op = "aclnnMoeDistributeCombine";
  softnpu::refuse(op, activation_scale, "activation_scale");
  softnpu::refuse(op, weight_scale, "weight_scale");
  softnpu::refuse(op, group_list, "group_list");
  softnpu::refuse_modes(op, out_dtype, comm_quant_mode, group_list_type);
  const softnpu::ExpertGroup group{op, softnpu::text(group_ep), ep_world_size, ep_rank, experts, global_bs, ""};
  const softnpu::Combine call{group,         expand_x,
                              expert_ids,    nullptr,
                              expand_idx,    ep_send_counts,
                              expert_scales, softnpu::hierarchical(group) ? expand_scales : nullptr,
                              mask,          out};
  call.check({tp_world_size, expert_shard_type, shared_experts, shared_expert_ranks, 0, 0, 0});
  ACLNN_RUN(out) { call.run(); };
}

ACLNN_OP(aclnnMoeDistributeCombineV4, const aclTensor* expand_x, const aclTensor* expert_ids,
         const aclTensor* assist_info, const aclTensor* ep_send_counts, const aclTensor* expert_scales,
         const aclTensor* /*tp_send_counts: no TP*/, const aclTensor* mask, const aclTensor* activation_scale,
         const aclTensor* weight_scale, const aclTensor* group_list, const aclTensor* expand_scales,
         const aclTensor* shared_expert_x, const aclTensor* elastic_info, const aclTensor* ori_x,
         const aclTensor* alpha_1, const aclTensor* alpha_2, const aclTensor* const_expert_v,
         const aclTensor* performance_info, const char* group_ep, int64_t ep_world_size, int64_t ep_rank,
         int64_t experts, const char* /*group_tp*/, int64_t tp_world_size, int64_t /*tp_rank_id: no TP*/,
         int64_t expert_shard_type, int64_t shared_experts, int64_t shared_expert_ranks, int64_t global_bs,
         int64_t out_dtype, int64_t comm_quant_mode, int64_t group_list_type, const char* algorithm,
         int64_t zero_experts, int64_t copy_experts, int64_t const_experts, aclTensor* out) {
  constexpr const char* op = "aclnnMoeDistributeCombineV4";
  softnpu::refuse(op, activation_scale, "activation_scale");
  softnpu::refuse(op, weight_scale, "weight_scale");
  softnpu::refuse(op, group_list, "group_list");
  softnpu::refuse(op, shared_expert_x, "shared_expert_x");
  softnpu::refuse(op, elastic_info, "elastic_info");
  softnpu::refuse(op, ori_x, "ori_x");
  softnpu::refuse(op, alpha_1, "const_expert_alpha_1");
  softnpu::refuse(op, alpha_2, "const_expert_alpha_2");
  softnpu::refuse(op, const_expert_v, "const_expert_v");
  softnpu::refuse(op, performance_info, "performance_info");
  softnpu::refuse_modes(op, out_dtype, comm_quant_mode, group_list_type);
  const softnpu::ExpertGroup group{op,        softnpu::text(group_ep), ep_world_size, ep_rank, experts,
                                   global_bs, softnpu::text(algorithm)};
  const softnpu::Combine call{group,
                              expand_x,
                              expert_ids,
                              assist_info,
                              nullptr,
                              ep_send_counts,
                              expert_scales,
                              softnpu::hierarchical(group) ? expand_scales : nullptr,  // of no effect otherwise
                              mask,
                              out};
  call.check({tp_world_size, expert_shard_type, shared_experts, shared_expert_ranks, zero_experts, copy_experts,
              const_experts});
  ACLNN_RUN(out) { call.run(); };
}
