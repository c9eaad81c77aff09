// The operator interface before aclnn: torch_npu describes an operator by name. None is emulated, and each says so.
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

aclError aclopCompileAndExecute(const char* type, int, const aclTensorDesc* const[], const aclDataBuffer* const[], int,
                                const aclTensorDesc* const[], aclDataBuffer* const[], const aclopAttr*, aclopEngineType,
                                aclopCompileType, const char*, aclrtStream) {
  return softnpu::fail(ACL_ERROR_OP_NOT_FOUND, std::string("operator ") + type +
                                                   " is not emulated (torch_npu fell back from its aclnn "
                                                   "function to the older interface; add aclnn" +
                                                   type + " to csrc/softnpu/opapi)");
}
aclError aclopCompileAndExecuteV2(const char* type, int, aclTensorDesc*[], aclDataBuffer*[], int, aclTensorDesc*[],
                                  aclDataBuffer*[], aclopAttr*, aclopEngineType, aclopCompileType, const char*,
                                  aclrtStream) {
  return aclopCompileAndExecute(type, 0, nullptr, nullptr, 0, nullptr, nullptr, nullptr, ACL_ENGINE_SYS,
                                ACL_COMPILE_SYS, nullptr, nullptr);
}

}  // extern "C"
