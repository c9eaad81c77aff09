// torch_npu links to these and does not need them for what is emulated: each fails with its name, and has a mark beside
// it so that `info` does not list it.
#include <string>

namespace softnpu {
int not_emulated(const char* name);
}

#define NOT_EMULATED(name)                                       \
  extern "C" int name() { return softnpu::not_emulated(#name); } \
  extern "C" void softnpu_not_emulated_##name() {}

NOT_EMULATED(aclrtBinaryGetFunction)
NOT_EMULATED(aclrtBinaryLoadFromData)
NOT_EMULATED(aclrtGetFunctionAddr)
NOT_EMULATED(rtDevBinaryRegister)
NOT_EMULATED(rtFunctionRegister)
NOT_EMULATED(rtGetC2cCtrlAddr)
NOT_EMULATED(rtKernelLaunch)
NOT_EMULATED(aclrtMemExportToShareableHandle)
NOT_EMULATED(aclrtMemImportFromShareableHandle)
NOT_EMULATED(aclrtMemSetPidToShareableHandle)
