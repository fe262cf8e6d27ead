// WaitList: what this process is waiting for: slots that somebody fills, points
// in time, and metadata changes that found the region's mutex taken. One
// thread, on one futex of the region, asleep while there is nothing to do.
//
// Copy workers never wait: they leave a continuation here and go on.
// Continuations run on this thread or on the caller of Notify, without any
// lock held, and must not block.
//
// Thread-safe.
#ifndef CACHESTORE_CACHE_WAIT_LIST_H_
#define CACHESTORE_CACHE_WAIT_LIST_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "cache/region.h"
#include "cache/slot_table.h"

namespace cachestore {

class WaitList {
 public:
  using Clock = std::chrono::steady_clock;
  // `in_time`: the slot isn't being filled any more. False: it took too long,
  // or the list is closing.
  using Resume = std::function<void(bool in_time)>;

  // `patience`: how long to wait for another process to fill a slot.
  // `reclaim`: looks for processes that died; called now and then while a slot
  // is waited for.
  WaitList(Region& region, SlotTable& slots, std::chrono::milliseconds patience,
           std::function<void()> reclaim);
  ~WaitList();

  // Calls `resume` once, soon if the slot is not being filled even now.
  void Add(SlotRef ref, Resume resume);
  // This process has just filled the slot, or failed to.
  void Notify(SlotRef ref);
  // Calls `action` at a point in time. At most once; dropped by Close.
  void At(Clock::time_point when, std::function<void()> action);
  // Whatever is to be called at a point in time is called now.
  void Hurry();
  // Calls `attempt` again and again, every kRetry, until it is true. For changes
  // that must not be lost. Close tries each once more.
  void Later(std::function<bool()> attempt);

  size_t waiting() const;
  void Close();

 private:
  static constexpr std::chrono::milliseconds kRetry{50};
  // While waiting for another process: how often to look whether it lives.
  static constexpr std::chrono::milliseconds kLiveness{100};

  struct Wait {
    SlotRef ref;
    Clock::time_point deadline;
    Resume resume;
  };

  void Run();
  void Wake();
  std::vector<Wait> TakeEnded(Clock::time_point now);

  Region& region_;
  SlotTable& slots_;
  const std::chrono::milliseconds patience_;
  const std::function<void()> reclaim_;

  mutable std::mutex mutex_;  // guards all below but the thread
  std::vector<Wait> waits_;
  std::multimap<Clock::time_point, std::function<void()>> timers_;
  std::vector<std::function<bool()>> later_;
  bool closed_ = false;

  std::thread thread_;
};

}  // namespace cachestore

#endif  // CACHESTORE_CACHE_WAIT_LIST_H_
