// Quota: how many shards are queued or running in one direction, and the most
// there may be. A request takes room for all of its shards or for none.
// Thread-safe.
#ifndef CACHESTORE_BASE_QUOTA_H_
#define CACHESTORE_BASE_QUOTA_H_

#include <atomic>
#include <cstdint>

namespace cachestore {

class Quota {
 public:
  explicit Quota(uint64_t limit) : limit_(limit) {}

  [[nodiscard]] bool TryTake(uint64_t n) {
    uint64_t taken = taken_.load(std::memory_order_relaxed);
    do {
      if (n > limit_ - taken) return false;
    } while (!taken_.compare_exchange_weak(taken, taken + n, std::memory_order_acq_rel,
                                           std::memory_order_relaxed));
    return true;
  }

  void GiveBack(uint64_t n) { taken_.fetch_sub(n, std::memory_order_acq_rel); }

  uint64_t taken() const { return taken_.load(std::memory_order_relaxed); }
  uint64_t limit() const { return limit_; }

 private:
  const uint64_t limit_;
  std::atomic<uint64_t> taken_{0};  // invariant: <= limit_
};

}  // namespace cachestore

#endif  // CACHESTORE_BASE_QUOTA_H_
