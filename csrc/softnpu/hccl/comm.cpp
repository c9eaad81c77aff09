#include "hccl/comm.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <sstream>

#include "common/settings.h"

namespace softnpu::hccl {
namespace {

// What HcclRootInfo carries from the process that made it to the others.
struct Root {
  char magic[8];
  int32_t pid, file;
  uint64_t nonce;
};
static_assert(sizeof(Root) <= HCCL_ROOT_INFO_BYTES);
constexpr char kMagic[8] = "softnpu";
constexpr uint64_t kPage = 4096;

std::mutex mutex;
std::set<Comm*> comms;

uint64_t round_up(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
uint64_t record_bytes(uint64_t n) { return sizeof(Record) + n * (sizeof(Segment) + sizeof(uint64_t)); }
uint64_t records_at() { return round_up(sizeof(Header)); }
uint64_t slots_at(uint64_t n) { return records_at() + round_up(n * record_bytes(n)); }
uint64_t mailboxes_at(uint64_t n) { return slots_at(n) + n * kSlotBytes; }
uint64_t total_bytes(uint64_t n) { return mailboxes_at(n) + round_up(n * n * sizeof(Mailbox)); }

unsigned char* map_shared(int file, uint64_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return base == MAP_FAILED ? nullptr : static_cast<unsigned char*>(base);
}

std::string system_error(const std::string& what) { return what + ": " + std::strerror(errno); }

}  // namespace

HcclResult failed(HcclResult code, const std::string& message) {
  fail(ACL_ERROR_RT_PARAM_INVALID, message);
  return code;
}

HcclResult make_root(HcclRootInfo* info) {
  const int file = memfd_create("softnpu-hccl", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(kPage)) != 0) {
    return failed(HCCL_E_SYSCALL, system_error("HcclGetRootInfo: shared memory"));
  }
  std::random_device random;
  const uint64_t nonce = (static_cast<uint64_t>(random()) << 32 | random()) | 1;
  unsigned char* base = map_shared(file, kPage);
  if (base == nullptr) return failed(HCCL_E_SYSCALL, system_error("HcclGetRootInfo: mmap"));
  reinterpret_cast<Header*>(base)->nonce = nonce;
  munmap(base, kPage);
  Root root{{}, getpid(), file, nonce};
  std::memcpy(root.magic, kMagic, sizeof kMagic);
  std::memset(info->internal, 0, sizeof info->internal);
  std::memcpy(info->internal, &root, sizeof root);
  return HCCL_SUCCESS;
}

HcclResult Comm::create(uint32_t ranks, const HcclRootInfo& info, uint32_t rank, const char* name, double timeout_s,
                        Comm** made) {
  Root root;
  std::memcpy(&root, info.internal, sizeof root);
  if (std::memcmp(root.magic, kMagic, sizeof kMagic) != 0) {
    return failed(HCCL_E_PARA, "communicator: the root information is not from this HcclGetRootInfo");
  }
  if (rank >= ranks) return failed(HCCL_E_PARA, "communicator: rank is not below the number of ranks");
  const std::string path = "/proc/" + std::to_string(root.pid) + "/fd/" + std::to_string(root.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) {
    return failed(HCCL_E_NOT_FOUND, system_error("communicator: process " + std::to_string(root.pid) +
                                                 ", which made the root information, is gone"));
  }
  auto comm = std::unique_ptr<Comm>(new Comm);
  comm->ranks_ = ranks;
  comm->rank_ = rank;
  comm->timeout_s_ = timeout_s;
  comm->bytes_ = total_bytes(ranks);
  const bool sized = ftruncate(file, static_cast<off_t>(comm->bytes_)) == 0;
  comm->base_ = sized ? map_shared(file, comm->bytes_) : nullptr;
  close(file);
  if (comm->base_ == nullptr) return failed(HCCL_E_SYSCALL, system_error("communicator: mapping shared memory"));
  Header& header = comm->header();
  if (header.nonce != root.nonce) return failed(HCCL_E_PARA, "communicator: the root information is stale");
  uint32_t none = 0;
  if (!header.ranks.compare_exchange_strong(none, ranks) && none != ranks) {
    return failed(HCCL_E_PARA, "communicator: rank " + std::to_string(rank) + " says " + std::to_string(ranks) +
                                   " ranks, another says " + std::to_string(none));
  }
  int32_t nobody = 0;
  if (!comm->record(rank).pid.compare_exchange_strong(nobody, getpid())) {
    return failed(HCCL_E_PARA, "communicator: two processes say they are rank " + std::to_string(rank));
  }
  comm->name_ = name != nullptr && *name != '\0' ? name : "softnpu_" + std::to_string(root.nonce);
  ++header.attached;
  const HcclResult result = comm->wait_until("making the communicator", [&] { return header.attached == ranks; });
  // The maker's own descriptor is needed until everybody has opened it, and no longer.
  if (root.pid == getpid()) close(root.file);
  if (result != HCCL_SUCCESS) return result;
  *made = comm.release();
  const std::lock_guard<std::mutex> lock(mutex);
  comms.insert(*made);
  return HCCL_SUCCESS;
}

Comm::~Comm() {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    comms.erase(this);
  }
  if (base_ != nullptr) munmap(base_, bytes_);
}

