// Streams run their tasks at once, in the thread that submits them; events are points in that order.
#include <chrono>
#include <map>
#include <mutex>
#include <set>

#include "common/softnpu.h"
#include "runtime/state.h"

namespace softnpu {
namespace {

std::mutex mutex;
std::set<Stream*> streams;
std::map<int32_t, Stream*> defaults;
int32_t next_id = 0;

Stream* create(int32_t device) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto* stream = new Stream{next_id++, device, nullptr};
  streams.insert(stream);
  return stream;
}

uint64_t now_ns() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

aclError unknown_stream(const char* name) {
  return fail(ACL_ERROR_RT_STREAM_CONTEXT, std::string(name) + ": no such stream (destroyed, or never created)");
}

aclError refuse_captured(aclrtStream handle, const char* name) {
  count(name);
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return unknown_stream(name);
  if (stream->capture == nullptr) return ACL_SUCCESS;
  return fail(ACL_ERROR_RT_STREAM_CAPTURED, std::string(name) + " of a stream that is being captured into a graph");
}

}  // namespace

Stream* stream_of(aclrtStream handle) {
  if (handle == nullptr) {
    const int32_t device = current_device();
    {
      const std::lock_guard<std::mutex> lock(mutex);
      const auto found = defaults.find(device);
      if (found != defaults.end()) return found->second;
    }
    Stream* stream = create(device);
    const std::lock_guard<std::mutex> lock(mutex);
    return defaults.emplace(device, stream).first->second;
  }
  auto* stream = static_cast<Stream*>(handle);
  const std::lock_guard<std::mutex> lock(mutex);
  return streams.count(stream) > 0 ? stream : nullptr;
}

int32_t device_of(aclrtStream handle) {
  const Stream* stream = stream_of(handle);
  return stream == nullptr ? -1 : stream->device;
}

bool capturing(aclrtStream handle) {
  const Stream* stream = stream_of(handle);
  return stream != nullptr && stream->capture != nullptr;
}

void leave_capture(const std::shared_ptr<Graph>& graph) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (Stream* stream : streams) {
    if (stream->capture == graph) stream->capture = nullptr;
  }
}

aclError submit(aclrtStream handle, const char* name, Task task) {
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return unknown_stream(name);
  count(name);
  if (stream->capture == nullptr) return task();
  stream->capture->tasks.push_back({name, std::move(task)});
  return ACL_SUCCESS;
}

}  // namespace softnpu

using namespace softnpu;

extern "C" {

aclError aclrtCreateStream(aclrtStream* stream) {
  *stream = create(current_device());
  return ACL_SUCCESS;
}
aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) { return aclrtCreateStream(stream); }
aclError aclrtDestroyStream(aclrtStream handle) {
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return unknown_stream("aclrtDestroyStream");
  const std::lock_guard<std::mutex> lock(softnpu::mutex);
  streams.erase(stream);
  delete stream;
  return ACL_SUCCESS;
}
aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
aclError aclrtSynchronizeStream(aclrtStream stream) { return refuse_captured(stream, "aclrtSynchronizeStream"); }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) {
  return refuse_captured(stream, "aclrtSynchronizeStreamWithTimeout");
}
aclError aclrtSynchronizeDevice() { return refuse_in_capture("aclrtSynchronizeDevice"); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return refuse_in_capture("aclrtSynchronizeDevice"); }
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  *status = ACL_STREAM_STATUS_COMPLETE;
  return refuse_captured(stream, "aclrtStreamQuery");
}
aclError aclrtStreamGetId(aclrtStream handle, int32_t* id) {
  const Stream* stream = stream_of(handle);
  if (stream == nullptr) return unknown_stream("aclrtStreamGetId");
  *id = stream->id;
  return ACL_SUCCESS;
}

aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) {
  *event = new Event;
  return ACL_SUCCESS;
}
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }
aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<Event*>(event);
  return ACL_SUCCESS;
}
aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
  const Stream* stream = stream_of(stream_handle);
  if (stream == nullptr) return unknown_stream("aclrtRecordEvent");
  auto* event = static_cast<Event*>(handle);
  event->time_ns = now_ns();
  event->recorded = true;
  event->capture = stream->capture;
  return ACL_SUCCESS;
}
aclError aclrtResetEvent(aclrtEvent event, aclrtStream) {
  static_cast<Event*>(event)->recorded = false;
  return ACL_SUCCESS;
}
// A stream that waits for an event of a captured stream joins the capture.
aclError aclrtStreamWaitEvent(aclrtStream handle, aclrtEvent event_handle) {
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return unknown_stream("aclrtStreamWaitEvent");
  const auto* event = static_cast<Event*>(event_handle);
  if (event->capture != nullptr && stream->capture == nullptr) stream->capture = event->capture;
  return ACL_SUCCESS;
}
aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  if (static_cast<Event*>(handle)->capture != nullptr) {
    return fail(ACL_ERROR_RT_STREAM_CAPTURED, "aclrtSynchronizeEvent of an event that belongs to a capture");
  }
  return ACL_SUCCESS;
}
aclError aclrtQueryEventStatus(aclrtEvent, aclrtEventRecordedStatus* status) {
  *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtEventElapsedTime(float* ms, aclrtEvent start, aclrtEvent end) {
  const auto *a = static_cast<Event*>(start), *b = static_cast<Event*>(end);
  if (!a->recorded || !b->recorded) {
    return fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "elapsed time of an event that was not recorded");
  }
  *ms = static_cast<float>(static_cast<int64_t>(b->time_ns - a->time_ns)) / 1e6f;
  return ACL_SUCCESS;
}
aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* microseconds) {
  *microseconds = static_cast<Event*>(event)->time_ns / 1000;
  return ACL_SUCCESS;
}

aclError aclrtLaunchCallback(aclrtCallback function, void* data, aclrtCallbackBlockType, aclrtStream stream) {
  return submit(stream, "aclrtLaunchCallback", [=] {
    function(data);
    return ACL_SUCCESS;
  });
}
aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* data) {
  return submit(stream, "aclrtLaunchHostFunc", [=] {
    function(data);
    return ACL_SUCCESS;
  });
}

}  // extern "C"
