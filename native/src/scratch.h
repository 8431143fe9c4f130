// Working memory of the calling thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace toque {

// At least `bytes`, 64-byte aligned, contents undefined; valid until this thread's next call. Grows, never
// shrinks.
uint8_t* thread_scratch(size_t bytes);

}  // namespace toque
