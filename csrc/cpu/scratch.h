// Memory each thread keeps between calls, so that a layer allocates nothing once sizes have been seen.
#pragma once

#include <cstdint>

namespace ascend_moe::cpu {

enum class Room { panels, accumulator, inputs, inners, count };

// At least `bytes`, aligned to a cache line, valid until this thread asks for the same room again. Contents are not
// kept.
char* thread_scratch(Room room, int64_t bytes);

}  // namespace ascend_moe::cpu
