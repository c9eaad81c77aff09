// What the emulated CANN libraries share. All of it is defined in libascendcl.so; the others link to that.
#pragma once

#include <functional>
#include <string>

#include "acl/acl.h"
#include "acl/error_codes/rt_error_codes.h"

namespace softnpu {

// Remembers `message` for aclGetRecentErrMsg, which torch_npu adds to the exception it raises, and returns `code`.
aclError fail(aclError code, const std::string& message);

// For a function of CANN's interface that exists only to be linked against: fails with its name.
aclError not_emulated(const char* name);

// Device work. Runs at once, or, where the stream is being captured, is recorded and runs at each replay.
using Task = std::function<aclError()>;
aclError submit(aclrtStream stream, const char* name, Task task);

// Whether `stream` is being captured into a graph (its tasks are recorded, not run).
bool capturing(aclrtStream stream);
// Whether any stream of this process is: objects that tasks refer to must then outlive the call.
bool any_capture();

// Counts one more of `name`. submit() counts by itself; blocking calls do it here.
void count(const char* name);
// All counts since the last reset: "name number" lines.
std::string counts_text();
void reset_counts();

// The operators of the interface before aclnn (aclopCompileAndExecute) that are emulated, one a line.
std::string emulated_aclops();

int32_t current_device();
int32_t device_of(aclrtStream stream);

// The device that owns [address, address + bytes), or -1 where it is no device memory. Use after free and ranges
// that leave their allocation are reported through `problem`.
int32_t owner(const void* address, uint64_t bytes, std::string* problem);

// Fault injection (ASCEND_MOE_SOFTNPU_FAULTS): see runtime/faults.cpp.
enum class Fault { none, fail, timeout };
Fault next_collective_fault(int rank);
bool next_allocation_fails();
void check_faults();  // throws where the variable cannot be understood

}  // namespace softnpu
