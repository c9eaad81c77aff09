// HCCL's collectives, as exchanges. Counts are in elements, as in HCCL's interface.
#include "hccl/exchange.h"
#include "hccl/reduce.h"
#include "third_party/hccl/inc/hccl/hccl.h"

using namespace softnpu;
using namespace softnpu::hccl;

namespace {

using Segments = std::vector<Segment>;

Segments nothing(const Comm& c) { return Segments(c.ranks(), {0, 0}); }
Segments same_to_all(const Comm& c, uint64_t bytes) { return Segments(c.ranks(), {0, bytes}); }
Segments in_rank_order(const Comm& c, uint64_t bytes) {
  Segments s;
  for (uint32_t r = 0; r < c.ranks(); ++r) s.push_back({r * bytes, bytes});
  return s;
}
Segments listed(const Comm& c, const void* counts, const void* offsets, uint64_t element) {
  Segments s;
  for (uint32_t r = 0; r < c.ranks(); ++r) {
    s.push_back(
        {static_cast<const uint64_t*>(offsets)[r] * element, static_cast<const uint64_t*>(counts)[r] * element});
  }
  return s;
}
Segments only(const Comm& c, uint32_t rank, uint64_t bytes) {
  Segments s = nothing(c);
  s[rank] = {0, bytes};
  return s;
}

// Makes the exchange from the communicator and submits it to the stream.
template <typename Make>
HcclResult submit_exchange(const char* name, HcclComm handle, aclrtStream stream, Make make) {
  Comm* comm = of(handle);
  if (comm == nullptr) return failed(HCCL_E_PARA, std::string(name) + ": no such communicator (destroyed?)");
  Exchange exchange = make(*comm);
  exchange.name = name;
  HcclResult result = HCCL_SUCCESS;
  const aclError submitted = submit(stream, name, [=, &result, now = !capturing(stream)]() -> aclError {
    const HcclResult ran = run(*comm, exchange);
    if (now) result = ran;  // a replay comes when `result` is gone
    return ran == HCCL_SUCCESS ? ACL_SUCCESS : ACL_ERROR_RT_FAILURE;
  });
  return result != HCCL_SUCCESS ? result : submitted == ACL_SUCCESS ? HCCL_SUCCESS : HCCL_E_RUNTIME;
}

}  // namespace

extern "C" {

HcclResult HcclAllReduce(void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                         aclrtStream stream) {
  const uint64_t bytes = count * size_of(type);
  return submit_exchange("HcclAllReduce", comm, stream, [=](const Comm& c) {
    return Exchange{"", HCCL_CMD_ALLREDUCE, type, send, same_to_all(c, bytes), receive, same_to_all(c, bytes), op};
  });
}

HcclResult HcclReduce(void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
                      HcclComm comm, aclrtStream stream) {
  const uint64_t bytes = count * size_of(type);
  return submit_exchange("HcclReduce", comm, stream, [=](const Comm& c) {
    auto from = c.rank() == root ? same_to_all(c, bytes) : nothing(c);
    return Exchange{"", HCCL_CMD_REDUCE, type, send, only(c, root, bytes), receive, from, op, root};
  });
}

HcclResult HcclReduceScatter(void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp op,
                             HcclComm comm, aclrtStream stream) {
  const uint64_t bytes = count * size_of(type);
  return submit_exchange("HcclReduceScatter", comm, stream, [=](const Comm& c) {
    return Exchange{"",      HCCL_CMD_REDUCE_SCATTER, type, send, in_rank_order(c, bytes),
                    receive, same_to_all(c, bytes),   op};
  });
}

HcclResult HcclReduceScatterV(void* send, const void* counts, const void* offsets, void* receive, uint64_t count,
                              HcclDataType type, HcclReduceOp op, HcclComm comm, aclrtStream stream) {
  const uint64_t bytes = count * size_of(type);
  return submit_exchange("HcclReduceScatterV", comm, stream, [=](const Comm& c) {
    return Exchange{"",      HCCL_CMD_REDUCE_SCATTER_V, type, send, listed(c, counts, offsets, size_of(type)),
                    receive, same_to_all(c, bytes),     op};
  });
}

HcclResult HcclAllGather(void* send, void* receive, uint64_t count, HcclDataType type, HcclComm comm,
                         aclrtStream stream) {
  const uint64_t bytes = count * size_of(type);
  return submit_exchange("HcclAllGather", comm, stream, [=](const Comm& c) {
    return Exchange{"", HCCL_CMD_ALLGATHER, type, send, same_to_all(c, bytes), receive, in_rank_order(c, bytes)};
  });
}

HcclResult HcclAllGatherV(void* send, uint64_t count, void* receive, const void* counts, const void* offsets,
                          HcclDataType type, HcclComm comm, aclrtStream stream) {
  const uint64_t bytes = count * size_of(type);
  return submit_exchange("HcclAllGatherV", comm, stream, [=](const Comm& c) {
    return Exchange{"",
                    HCCL_CMD_ALLGATHER_V,
                    type,
                    send,
                    same_to_all(c, bytes),
                    receive,
                    listed(c, counts, offsets, size_of(type))};
  });
}

HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm,
                         aclrtStream stream) {
  const uint64_t bytes = count * size_of(type);
  return submit_exchange("HcclBroadcast", comm, stream, [=](const Comm& c) {
    const bool sends = c.rank() == root;
    auto to = sends ? same_to_all(c, bytes) : nothing(c);
    return Exchange{"", HCCL_CMD_BROADCAST, type, buffer, to, buffer, only(c, root, bytes), -1, root};
  });
}

