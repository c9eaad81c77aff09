// What torch_npu's own host code calls inside other operators: copies, casts, fills, padding.
#include "opapi/op.h"

using softnpu::write;

ACLNN_OP(aclnnInplaceCopy, aclTensor* self, const aclTensor* source) {
  ACLNN_RUN() { self->copy_(*source); };
}

ACLNN_OP(aclnnCast, const aclTensor* self, aclDataType type, aclTensor* out) {
  TORCH_CHECK(type == out->type, "aclnnCast: dtype (aclDataType) = ", static_cast<int>(type), ", and the output is ",
              static_cast<int>(out->type));
  ACLNN_RUN(out) { write(out, *self); };
}

ACLNN_OP(aclnnInplaceZero, aclTensor* self) {
  ACLNN_RUN() { self->zero_(); };
}

ACLNN_OP(aclnnInplaceOne, aclTensor* self) {
  ACLNN_RUN() { self->fill_(1); };
}

ACLNN_OP(aclnnInplaceFillScalar, aclTensor* self, const aclScalar* value) {
  const at::Scalar number = *value;
  ACLNN_RUN() { self->fill_(number); };
}

ACLNN_OP(aclnnConstantPadNd, const aclTensor* self, const aclIntArray* padding, const aclScalar* value,
         aclTensor* out) {
  const at::Scalar number = *value;
  ACLNN_RUN(out) { write(out, at::constant_pad_nd(*self, *padding, number)); };
}
