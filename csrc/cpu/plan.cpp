#include "plan.h"

#include <algorithm>

namespace ascend_moe::cpu {

namespace {

// Blocks of nearly equal size, so that none is left with one row: 13 rows of at most 12 become 7 and 6. Where
// rows cost as much in groups, blocks are of nearly as many groups: 40 rows in groups of 16 become 16 and 24.
void cut_blocks(const std::vector<int64_t>& counts, const Kernels& kernels, Plan& plan) {
  const int64_t group = kernels.row_group, most = kernels.max_rows / group;
  plan.experts.clear();
  plan.blocks.clear();
  plan.first_block.clear();
  int64_t pair = 0;
  for (size_t e = 0; e < counts.size(); ++e) {
    if (counts[e] == 0) continue;
    plan.experts.push_back(static_cast<int>(e));
    plan.first_block.push_back(static_cast<int64_t>(plan.blocks.size()));
    const int64_t groups = (counts[e] + group - 1) / group, blocks = (groups + most - 1) / most;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t end = std::min(counts[e], groups * (b + 1) / blocks * group);
      const int64_t rows = end - groups * b / blocks * group;
      plan.blocks.push_back({static_cast<int>(e), static_cast<int>(rows), pair});
      pair += rows;
    }
  }
  plan.first_block.push_back(static_cast<int64_t>(plan.blocks.size()));
}

void resize_pairs(Plan& plan, int64_t pairs) {
  plan.pair_row.resize(pairs);
  plan.pair_slot.resize(pairs);
  plan.pair_weight.resize(pairs);
}

}  // namespace

int local_expert(const Routing& r, int64_t row, int64_t k, int num_experts) {
  const int64_t at = row * r.ids_row_stride + k * r.ids_stride;
  int64_t id = r.wide_ids ? static_cast<const int64_t*>(r.ids)[at] : static_cast<const int32_t*>(r.ids)[at];
  if (r.expert_map) id = id >= 0 && id < r.map_size ? r.expert_map[id] : -1;
  return id >= 0 && id < num_experts ? static_cast<int>(id) : -1;
}

void plan_rows(const Routing& r, int64_t first, int64_t rows, int num_experts, const Kernels& kernels, Plan& plan) {
  std::vector<int64_t> counts(num_experts, 0);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t k = 0; k < r.top_k; ++k) {
      const int e = local_expert(r, first + i, k, num_experts);
      if (e >= 0) ++counts[e];
    }
  cut_blocks(counts, kernels, plan);
  std::vector<int64_t> next(num_experts, 0);
  int64_t pairs = 0;
  for (int e = 0; e < num_experts; ++e) {
    next[e] = pairs;
    pairs += counts[e];
  }
  resize_pairs(plan, pairs);
  plan.slot_row.resize(rows);
  for (int64_t i = 0; i < rows; ++i) {
    plan.slot_row[i] = first + i;
    for (int64_t k = 0; k < r.top_k; ++k) {
      const int e = local_expert(r, first + i, k, num_experts);
      if (e < 0) continue;
      const int64_t pair = next[e]++;
      plan.pair_row[pair] = first + i;
      plan.pair_slot[pair] = i;
      plan.pair_weight[pair] = r.weights ? r.weights[(first + i) * r.weights_row_stride + k * r.weights_stride] : 1.0f;
    }
  }
}

void plan_batched(const int64_t* counts, int num_experts, int64_t rows_per_expert, int64_t from, int64_t to,
                  const Kernels& kernels, Plan& plan) {
  resize_pairs(plan, to - from);
  plan.slot_row.resize(to - from);
  std::vector<int64_t> taken(num_experts, 0);
  int64_t token = 0;
  for (int e = 0; e < num_experts; token += counts[e++]) {
    const int64_t begin = std::max(from, token), end = std::min(to, token + counts[e]);
    for (int64_t t = begin; t < end; ++t) {
      const int64_t pair = t - from;
      plan.pair_row[pair] = plan.slot_row[pair] = e * rows_per_expert + t - token;
      plan.pair_slot[pair] = pair;
      plan.pair_weight[pair] = 1.0f;
    }
    taken[e] = std::max<int64_t>(0, end - begin);
  }
  cut_blocks(taken, kernels, plan);
}

}  // namespace ascend_moe::cpu
