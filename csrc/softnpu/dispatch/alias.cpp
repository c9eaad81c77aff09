#include "dispatch/alias.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/set.h>

#include "common/softnpu.h"

namespace softnpu {

at::Tensor cpu_alias(const at::Tensor& npu) {
  TORCH_CHECK(npu.layout() == at::kStrided, "softnpu: layout ", npu.layout(), " is not emulated");
  const c10::Storage& storage = npu.storage();
  void* data = const_cast<void*>(storage.data());
  if (data != nullptr && storage.nbytes() > 0) {
    std::string problem;
    const int32_t device = owner(data, storage.nbytes(), &problem);
    TORCH_CHECK(problem.empty(), "softnpu: tensor given to an operator: ", problem);
    TORCH_CHECK(device >= 0, "softnpu: an NPU tensor's memory is no device memory");
  }
  auto* keep = new c10::Storage(storage);
  c10::DataPtr pointer(data, keep, [](void* kept) { delete static_cast<c10::Storage*>(kept); }, at::kCPU);
  c10::Storage alias(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer), nullptr, false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(alias), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                         npu.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(npu.sizes(), npu.strides(), npu.storage_offset());
  if (npu.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (npu.is_conj()) tensor._set_conj(true);
  if (npu.is_neg()) tensor._set_neg(true);
  return tensor;
}

at::Tensor npu_empty_like(const at::Tensor& cpu, c10::Device device) {
  const auto options = cpu.options().device(device);
  if (cpu.is_non_overlapping_and_dense()) return at::empty_strided(cpu.sizes(), cpu.strides(), options);
  return at::empty(cpu.sizes(), options);
}

at::Tensor npu_copy(const at::Tensor& cpu, c10::Device device) {
  const WithoutPoison whole;
  auto npu = npu_empty_like(cpu, device);
  if (cpu.numel() > 0) cpu_alias(npu).copy_(cpu);
  return npu;
}

at::Tensor npu_view(const at::Tensor& npu, const at::Tensor& cpu) {
  if (cpu.scalar_type() == npu.scalar_type()) return npu.as_strided(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  auto view = at::empty({0}, cpu.options().device(npu.device()));
  view.set_(npu.storage(), cpu.storage_offset(), cpu.sizes(), cpu.strides());
  return view;
}

}  // namespace softnpu
