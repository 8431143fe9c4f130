// A fixed team of threads that enters one parallel region per engine step.
//
// A transformer step has some two hundred points where all threads must meet. Waking a sleeping thread costs
// about 50 us, meeting a spinning one about 0.1 us, so workers stay inside one region for the whole step and
// spin at its barriers. Spinning is bounded: other processes share these cores, and whoever waits for a
// preempted thread must give its core away instead of burning it. After the bound a waiter sleeps on a futex.
// An idle pool uses no CPU.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace toque {

// A number that threads wait on to change. Spins for `kSpinMicroseconds`, then sleeps in the kernel.
class alignas(64) WaitWord {
 public:
  uint32_t load() const { return value_.load(std::memory_order_acquire); }
  void advance();                  // value + 1, waking every sleeper
  void wait_while(uint32_t seen);  // returns once the value differs from `seen`

 private:
  std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
};

// Hands out the integers of [0, end) in ranges, to whichever thread asks first: large ranges while much is
// left, small ones towards the end, so that threads of unequal speed finish together.
class alignas(64) WorkQueue {
 public:
  struct Range {
    int begin, end;
    bool empty() const { return begin >= end; }
  };

  // Each claim takes 1 / shares of what is left, at least one.
  void reset(int end, int shares) {
    end_ = end;
    shares_ = shares;
    next_.store(0, std::memory_order_relaxed);
  }

  Range claim() {
    int begin = next_.load(std::memory_order_relaxed);
    while (begin < end_) {
      int size = (end_ - begin) / shares_;
      if (size < 1) size = 1;
      const int end = begin + size < end_ ? begin + size : end_;
      if (next_.compare_exchange_weak(begin, end, std::memory_order_relaxed)) return {begin, end};
    }
    return {end_, end_};
  }

 private:
  std::atomic<int> next_{0};
  int end_ = 0;
  int shares_ = 2;
};

class Pool {
 public:
  // `threads` includes the calling thread, which is worker 0 of every region.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return size_; }

  // Calls region(worker) once on every thread and returns when all have returned. Regions must not throw or
  // nest, and only one thread at a time may call run.
  template <class Region>
  void run(Region&& region) {
    using Plain = std::remove_reference_t<Region>;
    call_ = [](void* context, int worker) { (*static_cast<Plain*>(context))(worker); };
    context_ = const_cast<void*>(static_cast<const void*>(std::addressof(region)));
    enter();
  }

  // Inside a region, called by all threads: nobody passes before everybody has arrived.
  void barrier();

 private:
  void enter();
  void work(int worker);

  const int size_;
  std::vector<std::thread> threads_;
  void (*call_)(void*, int) = nullptr;
  void* context_ = nullptr;
  bool stopping_ = false;
  WaitWord started_;
  WaitWord met_;  // advances each time a barrier opens
  alignas(64) std::atomic<int> arrived_{0};
};

}  // namespace toque
