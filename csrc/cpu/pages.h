// Pages of the operating system behind weights.
#pragma once

#include <cstdint>

namespace ascend_moe::cpu {

// Asks for 2 MiB pages behind this memory, now. Few tokens read weights at the speed of memory, and with 4 KiB pages
// address translation costs 15 to 25 % of it. Where the system has none to give, nothing changes.
void prefer_huge_pages(void* data, int64_t bytes);

}  // namespace ascend_moe::cpu
