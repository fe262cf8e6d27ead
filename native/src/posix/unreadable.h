// Unreadable: blocks that are there and couldn't be read. Lookups say of them that
// they aren't, so that a doomed load isn't tried for ever, until a dump has stored
// them anew or they could be read after all. Bounded: the oldest is forgotten.
// Thread-safe; while there are none, looking is one load.
#ifndef CACHESTORE_POSIX_UNREADABLE_H_
#define CACHESTORE_POSIX_UNREADABLE_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <deque>
#include <mutex>
#include <set>

#include "tier/geometry.h"

namespace cachestore {

class Unreadable {
 public:
  static constexpr size_t kMost = 4096;

  bool Contains(const BlockId& block) const {
    if (count_.load(std::memory_order_relaxed) == 0) return false;
    const std::lock_guard lock(mutex_);
    return blocks_.contains(block);
  }
  void Add(const BlockId& block) {
    const std::lock_guard lock(mutex_);
    if (!blocks_.insert(block).second) return;
    order_.push_back(block);
    if (order_.size() > kMost) {
      blocks_.erase(order_.front());
      order_.pop_front();
    }
    count_.store(blocks_.size(), std::memory_order_relaxed);
  }
  void Remove(const BlockId& block) {
    if (count_.load(std::memory_order_relaxed) == 0) return;
    const std::lock_guard lock(mutex_);
    if (blocks_.erase(block) == 0) return;
    order_.erase(std::find(order_.begin(), order_.end(), block));
    count_.store(blocks_.size(), std::memory_order_relaxed);
  }
  size_t size() const { return count_.load(std::memory_order_relaxed); }

 private:
  std::atomic<size_t> count_{0};

  mutable std::mutex mutex_;  // guards all below, and changes of count_
  std::set<BlockId> blocks_;
  std::deque<BlockId> order_;  // the oldest first
};

}  // namespace cachestore

#endif  // CACHESTORE_POSIX_UNREADABLE_H_