HcclResult HcclScatter(void* send, void* receive, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm,
                       aclrtStream stream) {
  const uint64_t bytes = count * size_of(type);
  return submit_exchange("HcclScatter", comm, stream, [=](const Comm& c) {
    auto to = c.rank() == root ? in_rank_order(c, bytes) : nothing(c);
    return Exchange{"", HCCL_CMD_SCATTER, type, send, to, receive, only(c, root, bytes), -1, root};
  });
}

HcclResult HcclAlltoAll(const void* send, uint64_t send_count, HcclDataType send_type, const void* receive,
                        uint64_t receive_count, HcclDataType receive_type, HcclComm comm, aclrtStream stream) {
  const uint64_t sent = send_count * size_of(send_type), received = receive_count * size_of(receive_type);
  return submit_exchange("HcclAlltoAll", comm, stream, [=](const Comm& c) {
    return Exchange{"",
                    HCCL_CMD_ALLTOALL,
                    send_type,
                    send,
                    in_rank_order(c, sent),
                    const_cast<void*>(receive),
                    in_rank_order(c, received)};
  });
}

HcclResult HcclAlltoAllV(const void* send, const void* send_counts, const void* send_offsets, HcclDataType send_type,
                         const void* receive, const void* receive_counts, const void* receive_offsets,
                         HcclDataType receive_type, HcclComm comm, aclrtStream stream) {
  return submit_exchange("HcclAlltoAllV", comm, stream, [=](const Comm& c) {
    return Exchange{"",
                    HCCL_CMD_ALLTOALLV,
                    send_type,
                    send,
                    listed(c, send_counts, send_offsets, size_of(send_type)),
                    const_cast<void*>(receive),
                    listed(c, receive_counts, receive_offsets, size_of(receive_type))};
  });
}

HcclResult HcclAlltoAllVC(const void* send, const void* matrix, HcclDataType type, const void* receive, HcclDataType,
                          HcclComm comm, aclrtStream stream) {
  return submit_exchange("HcclAlltoAllVC", comm, stream, [=](const Comm& c) {
    const auto* counts = static_cast<const uint64_t*>(matrix);  // [n, n]: from row to column
    Segments to, from;
    uint64_t sent = 0, received = 0;
    for (uint32_t r = 0; r < c.ranks(); ++r) {
      const uint64_t out = counts[c.rank() * c.ranks() + r] * size_of(type);
      const uint64_t in = counts[r * c.ranks() + c.rank()] * size_of(type);
      to.push_back({sent, out});
      from.push_back({received, in});
      sent += out;
      received += in;
    }
    return Exchange{"", HCCL_CMD_ALLTOALLVC, type, send, to, const_cast<void*>(receive), from};
  });
}

HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
  return submit_exchange("HcclBarrier", comm, stream, [=](const Comm& c) {
    return Exchange{"", HCCL_CMD_BARRIER, HCCL_DATA_TYPE_INT8, nullptr, nothing(c), nullptr, nothing(c)};
  });
}

}  // extern "C"
