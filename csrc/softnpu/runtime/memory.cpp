// Device memory on the host: allocations with owners, so that wrong addresses are found and named.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <sstream>

#include "common/settings.h"
#include "common/softnpu.h"
#include "runtime/state.h"

namespace softnpu {
namespace {

constexpr uint64_t kAlignment = 512;
constexpr uint64_t kPage = 4096;
// Freed ranges stay mapped without access, so that no new allocation takes their addresses; the oldest are given up.
constexpr size_t kQuarantine = 1024;

struct Allocation {
  uint64_t bytes;
  uint64_t mapped;
  int32_t device;
  uint64_t serial;
  bool piece = false;  // of a reserved range: goes on in the piece that begins where it ends
};

std::mutex mutex;
std::map<uintptr_t, Allocation> live;
std::map<uintptr_t, Allocation> freed;
std::deque<uintptr_t> freed_order;
std::map<int32_t, uint64_t> used;
uint64_t allocations = 0;

uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

// The entry of `table` that holds `address`, or its end.
std::map<uintptr_t, Allocation>::iterator holding(std::map<uintptr_t, Allocation>& table, uintptr_t address) {
  auto next = table.upper_bound(address);
  if (next == table.begin()) return table.end();
  --next;
  return address < next->first + next->second.mapped ? next : table.end();
}

// Where the memory that goes on from `a` ends.
uintptr_t end_of(uintptr_t start, const Allocation& a) {
  uintptr_t end = start + round_up(a.bytes, kAlignment);
  if (!a.piece) return end;
  for (auto next = live.find(end); next != live.end() && next->second.piece; next = live.find(end)) {
    end += next->second.bytes;
  }
  return end;
}

aclError out_of_memory(int32_t device, uint64_t bytes) {
  std::ostringstream out;
  out << "out of memory on device " << device << ": " << bytes << " bytes asked for, " << used[device] << " of "
      << settings().memory << " in use (ASCEND_MOE_SOFTNPU_MEMORY sets the size)";
  return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, out.str());
}

std::string describe(const Allocation& a, uintptr_t start) {
  std::ostringstream out;
  out << "allocation " << a.serial << " of device " << a.device << " (" << a.bytes << " bytes at 0x" << std::hex
      << start << ")";
  return out.str();
}

}  // namespace

int32_t owner(const void* pointer, uint64_t bytes, std::string* problem) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = holding(live, address);
  if (found != live.end()) {
    const Allocation& a = found->second;
    if (address + bytes > end_of(found->first, a) && problem != nullptr) {
      std::ostringstream out;
      out << "out of bounds: " << bytes << " bytes at offset " << address - found->first << " of "
          << describe(a, found->first);
      *problem = out.str();
    }
    return a.device;
  }
  const auto gone = holding(freed, address);
  if (gone != freed.end()) {
    if (problem != nullptr) *problem = "use after free of " + describe(gone->second, gone->first);
    return gone->second.device;
  }
  return -1;
}

aclError allocate(void** address, uint64_t bytes) {
  const int32_t device = current_device();
  if (next_allocation_fails()) {
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "out of memory by ASCEND_MOE_SOFTNPU_FAULTS");
  }
  const std::lock_guard<std::mutex> lock(mutex);
  const uint64_t size = round_up(bytes == 0 ? 1 : bytes, kAlignment);
  if (used[device] + size > settings().memory) return out_of_memory(device, size);
  const uint64_t mapped = round_up(size, kPage);
  void* start = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host has no memory left");
  live[reinterpret_cast<uintptr_t>(start)] = Allocation{bytes, mapped, device, ++allocations};
  used[device] += size;
  *address = start;
  return ACL_SUCCESS;
}

aclError release(void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = live.find(address);
  if (found == live.end()) {
    const auto gone = freed.find(address);
    if (gone != freed.end()) return fail(ACL_ERROR_RT_PARAM_INVALID, "freed twice: " + describe(gone->second, address));
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFree of an address that is no device allocation");
  }
  mmap(pointer, found->second.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  used[found->second.device] -= round_up(found->second.bytes == 0 ? 1 : found->second.bytes, kAlignment);
  freed[address] = found->second;
  freed_order.push_back(address);
  live.erase(found);
  if (freed_order.size() > kQuarantine) {
    const auto oldest = freed.find(freed_order.front());
    munmap(reinterpret_cast<void*>(oldest->first), oldest->second.mapped);
    freed.erase(oldest);
    freed_order.pop_front();
  }
  return ACL_SUCCESS;
}

aclError reserve_bytes(int32_t device, uint64_t bytes) {
  if (next_allocation_fails()) {
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "out of memory by ASCEND_MOE_SOFTNPU_FAULTS");
  }
  const std::lock_guard<std::mutex> lock(mutex);
  if (used[device] + bytes > settings().memory) return out_of_memory(device, bytes);
  used[device] += bytes;
  return ACL_SUCCESS;
}

void return_bytes(int32_t device, uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  used[device] -= bytes;
}

void add_piece(void* start, uint64_t bytes, int32_t device) {
  const std::lock_guard<std::mutex> lock(mutex);
  live[reinterpret_cast<uintptr_t>(start)] = Allocation{bytes, bytes, device, ++allocations, true};
}

uint64_t remove_piece(void* start) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = live.find(reinterpret_cast<uintptr_t>(start));
  if (found == live.end() || !found->second.piece) return 0;
  const uint64_t bytes = found->second.bytes;
  live.erase(found);
  return bytes;
}

}  // namespace softnpu

using softnpu::fail;

extern "C" {

aclError aclrtMalloc(void** address, size_t bytes, aclrtMemMallocPolicy) { return softnpu::allocate(address, bytes); }
aclError aclrtMallocAlign32(void** address, size_t bytes, aclrtMemMallocPolicy) {
  return softnpu::allocate(address, bytes);
}
aclError aclrtFree(void* address) { return softnpu::release(address); }

aclError aclrtMallocHost(void** address, size_t bytes) {
  return posix_memalign(address, 4096, bytes == 0 ? 1 : bytes) == 0 ? ACL_SUCCESS : ACL_ERROR_RT_MEMORY_ALLOCATION;
}
aclError aclrtMallocHostWithCfg(void** address, uint64_t bytes, aclrtMallocConfig*) {
  return aclrtMallocHost(address, bytes);
}
aclError aclrtFreeHost(void* address) {
  std::free(address);
  return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total) {
  const std::lock_guard<std::mutex> lock(softnpu::mutex);
  *total = softnpu::settings().memory;
  *free_bytes = *total - softnpu::used[softnpu::current_device()];
  return ACL_SUCCESS;
}

aclError aclrtPointerGetAttributes(const void* address, aclrtPtrAttributes* attributes) {
  const int32_t device = softnpu::owner(address, 1, nullptr);
  *attributes = aclrtPtrAttributes{};
  attributes->location.type = device >= 0 ? ACL_MEM_LOCATION_TYPE_DEVICE : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  attributes->location.id = device >= 0 ? static_cast<uint32_t>(device) : 0;
  attributes->pageSize = 4096;
  return ACL_SUCCESS;
}

}  // extern "C"
