// The operator interface before aclnn: torch_npu describes an operator by name. All but casts between
// formats fail with their name.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "acl/acl_op_compiler.h"
#include "common/softnpu.h"

struct aclTensorDesc {
  aclDataType type;
  std::vector<int64_t> dims;
  aclFormat format;
};

struct aclDataBuffer {
  void* data;
  size_t bytes;
};

struct aclopAttr {};

namespace {

// Casts between formats are copies: a tensor of a private format keeps the plain layout here, at the start of its
// (larger) storage. With the storage come a shape and a format, which a plain copy has no use for.
constexpr std::array<const char*, 2> kCopies = {"Identity", "TransData"};

aclError copy(const char* name, const aclDataBuffer& from, const aclDataBuffer& to, aclrtStream stream) {
  return softnpu::submit(stream, name, [from, to] {
    std::memmove(to.data, from.data, std::min(from.bytes, to.bytes));
    return ACL_SUCCESS;
  });
}

}  // namespace

std::string softnpu::emulated_aclops() {
  std::string text;
  for (const char* name : kCopies) text += std::string(name) + '\n';
  return text;
}

extern "C" {

aclTensorDesc* aclCreateTensorDesc(aclDataType type, int count, const int64_t* dims, aclFormat format) {
  return new aclTensorDesc{type, {dims, dims + count}, format};
}
void aclDestroyTensorDesc(const aclTensorDesc* desc) { delete desc; }
aclDataType aclGetTensorDescType(const aclTensorDesc* desc) { return desc->type; }
aclFormat aclGetTensorDescFormat(const aclTensorDesc* desc) { return desc->format; }
size_t aclGetTensorDescNumDims(const aclTensorDesc* desc) { return desc->dims.size(); }
aclError aclGetTensorDescDimV2(const aclTensorDesc* desc, size_t index, int64_t* size) {
  *size = desc->dims.at(index);
  return ACL_SUCCESS;
}
void aclSetTensorDescName(aclTensorDesc*, const char*) {}
aclError aclSetTensorFormat(aclTensorDesc*, aclFormat) { return ACL_SUCCESS; }
aclError aclSetTensorShape(aclTensorDesc*, int, const int64_t*) { return ACL_SUCCESS; }
aclError aclSetTensorPlaceMent(aclTensorDesc*, aclMemType) { return ACL_SUCCESS; }
aclDataBuffer* aclCreateDataBuffer(void* data, size_t bytes) { return new aclDataBuffer{data, bytes}; }
aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  delete buffer;
  return ACL_SUCCESS;
}

aclopAttr* aclopCreateAttr() { return new aclopAttr; }
void aclopDestroyAttr(const aclopAttr* attr) { delete attr; }
aclError aclopSetAttrBool(aclopAttr*, const char*, uint8_t) { return ACL_SUCCESS; }
aclError aclopSetAttrInt(aclopAttr*, const char*, int64_t) { return ACL_SUCCESS; }
aclError aclopSetAttrFloat(aclopAttr*, const char*, float) { return ACL_SUCCESS; }
aclError aclopSetAttrString(aclopAttr*, const char*, const char*) { return ACL_SUCCESS; }
aclError aclopSetAttrDataType(aclopAttr*, const char*, aclDataType) { return ACL_SUCCESS; }
aclError aclopSetAttrListBool(aclopAttr*, const char*, int, const uint8_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListInt(aclopAttr*, const char*, int, const int64_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListFloat(aclopAttr*, const char*, int, const float*) { return ACL_SUCCESS; }
aclError aclopSetAttrListListInt(aclopAttr*, const char*, int, const int*, const int64_t* const[]) {
  return ACL_SUCCESS;
}

aclError aclopCompileAndExecute(const char* type, int inputs, const aclTensorDesc* const[],
                                const aclDataBuffer* const in[], int outputs, const aclTensorDesc* const[],
                                aclDataBuffer* const out[], const aclopAttr*, aclopEngineType, aclopCompileType,
                                const char*, aclrtStream stream) {
  const std::string name = type;
  if (std::count(kCopies.begin(), kCopies.end(), name) == 1 && inputs >= 1 && outputs == 1) {
    return copy(type, *in[0], *out[0], stream);
  }
  return softnpu::fail(ACL_ERROR_OP_NOT_FOUND,
                       "operator " + name +
                           " is not emulated (torch_npu fell back from its aclnn function to the "
                           "older interface; add aclnn" +
                           name + " to csrc/softnpu/opapi)");
}
aclError aclopCompileAndExecuteV2(const char* type, int inputs, aclTensorDesc* in_desc[], aclDataBuffer* in[],
                                  int outputs, aclTensorDesc* out_desc[], aclDataBuffer* out[], aclopAttr* attr,
                                  aclopEngineType engine, aclopCompileType flag, const char* path, aclrtStream stream) {
  return aclopCompileAndExecute(type, inputs, in_desc, in, outputs, out_desc, out, attr, engine, flag, path, stream);
}

}  // extern "C"
