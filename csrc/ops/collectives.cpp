// Collectives of the padded layout. R ranks, M max_local_size, T_r rows of this rank, [R*M, ...] gathered rows.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "ranks.h"
#include "row_format.h"

namespace ascend_moe {

namespace {

void check_rows(const at::Tensor& x, int64_t max_rows) {
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(0) <= max_rows, "a tensor of ", x.dim() ? x.size(0) : 0,
                    " rows does not fit max_local_size = ", max_rows);
}

template <class Int>
std::vector<Int> with_rows(c10::ArrayRef<Int> sizes, Int rows) {
  std::vector<Int> out(sizes.begin(), sizes.end());
  out[0] = rows;
  return out;
}

// This rank's M rows, ready to send: `x` itself where nothing is to do, else a padded copy in `slot`.
at::Tensor padded_rows(const at::Tensor& x, int64_t rows, double pad, at::Tensor slot) {
  if (x.size(0) > 0) slot.narrow(0, 0, x.size(0)).copy_(x);
  if (x.size(0) < rows) slot.narrow(0, x.size(0), rows - x.size(0)).fill_(pad);
  return slot;
}

// Where this rank prepares what it sends: its own part of `output` where the backend gathers in place.
at::Tensor send_slot(const Ranks& ranks, const at::Tensor& output, int64_t rows) {
  if (ranks.in_place()) return output.narrow(0, ranks.rank() * rows, rows);
  return at::empty(with_rows(output.sizes(), rows), output.options());
}

struct Gather {
  at::Tensor output, input;
};

Gather prepare_gather(const Ranks& ranks, const at::Tensor& x, int64_t rows, double pad) {
  at::Tensor output = at::empty(with_rows(x.sizes(), ranks.size() * rows), x.options());
  const bool ready = x.size(0) == rows && x.is_contiguous() && x.stride(-1) == 1;
  return {output, ready ? x : padded_rows(x, rows, pad, send_slot(ranks, output, rows))};
}

at::Tensor padded_all_gather(const at::Tensor& x, int64_t max_local_size, const std::string& group_name, double pad) {
  check_rows(x, max_local_size);
  const Ranks ranks(group_name, x.device().type());
  const Gather gather = prepare_gather(ranks, x, max_local_size, pad);
  if (gather.output.numel() == 0) return gather.output;
  at::Tensor output = as_wire(gather.output), input = as_wire(gather.input);
  ranks.all_gather(output, input);
  return gather.output;
}

std::vector<at::Tensor> coalesced_all_gather(at::TensorList tensors, at::IntArrayRef pad, int64_t max_local_size,
                                             const std::string& group_name) {
  TORCH_CHECK_VALUE(!tensors.empty() && pad.size() == tensors.size(), "one pad value for each of 1 or more tensors");
  const Ranks ranks(group_name, tensors[0].device().type());
  std::vector<at::Tensor> results, outputs, inputs;
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_rows(tensors[i], max_local_size);
    const Gather gather = prepare_gather(ranks, tensors[i], max_local_size, static_cast<double>(pad[i]));
    results.push_back(gather.output);
    if (gather.output.numel() == 0) continue;
    outputs.push_back(gather.output.view(at::kByte));
    inputs.push_back(gather.input.view(at::kByte));
  }
  if (!outputs.empty()) ranks.all_gather(outputs, inputs);
  return results;
}

at::Tensor packed_all_gather(at::TensorList tensors, at::IntArrayRef pad, int64_t max_local_size,
                             const std::string& group_name) {
  TORCH_CHECK_VALUE(!tensors.empty() && pad.size() == tensors.size(), "one pad value for each of 1 or more tensors");
  for (const at::Tensor& x : tensors) {
    check_rows(x, max_local_size);
    TORCH_CHECK_VALUE(x.size(0) == tensors[0].size(0), "tensors of ", tensors[0].size(0), " and ", x.size(0), " rows");
  }
  const Ranks ranks(group_name, tensors[0].device().type());
  const RowFormat format(tensors);
  at::Tensor wire = at::empty({ranks.size() * max_local_size, format.row_bytes}, tensors[0].options().dtype(at::kByte));
  if (wire.numel() > 0) {
    at::Tensor input = send_slot(ranks, wire, max_local_size);
    write_rows(format, tensors, pad, input);
    ranks.all_gather(wire, input);
  }
  return wire;
}

