// Send and receive through mailboxes: a send of up to kMailboxBytes does not wait for its receive.
#include <algorithm>
#include <cstring>
#include <vector>

#include "hccl/comm.h"
#include "hccl/reduce.h"
#include "third_party/hccl/inc/hccl/hccl.h"

using namespace softnpu;
using namespace softnpu::hccl;

namespace {

// A message starts with its size and type, so that a receive which wants something else is found.
struct Envelope {
  uint64_t bytes;
  uint64_t type;
};

struct Transfer {
  bool sends;
  unsigned char* data;
  uint32_t peer;
  Envelope envelope;
  uint64_t done = 0;  // bytes of envelope and data moved

  uint64_t total() const { return sizeof(Envelope) + envelope.bytes; }
  bool finished() const { return done == total(); }
};

void put(Mailbox& box, Transfer& t) {
  while (!t.finished()) {
    const uint64_t at = box.written, room = kMailboxBytes - (at - box.read);
    const bool head = t.done < sizeof(Envelope);
    const auto* source =
        head ? reinterpret_cast<unsigned char*>(&t.envelope) + t.done : t.data + (t.done - sizeof(Envelope));
    const uint64_t left = head ? sizeof(Envelope) - t.done : t.total() - t.done;
    const uint64_t length = std::min({left, room, kMailboxBytes - at % kMailboxBytes});
    if (length == 0) return;
    std::memcpy(box.ring + at % kMailboxBytes, source, length);
    box.written = at + length;
    t.done += length;
  }
}

// Empty: moved what there is. Otherwise: how the message differs from what is wanted.
std::string get(Mailbox& box, Transfer& t, Envelope& arrived) {
  while (!t.finished()) {
    const uint64_t at = box.read, filled = box.written - at;
    const bool head = t.done < sizeof(Envelope);
    auto* target = head ? reinterpret_cast<unsigned char*>(&arrived) + t.done : t.data + (t.done - sizeof(Envelope));
    const uint64_t left = head ? sizeof(Envelope) - t.done : t.total() - t.done;
    const uint64_t length = std::min({left, filled, kMailboxBytes - at % kMailboxBytes});
    if (length == 0) return "";
    std::memcpy(target, box.ring + at % kMailboxBytes, length);
    box.read = at + length;
    t.done += length;
    if (t.done == sizeof(Envelope) && (arrived.bytes != t.envelope.bytes || arrived.type != t.envelope.type)) {
      return "rank " + std::to_string(t.peer) + " sent " + std::to_string(arrived.bytes) + " bytes of type " +
             std::to_string(arrived.type) + ", the receive wants " + std::to_string(t.envelope.bytes) + " of type " +
             std::to_string(t.envelope.type);
    }
  }
  return "";
}

// Moves all transfers on together; those with one peer in one direction go one after the other.
HcclResult run(Comm& comm, std::vector<Transfer> transfers) {
  std::vector<Envelope> arrived(transfers.size());
  std::string problem;
  const auto step = [&] {
    bool all = true;
    std::vector<bool> busy(2 * comm.ranks(), false);
    for (size_t i = 0; i < transfers.size() && problem.empty(); ++i) {
      Transfer& t = transfers[i];
      const size_t lane = 2 * t.peer + (t.sends ? 1 : 0);
      if (t.finished() || busy[lane]) continue;
      if (t.sends) {
        put(comm.mailbox(comm.rank(), t.peer), t);
      } else {
        problem = get(comm.mailbox(t.peer, comm.rank()), t, arrived[i]);
      }
      busy[lane] = !t.finished();
      all = all && t.finished();
    }
    for (const Transfer& t : transfers) all = all && t.finished();
    return all || !problem.empty();
  };
  if (const HcclResult bad = comm.wait_until("send or receive", step)) return bad;
  return problem.empty() ? HCCL_SUCCESS : comm.give_up(HCCL_E_PARA, problem);
}

HcclResult check(const Comm& comm, const Transfer& t) {
  if (t.peer >= comm.ranks()) return failed(HCCL_E_PARA, "send or receive: no rank " + std::to_string(t.peer));
  std::string problem;
  if (t.envelope.bytes > 0 && owner(t.data, t.envelope.bytes, &problem) < 0) problem = "no device memory";
  return problem.empty() ? HCCL_SUCCESS : failed(HCCL_E_PARA, "buffer of a send or receive: " + problem);
}

HcclResult submit_transfers(HcclComm handle, aclrtStream stream, std::vector<Transfer> transfers) {
  Comm* comm = of(handle);
  if (comm == nullptr) return failed(HCCL_E_PARA, "send or receive: no such communicator (destroyed?)");
  for (const Transfer& t : transfers) {
    if (const HcclResult bad = check(*comm, t)) return bad;
  }
  HcclResult result = HCCL_SUCCESS;
  const aclError submitted = submit(stream, "HcclSend/HcclRecv", [=, &result, now = !capturing(stream)]() -> aclError {
    HcclResult ran = HCCL_SUCCESS;
    const Fault fault = next_collective_fault(static_cast<int>(comm->rank()));
    if (fault != Fault::none) {
      ran = comm->give_up(fault == Fault::fail ? HCCL_E_INTERNAL : HCCL_E_TIMEOUT,
                          "send or receive fails by ASCEND_MOE_SOFTNPU_FAULTS");
    } else {
      ran = run(*comm, transfers);
    }
    if (now) result = ran;
    return ran == HCCL_SUCCESS ? ACL_SUCCESS : ACL_ERROR_RT_FAILURE;
  });
  return result != HCCL_SUCCESS ? result : submitted == ACL_SUCCESS ? HCCL_SUCCESS : HCCL_E_RUNTIME;
}

// Between HcclGroupStart and HcclGroupEnd, sends and receives are collected and run as one.
struct Group {
  int depth = 0;
  HcclComm comm = nullptr;
  aclrtStream stream = nullptr;
  std::vector<Transfer> transfers;
};
thread_local Group group;

HcclResult transfer(bool sends, void* data, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm,
                    aclrtStream stream) {
  const Transfer t{sends, static_cast<unsigned char*>(data), peer,
                   Envelope{count * size_of(type), static_cast<uint64_t>(type)}};
  if (group.depth == 0) return submit_transfers(comm, stream, {t});
  if (!group.transfers.empty() && (group.comm != comm || group.stream != stream)) {
    return failed(HCCL_E_NOT_SUPPORT, "HcclGroup over several communicators or streams is not emulated");
  }
  group.comm = comm;
  group.stream = stream;
  group.transfers.push_back(t);
  return HCCL_SUCCESS;
}

}  // namespace

