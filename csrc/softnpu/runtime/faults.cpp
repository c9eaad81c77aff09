// Faults on demand. ASCEND_MOE_SOFTNPU_FAULTS is a comma-separated list of
//   collective_fail@N | collective_timeout@N | collective_slow@N | oom@N
// with optional ":rank=R" (collectives only: the rank in its communicator) and ":ms=M" (collective_slow only). N counts
// this process's collectives, or its device allocations, from 1; "N+" means the N-th and all later ones.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <vector>

#include "common/settings.h"
#include "common/softnpu.h"

namespace softnpu {
namespace {

struct Spec {
  std::string kind;
  uint64_t at = 0;
  bool onwards = false;
  int rank = -1;
  int milliseconds = 1000;

  bool hits(uint64_t count) const { return onwards ? count >= at : count == at; }
};

[[noreturn]] void refuse(const std::string& item) {
  throw std::runtime_error("softnpu: ASCEND_MOE_SOFTNPU_FAULTS has '" + item +
                           "'; wanted collective_fail@N, collective_timeout@N, collective_slow@N or oom@N, with "
                           ":rank=R and :ms=M after it, comma-separated");
}

int number(const std::string& text, const std::string& item) {
  char* end = nullptr;
  const long value = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || value < 0) refuse(item);
  return static_cast<int>(value);
}

Spec parse(const std::string& item) {
  Spec spec;
  const size_t sign = item.find('@');
  if (sign == std::string::npos) refuse(item);
  spec.kind = item.substr(0, sign);
  if (spec.kind != "collective_fail" && spec.kind != "collective_timeout" && spec.kind != "collective_slow" &&
      spec.kind != "oom") {
    refuse(item);
  }
  std::stringstream rest(item.substr(sign + 1));
  std::string part;
  std::getline(rest, part, ':');
  if (!part.empty() && part.back() == '+') {
    spec.onwards = true;
    part.pop_back();
  }
  spec.at = number(part, item);
  while (std::getline(rest, part, ':')) {
    if (part.rfind("rank=", 0) == 0) {
      spec.rank = number(part.substr(5), item);
    } else if (part.rfind("ms=", 0) == 0) {
      spec.milliseconds = number(part.substr(3), item);
    } else {
      refuse(item);
    }
  }
  return spec;
}

const std::vector<Spec>& specs() {
  static const std::vector<Spec> all = [] {
    std::vector<Spec> parsed;
    std::stringstream list(settings().faults);
    std::string item;
    while (std::getline(list, item, ',')) parsed.push_back(parse(item));
    return parsed;
  }();
  return all;
}

}  // namespace

void check_faults() { specs(); }

Fault next_collective_fault(int rank) {
  static std::atomic<uint64_t> collectives{0};
  const uint64_t count = ++collectives;
  for (const Spec& spec : specs()) {
    if (spec.kind == "oom" || !spec.hits(count) || (spec.rank >= 0 && spec.rank != rank)) continue;
    if (spec.kind == "collective_fail") return Fault::fail;
    if (spec.kind == "collective_timeout") return Fault::timeout;
    std::this_thread::sleep_for(std::chrono::milliseconds(spec.milliseconds));
  }
  return Fault::none;
}

bool next_allocation_fails() {
  static std::atomic<uint64_t> allocations{0};
  const uint64_t count = ++allocations;
  for (const Spec& spec : specs()) {
    if (spec.kind == "oom" && spec.hits(count)) return true;
  }
  return false;
}

}  // namespace softnpu
