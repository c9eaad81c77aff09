// Attention over sequences, whatever the layout they come in.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "opapi/op.h"

namespace softnpu {

// The arguments of aclnnFusedInferAttentionScore that are emulated; its versions share them.
struct AttentionCall {
  const char* op;
  at::Tensor query, key, value;
  at::Tensor query_rope, key_rope;            // or undefined: further components of each head
  at::Tensor mask, block_table, sink;         // or undefined
  std::optional<std::vector<int64_t>> q, kv;  // actual_seq_lengths(_kv): of each sequence, or sums up to it (T layouts)
  int64_t heads, kv_heads;
  double scale;
  int64_t pre_tokens, next_tokens;
  std::string layout;
  int64_t sparse_mode;
  bool fix_masked_rows, want_lse;
  int64_t block_size;
};

// A layout as TND_NTD names it: of the inputs, and of the output.
struct AttentionLayout {
  std::string in, out;
  explicit AttentionLayout(const AttentionCall& call);
  bool packed() const { return in == "TND" || in == "NTD"; }  // sequences one after another, without padding
};

// A view with the heads before the tokens: [N, T, D] of a packed layout, [B, N, S, D] of another.
at::Tensor heads_first(const at::Tensor& tensor, const std::string& layout, int64_t heads);

// Where each sequence's tokens are.
struct Span {
  int64_t start, length;
};
std::vector<Span> query_spans(const AttentionCall& call, const AttentionLayout& layout);
std::vector<Span> kv_spans(const AttentionCall& call, const AttentionLayout& layout, int64_t sequences);

// Tokens of sequence b of a tensor with the heads first: [N, length, ...].
at::Tensor tokens(const at::Tensor& heads_first, const AttentionLayout& layout, int64_t b, Span span);

// The first `length` tokens of a sequence from a paged cache, [N, length, D]. The cache is [blocks, block, N * D],
// [blocks, N, block, D], or [blocks, N, D / 16, block, 16].
at::Tensor paged_tokens(const AttentionCall& call, const at::Tensor& cache, int64_t b, int64_t length);

// What a query does not see, [queries, keys] of bool; undefined where each sees all.
at::Tensor hidden(const AttentionCall& call, int64_t b, int64_t queries, int64_t keys);

// Checks that need no values of device memory.
void check(const AttentionCall& call);

// Writes `out` and, where it is wanted, `lse` (the log of the sum of exp of the scores, of each query and head), in the
// layouts that torch_npu allots.
void attend(const AttentionCall& call, const at::Tensor& out, const at::Tensor& lse);

}  // namespace softnpu
