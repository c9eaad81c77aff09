// Tokens to the experts of other ranks and back: what dispatch and combine have in common.
// Symbols: R ranks, E experts (E / R on each rank), BS tokens of this rank, K experts per token, A rows that fit.
#pragma once

#include <string>

#include "opapi/moe_routing.h"

namespace softnpu {

struct ExpertGroup {
  const char* op;
  std::string name;  // of the communicator
  int64_t ranks, rank, experts, global_bs;
  std::string algorithm;

  int64_t local_experts() const { return experts / ranks; }
};

// Arguments that both operators have, and that must keep their default.
struct Unused {
  int64_t tp_world_size, expert_shard_type, shared_experts, shared_expert_ranks, zero_experts, copy_experts,
      const_experts;
};

inline std::string text(const char* value) { return value == nullptr ? "" : value; }

// What can be checked when the operator is called: sizes against the device's limits and the communicator.
void check_call(const ExpertGroup& group, const Unused& unused, const at::Tensor& ids, const aclTensor* mask,
                int64_t hidden);

// The ids [BS, K] with -1 for those that the mask ([BS] or [BS, K]) leaves out. For the body of ACLNN_RUN.
at::Tensor active_ids(const ExpertGroup& group, const at::Tensor& ids, const aclTensor* mask);

// Whether tokens go to another server once and are passed on there: comm_alg, or two of HCCL's variables, on Atlas A2.
bool hierarchical(const ExpertGroup& group);

// Rows per destination rank of assignments that are sorted by expert.
std::vector<int64_t> rows_by_rank(const ExpertGroup& group, const Routing& routing);

// counts [a, b] of rows that are stored by a, then by b: their indices by b, then by a.
at::Tensor regrouped(const at::Tensor& counts);

}  // namespace softnpu
