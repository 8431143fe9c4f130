#include "pool.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>

namespace toque {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kPausesPerClockRead = 32;

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

// The waiter announces itself before it looks at the value for the last time, the waker changes the value
// before it looks for sleepers; both orders are sequentially consistent, so at least one of them sees the
// other.
void WaitWord::advance() {
  value_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) != 0) futex_wake_all(value_);
}

void WaitWord::wait_while(uint32_t seen) {
  for (int i = 0; i < kPausesPerClockRead; ++i) {
    if (load() != seen) return;
    cpu_relax();
  }
  const auto give_up = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      if (load() != seen) return;
      cpu_relax();
    }
  } while (std::chrono::steady_clock::now() < give_up);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (value_.load(std::memory_order_seq_cst) == seen) futex_wait(value_, seen);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

Pool::Pool(int threads) : size_(threads < 1 ? 1 : threads) {
  threads_.reserve(static_cast<size_t>(size_ - 1));
  for (int worker = 1; worker < size_; ++worker) threads_.emplace_back([this, worker] { work(worker); });
}

Pool::~Pool() {
  stopping_ = true;
  started_.advance();
  for (auto& thread : threads_) thread.join();
}

void Pool::enter() {
  if (size_ > 1) started_.advance();
  call_(context_, 0);
  barrier();
}

void Pool::work(int worker) {
  // A thread that starts late must still join every region: regions are numbered, and it counts along.
  for (uint32_t region = 0;; ++region) {
    started_.wait_while(region);
    if (stopping_) return;
    call_(context_, worker);
    barrier();
  }
}

void Pool::barrier() {
  if (size_ == 1) return;
  const uint32_t round = met_.load();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    arrived_.store(0, std::memory_order_relaxed);
    met_.advance();
  } else {
    met_.wait_while(round);
  }
}

}  // namespace toque
