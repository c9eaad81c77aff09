#include "pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ascend_moe::cpu {

#if defined(__linux__)
void prefer_huge_pages(void* data, int64_t bytes) {
  constexpr uintptr_t kHuge = uintptr_t{2} << 20;
  constexpr int kCollapse = 25;  // MADV_COLLAPSE of Linux 6.1, which older headers lack
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHuge - 1) / kHuge * kHuge;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / kHuge * kHuge;
  if (begin >= end) return;
  void* start = reinterpret_cast<void*>(begin);
  // Both are advice: a refusal (no such kernel feature, no free huge pages) leaves the pages as they are.
  if (madvise(start, end - begin, MADV_HUGEPAGE) == 0) (void)madvise(start, end - begin, kCollapse);
}
#else
void prefer_huge_pages(void*, int64_t) {}
#endif

}  // namespace ascend_moe::cpu
