// Which rows go to which expert: a counting sort of the routed (row, choice) pairs, cut into row blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace ascend_moe::cpu {

// One expert's rows that are multiplied together; at most Kernels::max_rows of them.
struct Block {
  int expert;
  int rows;
  int64_t first_pair;
};

struct Plan {
  std::vector<int> experts;          // those with at least one row, ascending
  std::vector<int64_t> first_block;  // experts.size() + 1: blocks of experts[i] are first_block[i] .. [i + 1] - 1
  std::vector<Block> blocks;         // by expert; within an expert in row order
  std::vector<int64_t> pair_row;     // input and output row of each pair, sorted by expert
  std::vector<int64_t> pair_slot;    // its row of the accumulator
  std::vector<float> pair_weight;
  std::vector<int64_t> slot_row;  // output row of each accumulator row

  int64_t num_pairs() const { return static_cast<int64_t>(pair_row.size()); }
};

// Token choices, as the caller holds them. Strides are in elements.
struct Routing {
  const void* ids;  // int32 or int64 [rows, top_k]
  bool wide_ids;
  int64_t ids_row_stride, ids_stride;
  const float* weights;  // [rows, top_k], or null where each pair counts once
  int64_t weights_row_stride, weights_stride;
  int64_t top_k;
  const int32_t* expert_map;  // [map_size] global id -> local expert or -1, or null
  int64_t map_size;
};

// Local expert of choice k of a row, or -1: an id that is out of range, not routed, or another rank's.
int local_expert(const Routing& routing, int64_t row, int64_t k, int num_experts);

// Plans rows first .. first + rows - 1 (accumulator row i holds row first + i). Reuses the vectors' memory.
void plan_rows(const Routing& routing, int64_t first, int64_t rows, int num_experts, const Kernels& kernels,
               Plan& plan);

// Plans rows from .. to - 1 of the expert-by-expert layout [num_experts, rows_per_expert]: row r of expert e is
// row e * rows_per_expert + r, and only the first counts[e] rows of an expert hold tokens. `from` and `to` count
// tokens.
void plan_batched(const int64_t* counts, int num_experts, int64_t rows_per_expert, int64_t from, int64_t to,
                  const Kernels& kernels, Plan& plan);

}  // namespace ascend_moe::cpu
