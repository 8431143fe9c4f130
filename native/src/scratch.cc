#include "scratch.h"

#include <cstdlib>
#include <memory>
#include <new>

namespace toque {

namespace {
struct Free {
  void operator()(uint8_t* p) const { std::free(p); }
};
struct Scratch {
  std::unique_ptr<uint8_t, Free> memory;
  size_t bytes = 0;
};
}  // namespace

uint8_t* thread_scratch(size_t bytes) {
  thread_local Scratch scratch;
  if (bytes > scratch.bytes) {
    size_t rounded = (bytes + 65535) / 65536 * 65536;
    void* p = std::aligned_alloc(64, rounded);
    if (p == nullptr) throw std::bad_alloc();
    scratch.memory.reset(static_cast<uint8_t*>(p));
    scratch.bytes = rounded;
  }
  return scratch.memory.get();
}

}  // namespace toque
