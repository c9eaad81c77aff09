// Waiting for other processes: a condition on shared memory, polled, with a deadline and a check that peers live.
#pragma once

#include <sched.h>
#include <sys/types.h>
#include <time.h>
#include <fstream>
#include <functional>
#include <string>

namespace softnpu::hccl {

inline double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

// Whether the process exists and is no zombie.
inline bool alive(pid_t pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(stat, line)) return false;
  const size_t end = line.rfind(')');
  return end != std::string::npos && line.size() > end + 2 && line[end + 2] != 'Z' && line[end + 2] != 'X';
}

// Polls `ready` until it holds: true. `check` is called now and then, and may end the wait with false.
inline bool wait(const std::function<bool()>& ready, const std::function<bool()>& check) {
  constexpr int kSpins = 200;  // yields before the first sleep: peers are mostly microseconds away
  constexpr double kCheckEvery = 0.2;
  double next_check = now_s() + kCheckEvery;
  for (long turn = 0; !ready(); ++turn) {
    if (turn < kSpins) {
      sched_yield();
      continue;
    }
    const timespec pause{0, turn < 2000 ? 50'000 : 500'000};
    nanosleep(&pause, nullptr);
    if (now_s() < next_check) continue;
    next_check = now_s() + kCheckEvery;
    if (!check()) return ready();
  }
  return true;
}

}  // namespace softnpu::hccl
