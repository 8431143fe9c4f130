#include "arena.h"

#include <sys/mman.h>

#include <new>
#include <stdexcept>
#include <string>

#include "packed.h"

namespace toque {

namespace {
constexpr size_t kHugePage = 2 << 20;
}

Arena::Arena(size_t bytes) : capacity_(bytes) {
  // Kernels prefetch a little past the end of a matrix; keep that inside the mapping.
  mapping_bytes_ = (bytes + kReadAhead + kHugePage - 1) / kHugePage * kHugePage + kHugePage;
  void* p = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                 -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<uint8_t*>(p);
  base_ =
      reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(p) + kHugePage - 1) / kHugePage * kHugePage);
#if defined(MADV_HUGEPAGE)
  madvise(base_, mapping_bytes_ - kHugePage,
          MADV_HUGEPAGE);  // a hint: without it everything works, a little slower
#endif
}

Arena::~Arena() { munmap(mapping_, mapping_bytes_); }

uint8_t* Arena::allocate(size_t bytes, size_t alignment) {
  size_t start = (used_ + alignment - 1) / alignment * alignment;
  if (start > capacity_ || bytes > capacity_ - start) {
    throw std::length_error("arena of " + std::to_string(capacity_) + " bytes is full: " +
                            std::to_string(bytes) + " more wanted at " + std::to_string(start));
  }
  used_ = start + bytes;
  return base_ + start;
}

}  // namespace toque
