#include "common/settings.h"

#include <cstdlib>
#include <stdexcept>

namespace softnpu {
namespace {

std::string text(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

[[noreturn]] void refuse(const char* name, const std::string& value, const char* wanted) {
  throw std::runtime_error(std::string("softnpu: ") + name + "=" + value + " is not " + wanted);
}

double number(const char* name, const std::string& value, const char* wanted) {
  char* end = nullptr;
  const double result = std::strtod(value.c_str(), &end);
  if (end == value.c_str() || result <= 0) refuse(name, value, wanted);
  const std::string unit = end;
  if (unit.empty()) return result;
  if (unit == "K") return result * (1ull << 10);
  if (unit == "M") return result * (1ull << 20);
  if (unit == "G") return result * (1ull << 30);
  refuse(name, value, wanted);
}

std::string soc_name(const std::string& name) {
  if (name == "A2") return "Ascend910B2";
  if (name == "A3") return "Ascend910_9391";
  if (name.rfind("Ascend", 0) == 0) return name;
  refuse("ASCEND_MOE_SOFTNPU_SOC", name, "A2, A3 or a SoC's full name, such as Ascend910B2");
}

Settings read() {
  Settings s;
  s.soc = soc_name(text("ASCEND_MOE_SOFTNPU_SOC", "A2"));
  const auto devices = text("ASCEND_MOE_SOFTNPU_DEVICES", "8");
  s.devices = static_cast<uint32_t>(number("ASCEND_MOE_SOFTNPU_DEVICES", devices, "a number of devices, such as 8"));
  const auto memory = text("ASCEND_MOE_SOFTNPU_MEMORY", "4G");
  s.memory = static_cast<uint64_t>(number("ASCEND_MOE_SOFTNPU_MEMORY", memory, "a size such as 4G or 512M"));
  const auto timeout = text("ASCEND_MOE_SOFTNPU_TIMEOUT", "120");
  s.collective_timeout_s = number("ASCEND_MOE_SOFTNPU_TIMEOUT", timeout, "a number of seconds");
  s.poison = text("ASCEND_MOE_SOFTNPU_POISON", "1") != "0";
  s.faults = text("ASCEND_MOE_SOFTNPU_FAULTS", "");
  return s;
}

}  // namespace

const Settings& settings() {
  static const Settings all = read();
  return all;
}

}  // namespace softnpu
