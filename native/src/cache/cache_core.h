// CacheCore: what the two queues of a cache tier share: the region and its
// slots, the tier below, the waits, and the counters.
#ifndef CACHESTORE_CACHE_CACHE_CORE_H_
#define CACHESTORE_CACHE_CACHE_CORE_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/event_ring.h"
#include "base/quota.h"
#include "cache/region.h"
#include "cache/slot_table.h"
#include "cache/wait_list.h"
#include "tier/tier.h"

namespace cachestore {

struct CacheCounters {
  // Shards, by how they ended.
  std::atomic<uint64_t> hit{0};     // ready in a slot
  std::atomic<uint64_t> waited{0};  // by another's load of it
  std::atomic<uint64_t> loaded{0};  // into a slot, from below
  std::atomic<uint64_t> direct{0};  // from below, without a slot
  std::atomic<uint64_t> dump_existing{0};
  std::atomic<uint64_t> dump_cached{0};
  std::atomic<uint64_t> dump_direct{0};
  std::atomic<uint64_t> stored{0};        // dirty slots that went below
  std::atomic<uint64_t> store_failed{0};  // attempts that failed
  std::atomic<uint64_t> given_up{0};      // dirty slots never stored
};

// Adds a slot's block to a request to the tier below: its tensors lie in the slot
// one after another.
void AddSlot(Batch& batch, const Region& region, uint32_t slot, const Geometry& geometry);

class CacheCore {
 public:
  CacheCore(Region& region, SlotTable& slots, Tier& below, const Geometry& geometry,
            EventRing& events, std::chrono::milliseconds peer_patience,
            std::chrono::milliseconds timeout);

  Region& region() { return region_; }
  SlotTable& slots() { return slots_; }
  Tier& below() { return below_; }
  WaitList& waits() { return *waits_; }
  EventRing& events() { return events_; }
  CacheCounters& counters() { return counters_; }
  const Geometry& geometry() const { return geometry_; }
  uint64_t payload() const { return payload_; }

  // A request to the tier below for slots.
  Batch BatchOf(std::span<const SlotRef> slots) const;

  // Starts a request below that ends at the time limit by itself. `done` is
  // called once with its results, by whoever ends it, unless it is refused.
  using Done = std::function<void(const std::vector<Code>&)>;
  Result<std::shared_ptr<Request>> StartBelow(
      Batch batch, Status (Tier::*start)(const std::shared_ptr<Request>&), Done done);

  // Forgets what somebody has cleared who doesn't share the region: another host,
  // the command line. To be called before whatever looks at slots: one look at the
  // storage's mark, and no lock while it is the old one. Throws nothing.
  void FollowClears();

  // Counts a request's use of its blocks, here and in the tier below, which
  // doesn't see those that a slot served. At its end; without locks.
  void NoteUse(std::span<const BlockId> blocks, const std::optional<BlockId>& parent);

  // Metadata changes that are never lost, and what follows from them.
  void PublishLoad(SlotRef ref);
  void PublishDump(SlotRef ref, uint32_t checksum, uint64_t epoch);
  void Fail(SlotRef ref, Code code);
  void Revoke(SlotRef ref, Code code);
  void Clean(SlotRef ref);

  // Stores dirty slots; tries again, later and later, what fails. `epoch`: of
  // the tier below, when the dump was accepted.
  void Store(std::vector<SlotRef> slots, uint64_t epoch, int attempt = 0);
  // As Store's first attempt, but a refusal is the caller's to deal with.
  Status StoreOnce(const std::vector<SlotRef>& slots, uint64_t epoch, int attempt = 0);
  // Looks for processes that died and stores what only they had.
  void Reclaim();
  // Dirty slots that are being stored or wait for their next attempt.
  size_t storing() const;
  // Until nothing is being stored; false if the time was over first.
  bool WaitStored(std::chrono::steady_clock::time_point deadline);
  // From now on a failed attempt is the last one; those that wait for their next
  // one are made now.
  void FinishStoring();

  // Looks for processes that died, soon; for when no slot was to be had.
  void ReclaimSoon();

  // Stops the waits and ends what is asked of the tier below: nothing calls
  // this object any more.
  void Close();

 private:
  template <typename Change>
  void Do(SlotRef ref, Change change);
  void CancelLate();
  void Uncount(size_t slots);  // of storing_
  void EndStored(const std::vector<SlotRef>& slots, const std::vector<Code>& codes, uint64_t epoch,
                 int attempt);

  Region& region_;
  SlotTable& slots_;
  Tier& below_;
  const Geometry geometry_;
  const uint64_t payload_;
  EventRing& events_;
  const std::chrono::milliseconds timeout_;
  CacheCounters counters_;
  std::unique_ptr<WaitList> waits_;
  // Tier::LatestClear of the tier below, as the region was last compared with it;
  // at first nothing that it would be.
  std::atomic<uint64_t> followed_clear_{UINT64_MAX};

  mutable std::mutex mutex_;  // guards all below
  std::condition_variable stored_;
  struct Below {
    std::shared_ptr<Request> request;
    std::chrono::steady_clock::time_point deadline;
  };
  std::map<uint64_t, Below> below_requests_;  // by start, so by deadline
  uint64_t next_below_ = 0;
  bool reclaim_armed_ = false;
  bool watch_armed_ = false;  // a call of CancelLate is due
  size_t storing_ = 0;
  bool finishing_ = false;
};

}  // namespace cachestore

#endif  // CACHESTORE_CACHE_CACHE_CORE_H_
