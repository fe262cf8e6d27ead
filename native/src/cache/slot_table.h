// SlotTable: which block is in which slot, in what state, and what may be
// replaced. Every method takes the region's mutex for a few operations on
// metadata; none copies, does I/O or waits for anything else.
//
// Who may touch a slot's bytes:
//   kLoading  its owner alone
//   kReady    readers that have it pinned; the owner of a dirty one (to store it)
//   else      nobody
// A slot leaves kReady only when nobody has it pinned and it isn't dirty. A slot of a
// process that died is given back only when the kernel has released that
// process's lock: no thread of it runs any more, so nothing can still write.
//
// Replacement: the least recently used first. A request touches its blocks
// from the last to the first, and then those that the first one follows, so
// that a prefix outlives its tail.
//
// A clear takes every block that is there, and every dump accepted before it:
// each dump carries the epoch of its acceptance.
//
// Thread-safe, across processes.
#ifndef CACHESTORE_CACHE_SLOT_TABLE_H_
#define CACHESTORE_CACHE_SLOT_TABLE_H_

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "cache/region.h"

namespace cachestore {

// One use of a slot; stale once the slot's generation has moved on.
struct SlotRef {
  uint32_t slot = kNone;
  uint32_t generation = 0;
};

struct Claim {
  enum Kind {
    kReady,    // pinned for the worker: copy, then Unpin
    kLoading,  // somebody fills it: we are woken when that ends
    kClaimed,  // ours to fill: then Publish or Fail
    kFailed,   // the latest filling failed with `code` (only with `accept_failed`)
    kNoSlot,   // nothing can be replaced
    kLocked,   // the mutex was not to be had in time
  };
  Kind kind = kLocked;
  SlotRef ref;
  Code code = CS_OK;
};

struct SlotCounts {
  uint32_t free = 0, used = 0, dirty = 0, loading = 0;
};

class SlotTable {
 public:
  // `reserve`: slots that only loads may take. `max_dirty`: dirty slots there
  // may be.
  SlotTable(Region& region, uint32_t reserve, uint32_t max_dirty)
      : region_(region), reserve_(reserve), max_dirty_(max_dirty) {}

  // For a load or a dump by copy worker `worker` of this process.
  // `accept_failed`: a failure is an answer (to somebody who waited for it),
  // not a reason to start afresh.
  Claim ClaimForLoad(const BlockId& block, uint32_t worker, bool accept_failed);
  Claim ClaimForDump(const BlockId& block);

  // Takes no mutex.
  void Unpin(uint32_t worker);
  // A filled slot: its bytes are in place (and fenced). Wakes who waits. It is
  // clean after a load, dirty after a dump, and a dump of an earlier epoch is
  // seen by nobody. False, of these and the next three: the mutex was not to be
  // had; try again. They come in any order then: what comes after the end of that
  // use of the slot has no effect.
  [[nodiscard]] bool PublishLoad(SlotRef ref);
  [[nodiscard]] bool PublishDump(SlotRef ref, uint32_t checksum, uint64_t epoch);
  [[nodiscard]] bool Fail(SlotRef ref, Code code);
  // A dirty slot that the tier below didn't even take: kFailed.
  [[nodiscard]] bool Revoke(SlotRef ref, Code code);
  // A dirty slot is stored, or given up: it may be replaced from now on. False
  // also if it is to be published yet.
  [[nodiscard]] bool Clean(SlotRef ref);

  // Whether the slot is still being filled in that use of it. Takes no mutex.
  bool IsLoading(SlotRef ref) const;
  uint8_t* bytes(SlotRef ref) const { return region_.bytes(ref.slot); }
  BlockId block(SlotRef ref) const { return region_.slot(ref.slot).block; }

  // present[i] |= block i is ready. False: the mutex was not to be had.
  bool Lookup(std::span<const BlockId> blocks, std::span<uint8_t> present);
  // Counts a use of the blocks that are there, the last one as the oldest, and of
  // those that they follow. Notes that each follows the one before, and the
  // first one `parent`. Bounded.
  void Touch(std::span<const BlockId> blocks, const BlockId* parent);
  // Takes no mutex.
  uint64_t epoch() const { return region_.header().epoch.load(std::memory_order_acquire); }
  // False: the mutex was not to be had, and nothing is cleared. `latest_clear`:
  // of the tier below, to be kept with the region.
  [[nodiscard]] bool Clear(uint64_t latest_clear);
  // Clears unless `latest_clear` is the one that the region has heard of last: of
  // clears made by whoever doesn't share it.
  enum class Follow { kLocked, kHadHeard, kCleared };
  [[nodiscard]] Follow FollowClear(uint64_t latest_clear);
  SlotCounts Counts();

  // Gives back what dead processes held; returns their dirty slots, which are
  // ours to store from now on.
  std::vector<SlotRef> ReclaimDead();

  // For the region's callbacks, with its mutex held.
  static void Repair(Region& region);
  static void Reclaim(Region& region, uint32_t process);
  // Dirty slots of a region that nobody holds, whose bytes are intact.
  static std::vector<uint32_t> IntactDirty(Region& region);

 private:
  SlotEntry& Entry(SlotRef ref) const { return region_.slot(ref.slot); }
  bool IsCurrent(SlotRef ref) const;
  void Publish(SlotEntry& entry, uint32_t slot, bool dirty);
  void ClearLocked(uint64_t latest_clear);
  void Use(uint32_t slot);
  uint32_t Take(bool for_load);
  Claim ClaimFree(const BlockId& block, bool for_load);

  Region& region_;
  const uint32_t reserve_;
  const uint32_t max_dirty_;
};

}  // namespace cachestore

#endif  // CACHESTORE_CACHE_SLOT_TABLE_H_
