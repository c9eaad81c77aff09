// A communicator: one piece of shared memory that its ranks, processes of this machine, map.
//
//   Header | Record of each rank, with its 3 * n sizes | slot of each rank | mailbox of each ordered pair of ranks
//
// The memory is an anonymous file of the process that made the root information; others open it through /proc. It has
// no name, so nothing is left behind, whatever happens to the processes.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "common/softnpu.h"
#include "third_party/hccl/inc/hccl/hccl_types.h"

namespace softnpu::hccl {

constexpr uint64_t kSlotBytes = 1 << 20;     // what each rank can put up per round of a collective
constexpr uint64_t kMailboxBytes = 1 << 16;  // what a send can put up before its receive takes it

struct Header {
  std::atomic<uint64_t> nonce;
  std::atomic<uint32_t> ranks;
  std::atomic<uint32_t> attached;
  std::atomic<uint32_t> detached;
  std::atomic<uint32_t> arrived;
  std::atomic<uint32_t> generation;
  std::atomic<int32_t> broken;  // an HcclResult: a rank gave up, and nobody waits for it
  std::atomic<int32_t> broken_by;
};

struct Segment {
  uint64_t offset, bytes;
};

// What a rank is doing, for the others to compare with what they do.
struct Record {
  std::atomic<int32_t> pid;
  int32_t operation, type, reduce;
  uint32_t root;
  uint64_t extent;  // bytes of the send buffer
  uint64_t sequence;
};

struct Mailbox {
  std::atomic<uint64_t> written, read;
  unsigned char ring[kMailboxBytes];
};

class Comm {
 public:
  static HcclResult create(uint32_t ranks, const HcclRootInfo& root, uint32_t rank, const char* name, double timeout_s,
                           Comm** comm);
  ~Comm();

  uint32_t ranks() const { return ranks_; }
  uint32_t rank() const { return rank_; }
  const std::string& name() const { return name_; }
  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  Record& record(uint32_t rank) const;
  Segment* sends(uint32_t rank) const;       // [n]: what goes to each rank
  uint64_t* receives(uint32_t rank) const;   // [n]: bytes expected from each rank
  unsigned char* slot(uint32_t rank) const;  // kSlotBytes
  Mailbox& mailbox(uint32_t from, uint32_t to) const;

  // Waits until `ready`; false, with the reason in aclGetRecentErrMsg and in `result`, where that will not happen.
  template <typename Ready>
  HcclResult wait_until(const char* what, Ready ready);
  HcclResult barrier(const char* what);
  // Gives up: ranks that wait for this one stop waiting.
  HcclResult give_up(HcclResult why, const std::string& message);
  // The same, where the message is set already.
  HcclResult give_up_after(HcclResult why);

  uint64_t sequence = 0;

 private:
  Comm() = default;
  HcclResult check(const char* what, double deadline);

  uint32_t ranks_ = 0, rank_ = 0;
  std::string name_;
  double timeout_s_ = 0;
  unsigned char* base_ = nullptr;
  uint64_t bytes_ = 0;
};

// The live communicator of this name, or null.
Comm* find(const std::string& name);
// The communicator behind a handle, or null where it is none (destroyed, say).
Comm* of(HcclComm handle);

HcclResult failed(HcclResult code, const std::string& message);

}  // namespace softnpu::hccl

#include "hccl/wait.h"

namespace softnpu::hccl {

template <typename Ready>
HcclResult Comm::wait_until(const char* what, Ready ready) {
  const double deadline = now_s() + timeout_s_;
  HcclResult result = HCCL_SUCCESS;
  const auto unbroken = [&] {
    result = check(what, deadline);
    return result == HCCL_SUCCESS;
  };
  return wait([&] { return ready() || header().broken != 0; }, unbroken) && ready() ? HCCL_SUCCESS
         : result != HCCL_SUCCESS                                                   ? result
                                                                                    : check(what, deadline);
}

}  // namespace softnpu::hccl
