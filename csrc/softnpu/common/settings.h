// What the environment asks for, read once per process. The variables are documented in docs/softnpu.md.
#pragma once

#include <cstdint>
#include <string>

namespace softnpu {

struct Settings {
  std::string soc;              // ASCEND_MOE_SOFTNPU_SOC: "A2", "A3" or a SoC's full name; here always the full name
  uint32_t devices;             // ASCEND_MOE_SOFTNPU_DEVICES
  uint64_t memory;              // ASCEND_MOE_SOFTNPU_MEMORY: bytes of each device ("4G", "512M" or a plain number)
  double collective_timeout_s;  // ASCEND_MOE_SOFTNPU_TIMEOUT: seconds until a collective's missing rank is an error
  bool poison;                  // ASCEND_MOE_SOFTNPU_POISON: outputs start as NaN or 0xAA
  std::string faults;           // ASCEND_MOE_SOFTNPU_FAULTS
};

const Settings& settings();

}  // namespace softnpu
