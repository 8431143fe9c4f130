// One block of memory for all packed weights, on huge pages where the system allows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace toque {

// Address space for `bytes` is reserved at once and committed by the kernel as it is written. Weights are
// streamed end to end at every step: with 2 MB pages that runs 10-30 % faster than with 4 kB pages.
class Arena {
 public:
  explicit Arena(size_t bytes);  // throws std::bad_alloc
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // `bytes` rounded up to `alignment`, zero-filled. Throws std::length_error when the arena is full.
  uint8_t* allocate(size_t bytes, size_t alignment = 64);
  size_t used() const { return used_; }
  size_t capacity() const { return capacity_; }

 private:
  uint8_t* mapping_;
  size_t mapping_bytes_;
  uint8_t* base_;
  size_t capacity_, used_ = 0;
};

}  // namespace toque
