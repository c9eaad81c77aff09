// Graph capture: aclmdlRI records the tasks of the streams that take part, and runs them again on each execution.
// As on the device, nothing runs while it is recorded, addresses are fixed at capture and contents are read at replay.
#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>

#include "common/softnpu.h"
#include "runtime/state.h"

namespace softnpu {
namespace {

std::mutex mutex;
// Never destroyed: tasks hold tensors, and when the process ends, torch_npu's allocator is gone before this would be.
// A graph is left over whenever its NPUGraph lives that long, be it captured or failed.
auto& graphs = *new std::map<aclmdlRI, std::shared_ptr<Graph>>;
std::atomic<uint32_t> next_id{1};
std::atomic<int> captures{0};
thread_local int captures_here = 0;
thread_local aclmdlRICaptureMode mode_here = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

std::shared_ptr<Graph> graph_of(aclmdlRI handle) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = graphs.find(handle);
  return found == graphs.end() ? nullptr : found->second;
}

aclError unknown_graph(const char* name) {
  return fail(ACL_ERROR_RT_PARAM_INVALID, std::string(name) + ": no such graph (destroyed, or never captured)");
}

}  // namespace

bool any_capture() { return captures > 0; }

aclError refuse_in_capture(const char* name) {
  count(name);
  if (captures_here == 0 || mode_here == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return ACL_SUCCESS;
  return fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT,
              std::string(name) + " while this thread captures a graph: a synchronous call cannot be recorded");
}

}  // namespace softnpu

using namespace softnpu;

extern "C" {

aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return fail(ACL_ERROR_RT_STREAM_CONTEXT, "aclmdlRICaptureBegin: no such stream");
  if (stream->capture != nullptr) {
    return fail(ACL_ERROR_STREAM_CAPTURE_CONFLICT, "aclmdlRICaptureBegin: the stream is being captured already");
  }
  const auto graph = std::make_shared<Graph>();
  graph->id = next_id++;
  stream->capture = graph;
  stream->origin = true;
  mode_here = mode;
  ++captures_here;
  ++captures;
  const std::lock_guard<std::mutex> lock(softnpu::mutex);
  graphs[graph.get()] = graph;
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus* status, aclmdlRI* model) {
  const Stream* stream = stream_of(handle);
  if (stream == nullptr) return fail(ACL_ERROR_RT_STREAM_CONTEXT, "aclmdlRICaptureGetInfo: no such stream");
  const bool active = stream->capture != nullptr;
  if (status != nullptr) *status = active ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  if (model != nullptr) *model = stream->capture.get();
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* model) {
  Stream* stream = stream_of(handle);
  if (stream == nullptr || stream->capture == nullptr) {
    return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "aclmdlRICaptureEnd: the stream is not being captured");
  }
  if (!stream->origin) {
    return fail(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "aclmdlRICaptureEnd: the capture began on another stream");
  }
  const auto graph = stream->capture;
  stream->origin = false;
  leave_capture(graph);
  --captures_here;
  --captures;
  *model = graph.get();
  return ACL_SUCCESS;
}

aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream stream) {
  const auto graph = graph_of(model);
  if (graph == nullptr) return unknown_graph("aclmdlRIExecuteAsync");
  return submit(stream, "aclmdlRIExecuteAsync", [graph] {
    for (const Graph::Entry& entry : graph->tasks) {
      if (const aclError code = entry.task()) return code;
    }
    return ACL_SUCCESS;
  });
}

aclError aclmdlRIDestroy(aclmdlRI model) {
  const std::lock_guard<std::mutex> lock(softnpu::mutex);
  return graphs.erase(model) > 0 ? ACL_SUCCESS : unknown_graph("aclmdlRIDestroy");
}

aclError aclmdlRIGetId(aclmdlRI model, uint32_t* id) {
  const auto graph = graph_of(model);
  if (graph == nullptr) return unknown_graph("aclmdlRIGetId");
  *id = graph->id;
  return ACL_SUCCESS;
}

aclError aclmdlRIDebugPrint(aclmdlRI model) {
  const auto graph = graph_of(model);
  if (graph == nullptr) return unknown_graph("aclmdlRIDebugPrint");
  for (const Graph::Entry& entry : graph->tasks) std::printf("%s\n", entry.name.c_str());
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
  std::swap(*mode, mode_here);
  return ACL_SUCCESS;
}

}  // extern "C"
