#include "hccl/exchange.h"

#include <algorithm>
#include <cstring>
#include <sstream>

#include "hccl/reduce.h"

namespace softnpu::hccl {
namespace {

uint64_t extent_of(const std::vector<Segment>& segments) {
  uint64_t extent = 0;
  for (const Segment& s : segments) {
    if (s.bytes > 0) extent = std::max(extent, s.offset + s.bytes);
  }
  return extent;
}

void publish(Comm& comm, const Exchange& x) {
  Record& mine = comm.record(comm.rank());
  mine.operation = x.operation;
  mine.type = x.type;
  mine.reduce = x.reduce;
  mine.root = x.root;
  mine.extent = extent_of(x.to);
  mine.sequence = ++comm.sequence;
  std::copy(x.to.begin(), x.to.end(), comm.sends(comm.rank()));
  for (uint32_t s = 0; s < comm.ranks(); ++s) comm.receives(comm.rank())[s] = x.from[s].bytes;
}

// The first disagreement between what ranks do, or nothing. All ranks see the same records, so all find the same.
std::string mismatch(const Comm& comm) {
  std::ostringstream out;
  const Record& first = comm.record(0);
  for (uint32_t r = 1; r < comm.ranks(); ++r) {
    const Record& other = comm.record(r);
    const auto differ = [&](const char* what, int64_t a, int64_t b) {
      out << what << " is " << a << " on rank 0 and " << b << " on rank " << r;
      return out.str();
    };
    if (first.operation != other.operation) return differ("operation (HcclCMDType)", first.operation, other.operation);
    if (first.type != other.type) return differ("data type (HcclDataType)", first.type, other.type);
    if (first.reduce != other.reduce) return differ("reduction (HcclReduceOp)", first.reduce, other.reduce);
    if (first.root != other.root) return differ("root", first.root, other.root);
  }
  for (uint32_t s = 0; s < comm.ranks(); ++s) {
    for (uint32_t d = 0; d < comm.ranks(); ++d) {
      const uint64_t sent = comm.sends(s)[d].bytes, expected = comm.receives(d)[s];
      if (sent == expected) continue;
      out << "rank " << s << " sends " << sent << " bytes to rank " << d << ", which expects " << expected;
      return out.str();
    }
  }
  return "";
}

// Copies or reduces this rank's part of round `round`: the bytes [begin, end) of every rank's send buffer.
bool take(const Comm& comm, const Exchange& x, uint64_t round) {
  const uint64_t begin = round * kSlotBytes, end = begin + kSlotBytes;
  std::vector<const void*> sources;
  for (uint32_t s = 0; s < comm.ranks(); ++s) {
    const Segment part = comm.sends(s)[comm.rank()];
    const uint64_t first = std::max(begin, part.offset), last = std::min(end, part.offset + part.bytes);
    if (first >= last) continue;
    const unsigned char* source = comm.slot(s) + (first - begin);
    unsigned char* target = static_cast<unsigned char*>(x.receive) + x.from[s].offset + (first - part.offset);
    if (x.reduce < 0) {
      std::memcpy(target, source, last - first);
      continue;
    }
    sources.push_back(source);
    if (sources.size() < comm.ranks()) continue;
    const auto op = static_cast<HcclReduceOp>(x.reduce);
    if (!reduce(x.type, op, sources, target, (last - first) / size_of(x.type))) return false;
  }
  return true;
}

HcclResult check_buffer(const Exchange& x, const char* which, const void* address, uint64_t bytes) {
  if (bytes == 0 || x.host) return HCCL_SUCCESS;
  std::string problem;
  if (owner(address, bytes, &problem) < 0) problem = "no device memory";
  return problem.empty() ? HCCL_SUCCESS : failed(HCCL_E_PARA, std::string(x.name) + "'s " + which + ": " + problem);
}

HcclResult injected(Comm& comm, const Exchange& x) {
  switch (next_collective_fault(static_cast<int>(comm.rank()))) {
    case Fault::fail:
      return comm.give_up(HCCL_E_INTERNAL, std::string(x.name) + " fails by ASCEND_MOE_SOFTNPU_FAULTS");
    case Fault::timeout:
      return comm.give_up(HCCL_E_TIMEOUT, std::string(x.name) + " times out by ASCEND_MOE_SOFTNPU_FAULTS");
    default:
      return HCCL_SUCCESS;
  }
}

}  // namespace

HcclResult run(Comm& comm, const Exchange& x) {
  if (size_of(x.type) == 0) return failed(HCCL_E_PARA, std::string(x.name) + ": unknown data type");
  const uint64_t extent = extent_of(x.to);
  if (const HcclResult bad = check_buffer(x, "send buffer", x.send, extent)) return comm.give_up_after(bad);
  if (const HcclResult bad = check_buffer(x, "receive buffer", x.receive, extent_of(x.from)))
    return comm.give_up_after(bad);
  if (const HcclResult bad = injected(comm, x)) return bad;

  publish(comm, x);
  uint64_t rounds = 1;
  for (uint64_t round = 0; round < rounds; ++round) {
    const uint64_t begin = round * kSlotBytes;
    if (begin < extent) {
      std::memcpy(comm.slot(comm.rank()), static_cast<const unsigned char*>(x.send) + begin,
                  std::min(kSlotBytes, extent - begin));
    }
    if (const HcclResult bad = comm.barrier(x.name)) return bad;
    if (round == 0) {
      const std::string difference = mismatch(comm);
      if (!difference.empty()) {
        return comm.give_up(HCCL_E_PARA, std::string(x.name) + " in " + comm.name() + ": " + difference);
      }
      for (uint32_t r = 0; r < comm.ranks(); ++r) {
        rounds = std::max(rounds, (comm.record(r).extent + kSlotBytes - 1) / kSlotBytes);
      }
    }
    if (!take(comm, x, round)) {
      return comm.give_up(HCCL_E_NOT_SUPPORT, std::string(x.name) + ": HCCL cannot reduce data type " +
                                                  std::to_string(x.type) + " by operation " + std::to_string(x.reduce));
    }
    if (const HcclResult bad = comm.barrier(x.name)) return bad;
  }
  return HCCL_SUCCESS;
}

}  // namespace softnpu::hccl