Record& Comm::record(uint32_t rank) const {
  return *reinterpret_cast<Record*>(base_ + records_at() + rank * record_bytes(ranks_));
}
Segment* Comm::sends(uint32_t rank) const { return reinterpret_cast<Segment*>(&record(rank) + 1); }
uint64_t* Comm::receives(uint32_t rank) const { return reinterpret_cast<uint64_t*>(sends(rank) + ranks_); }
unsigned char* Comm::slot(uint32_t rank) const { return base_ + slots_at(ranks_) + rank * kSlotBytes; }
Mailbox& Comm::mailbox(uint32_t from, uint32_t to) const {
  return reinterpret_cast<Mailbox*>(base_ + mailboxes_at(ranks_))[from * ranks_ + to];
}

HcclResult Comm::check(const char* what, double deadline) {
  const std::string here =
      std::string(what) + " in " + name_ + ", rank " + std::to_string(rank_) + " of " + std::to_string(ranks_) + ": ";
  if (header().broken != 0) {
    return failed(static_cast<HcclResult>(header().broken.load()),
                  here + "rank " + std::to_string(header().broken_by) + " failed or gave up");
  }
  for (uint32_t r = 0; r < ranks_; ++r) {
    const int32_t pid = record(r).pid;
    if (pid != 0 && !alive(pid)) {
      return give_up(HCCL_E_REMOTE,
                     here + "rank " + std::to_string(r) + " (process " + std::to_string(pid) + ") has died");
    }
  }
  if (now_s() < deadline) return HCCL_SUCCESS;
  std::ostringstream out;
  out << here << "no answer within " << timeout_s_ << " s; last calls:";
  for (uint32_t r = 0; r < ranks_; ++r) {
    out << " rank " << r << ": " << (record(r).pid == 0 ? "never came" : "call " + std::to_string(record(r).sequence));
  }
  return give_up(HCCL_E_TIMEOUT, out.str());
}

HcclResult Comm::give_up_after(HcclResult why) {
  int32_t fine = 0;
  if (header().broken == 0) header().broken_by = static_cast<int32_t>(rank_);
  header().broken.compare_exchange_strong(fine, why);
  return why;
}

HcclResult Comm::give_up(HcclResult why, const std::string& message) {
  give_up_after(why);
  return failed(why, message);
}

HcclResult Comm::barrier(const char* what) {
  Header& h = header();
  const uint32_t generation = h.generation;
  if (h.arrived.fetch_add(1) + 1 == ranks_) {
    h.arrived = 0;
    ++h.generation;
    return HCCL_SUCCESS;
  }
  return wait_until(what, [&] { return h.generation != generation; });
}

Comm* of(HcclComm handle) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto* comm = static_cast<Comm*>(handle);
  return comms.count(comm) > 0 ? comm : nullptr;
}

Comm* find(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (Comm* comm : comms) {
    if (comm->name() == name) return comm;
  }
  return nullptr;
}

}  // namespace softnpu::hccl

using namespace softnpu::hccl;

namespace {

double default_timeout_s() {
  const char* hccl = std::getenv("HCCL_EXEC_TIMEOUT");
  const double seconds = hccl != nullptr ? std::atof(hccl) : 0;
  return seconds > 0 ? seconds : softnpu::settings().collective_timeout_s;
}

}  // namespace

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo* info) { return make_root(info); }
HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo* root, uint32_t rank,
                                      const HcclCommConfig* config, HcclComm* comm) {
  Comm* made = nullptr;
  const char* name = config == nullptr ? nullptr : config->hcclCommName;
  const HcclResult result = Comm::create(ranks, *root, rank, name, default_timeout_s(), &made);
  *comm = made;
  return result;
}
HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* root, uint32_t rank, HcclComm* comm) {
  return HcclCommInitRootInfoConfig(ranks, root, rank, nullptr, comm);
}
HcclResult HcclCommDestroy(HcclComm handle) {
  Comm* comm = of(handle);
  if (comm == nullptr) return failed(HCCL_E_PARA, "HcclCommDestroy: no such communicator");
  delete comm;
  return HCCL_SUCCESS;
}
HcclResult HcclGetCommName(HcclComm handle, char* name) {
  const Comm* comm = of(handle);
  if (comm == nullptr) return failed(HCCL_E_PARA, "HcclGetCommName: no such communicator");
  std::strncpy(name, comm->name().c_str(), COMM_NAME_MAX_LENGTH - 1);
  name[COMM_NAME_MAX_LENGTH - 1] = '\0';
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankSize(HcclComm handle, uint32_t* ranks) {
  const Comm* comm = of(handle);
  if (comm == nullptr) return failed(HCCL_E_PARA, "HcclGetRankSize: no such communicator");
  *ranks = comm->ranks();
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankId(HcclComm handle, uint32_t* rank) {
  const Comm* comm = of(handle);
  if (comm == nullptr) return failed(HCCL_E_PARA, "HcclGetRankId: no such communicator");
  *rank = comm->rank();
  return HCCL_SUCCESS;
}
HcclResult HcclGetCommAsyncError(HcclComm handle, HcclResult* error) {
  const Comm* comm = of(handle);
  if (comm == nullptr) return failed(HCCL_E_PARA, "HcclGetCommAsyncError: no such communicator");
  // Errors are returned by the calls that meet them. One reported here too would have torch_npu's watchdog end the
  // process before Python sees the exception.
  *error = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}
uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }
HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }
HcclResult HcclGetConfig(HcclConfig, HcclConfigValue* value) {
  value->value = 1;  // deterministic
  return HCCL_SUCCESS;
}
const char* HcclGetErrorString(HcclResult code) {
  static const char* const names[] = {"success",           "parameter error", "empty pointer", "memory error",
                                      "internal error",    "not supported",   "not found",     "unavailable",
                                      "system call error", "timeout"};
  return code < 10 ? names[code] : "HCCL error";
}

}  // extern "C"
