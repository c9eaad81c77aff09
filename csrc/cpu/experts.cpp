// Operators of the CPU experts: checks, chunks of rows within a fixed scratch budget, schemas.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "isa.h"
#include "mlp.h"
#include "pages.h"
#include "scratch.h"

namespace ascend_moe::cpu {

namespace {

constexpr int64_t kScratchBytes = int64_t{128} << 20;  // of one call; more rows are worked on in several chunks
constexpr int64_t kLeastRows = 64;

Weight weight_type(at::ScalarType type) {
  TORCH_CHECK_TYPE(type == at::kBFloat16 || type == at::kHalf || type == at::kFloat, "expert weights have dtype ", type,
                   ", but the native CPU experts take bfloat16, float16 or float32");
  return type == at::kBFloat16 ? Weight::bf16 : type == at::kHalf ? Weight::fp16 : Weight::fp32;
}

struct NamedActivation {
  const char* name;
  Activation activation;
  Gate gate;
};
constexpr NamedActivation kActivations[] = {
    {"silu", Activation::silu, Gate::halves},
    {"gelu", Activation::gelu, Gate::halves},
    {"gelu_tanh", Activation::gelu_tanh, Gate::halves},
    {"relu2", Activation::relu2, Gate::halves},
    {"silu_no_mul", Activation::silu, Gate::none},
    {"gelu_no_mul", Activation::gelu, Gate::none},
    {"gelu_tanh_no_mul", Activation::gelu_tanh, Gate::none},
    {"relu2_no_mul", Activation::relu2, Gate::none},
    {"swigluoai", Activation::swigluoai, Gate::interleaved},
    {"swigluoai_uninterleave", Activation::swigluoai, Gate::halves},
};

const NamedActivation& find_activation(std::string_view name) {
  for (const auto& known : kActivations)
    if (name == known.name) return known;
  TORCH_CHECK_VALUE(false, "activation = '", name, "' is not one the native CPU experts know");
}

Matrix matrix(const at::Tensor& w, bool packed) {
  return {static_cast<const char*>(w.const_data_ptr()), w.size(1), w.size(2), int(w.element_size()), packed, nullptr};
}

// Biases as fp32; `keep` owns the converted copy.
const float* bias_data(const std::optional<at::Tensor>& bias, at::Tensor& keep) {
  if (!bias) return nullptr;
  keep = bias->to(at::kFloat).contiguous();
  return keep.const_data_ptr<float>();
}

void check_weights(const at::Tensor& hidden, const at::Tensor& out, const at::Tensor& w13, const at::Tensor& w2,
                   Gate gate) {
  TORCH_CHECK_VALUE(w13.dim() == 3 && w2.dim() == 3 && w13.is_contiguous() && w2.is_contiguous(),
                    "w13 and w2 must be contiguous [experts, rows, k]");
  const int64_t rows = gate == Gate::none ? w2.size(2) : 2 * w2.size(2);
  TORCH_CHECK_VALUE(w13.size(0) == w2.size(0) && w13.size(1) == rows && w13.size(2) == w2.size(1), "w13 ", w13.sizes(),
                    " does not fit w2 ", w2.sizes(), " and the activation");
  TORCH_CHECK_TYPE(w13.scalar_type() == w2.scalar_type() && hidden.scalar_type() == w13.scalar_type() &&
                       out.scalar_type() == w13.scalar_type(),
                   "hidden, out, w13 and w2 must have one dtype");
  TORCH_CHECK_VALUE(
      hidden.size(-1) == w2.size(1) && hidden.stride(-1) == 1 && out.stride(-1) == 1 && out.sizes() == hidden.sizes(),
      "hidden ", hidden.sizes(), " and out ", out.sizes(), " must be [..., ", w2.size(1), "] with contiguous rows");
}

struct Prepared {
  Mlp mlp;
  at::Tensor keep13, keep2;
};

Prepared prepare(const at::Tensor& out, const at::Tensor& hidden, const at::Tensor& w13, const at::Tensor& w2,
                 const std::optional<at::Tensor>& w13_bias, const std::optional<at::Tensor>& w2_bias,
                 std::string_view activation, bool packed, std::string_view isa) {
  const NamedActivation& act = find_activation(activation);
  check_weights(hidden, out, w13, w2, act.gate);
  Prepared p{{}, {}, {}};
  p.mlp.kernels = find_kernels(weight_type(w13.scalar_type()), std::string(isa));
  TORCH_CHECK_VALUE(p.mlp.kernels, "isa = '", isa, "' is not available on this processor for this dtype");
  p.mlp.w13 = matrix(w13, packed);
  p.mlp.w2 = matrix(w2, packed);
  p.mlp.w13.bias = bias_data(w13_bias, p.keep13);
  p.mlp.w2.bias = bias_data(w2_bias, p.keep2);
  p.mlp.hidden = w2.size(1);
  p.mlp.inner = w2.size(2);
  p.mlp.activation = act.activation;
  p.mlp.gate = act.gate;
  p.mlp.item_size = int(w13.element_size());
  p.mlp.input = static_cast<const char*>(hidden.const_data_ptr());
  p.mlp.output = static_cast<char*>(out.mutable_data_ptr());
  p.mlp.input_stride = hidden.stride(-2) * p.mlp.item_size;
  p.mlp.output_stride = out.stride(-2) * p.mlp.item_size;
  return p;
}

Routing routing(const at::Tensor& ids, const at::Tensor& weights, const std::optional<at::Tensor>& expert_map,
                bool weight_on_input) {
  TORCH_CHECK_TYPE(ids.scalar_type() == at::kInt || ids.scalar_type() == at::kLong, "topk_ids must be int32 or int64");
  TORCH_CHECK_TYPE(weights.scalar_type() == at::kFloat, "topk_weights must be float32");
  TORCH_CHECK_VALUE(ids.dim() == 2 && ids.sizes() == weights.sizes(), "topk_ids and topk_weights must be [rows, K]");
  TORCH_CHECK_TYPE(!expert_map || (expert_map->scalar_type() == at::kInt && expert_map->is_contiguous()),
                   "expert_map must be contiguous int32");
  return {ids.const_data_ptr(),
          ids.scalar_type() == at::kLong,
          ids.stride(0),
          ids.stride(1),
          weight_on_input ? nullptr : weights.const_data_ptr<float>(),
          weights.stride(0),
          weights.stride(1),
          ids.size(1),
          expert_map ? expert_map->const_data_ptr<int32_t>() : nullptr,
          expert_map ? expert_map->numel() : 0};
}

void grouped_mlp(const at::Tensor& out, const at::Tensor& hidden, const at::Tensor& w13, const at::Tensor& w2,
                 const std::optional<at::Tensor>& w13_bias, const std::optional<at::Tensor>& w2_bias,
                 const at::Tensor& topk_weights, const at::Tensor& topk_ids,
                 const std::optional<at::Tensor>& expert_map, std::string_view activation, bool weight_on_input,
                 bool packed, std::string_view isa) {
  const Prepared p = prepare(out, hidden, w13, w2, w13_bias, w2_bias, activation, packed, isa);
  const Routing choices = routing(topk_ids, topk_weights, expert_map, weight_on_input);
  const int64_t rows = hidden.size(0);
  TORCH_CHECK_VALUE(hidden.dim() == 2 && topk_ids.size(0) == rows,
                    "hidden must be [rows, H], one row for each of topk_ids");
  const int64_t fitting = kScratchBytes / (scratch_per_pair(p.mlp) * std::max<int64_t>(1, choices.top_k));
  const int64_t chunk = std::max(kLeastRows, fitting);
  thread_local Plan plan;
  for (int64_t first = 0; first < rows; first += chunk) {
    plan_rows(choices, first, std::min(chunk, rows - first), int(w13.size(0)), *p.mlp.kernels, plan);
    run(p.mlp, plan);
  }
}

void batched_mlp(const at::Tensor& out, const at::Tensor& hidden, const at::Tensor& expert_num_tokens,
                 const at::Tensor& w13, const at::Tensor& w2, const std::optional<at::Tensor>& w13_bias,
                 const std::optional<at::Tensor>& w2_bias, std::string_view activation, bool packed,
                 std::string_view isa) {
  TORCH_CHECK_VALUE(hidden.dim() == 3 && hidden.size(0) == w13.size(0) && hidden.is_contiguous() && out.is_contiguous(),
                    "hidden and out must be contiguous [experts, rows, H]");
  const Prepared p = prepare(out, hidden, w13, w2, w13_bias, w2_bias, activation, packed, isa);
  const at::Tensor counts = expert_num_tokens.to(at::kLong).contiguous();
  const int experts = int(hidden.size(0));
  TORCH_CHECK_VALUE(counts.dim() == 1 && counts.numel() == experts, "expert_num_tokens must be [", experts, "]");
  const int64_t* count = counts.const_data_ptr<int64_t>();
  int64_t tokens = 0;
  for (int e = 0; e < experts; ++e) {
    TORCH_CHECK_VALUE(count[e] >= 0 && count[e] <= hidden.size(1), "expert_num_tokens[", e, "] = ", count[e],
                      " is not between 0 and ", hidden.size(1), " rows");
    tokens += count[e];
  }
  const int64_t chunk = std::max(kLeastRows, kScratchBytes / scratch_per_pair(p.mlp));
  thread_local Plan plan;
  for (int64_t from = 0; from < tokens; from += chunk) {
    plan_batched(count, experts, hidden.size(1), from, std::min(from + chunk, tokens), *p.mlp.kernels, plan);
    run(p.mlp, plan);
  }
}

// Repacks rows into panels in place: 16 rows are copied out and written back k-major.
void pack_expert_weights_(const at::Tensor& w) {
  TORCH_CHECK_VALUE(w.dim() == 3 && w.is_contiguous() && w.size(1) % kPanel == 0 && w.size(2) % 2 == 0, "weights ",
                    w.sizes(), " must be contiguous [experts, rows, k], rows a multiple of 16 and k even");
  const Kernels* kernels = find_kernels(weight_type(w.scalar_type()), "");
  const int64_t k = w.size(2), bytes = kPanel * k * w.element_size();
  char* data = static_cast<char*>(w.mutable_data_ptr());
  prefer_huge_pages(data, static_cast<int64_t>(w.nbytes()));
  for (int64_t panel = 0; panel < w.size(0) * w.size(1) / kPanel; ++panel) {
    char* room = thread_scratch(Room::panels, bytes);
    kernels->pack_panel(data + panel * bytes, k, kPanel, k, room);
    std::memcpy(data + panel * bytes, room, bytes);
  }
}

std::vector<std::string> cpu_isas(at::ScalarType dtype) { return isas(weight_type(dtype)); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(ascend_moe, m) {
  m.def(
      "grouped_mlp(Tensor(a!) out, Tensor hidden, Tensor w13, Tensor w2, Tensor? w13_bias, Tensor? w2_bias, "
      "Tensor topk_weights, Tensor topk_ids, Tensor? expert_map, str activation, bool weight_on_input, bool packed, "
      "str isa) -> ()");
  m.def(
      "batched_mlp(Tensor(a!) out, Tensor hidden, Tensor expert_num_tokens, Tensor w13, Tensor w2, Tensor? w13_bias, "
      "Tensor? w2_bias, str activation, bool packed, str isa) -> ()");
  m.def("pack_expert_weights_(Tensor(a!) w) -> ()");
  m.def("cpu_isas(ScalarType dtype) -> str[]", cpu_isas);
}

TORCH_LIBRARY_IMPL(ascend_moe, CPU, m) {
  m.impl("grouped_mlp", grouped_mlp);
  m.impl("batched_mlp", batched_mlp);
  m.impl("pack_expert_weights_", pack_expert_weights_);
}

// They return nothing, so there is nothing for a meta kernel to shape.
TORCH_LIBRARY_IMPL(ascend_moe, Meta, m) {
  m.impl("grouped_mlp",
         [](const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
            const std::optional<at::Tensor>&, const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&,
            const std::optional<at::Tensor>&, std::string_view, bool, bool, std::string_view) {});
  m.impl("batched_mlp", [](const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                           const at::Tensor&, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                           std::string_view, bool, std::string_view) {});
  m.impl("pack_expert_weights_", [](const at::Tensor&) {});
}

}  // namespace ascend_moe::cpu
