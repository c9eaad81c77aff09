// Communication inside an operator, over a communicator that torch_npu named in the operator's arguments.
#pragma once

#include <string>
#include <vector>

#include "opapi/op.h"

namespace softnpu {

int64_t group_size(const std::string& group);
int64_t group_rank(const std::string& group);

// Sends to[d] to rank d and returns what each rank sent here, [rows, ...]. Row counts may differ and be 0; the other
// dimensions and the type are the same on all ranks. All ranks of the group must call it. For ACLNN_RUN's body.
std::vector<at::Tensor> all_to_all(const std::string& group, const std::vector<at::Tensor>& to);

}  // namespace softnpu
