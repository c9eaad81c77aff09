#include "opapi/moe_distribute.h"

#include <algorithm>
#include <cstdlib>

#include "common/settings.h"
#include "opapi/collective.h"

namespace softnpu {
namespace {

bool is_a2() { return settings().soc.rfind("Ascend910B", 0) == 0; }

void check_unused(const char* op, const Unused& u) {
  TORCH_CHECK(u.tp_world_size <= 1, op, ": tp_world_size = ", u.tp_world_size, "; CANN no longer supports TP here");
  TORCH_CHECK(u.expert_shard_type == 0, op, ": expert_shard_type = ", u.expert_shard_type);
  TORCH_CHECK(u.shared_experts <= 1 || u.shared_expert_ranks > 0, op, ": shared_expert_num = ", u.shared_experts,
              " without ranks for them");
  EMULATED(u.shared_expert_ranks == 0, op, "shared_expert_rank_num", u.shared_expert_ranks);
  EMULATED(u.zero_experts == 0, op, "zero_expert_num", u.zero_experts);
  EMULATED(u.copy_experts == 0, op, "copy_expert_num", u.copy_experts);
  EMULATED(u.const_experts == 0, op, "const_expert_num", u.const_experts);
}

// Atlas A3 wants a hidden size of at least 1024 too. That is not checked, so that small models can be run.
void check_limits(const ExpertGroup& g, int64_t tokens, int64_t k, int64_t hidden) {
  const int64_t most = is_a2() && g.algorithm == "fullmesh" ? 256 : 512;
  TORCH_CHECK(tokens >= 1 && tokens <= most, g.op, ": ", tokens, " tokens on a rank, not 1 to ", most);
  TORCH_CHECK(k >= 1 && k <= 16 && k <= g.experts, g.op, ": ", k, " experts per token, not 1 to 16");
  TORCH_CHECK(g.ranks >= 2 && g.ranks <= (is_a2() ? 384 : 768), g.op, ": ep_world_size = ", g.ranks);
  TORCH_CHECK(g.experts >= 1 && g.experts <= 1024 && g.experts % g.ranks == 0, g.op, ": moe_expert_num = ", g.experts,
              " on ", g.ranks, " ranks");
  TORCH_CHECK(is_a2() || g.experts <= 2048, g.op, ": moe_expert_num = ", g.experts);
  if (is_a2()) {
    TORCH_CHECK(hidden % 32 == 0 && hidden <= 10240, g.op, ": hidden size ", hidden,
                ", not a multiple of 32 up to 10240");
  } else {
    TORCH_CHECK(hidden <= 8192, g.op, ": hidden size ", hidden, ", not up to 8192");
  }
}

}  // namespace

void check_call(const ExpertGroup& g, const Unused& unused, const at::Tensor& ids, const aclTensor* mask,
                int64_t hidden) {
  check_unused(g.op, unused);
  TORCH_CHECK(ids.dim() == 2 && ids.scalar_type() == at::kInt, g.op, ": expert_ids ", ids.sizes(), " of ",
              ids.scalar_type(), "; must be int32 [BS, K]");
  check_limits(g, ids.size(0), ids.size(1), hidden);
  const auto known = {"", "fullmesh", "fullmesh_v1", "fullmesh_v2", "hierarchy"};
  EMULATED(std::count(known.begin(), known.end(), g.algorithm) == 1, g.op, "comm_alg", g.algorithm);
  TORCH_CHECK(g.ranks == group_size(g.name) && g.rank == group_rank(g.name), g.op, ": rank ", g.rank, " of ", g.ranks,
              ", but the communicator has this process as ", group_rank(g.name), " of ", group_size(g.name));
  TORCH_CHECK(g.global_bs % g.ranks == 0 && g.global_bs >= ids.size(0) * g.ranks, g.op, ": global_bs = ", g.global_bs,
              " for ", ids.size(0), " tokens on one of ", g.ranks, " ranks");
  if (mask == nullptr) return;
  const auto sizes = mask->sizes();
  TORCH_CHECK(mask->scalar_type() == at::kBool && (sizes == ids.sizes().slice(0, 1) || sizes == ids.sizes()), g.op,
              ": x_active_mask ", sizes, " of ", mask->scalar_type(), " does not fit expert_ids ", ids.sizes());
  TORCH_CHECK(!is_a2() || (mask->dim() == 1 && g.algorithm != "hierarchy"), g.op,
              ": this SoC takes a 1-D x_active_mask only, and none with comm_alg hierarchy");
}

bool hierarchical(const ExpertGroup& g) {
  const auto is = [](const char* name, const char* value) { return text(std::getenv(name)) == value; };
  if (!is_a2()) return false;
  return g.algorithm.empty() ? is("HCCL_INTRA_PCIE_ENABLE", "1") && is("HCCL_INTRA_ROCE_ENABLE", "0")
                             : g.algorithm == "hierarchy";
}

at::Tensor active_ids(const ExpertGroup& g, const at::Tensor& ids, const aclTensor* mask) {
  auto active = at::ones_like(ids, at::kBool);
  if (mask != nullptr && mask->dim() == 2) active = *mask;
  if (mask != nullptr && mask->dim() == 1) {
    const int64_t count = mask->sum().item<int64_t>();
    TORCH_CHECK(mask->narrow(0, 0, count).all().item<bool>(), g.op, ": x_active_mask has true after false");
    active = mask->unsqueeze(1).expand_as(ids);
  }
  check_values(g.op, "expert_ids", ids.masked_select(active), 0, g.experts - 1);
  return at::where(active, ids, -1);
}

std::vector<int64_t> rows_by_rank(const ExpertGroup& g, const Routing& routing) {
  const auto rows = routing.counts.view({g.ranks, g.local_experts()}).sum(1);
  return {rows.data_ptr<int64_t>(), rows.data_ptr<int64_t>() + g.ranks};
}

at::Tensor regrouped(const at::Tensor& counts) {
  const auto flat = counts.flatten();
  const auto segments = at::arange(counts.numel()).view_as(counts).t().flatten();
  const auto sizes = flat.index_select(0, segments);
  const auto starts = (flat.cumsum(0) - flat).index_select(0, segments);
  const auto within = at::arange(flat.sum().item<int64_t>()) - at::repeat_interleave(sizes.cumsum(0) - sizes, sizes);
  return at::repeat_interleave(starts, sizes) + within;
}

}  // namespace softnpu
