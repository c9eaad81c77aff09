#include "row_format.h"

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <cstring>

#include "ranks.h"

namespace ascend_moe {

namespace {

int64_t aligned(int64_t bytes) { return (bytes + kColumnAlign - 1) / kColumnAlign * kColumnAlign; }

// A view without the dispatcher's bookkeeping, three times faster; only where a tensor is nothing but its storage.
at::Tensor bare_view(const at::Tensor& x, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides,
                     int64_t offset_bytes) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(x.storage()), x.key_set(),
                                                       c10::scalarTypeToTypeMeta(dtype));
  const auto item = static_cast<int64_t>(c10::elementSize(dtype));
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset_bytes / item);
  return view;
}

bool is_plain(const at::Tensor& x) {
  return (x.is_cpu() || x.is_cuda()) && !at::isTensorSubclassLike(x) &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

at::Tensor traced_view(const at::Tensor& wire, const Column& column, int64_t row_bytes) {
  const auto item = static_cast<int64_t>(c10::elementSize(column.dtype));
  c10::SmallVector<c10::SymInt, 4> sizes{wire.sym_size(0)}, strides{row_bytes / item};
  sizes.append(column.sizes.begin(), column.sizes.end());
  strides.append(column.strides.begin(), column.strides.end());
  const c10::SymInt start = (wire.sym_storage_offset() + column.offset) / item;
  return wire.view(column.dtype).as_strided_symint(sizes, strides, start);
}

at::Tensor view_of(const at::Tensor& wire, const Column& column, int64_t row_bytes) {
  if (!is_plain(wire)) return traced_view(wire, column, row_bytes);
  at::DimVector sizes{wire.size(0)}, strides{row_bytes / static_cast<int64_t>(c10::elementSize(column.dtype))};
  sizes.append(column.sizes.begin(), column.sizes.end());
  strides.append(column.strides.begin(), column.strides.end());
  return bare_view(wire, column.dtype, sizes, strides, wire.storage_offset() + column.offset);  // wire is bytes
}

// The rows of `x` as 8-byte words [rows, row_bytes / 8]; a copy where `x` is not in order, or does not begin at a word.
at::Tensor words_of(const at::Tensor& x, int64_t row_bytes) {
  const int64_t words = row_bytes / 8, begin = x.storage_offset() * static_cast<int64_t>(x.element_size());
  const bool aligned_start = begin % 8 == 0;
  const at::Tensor in_order = dense(aligned_start ? x : x.clone(at::MemoryFormat::Contiguous));
  if (!is_plain(x)) return in_order.view({x.size(0), -1}).view(at::kLong);
  const int64_t start = in_order.storage_offset() * static_cast<int64_t>(x.element_size());
  return bare_view(in_order, at::kLong, {x.size(0), words}, {words, 1}, start);
}

// Rows of host memory: one memcpy a cell, no kernel launches.
void write_on_host(const RowFormat& format, at::TensorList tensors, char* wire) {
  for (size_t c = 0; c < tensors.size(); ++c) {
    const at::Tensor x = tensors[c].contiguous();
    const Column& column = format.columns[c];
    const char* from = static_cast<const char*>(x.const_data_ptr());
    for (int64_t row = 0; row < x.size(0); ++row)
      std::memcpy(wire + row * format.row_bytes + column.offset, from + row * column.bytes, column.bytes);
  }
}

// One kernel for all columns where they touch, else one for each.
void write_on_device(const RowFormat& format, at::TensorList tensors, const at::Tensor& rows) {
  if (!format.gapless) {
    const auto views = format.views(rows);
    for (size_t c = 0; c < tensors.size(); ++c) views[c].copy_(tensors[c]);
    return;
  }
  std::vector<at::Tensor> words;
  words.reserve(tensors.size());
  for (size_t c = 0; c < tensors.size(); ++c) words.push_back(words_of(tensors[c], format.columns[c].bytes));
  at::Tensor to = words_of(rows, format.row_bytes);
  at::cat_out(to, words, 1);
}

}  // namespace

RowFormat::RowFormat(at::TensorList tensors) {
  int64_t at = 0;
  gapless = true;
  columns.reserve(tensors.size());
  for (const at::Tensor& x : tensors) {
    std::vector<int64_t> sizes = x.sizes().slice(1).vec(), strides(sizes.size());
    int64_t values = 1;
    for (size_t d = sizes.size(); d > 0; values *= sizes[--d]) strides[d - 1] = values;
    const int64_t bytes = values * static_cast<int64_t>(x.element_size());
    gapless = gapless && bytes % kColumnAlign == 0 && bytes > 0;
    columns.push_back({x.scalar_type(), at, bytes, std::move(sizes), std::move(strides)});
    at += aligned(bytes);
  }
  row_bytes = at;
}

std::vector<at::Tensor> RowFormat::views(const at::Tensor& wire) const {
  std::vector<at::Tensor> out;
  out.reserve(columns.size());
  for (const Column& column : columns) out.push_back(view_of(wire, column, row_bytes));
  return out;
}

void write_rows(const RowFormat& format, at::TensorList tensors, at::ArrayRef<int64_t> pad, at::Tensor& wire) {
  const int64_t used = tensors[0].size(0), rows = wire.size(0);
  if (!format.gapless) wire.zero_();  // unused bytes between columns are sent too
  if (wire.is_cpu()) {
    write_on_host(format, tensors, static_cast<char*>(wire.mutable_data_ptr()));
  } else if (used > 0) {
    write_on_device(format, tensors, used == rows ? wire : wire.narrow(0, 0, used));
  }
  if (used == rows) return;
  at::Tensor rest = wire.narrow(0, used, rows - used);
  rest.zero_();
  for (size_t c = 0; c < tensors.size(); ++c)
    if (pad[c] != 0) view_of(rest, format.columns[c], format.row_bytes).fill_(pad[c]);
}

}  // namespace ascend_moe
