// Start-up, versions, options and profiling: what torch_npu asks for and that has nothing to do here.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "acl/acl_op_compiler.h"
#include "acl/acl_prof.h"
#include "common/settings.h"
#include "common/softnpu.h"

using namespace softnpu;

namespace {
constexpr const char* kVersion = "9.0.0";
std::mutex option_mutex;
std::map<int, std::string> compile_options;
std::map<int, int64_t> system_options;
}  // namespace

extern "C" {

// The first thing that torch_npu does with a device: loads the kernels of plain operators where nobody has yet.
aclError aclInit(const char*) {
  settings();
  check_faults();
  void* library = dlopen("libsoftnpu_dispatch.so", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) return fail(ACL_ERROR_INTERNAL_ERROR, std::string("libsoftnpu_dispatch.so: ") + dlerror());
  return reinterpret_cast<aclError (*)()>(dlsym(library, "softnpu_start_python"))();
}
aclError aclFinalize() { return ACL_SUCCESS; }
aclError aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = getpid();
  return ACL_SUCCESS;
}

aclError aclsysGetVersionStr(char*, char* version) {
  std::strcpy(version, kVersion);
  return ACL_SUCCESS;
}
aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
  std::memset(version, 0, sizeof *version);
  std::strcpy(version->version, kVersion);
  return ACL_SUCCESS;
}

aclError aclSetCompileopt(aclCompileOpt option, const char* value) {
  const std::lock_guard<std::mutex> lock(option_mutex);
  compile_options[option] = value;
  return ACL_SUCCESS;
}
size_t aclGetCompileoptSize(aclCompileOpt option) {
  const std::lock_guard<std::mutex> lock(option_mutex);
  return compile_options[option].size() + 1;
}
aclError aclGetCompileopt(aclCompileOpt option, char* value, size_t length) {
  const std::lock_guard<std::mutex> lock(option_mutex);
  std::snprintf(value, length, "%s", compile_options[option].c_str());
  return ACL_SUCCESS;
}
aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  const std::lock_guard<std::mutex> lock(option_mutex);
  system_options[option] = value;
  return ACL_SUCCESS;
}
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }
aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  const std::lock_guard<std::mutex> lock(option_mutex);
  *value = system_options[option];
  return ACL_SUCCESS;
}
aclError aclGetCannAttribute(aclCannAttr attribute, int32_t* value) {
  // INF_NAN and BF16 are there; just-in-time compilation of operators is not.
  *value = attribute == ACL_CANN_ATTR_JIT_COMPILE ? 0 : 1;
  return ACL_SUCCESS;
}
aclError aclGetCannAttributeList(const aclCannAttr** list, size_t* count) {
  static const aclCannAttr all[] = {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16};
  *list = all;
  *count = 2;
  return ACL_SUCCESS;
}

// Numbers that are too large become infinite here; saturation would be another arithmetic.
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
  if (mode == ACL_RT_OVERFLOW_MODE_INFNAN) return ACL_SUCCESS;
  return fail(ACL_ERROR_API_NOT_SUPPORT, "aclrtSetDeviceSatMode: mode = " + std::to_string(mode) +
                                             " (saturation) is not emulated, only infinity and NaN (mode 1)");
}
aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t flag) {
  if (flag == 0) return ACL_SUCCESS;
  return fail(ACL_ERROR_API_NOT_SUPPORT, "aclrtSetStreamOverflowSwitch: flag = " + std::to_string(flag) +
                                             " is not emulated: overflows are not detected");
}

// Settings of hardware behaviour with no counterpart on a host.
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t* actual) {
  if (actual != nullptr) *actual = timeout;
  return ACL_SUCCESS;
}
aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) { return ACL_SUCCESS; }
aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t* flag) {
  *flag = 0;
  return ACL_SUCCESS;
}
aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtProcessReport(int32_t) { return ACL_SUCCESS; }
aclError aclrtUseStreamResInCurrentThread(aclrtStream) { return ACL_SUCCESS; }
aclError aclrtUnuseStreamResInCurrentThread(aclrtStream) { return ACL_SUCCESS; }
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtCmoAsync(void*, size_t, aclrtCmoType, aclrtStream) {
  return ACL_SUCCESS;  // a hint to prefetch into a cache
}
aclError aclmdlInitDump() { return ACL_SUCCESS; }
aclError aclmdlSetDump(const char*) { return ACL_SUCCESS; }
aclError aclmdlFinalizeDump() { return ACL_SUCCESS; }

// The profiler's host side runs; there is no device to report.
int32_t MsprofRegisterCallback(uint32_t, void*) { return 0; }
uint64_t MsprofGetHashId(const char* text, size_t length) {
  return std::hash<std::string>{}(std::string(text, length));
}
uint64_t MsprofSysCycleTime() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000ull + static_cast<uint64_t>(now.tv_nsec);
}
int32_t MsprofReportApi(uint32_t, const void*) { return 0; }
int32_t MsprofReportCompactInfo(uint32_t, const void*, uint32_t) { return 0; }
int32_t MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t) { return 0; }

}  // extern "C"
