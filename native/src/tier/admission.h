// Admission: one direction of a tier: room for whole requests, and how their
// shards ended. Thread-safe.
#ifndef CACHESTORE_TIER_ADMISSION_H_
#define CACHESTORE_TIER_ADMISSION_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "base/quota.h"
#include "tier/request.h"

namespace cachestore {

class Admission {
 public:
  explicit Admission(uint64_t depth) : quota_(depth) {}

  // Takes room for all shards of a request, to be given back shard by shard as
  // they end, or refuses. `also`: called for each shard as it ends, under the
  // rules of Request::OnShard. The Admission must outlive the request.
  Status Admit(Request& request, std::shared_ptr<void> tier_data,
               std::function<void()> also = {}) {
    const size_t shards = request.size();
    requested_.fetch_add(shards, std::memory_order_relaxed);
    if (!quota_.TryTake(shards)) {
      Refuse(shards);
      return {CS_REFUSED, "no room for " + std::to_string(shards) + " shards in a queue of " +
                              std::to_string(quota_.limit())};
    }
    request.Prepare(
        [this, also = std::move(also)](size_t, Code code) {
          Count(code);
          quota_.GiveBack(1);
          if (also) also();
        },
        std::move(tier_data));
    return Status::Ok();
  }
  // After Admit: the request could not be queued after all.
  void TakeBack(size_t shards) {
    quota_.GiveBack(shards);
    Refuse(shards);
  }

  uint64_t requested() const { return requested_.load(std::memory_order_relaxed); }
  uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }
  uint64_t outstanding() const { return quota_.taken(); }
  // Shards that ended with `code`.
  uint64_t ended(Code code) const { return ended_[code].load(std::memory_order_relaxed); }

 private:
  void Count(Code code) { ended_[code].fetch_add(1, std::memory_order_relaxed); }
  void Refuse(size_t shards) { refused_.fetch_add(shards, std::memory_order_relaxed); }

  Quota quota_;
  std::atomic<uint64_t> requested_{0};
  std::atomic<uint64_t> refused_{0};
  std::atomic<uint64_t> ended_[CS_INTERNAL + 1] = {};
};

}  // namespace cachestore

#endif  // CACHESTORE_TIER_ADMISSION_H_
