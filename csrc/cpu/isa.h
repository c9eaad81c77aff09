// Which kernels this processor runs.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace ascend_moe::cpu {

// Names of the instruction sets that work here for this weight type, best first.
std::vector<std::string> isas(Weight weight);

// The kernels of one of them, or of the best where the name is empty; null for a name that is not among them.
const Kernels* find_kernels(Weight weight, const std::string& isa);

}  // namespace ascend_moe::cpu
