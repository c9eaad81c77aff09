// Copies and fills, with their addresses checked against the allocations.
#include <cstring>
#include <sstream>

#include "common/softnpu.h"
#include "runtime/state.h"

namespace softnpu {
namespace {

enum class Place { host, device, any };

struct Ends {
  Place source, destination;
};

Ends ends_of(aclrtMemcpyKind kind) {
  switch (kind) {
    case ACL_MEMCPY_HOST_TO_HOST:
      return {Place::host, Place::host};
    case ACL_MEMCPY_HOST_TO_DEVICE:
    case ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE:
      return {Place::host, Place::device};
    case ACL_MEMCPY_DEVICE_TO_HOST:
      return {Place::device, Place::host};
    case ACL_MEMCPY_DEFAULT:
      return {Place::any, Place::any};
    default:
      return {Place::device, Place::device};
  }
}

// Fails where [address, address + bytes) is not what the copy's kind says it is.
aclError check_end(const char* which, const void* address, uint64_t bytes, Place place, int32_t* device) {
  std::string problem;
  *device = owner(address, bytes, &problem);
  if (!problem.empty()) return fail(ACL_ERROR_RT_PARAM_INVALID, std::string("copy's ") + which + ": " + problem);
  if (place == Place::device && *device < 0) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, std::string("copy's ") + which + " should be device memory and is not");
  }
  if (place == Place::host && *device >= 0) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, std::string("copy's ") + which + " should be host memory and is device's");
  }
  return ACL_SUCCESS;
}

aclError check_copy(void* to, uint64_t room, const void* from, uint64_t bytes, aclrtMemcpyKind kind, bool on_stream) {
  if (bytes > room) {
    std::ostringstream out;
    out << "out of bounds: copy of " << bytes << " bytes to a destination of " << room;
    return fail(ACL_ERROR_RT_PARAM_INVALID, out.str());
  }
  int32_t source = -1, destination = -1;
  const Ends ends = ends_of(kind);
  if (const aclError code = check_end("source", from, bytes, ends.source, &source)) return code;
  if (const aclError code = check_end("destination", to, bytes, ends.destination, &destination)) return code;
  if (source < 0 || destination < 0 || source == destination) return ACL_SUCCESS;
  std::ostringstream out;
  out << "copy from device " << source << " to device " << destination;
  if (!on_stream) return fail(ACL_ERROR_RT_PARAM_INVALID, out.str() + " without a stream");
  if (!peers_enabled(source, destination)) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, out.str() + " before aclrtDeviceEnablePeerAccess");
  }
  return ACL_SUCCESS;
}

}  // namespace
}  // namespace softnpu

using namespace softnpu;

extern "C" {

aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind) {
  if (bytes == 0) return ACL_SUCCESS;
  if (const aclError code = refuse_in_capture("aclrtMemcpy")) return code;
  if (const aclError code = check_copy(to, room, from, bytes, kind, false)) return code;
  std::memmove(to, from, bytes);
  return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind,
                          aclrtStream stream) {
  if (bytes == 0) return ACL_SUCCESS;
  if (const aclError code = check_copy(to, room, from, bytes, kind, true)) return code;
  return submit(stream, "aclrtMemcpyAsync", [=] {
    std::memmove(to, from, bytes);
    return ACL_SUCCESS;
  });
}

aclError aclrtMemcpyAsyncWithCondition(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind,
                                       aclrtStream stream) {
  return aclrtMemcpyAsync(to, room, from, bytes, kind, stream);
}

aclError aclrtMemset(void* to, size_t room, int32_t value, size_t bytes) {
  if (const aclError code = refuse_in_capture("aclrtMemset")) return code;
  int32_t device = -1;
  if (bytes > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "out of bounds: aclrtMemset");
  if (const aclError code = check_end("destination", to, bytes, Place::any, &device)) return code;
  std::memset(to, value, bytes);
  return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void* to, size_t room, int32_t value, size_t bytes, aclrtStream stream) {
  int32_t device = -1;
  if (bytes > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "out of bounds: aclrtMemsetAsync");
  if (const aclError code = check_end("destination", to, bytes, Place::any, &device)) return code;
  return submit(stream, "aclrtMemsetAsync", [=] {
    std::memset(to, value, bytes);
    return ACL_SUCCESS;
  });
}

}  // extern "C"
