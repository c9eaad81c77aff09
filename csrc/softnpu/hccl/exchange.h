// Every collective is one exchange: each rank names what of its send buffer goes to whom, and where what it gets goes.
#pragma once

#include <vector>

#include "hccl/comm.h"

namespace softnpu::hccl {

struct Exchange {
  const char* name;
  int operation;  // HcclCMDType: must agree on all ranks, like type, reduce and root
  HcclDataType type;
  const void* send;
  std::vector<Segment> to;  // by destination rank
  void* receive;
  std::vector<Segment> from;  // by source rank
  int reduce = -1;            // an HcclReduceOp: what comes from all ranks is reduced into receive + from[0].offset
  uint32_t root = 0;
  bool host = false;  // the buffers are host memory: of an operator's own
};

// Blocks until all ranks take part. Calls that do not match are found on every rank, before anything is written.
HcclResult run(Comm& comm, const Exchange& exchange);

}  // namespace softnpu::hccl