// Apart from the gather, since an operator's results may not share memory unless they are views of its argument.
std::vector<at::Tensor> row_views(const at::Tensor& wire, at::TensorList like) { return RowFormat(like).views(wire); }

at::Tensor padded_reduce_scatter(const at::Tensor& x, int64_t max_local_size, int64_t local_size,
                                 const std::string& group_name) {
  const Ranks ranks(group_name, x.device().type());
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(0) == ranks.size() * max_local_size, "x has ", x.dim() ? x.size(0) : 0,
                    " rows, but ep_size * max_local_size = ", ranks.size() * max_local_size);
  TORCH_CHECK_VALUE(local_size >= 0 && local_size <= max_local_size, "local_size = ", local_size,
                    " is not between 0 and max_local_size = ", max_local_size);
  at::Tensor output = at::empty(with_rows(x.sizes(), max_local_size), x.options());
  if (output.numel() > 0) {
    at::Tensor input = dense(x);
    ranks.reduce_scatter(output, input);
  }
  // The pad tail is dropped by giving the fresh output fewer rows: no view, no copy.
  if (local_size < max_local_size)
    output.unsafeGetTensorImpl()->set_sizes_contiguous(with_rows(output.sizes(), local_size));
  return output;
}

// ---- shapes only ---------------------------------------------------------------------------------------------------

at::Tensor gather_shape(const at::Tensor& x, const c10::SymInt& rows, const std::string& group_name) {
  return at::empty_symint(with_rows(x.sym_sizes(), rows * group_size(group_name)), x.options());
}

at::Tensor padded_all_gather_meta(const at::Tensor& x, c10::SymInt max_local_size, const std::string& group_name,
                                  double) {
  return gather_shape(x, max_local_size, group_name);
}

std::vector<at::Tensor> coalesced_all_gather_meta(at::TensorList tensors, at::IntArrayRef, c10::SymInt max_local_size,
                                                  const std::string& group_name) {
  std::vector<at::Tensor> out;
  for (const at::Tensor& x : tensors) out.push_back(gather_shape(x, max_local_size, group_name));
  return out;
}

at::Tensor packed_all_gather_meta(at::TensorList tensors, at::IntArrayRef, c10::SymInt max_local_size,
                                  const std::string& group_name) {
  c10::SymInt row_bytes = 0;
  for (const at::Tensor& x : tensors) {
    c10::SymInt bytes = static_cast<int64_t>(x.element_size());
    for (const c10::SymInt& size : x.sym_sizes().slice(1)) bytes = bytes * size;
    row_bytes = row_bytes + (bytes + kColumnAlign - 1) / kColumnAlign * kColumnAlign;
  }
  return at::empty_symint({max_local_size * group_size(group_name), row_bytes}, tensors[0].options().dtype(at::kByte));
}

at::Tensor padded_reduce_scatter_meta(const at::Tensor& x, c10::SymInt, c10::SymInt local_size, const std::string&) {
  return at::empty_symint(with_rows(x.sym_sizes(), local_size), x.options());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ascend_moe, m) {
  m.def("padded_all_gather(Tensor x, SymInt max_local_size, str group_name, float pad) -> Tensor");
  m.def("coalesced_all_gather(Tensor[] xs, int[] pad, SymInt max_local_size, str group_name) -> Tensor[]");
  m.def("packed_all_gather(Tensor[] xs, int[] pad, SymInt max_local_size, str group_name) -> Tensor");
  m.def("row_views(Tensor(a) wire, Tensor[] like) -> Tensor(a)[]", row_views);  // traced as the views it makes
  m.def("padded_reduce_scatter(Tensor x, SymInt max_local_size, SymInt local_size, str group_name) -> Tensor");
}

// Every device: the process group of the tensors' device does the rest.
TORCH_LIBRARY_IMPL(ascend_moe, CompositeExplicitAutograd, m) {
  m.impl("padded_all_gather", padded_all_gather);
  m.impl("coalesced_all_gather", coalesced_all_gather);
  m.impl("packed_all_gather", packed_all_gather);
  m.impl("padded_reduce_scatter", padded_reduce_scatter);
}

TORCH_LIBRARY_IMPL(ascend_moe, Meta, m) {
  m.impl("padded_all_gather", padded_all_gather_meta);
  m.impl("coalesced_all_gather", coalesced_all_gather_meta);
  m.impl("packed_all_gather", packed_all_gather_meta);
  m.impl("padded_reduce_scatter", padded_reduce_scatter_meta);
}

}  // namespace ascend_moe
