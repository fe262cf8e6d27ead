// Admission: one direction of a tier: room for whole requests, of all pools, and
// how their shards ended. Thread-safe.
#ifndef CACHESTORE_TIER_ADMISSION_H_
#define CACHESTORE_TIER_ADMISSION_H_

#include <algorithm>
#include <array>
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
  // Whose counts: the first pool's, or those of all others.
  enum class Pools : uint8_t { kFirst, kSides };
  static Pools PoolsOf(uint32_t pool) { return pool == 0 ? Pools::kFirst : Pools::kSides; }

  // Dumps that ended well because their block was stored already.
  struct Existing {
    uint64_t shards = 0;
    uint64_t bytes = 0;
  };

  explicit Admission(uint64_t depth) : quota_(depth) {}

  // Takes room for all shards of a request, of `payload` bytes each, to be given
  // back shard by shard as they end, or refuses. `also`: called for each shard as
  // it ends, under the rules of Request::OnShard. The Admission must outlive the
  // request.
  Status Admit(Request& request, uint64_t payload, std::shared_ptr<void> tier_data,
               Request::OnShard also = {}) {
    const size_t shards = request.size();
    Counts& counts = CountsOf(PoolsOf(request.batch().pool));
    counts.requested.fetch_add(shards, std::memory_order_relaxed);
    if (!quota_.TryTake(shards)) {
      counts.refused.fetch_add(shards, std::memory_order_relaxed);
      return {CS_REFUSED, "no room for " + std::to_string(shards) + " shards in a queue of " +
                              std::to_string(quota_.limit())};
    }
    counts.outstanding.fetch_add(shards, std::memory_order_relaxed);
    request.Prepare(
        [this, &counts, payload, also = std::move(also)](size_t shard, Code code) {
          counts.ended[code].fetch_add(1, std::memory_order_relaxed);
          if (code == CS_OK) counts.bytes.fetch_add(payload, std::memory_order_relaxed);
          counts.outstanding.fetch_sub(1, std::memory_order_relaxed);
          quota_.GiveBack(1);
          if (also) also(shard, code);
        },
        std::move(tier_data));
    return Status::Ok();
  }
  // After Admit: has `queue` queue all of the request or nothing. If that fails or
  // throws, the room is taken back.
  template <typename Queue>
  Status Submit(const Request& request, Queue queue) {
    Status queued{CS_NO_MEMORY, "no memory for a request"};
    (void)Thrown([&] { queued = queue(); });
    if (!queued.ok()) {
      Counts& counts = CountsOf(PoolsOf(request.batch().pool));
      counts.outstanding.fetch_sub(request.size(), std::memory_order_relaxed);
      counts.refused.fetch_add(request.size(), std::memory_order_relaxed);
      quota_.GiveBack(request.size());
    }
    return queued;
  }

  void AddLoadStats(cs_stats& stats, Pools pools) const {
    const Counts& counts = CountsOf(pools);
    stats.load_requested += Value(counts.requested);
    stats.load_ok += counts.Ended(CS_OK);
    stats.load_absent += counts.Ended(CS_NOT_FOUND);
    stats.load_corrupt += counts.Ended(CS_CORRUPT);
    stats.load_failed += counts.OtherFailures() + counts.Ended(CS_NO_SPACE);
    stats.load_timeout += counts.Ended(CS_TIMEOUT);
    stats.load_refused += Value(counts.refused);
    stats.load_bytes += Value(counts.bytes);
    stats.load_outstanding += Value(counts.outstanding);
  }
  void AddDumpStats(cs_stats& stats, Pools pools, Existing existing) const {
    const Counts& counts = CountsOf(pools);
    // One is read after the other: never less than none.
    const auto without = [](uint64_t all, uint64_t some) { return all - std::min(all, some); };
    stats.dump_requested += Value(counts.requested);
    stats.dump_ok += without(counts.Ended(CS_OK), existing.shards);
    stats.dump_existing += existing.shards;
    stats.dump_failed +=
        counts.OtherFailures() + counts.Ended(CS_NOT_FOUND) + counts.Ended(CS_CORRUPT);
    stats.dump_no_space += counts.Ended(CS_NO_SPACE);
    stats.dump_timeout += counts.Ended(CS_TIMEOUT);
    stats.dump_refused += Value(counts.refused);
    stats.dump_bytes += without(Value(counts.bytes), existing.bytes);
    stats.dump_outstanding += Value(counts.outstanding);
  }

 private:
  static uint64_t Value(const std::atomic<uint64_t>& counter) {
    return counter.load(std::memory_order_relaxed);
  }
  // Of shards, but for `bytes`.
  struct Counts {
    uint64_t Ended(Code code) const { return Value(ended[code]); }
    uint64_t OtherFailures() const {
      return Ended(CS_INVALID) + Ended(CS_IO) + Ended(CS_REFUSED) + Ended(CS_CLOSED) +
             Ended(CS_NO_MEMORY) + Ended(CS_INTERNAL);
    }
    std::atomic<uint64_t> requested{0};
    std::atomic<uint64_t> refused{0};
    std::atomic<uint64_t> ended[CS_INTERNAL + 1] = {};
    std::atomic<uint64_t> bytes{0};  // of those that ended well
    std::atomic<uint64_t> outstanding{0};
  };
  Counts& CountsOf(Pools pools) { return counts_[static_cast<size_t>(pools)]; }
  const Counts& CountsOf(Pools pools) const { return counts_[static_cast<size_t>(pools)]; }

  Quota quota_;
  std::array<Counts, 2> counts_;
};

}  // namespace cachestore

#endif  // CACHESTORE_TIER_ADMISSION_H_