extern "C" {

HcclResult HcclSend(void* data, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm, aclrtStream stream) {
  return transfer(true, data, count, type, peer, comm, stream);
}
HcclResult HcclRecv(void* data, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm, aclrtStream stream) {
  return transfer(false, data, count, type, peer, comm, stream);
}
HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm comm, aclrtStream stream) {
  std::vector<Transfer> transfers;
  for (uint32_t i = 0; i < count; ++i) {
    const HcclSendRecvItem& item = items[i];
    transfers.push_back({item.sendRecvType == HCCL_SEND, static_cast<unsigned char*>(item.buf), item.remoteRank,
                         Envelope{item.count * size_of(item.dataType), static_cast<uint64_t>(item.dataType)}});
  }
  return submit_transfers(comm, stream, transfers);
}
HcclResult HcclGroupStart() {
  ++group.depth;
  return HCCL_SUCCESS;
}
HcclResult HcclGroupEnd() {
  if (group.depth == 0) return failed(HCCL_E_PARA, "HcclGroupEnd without HcclGroupStart");
  if (--group.depth > 0 || group.transfers.empty()) return HCCL_SUCCESS;
  const auto transfers = std::move(group.transfers);
  group.transfers.clear();
  return submit_transfers(group.comm, group.stream, transfers);
}

}  // extern "C"
