// How an aclnn function is written: see rms_norm in norm.cpp. torch_npu's own host code calls these functions with
// aclTensor and the like, which here are ATen's types on the same memory.
//
//   ACLNN_OP(aclnnRelu, const aclTensor* self, aclTensor* out) {
//     ACLNN_RUN(out) { write(out, at::relu(*self)); };
//   }
//
// The parameters are those of CANN's aclnnReluGetWorkspaceSize without the last two. Checks go before ACLNN_RUN (they
// are made when the operator is called), arithmetic into it (it runs then, or at each replay of a graph). ACLNN_RUN
// names the outputs: they start as NaN, or 0xAA bytes, so that what the operator does not write is seen. Leave out what
// is also an input.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <vector>

#include "common/softnpu.h"

struct aclTensor : at::Tensor {
  aclDataType type;  // as torch_npu says it: may be one that ATen has no type for
  aclFormat format;
  std::vector<int64_t> storage_shape;  // of the storage, in its own format
};
struct aclScalar : at::Scalar {
  explicit aclScalar(at::Scalar value) : at::Scalar(value) {}
};
struct aclTensorList : std::vector<const aclTensor*> {
  std::vector<at::Tensor> tensors() const {
    std::vector<at::Tensor> all;
    for (const aclTensor* t : *this) all.push_back(*t);
    return all;
  }
};
struct aclScalarList : std::vector<at::Scalar> {};
struct aclIntArray : std::vector<int64_t> {};
struct aclFloatArray : std::vector<float> {};
struct aclBoolArray : std::vector<bool> {};

namespace softnpu {
struct Plan;
}
struct aclOpExecutor;
using aclnnStatus = int;

namespace softnpu {

// The tensor, or an undefined one where an optional argument was left out.
inline at::Tensor optional(const aclTensor* tensor) {
  return tensor == nullptr ? at::Tensor() : static_cast<const at::Tensor&>(*tensor);
}

// Copies `value` into the output, converting its type; the shape must be the one that torch_npu's host code allotted.
void write(const aclTensor* output, const at::Tensor& value);

// ATen's type of a CANN type; fails, naming it, where there is none.
at::ScalarType scalar_type(aclDataType type);

// Collects what an aclnn function is going to do: ACLNN_RUN(outputs) { body };
struct Planner {
  const char* name;
  uint64_t* workspace;
  aclOpExecutor** executor;
  std::vector<const aclTensor*> outputs;

  aclnnStatus operator*(std::function<void()> body);
};

aclnnStatus run(aclOpExecutor* executor, aclrtStream stream);

}  // namespace softnpu

#define ACLNN_OP(name, ...)                                                                   \
  extern "C" aclnnStatus name(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) { \
    return softnpu::run(executor, stream);                                                    \
  }                                                                                           \
  extern "C" aclnnStatus name##GetWorkspaceSize(__VA_ARGS__, uint64_t* aclnn_workspace, aclOpExecutor** aclnn_executor)

#define ACLNN_RUN(...) return softnpu::Planner{__func__, aclnn_workspace, aclnn_executor, {__VA_ARGS__}}* [=]
