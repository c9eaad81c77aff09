#include "isa.h"

namespace ascend_moe::cpu {

namespace {

std::vector<const Kernels*> available(Weight weight) {
  std::vector<const Kernels*> found;
  for (const auto get : {kernels_amx_bf16, kernels_avx512_bf16, kernels_avx512, kernels_avx2, kernels_portable})
    if (const Kernels* kernels = get(weight)) found.push_back(kernels);
  return found;
}

}  // namespace

std::vector<std::string> isas(Weight weight) {
  std::vector<std::string> names;
  for (const Kernels* kernels : available(weight)) names.emplace_back(kernels->isa);
  return names;
}

const Kernels* find_kernels(Weight weight, const std::string& isa) {
  for (const Kernels* kernels : available(weight))
    if (isa.empty() || isa == kernels->isa) return kernels;
  return nullptr;
}

}  // namespace ascend_moe::cpu
