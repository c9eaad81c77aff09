// Reserved address ranges with physical memory mapped into them piece by piece (torch_npu's expandable segments).
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <mutex>

#include "common/softnpu.h"
#include "runtime/state.h"

namespace {

struct Physical {
  uint64_t bytes;
  int32_t device;
  int file;  // anonymous: goes with the last mapping
};

std::mutex mutex;
std::map<void*, uint64_t> reservations;

// Nothing can be read or written here until something is mapped.
void* inaccessible(void* at, uint64_t bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at == nullptr ? 0 : MAP_FIXED);
  return mmap(at, bytes, PROT_NONE, flags, -1, 0);
}

}  // namespace

using softnpu::fail;

extern "C" {

aclError aclrtReserveMemAddress(void** address, size_t bytes, size_t, void*, uint64_t) {
  void* start = inaccessible(nullptr, bytes);
  if (start == MAP_FAILED) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host has no address range that large");
  const std::lock_guard<std::mutex> lock(mutex);
  reservations[start] = bytes;
  *address = start;
  return ACL_SUCCESS;
}

aclError aclrtReleaseMemAddress(void* address) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = reservations.find(address);
  if (found == reservations.end()) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtReleaseMemAddress: the address was not reserved");
  }
  munmap(address, found->second);
  reservations.erase(found);
  return ACL_SUCCESS;
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t bytes, const aclrtPhysicalMemProp* properties,
                             uint64_t) {
  const auto device = static_cast<int32_t>(properties->location.id);
  if (const aclError code = softnpu::reserve_bytes(device, bytes)) return code;
  const int file = memfd_create("softnpu-memory", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    softnpu::return_bytes(device, bytes);
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host gives no memory");
  }
  *handle = new Physical{bytes, device, file};
  return ACL_SUCCESS;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  auto* physical = static_cast<Physical*>(handle);
  softnpu::return_bytes(physical->device, physical->bytes);
  close(physical->file);
  delete physical;
  return ACL_SUCCESS;
}

aclError aclrtMapMem(void* address, size_t bytes, size_t offset, aclrtDrvMemHandle handle, uint64_t) {
  const auto* physical = static_cast<Physical*>(handle);
  const void* mapped =
      mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, physical->file, static_cast<off_t>(offset));
  if (mapped == MAP_FAILED) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMapMem: the host cannot map it there");
  softnpu::add_piece(address, bytes, physical->device);
  return ACL_SUCCESS;
}

aclError aclrtUnmapMem(void* address) {
  const uint64_t bytes = softnpu::remove_piece(address);
  if (bytes == 0) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtUnmapMem: nothing is mapped at that address");
  inaccessible(address, bytes);
  return ACL_SUCCESS;
}

}  // extern "C"
