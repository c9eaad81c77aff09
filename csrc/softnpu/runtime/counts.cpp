// How often each kind of device work was submitted, and each blocking call made: the host work of a program, counted.
#include <map>
#include <mutex>
#include <sstream>

#include "common/softnpu.h"

namespace softnpu {
namespace {
std::mutex mutex;
std::map<std::string, uint64_t> counts;
}  // namespace

void count(const char* name) {
  const std::lock_guard<std::mutex> lock(mutex);
  ++counts[name];
}

std::string counts_text() {
  const std::lock_guard<std::mutex> lock(mutex);
  std::ostringstream out;
  for (const auto& [name, times] : counts) out << name << ' ' << times << '\n';
  return out.str();
}

void reset_counts() {
  const std::lock_guard<std::mutex> lock(mutex);
  counts.clear();
}

}  // namespace softnpu
