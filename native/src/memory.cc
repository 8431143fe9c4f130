#include "memory.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace toque {

Mapping::Mapping(size_t bytes, bool huge_pages) : size_(bytes) {
  if (bytes == 0) return;
  mapped_ = round_up(bytes, kHugePage) + kHugePage;
  base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base_ == MAP_FAILED) {
    base_ = nullptr;
    throw std::bad_alloc();
  }
  data_ = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<uintptr_t>(base_), kHugePage));
  // Both are advice: without huge pages everything still works, a little slower.
  madvise(data_, round_up(bytes, kHugePage), huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  madvise(data_, round_up(bytes, kHugePage), MADV_DONTDUMP);
}

Mapping::~Mapping() {
  if (base_ != nullptr) munmap(base_, mapped_);
}

Mapping::Mapping(Mapping&& other) noexcept { *this = std::move(other); }

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(mapped_, other.mapped_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace toque
