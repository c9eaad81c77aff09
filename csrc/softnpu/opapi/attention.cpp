// Attention: which query sees which key, scores, softmax.
#include "opapi/attention.h"

#include <limits>

#include "opapi/check.h"

namespace softnpu {
namespace {

constexpr int64_t kDefault = 0, kAll = 1, kLeftUp = 2, kRightDown = 3, kBand = 4;
constexpr int64_t kCompressed = 2048;  // side of the mask that stands for a triangle of any size

// Key j minus query i, [queries, keys]: 0 on the diagonal that starts in the upper left corner.
at::Tensor ahead(int64_t queries, int64_t keys) {
  return at::arange(keys).unsqueeze(0) - at::arange(queries).unsqueeze(1);
}

at::Tensor outside(const at::Tensor& distance, int64_t before, int64_t after) {
  return (distance > after).logical_or(distance < -before);
}

at::Tensor given_mask(const AttentionCall& call, int64_t b, int64_t queries, int64_t keys) {
  at::Tensor mask = call.mask;
  while (mask.dim() > 2) mask = mask.select(0, mask.size(0) == 1 ? 0 : b);
  TORCH_CHECK(mask.dim() == 2 && mask.size(0) >= queries && mask.size(1) >= keys, call.op, ": atten_mask ",
              call.mask.sizes(), " does not cover ", queries, " queries and ", keys, " keys");
  return mask.narrow(0, 0, queries).narrow(1, 0, keys).to(at::kBool);
}

// k and v of each query head, for which several share one.
at::Tensor for_queries(const at::Tensor& tensor, const AttentionCall& call) {
  return tensor.to(at::kFloat).repeat_interleave(call.heads / call.kv_heads, 0);
}

at::Tensor with_rope(const at::Tensor& tensor, const at::Tensor& rope) {
  return rope.defined() ? at::cat({tensor, rope}, -1) : tensor;
}

// scores, [N, queries, keys] -> their softmax, and the log of its denominator, [N, queries]. A sink is one more score
// of each head, with no value behind it.
std::pair<at::Tensor, at::Tensor> softmax(const at::Tensor& scores, const at::Tensor& sink) {
  if (!sink.defined()) return {scores.softmax(-1), scores.logsumexp(-1)};
  const auto column = sink.to(at::kFloat).view({-1, 1, 1}).expand({-1, scores.size(1), 1});
  const auto all = at::cat({scores, column}, -1);
  return {all.softmax(-1).narrow(-1, 0, scores.size(2)), all.logsumexp(-1)};
}

struct Sequence {
  at::Tensor query, key, value, hidden;  // [N, S, D], and [queries, keys] or undefined
};

void attend_one(const AttentionCall& call, const Sequence& sequence, const at::Tensor& out, const at::Tensor& lse) {
  const double infinity = std::numeric_limits<double>::infinity();
  if (sequence.key.size(1) == 0) {
    out.zero_();
    if (lse.defined()) lse.fill_(infinity);
    return;
  }
  const auto query = sequence.query.to(at::kFloat);
  auto scores = at::matmul(query, for_queries(sequence.key, call).transpose(1, 2)) * call.scale;
  if (sequence.hidden.defined()) scores.masked_fill_(sequence.hidden, -infinity);
  auto [weights, denominator] = softmax(scores, call.sink);
  if (sequence.hidden.defined() && (call.fix_masked_rows || call.sparse_mode >= kLeftUp)) {
    const auto blind = sequence.hidden.all(-1);  // queries that see no key
    weights.masked_fill_(blind.unsqueeze(-1), 0);
    denominator.masked_fill_(blind, infinity);
  }
  out.copy_(at::matmul(weights, for_queries(sequence.value, call)));
  if (lse.defined()) lse.copy_(denominator);
}

void check_triangle(const AttentionCall& call) {
  const auto wanted = at::ones({kCompressed, kCompressed}, at::kBool).triu(1);
  TORCH_CHECK(call.mask.view({kCompressed, kCompressed}).to(at::kBool).equal(wanted), call.op,
              ": atten_mask must have ones above the diagonal, and zeros elsewhere, with sparse_mode ",
              call.sparse_mode);
}

}  // namespace

at::Tensor hidden(const AttentionCall& call, int64_t b, int64_t queries, int64_t keys) {
  if (call.sparse_mode == kDefault && !call.mask.defined()) return {};
  const auto distance = ahead(queries, keys);
  switch (call.sparse_mode) {
    case kDefault:
      return given_mask(call, b, queries, keys).logical_or(outside(distance, call.pre_tokens, call.next_tokens));
    case kAll:
      return given_mask(call, b, queries, keys);
    case kLeftUp:
      return distance > 0;
    case kRightDown:
      return distance > keys - queries;
    default:
      return outside(distance - (keys - queries), call.pre_tokens, call.next_tokens);
  }
}

void check(const AttentionCall& call) {
  const AttentionLayout layout(call);
  EMULATED(call.sparse_mode >= kDefault && call.sparse_mode <= kBand, call.op, "sparse_mode", call.sparse_mode);
  EMULATED(call.query.scalar_type() == at::kHalf || call.query.scalar_type() == at::kBFloat16, call.op, "type of query",
           call.query.scalar_type());
  TORCH_CHECK(
      call.key.scalar_type() == call.query.scalar_type() && call.value.scalar_type() == call.query.scalar_type(),
      call.op, ": query is ", call.query.scalar_type(), ", key is ", call.key.scalar_type(), ", value is ",
      call.value.scalar_type());
  TORCH_CHECK(call.kv_heads > 0 && call.heads % call.kv_heads == 0, call.op, ": ", call.heads,
              " query heads cannot share ", call.kv_heads, " key heads evenly");
  TORCH_CHECK(call.query_rope.defined() == call.key_rope.defined(), call.op, ": query_rope and key_rope go together");
  const auto query = heads_first(call.query, layout.in, call.heads);
  TORCH_CHECK(query.size(query.dim() - 3) == call.heads, call.op, ": num_heads is ", call.heads, ", and query ",
              call.query.sizes(), " is ", call.layout);
  if (call.sparse_mode == kAll || call.sparse_mode == kDefault) {
    EMULATED(!call.mask.defined() || !layout.packed(), call.op, "atten_mask with sparse_mode 0 or 1 and layout",
             call.layout);
    TORCH_CHECK(call.mask.defined() || call.sparse_mode == kDefault, call.op, ": sparse_mode 1 needs atten_mask");
    return;
  }
  TORCH_CHECK(
      call.mask.defined() && call.mask.numel() == kCompressed * kCompressed && call.mask.size(-1) == kCompressed,
      call.op, ": sparse_mode ", call.sparse_mode, " needs an atten_mask of 2048 x 2048");
  const bool one = !layout.packed() && query.size(2) == 1;  // then the operator takes another way, and no sparse_mode
  EMULATED(!one || call.sparse_mode == kRightDown, call.op, "sparse_mode with one query a sequence", call.sparse_mode);
}

void attend(const AttentionCall& call, const at::Tensor& out, const at::Tensor& lse) {
  const AttentionLayout layout(call);
  if (call.sparse_mode >= kLeftUp) check_triangle(call);
  const auto queries = query_spans(call, layout);
  const auto keys = kv_spans(call, layout, static_cast<int64_t>(queries.size()));
  const auto out_view = heads_first(out, layout.out, call.heads);
  at::Tensor lse_view;  // [N, T] or [B, N, S]
  if (call.want_lse) lse_view = layout.packed() ? lse.squeeze(-1).transpose(0, 1) : lse.squeeze(-1);
  for (size_t b = 0; b < queries.size(); ++b) {
    if (queries[b].length == 0) continue;
    const auto q = [&](const at::Tensor& t) {
      return t.defined() ? tokens(heads_first(t, layout.in, call.heads), layout, b, queries[b]) : t;
    };
    const auto kv = [&](const at::Tensor& t) {
      if (!t.defined()) return t;
      if (call.block_table.defined()) return paged_tokens(call, t, b, keys[b].length);
      return tokens(heads_first(t, layout.in, call.kv_heads), layout, b, keys[b]);
    };
    const Sequence sequence{with_rope(q(call.query), q(call.query_rope)), with_rope(kv(call.key), kv(call.key_rope)),
                            kv(call.value), hidden(call, b, queries[b].length, keys[b].length)};
    attend_one(call, sequence, tokens(out_view, layout, b, queries[b]),
               call.want_lse ? tokens(lse_view, layout, b, queries[b]) : lse_view);
  }
}

}  // namespace softnpu
