#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "common/softnpu.h"

namespace softnpu {
namespace {
thread_local std::string recent;
thread_local std::string handed_out;
}  // namespace

aclError fail(aclError code, const std::string& message) {
  recent = "softnpu: " + message;
  return code;
}

aclError not_emulated(const char* name) {
  std::fprintf(stderr, "softnpu: %s is not emulated; add it under csrc/softnpu (docs/softnpu.md says how)\n", name);
  return fail(ACL_ERROR_API_NOT_SUPPORT, std::string(name) + " is not emulated; add it under csrc/softnpu");
}

}  // namespace softnpu

extern "C" const char* aclGetRecentErrMsg() {
  // Handed out once, as CANN does.
  softnpu::handed_out.swap(softnpu::recent);
  softnpu::recent.clear();
  return softnpu::handed_out.c_str();
}

extern "C" void aclAppLog(aclLogLevel level, const char* function, const char* file, uint32_t line, const char* format,
                          ...) {
  if (level < ACL_ERROR) return;
  std::va_list arguments;
  va_start(arguments, format);
  std::fprintf(stderr, "[CANN log] %s:%u %s: ", file, line, function);
  std::vfprintf(stderr, format, arguments);
  std::fputc('\n', stderr);
  va_end(arguments);
}
