// Devices, contexts and what they say about themselves.
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>
#include <sstream>

#include "common/settings.h"
#include "common/softnpu.h"
#include "runtime/state.h"

namespace softnpu {
namespace {

thread_local int32_t device = 0;
thread_local bool chosen = false;
std::mutex mutex;
std::set<std::pair<int32_t, int32_t>> peers;
constexpr int64_t kCubeCores = 24, kVectorCores = 48;

aclError choose(int32_t id) {
  if (id < 0 || id >= static_cast<int32_t>(settings().devices)) {
    std::ostringstream out;
    out << "device " << id << " of " << settings().devices << " (ASCEND_MOE_SOFTNPU_DEVICES sets how many there are)";
    return fail(ACL_ERROR_RT_INVALID_DEVICEID, out.str());
  }
  device = id;
  chosen = true;
  return ACL_SUCCESS;
}

// A context is a device here: the handle is its number plus one.
aclrtContext context_of(int32_t id) { return reinterpret_cast<aclrtContext>(static_cast<intptr_t>(id) + 1); }

}  // namespace

int32_t current_device() { return device; }

bool peers_enabled(int32_t a, int32_t b) {
  const std::lock_guard<std::mutex> lock(mutex);
  return peers.count({a, b}) > 0 || peers.count({b, a}) > 0;
}

}  // namespace softnpu

using namespace softnpu;

extern "C" {

aclError aclrtSetDevice(int32_t id) { return choose(id); }
aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }
aclError aclrtGetDevice(int32_t* id) {
  if (!chosen) return ACL_ERROR_RT_CONTEXT_NULL;
  *id = device;
  return ACL_SUCCESS;
}
aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = settings().devices;
  return ACL_SUCCESS;
}
const char* aclrtGetSocName() { return settings().soc.c_str(); }
aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (!chosen) return ACL_ERROR_RT_CONTEXT_NULL;
  *context = context_of(device);
  return ACL_SUCCESS;
}
aclError aclrtSetCurrentContext(aclrtContext context) {
  return choose(static_cast<int32_t>(reinterpret_cast<intptr_t>(context) - 1));
}
aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
  if (flags != nullptr) *flags = 0;
  *active = 1;
  return ACL_SUCCESS;
}
aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 1;
  return ACL_SUCCESS;
}
aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t) {
  const std::lock_guard<std::mutex> lock(softnpu::mutex);
  peers.insert({device, peer});
  return ACL_SUCCESS;
}
aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t* const logic) {
  *logic = user;
  return ACL_SUCCESS;
}

aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo info, int64_t* value) {
  switch (info) {
    case ACL_DEVICE_INFO_AI_CORE_NUM:
      *value = kCubeCores;
      return ACL_SUCCESS;
    case ACL_DEVICE_INFO_VECTOR_CORE_NUM:
      *value = kVectorCores;
      return ACL_SUCCESS;
    case ACL_DEVICE_INFO_L2_SIZE:
      *value = 192ll << 20;
      return ACL_SUCCESS;
    default:
      return fail(ACL_ERROR_INVALID_PARAM, "aclGetDeviceCapability: attribute " + std::to_string(info));
  }
}
aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr attribute, int64_t* value) {
  switch (attribute) {
    case ACL_DEV_ATTR_AICORE_CORE_NUM:
    case ACL_DEV_ATTR_CUBE_CORE_NUM:
      *value = kCubeCores;
      return ACL_SUCCESS;
    case ACL_DEV_ATTR_VECTOR_CORE_NUM:
      *value = kVectorCores;
      return ACL_SUCCESS;
    case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE:
      *value = static_cast<int64_t>(settings().memory);
      return ACL_SUCCESS;
    default:
      return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetDeviceInfo: attribute " + std::to_string(attribute));
  }
}
aclError aclrtGetDeviceUtilizationRate(int32_t, aclrtUtilizationInfo* info) {
  *info = aclrtUtilizationInfo{};
  return ACL_SUCCESS;
}
aclError aclrtGetDeviceResLimit(int32_t, aclrtDevResLimitType type, uint32_t* value) {
  *value = type == ACL_RT_DEV_RES_CUBE_CORE ? kCubeCores : kVectorCores;
  return ACL_SUCCESS;
}
aclError aclrtGetStreamResLimit(aclrtStream, aclrtDevResLimitType type, uint32_t* value) {
  return aclrtGetDeviceResLimit(0, type, value);
}
aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t* value) {
  return aclrtGetDeviceResLimit(0, type, value);
}

}  // extern "C"
