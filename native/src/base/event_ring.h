// EventRing: what happened in the background, for Python to log. Bounded: when
// it is full the newest is dropped and counted. Thread-safe.
#ifndef CACHESTORE_BASE_EVENT_RING_H_
#define CACHESTORE_BASE_EVENT_RING_H_

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "cachestore/c_api.h"

namespace cachestore {

class EventRing {
 public:
  struct Event {
    cs_event_level level;
    std::string text;
  };

  void Add(cs_event_level level, std::string text) {
    const std::lock_guard lock(mutex_);
    if (events_.size() >= kCapacity) {
      ++dropped_;
      return;
    }
    events_.push_back({level, std::move(text)});
  }

  std::optional<Event> Take() {
    const std::lock_guard lock(mutex_);
    if (events_.empty()) return std::nullopt;
    Event event = std::move(events_.front());
    events_.pop_front();
    return event;
  }

  uint64_t dropped() const {
    const std::lock_guard lock(mutex_);
    return dropped_;
  }

 private:
  static constexpr size_t kCapacity = 256;

  mutable std::mutex mutex_;  // guards all below
  std::deque<Event> events_;
  uint64_t dropped_ = 0;
};

}  // namespace cachestore

#endif  // CACHESTORE_BASE_EVENT_RING_H_
