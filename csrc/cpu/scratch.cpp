#include "scratch.h"

#include <memory>
#include <new>

namespace ascend_moe::cpu {

namespace {

constexpr std::align_val_t kLine{64};

struct Free {
  void operator()(char* p) const { ::operator delete(p, kLine); }
};

struct Buffer {
  std::unique_ptr<char, Free> data;
  int64_t bytes = 0;
};

}  // namespace

char* thread_scratch(Room room, int64_t bytes) {
  thread_local Buffer buffers[static_cast<int>(Room::count)];
  Buffer& buffer = buffers[static_cast<int>(room)];
  if (buffer.bytes < bytes) {
    buffer.data.reset();  // before the new one, so that both never exist at once
    buffer.bytes = 0;
    buffer.data.reset(static_cast<char*>(::operator new(static_cast<size_t>(bytes), kLine)));
    buffer.bytes = bytes;
  }
  return buffer.data.get();
}

}  // namespace ascend_moe::cpu
