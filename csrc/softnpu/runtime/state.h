// State of the emulated runtime that its source files share.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/softnpu.h"

namespace softnpu {

// What a capture recorded: tasks in the order they were submitted, from all streams that joined it.
struct Graph {
  struct Entry {
    std::string name;
    Task task;
  };
  std::vector<Entry> tasks;
  uint32_t id = 0;
};

struct Stream {
  int32_t id;
  int32_t device;
  std::shared_ptr<Graph> capture;  // being captured into this graph
  bool origin = false;             // the stream on which that capture began
};

struct Event {
  uint64_t time_ns = 0;
  bool recorded = false;
  std::shared_ptr<Graph> capture;  // recorded on a stream that was being captured
};

// The stream behind a handle; null is the current device's default stream. Null where the handle is none of ours.
Stream* stream_of(aclrtStream handle);

// For blocking calls: counts it, and fails with `name` where this thread is capturing: a synchronous call cannot be
// part of a graph.
aclError refuse_in_capture(const char* name);

// Ends the part of every stream in the capture into `graph`.
void leave_capture(const std::shared_ptr<Graph>& graph);

// Memory of a device by pieces (virtual_memory.cpp): its account, and what is mapped where.
aclError reserve_bytes(int32_t device, uint64_t bytes);
void return_bytes(int32_t device, uint64_t bytes);
void add_piece(void* start, uint64_t bytes, int32_t device);
uint64_t remove_piece(void* start);  // its bytes; 0: none begins there

bool peers_enabled(int32_t device, int32_t peer);

}  // namespace softnpu
