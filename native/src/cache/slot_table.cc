#include "cache/slot_table.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/checksum.h"
#include "base/shared_memory.h"

// Everything here but IsLoading runs with the region's mutex held. A process
// can die between any two statements, so `state` is written last when a slot
// gains a meaning and first when it loses one, and Repair rebuilds the rest
// (lists, chains, counts) from states and blocks.

namespace cachestore {
namespace {

uint64_t BucketOf(const Region& region, const BlockId& block) {
  uint64_t hash;
  std::memcpy(&hash, block.data(), sizeof hash);
  return hash & (region.header().bucket_count - 1);
}

SlotState StateOf(const SlotEntry& entry) { return entry.state.load(std::memory_order_relaxed); }

void SetState(SlotEntry& entry, SlotState state) {
  // Release: whoever sees kReady sees the bytes that were fenced before it.
  entry.state.store(state, std::memory_order_release);
}

// Lists.

void Append(Region& region, List& list, uint32_t slot) {
  SlotEntry& entry = region.slot(slot);
  entry.list_previous = list.last;
  entry.list_next = kNone;
  (list.last == kNone ? list.first : region.slot(list.last).list_next) = slot;
  list.last = slot;
  ++list.count;
}

void Remove(Region& region, List& list, uint32_t slot) {
  SlotEntry& entry = region.slot(slot);
  (entry.list_previous == kNone ? list.first : region.slot(entry.list_previous).list_next) =
      entry.list_next;
  (entry.list_next == kNone ? list.last : region.slot(entry.list_next).list_previous) =
      entry.list_previous;
  entry.list_next = entry.list_previous = kNone;
  --list.count;
}

// How far a slot that has become clean is moved back to its place.
constexpr int kPlaceSteps = 512;
// How many blocks a use is passed on to, from each to the one it follows.
constexpr int kAncestors = 4096;

// Where its last use puts it; not quite, if more than kPlaceSteps were used later.
void Place(Region& region, List& list, uint32_t slot) {
  SlotEntry& entry = region.slot(slot);
  uint32_t before = list.last;
  for (int steps = 0; before != kNone && steps < kPlaceSteps; ++steps) {
    if (region.slot(before).tick <= entry.tick) break;
    before = region.slot(before).list_previous;
  }
  const uint32_t after = before == kNone ? list.first : region.slot(before).list_next;
  entry.list_previous = before;
  entry.list_next = after;
  (before == kNone ? list.first : region.slot(before).list_next) = slot;
  (after == kNone ? list.last : region.slot(after).list_previous) = slot;
  ++list.count;
}

void Prepend(Region& region, List& list, uint32_t slot) {
  SlotEntry& entry = region.slot(slot);
  entry.list_previous = kNone;
  entry.list_next = list.first;
  (list.first == kNone ? list.last : region.slot(list.first).list_previous) = slot;
  list.first = slot;
  ++list.count;
}

// What is in the list `used`.
bool IsListed(const SlotEntry& entry) {
  const SlotState state = StateOf(entry);
  return (state == SlotState::kReady && entry.dirty == 0) || state == SlotState::kFailed;
}

bool IsPinned(const Region& region, uint32_t slot) {
  for (uint32_t p = 0; p < kMaxProcesses; ++p) {
    const ProcessEntry& process = region.process(p);
    if (process.in_use == 0) continue;
    for (uint32_t worker = 0; worker < process.workers; ++worker) {
      // Acquire: the copy that was under the pin is over.
      if (process.pinned[worker].load(std::memory_order_acquire) == slot) return true;
    }
  }
  return false;
}

// Chains of the hash.

uint32_t Find(Region& region, const BlockId& block) {
  uint32_t slot = region.bucket(BucketOf(region, block));
  while (slot != kNone && region.slot(slot).block != block) slot = region.slot(slot).hash_next;
  return slot;
}

void Link(Region& region, uint32_t slot) {
  SlotEntry& entry = region.slot(slot);
  uint32_t& bucket = region.bucket(BucketOf(region, entry.block));
  entry.hash_next = bucket;
  bucket = slot;
}

void Unlink(Region& region, uint32_t slot) {
  SlotEntry& entry = region.slot(slot);
  uint32_t* at = &region.bucket(BucketOf(region, entry.block));
  while (*at != kNone && *at != slot) at = &region.slot(*at).hash_next;
  if (*at == slot) *at = entry.hash_next;
  entry.hash_next = kNone;
}

// Makes an unlisted slot free.
void Release(Region& region, uint32_t slot) {
  SlotEntry& entry = region.slot(slot);
  SetState(entry, SlotState::kFree);
  entry.generation.fetch_add(1, std::memory_order_release);
  if (entry.orphan == 0) Unlink(region, slot);
  entry.orphan = entry.dirty = 0;
  entry.waiters = 0;
  Append(region, region.header().free, slot);
}

void WakeWaiters(Region& region, SlotEntry& entry) {
  for (uint64_t waiters = entry.waiters; waiters != 0; waiters &= waiters - 1) {
    ProcessEntry& process = region.process(static_cast<uint32_t>(std::countr_zero(waiters)));
    process.wake.fetch_add(1, std::memory_order_release);
    FutexWake(process.wake);
  }
  entry.waiters = 0;
}

// Takes a listed slot from its block. It is free at once, or, while somebody
// reads it, the first to be replaced.
void Discard(Region& region, uint32_t slot) {
  Remove(region, region.header().used, slot);
  if (!IsPinned(region, slot)) return Release(region, slot);
  Unlink(region, slot);
  region.slot(slot).orphan = 1;
  Prepend(region, region.header().used, slot);
}

// Lists a slot that has just become replaceable; what is of no more use first.
void Settle(Region& region, uint32_t slot) {
  const SlotEntry& entry = region.slot(slot);
  if (!IsListed(entry)) return;
  const bool is_of_use = entry.orphan == 0 && StateOf(entry) == SlotState::kReady;
  (is_of_use ? Place : Prepend)(region, region.header().used, slot);
}

}  // namespace

// A free slot, or the unpinned one whose use is longest ago; kNone if there is
// none. Bounded: there are at most as many pins as workers.
uint32_t SlotTable::Take(bool for_load) {
  RegionHeader& h = region_.header();
  const uint32_t reserve = for_load ? 0 : reserve_;
  if (h.free.count + h.used.count <= reserve) return kNone;
  if (h.free.count == 0) {
    uint32_t oldest = h.used.first;
    while (oldest != kNone && IsPinned(region_, oldest)) oldest = region_.slot(oldest).list_next;
    if (oldest == kNone) return kNone;
    Remove(region_, h.used, oldest);
    Release(region_, oldest);
  }
  const uint32_t slot = h.free.first;
  Remove(region_, h.free, slot);
  return slot;
}

// Gives the block a slot, to be filled by us.
Claim SlotTable::ClaimFree(const BlockId& block, bool for_load) {
  const uint32_t slot = Take(for_load);
  if (slot == kNone) return {Claim::kNoSlot, {}, CS_OK};
  RegionHeader& h = region_.header();
  SlotEntry& entry = region_.slot(slot);
  entry.block = block;
  entry.owner = region_.self();
  entry.tick = ++h.tick;
  entry.parent = kNone;
  Link(region_, slot);
  SetState(entry, SlotState::kLoading);
  ++h.loading_count;
  return {Claim::kClaimed, {slot, entry.generation.load(std::memory_order_relaxed)}, CS_OK};
}

Claim SlotTable::ClaimForLoad(const BlockId& block, uint32_t worker, bool accept_failed) {
  const Region::Lock lock(region_);
  if (!lock.ok()) return {};
  const uint32_t slot = Find(region_, block);
  if (slot != kNone) {
    SlotEntry& entry = region_.slot(slot);
    const SlotRef ref{slot, entry.generation.load(std::memory_order_relaxed)};
    switch (StateOf(entry)) {
      case SlotState::kReady:
        region_.process(region_.self()).pinned[worker].store(slot, std::memory_order_relaxed);
        Use(slot);
        return {Claim::kReady, ref, CS_OK};
      case SlotState::kLoading:
        entry.waiters |= uint64_t{1} << region_.self();
        return {Claim::kLoading, ref, CS_OK};
      case SlotState::kFailed:
        if (accept_failed) return {Claim::kFailed, ref, static_cast<Code>(entry.code)};
        Discard(region_, slot);
        break;
      case SlotState::kFree:
        break;  // can't be found
    }
  }
  return ClaimFree(block, /*for_load=*/true);
}

Claim SlotTable::ClaimForDump(const BlockId& block) {
  const Region::Lock lock(region_);
  if (!lock.ok()) return {};
  RegionHeader& h = region_.header();
  const uint32_t slot = Find(region_, block);
  if (slot != kNone) {
    SlotEntry& entry = region_.slot(slot);
    const SlotRef ref{slot, entry.generation.load(std::memory_order_relaxed)};
    switch (StateOf(entry)) {
      case SlotState::kReady:
        return {Claim::kReady, ref, CS_OK};  // not pinned: nothing will be copied
      case SlotState::kLoading:
        entry.waiters |= uint64_t{1} << region_.self();
        return {Claim::kLoading, ref, CS_OK};
      case SlotState::kFailed:
        Discard(region_, slot);
        break;
      case SlotState::kFree:
        break;
    }
  }
  // Slots being filled by dumps will be dirty: they count already.
  if (h.dirty_count + h.loading_count >= max_dirty_) return {Claim::kNoSlot, {}, CS_OK};
  return ClaimFree(block, /*for_load=*/false);
}

void SlotTable::Unpin(uint32_t worker) {
  // Release: our copy comes before whoever fills the slot next.
  region_.process(region_.self()).pinned[worker].store(kNone, std::memory_order_release);
}

void SlotTable::Publish(SlotEntry& entry, uint32_t slot, bool dirty) {
  RegionHeader& h = region_.header();
  entry.dirty = dirty ? 1 : 0;
  SetState(entry, SlotState::kReady);
  --h.loading_count;
  h.dirty_count += entry.dirty;
  WakeWaiters(region_, entry);  // before Settle, which may end this use of the slot
  Settle(region_, slot);
}

bool SlotTable::PublishLoad(SlotRef ref) {
  const Region::Lock lock(region_);
  if (!lock.ok()) return false;
  if (!IsLoading(ref)) return true;
  Publish(Entry(ref), ref.slot, /*dirty=*/false);
  return true;
}

bool SlotTable::PublishDump(SlotRef ref, uint32_t checksum, uint64_t epoch) {
  const Region::Lock lock(region_);
  if (!lock.ok()) return false;
  SlotEntry& entry = Entry(ref);
  if (!IsLoading(ref)) return true;  // revoked before it came to this
  entry.checksum = checksum;
  if (epoch != this->epoch() && entry.orphan == 0) {
    Unlink(region_, ref.slot);
    entry.orphan = 1;
  }
  Publish(entry, ref.slot, /*dirty=*/true);
  return true;
}

bool SlotTable::Fail(SlotRef ref, Code code) {
  const Region::Lock lock(region_);
  if (!lock.ok()) return false;
  if (!IsLoading(ref)) return true;
  SlotEntry& entry = Entry(ref);
  entry.code = code;
  SetState(entry, SlotState::kFailed);
  --region_.header().loading_count;
  WakeWaiters(region_, entry);  // before Settle, which may end this use of the slot
  Settle(region_, ref.slot);
  return true;
}

bool SlotTable::Clean(SlotRef ref) {
  const Region::Lock lock(region_);
  if (!lock.ok()) return false;
  if (IsLoading(ref)) return false;
  SlotEntry& entry = Entry(ref);
  if (!IsCurrent(ref) || entry.dirty == 0) return true;
  entry.dirty = 0;
  --region_.header().dirty_count;
  Settle(region_, ref.slot);
  return true;
}

bool SlotTable::Revoke(SlotRef ref, Code code) {
  const Region::Lock lock(region_);
  if (!lock.ok()) return false;
  SlotEntry& entry = Entry(ref);
  if (!IsCurrent(ref) || (StateOf(entry) != SlotState::kLoading && entry.dirty == 0)) return true;
  entry.code = code;
  if (StateOf(entry) == SlotState::kLoading) --region_.header().loading_count;
  SetState(entry, SlotState::kFailed);
  if (entry.dirty != 0) --region_.header().dirty_count;
  entry.dirty = 0;
  WakeWaiters(region_, entry);
  Settle(region_, ref.slot);
  return true;
}

bool SlotTable::IsCurrent(SlotRef ref) const {
  return Entry(ref).generation.load(std::memory_order_acquire) == ref.generation;
}

bool SlotTable::IsLoading(SlotRef ref) const {
  return IsCurrent(ref) && Entry(ref).state.load(std::memory_order_acquire) == SlotState::kLoading;
}

bool SlotTable::Lookup(std::span<const BlockId> blocks, std::span<uint8_t> present) {
  const Region::Lock lock(region_);
  if (!lock.ok()) return false;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const uint32_t slot = Find(region_, blocks[i]);
    if (slot != kNone && StateOf(region_.slot(slot)) == SlotState::kReady) present[i] = 1;
  }
  return true;
}

void SlotTable::Use(uint32_t slot) {
  RegionHeader& h = region_.header();
  SlotEntry& entry = region_.slot(slot);
  entry.tick = ++h.tick;
  if (!IsListed(entry)) return;
  Remove(region_, h.used, slot);
  Append(region_, h.used, slot);
}

void SlotTable::Touch(std::span<const BlockId> blocks, const BlockId* parent) {
  const Region::Lock lock(region_);
  if (!lock.ok()) return;
  const uint64_t start = region_.header().tick;
  uint32_t child = kNone;
  const auto follows = [&](uint32_t slot) {
    if (child != kNone && slot != kNone) {
      region_.slot(child).parent = slot;
      region_.slot(child).parent_generation =
          region_.slot(slot).generation.load(std::memory_order_relaxed);
    }
    child = slot;
  };
  for (size_t i = blocks.size(); i-- > 0;) {
    const uint32_t slot = Find(region_, blocks[i]);
    if (slot != kNone) Use(slot);
    follows(slot);
  }
  const uint32_t first = child;
  if (parent != nullptr) follows(Find(region_, *parent));
  uint32_t at = first == kNone ? child : first;
  if (first == kNone && at != kNone) Use(at);
  for (int steps = 0; at != kNone && steps < kAncestors; ++steps) {
    const SlotEntry& entry = region_.slot(at);
    at = entry.parent;
    if (at >= region_.slot_count()) return;
    const SlotEntry& before = region_.slot(at);
    if (before.generation.load(std::memory_order_relaxed) != entry.parent_generation) return;
    if (StateOf(before) == SlotState::kFree || before.tick > start) return;  // a circle
    Use(at);
  }
}

bool SlotTable::Clear(uint64_t latest_clear) {
  const Region::Lock lock(region_);
  if (!lock.ok()) return false;
  ClearLocked(latest_clear);
  return true;
}

SlotTable::Follow SlotTable::FollowClear(uint64_t latest_clear) {
  const Region::Lock lock(region_);
  if (!lock.ok()) return Follow::kLocked;
  if (region_.header().latest_clear == latest_clear) return Follow::kHadHeard;
  ClearLocked(latest_clear);
  return Follow::kCleared;
}

void SlotTable::ClearLocked(uint64_t latest_clear) {
  RegionHeader& h = region_.header();
  h.epoch.fetch_add(1, std::memory_order_release);
  h.latest_clear = latest_clear;
  for (uint32_t slot = 0; slot < region_.slot_count(); ++slot) {
    SlotEntry& entry = region_.slot(slot);
    if (StateOf(entry) == SlotState::kFree || entry.orphan != 0) continue;
    if (IsListed(entry)) {
      Discard(region_, slot);
    } else {
      Unlink(region_, slot);
      entry.orphan = 1;
    }
  }
}

SlotCounts SlotTable::Counts() {
  const Region::Lock lock(region_);
  if (!lock.ok()) return {};
  const RegionHeader& h = region_.header();
  return {h.free.count, h.used.count, h.dirty_count, h.loading_count};
}

std::vector<SlotRef> SlotTable::ReclaimDead() {
  std::vector<SlotRef> adopted;
  const Region::Lock lock(region_);
  if (!lock.ok()) return adopted;
  for (uint32_t p = 0; p < kMaxProcesses; ++p) {
    if (region_.process(p).in_use == 0 || region_.IsAlive(p)) continue;
    Reclaim(region_, p);
    region_.process(p).in_use = 0;
  }
  // Also those of a process whose number is in use again.
  RegionHeader& h = region_.header();
  if (h.ownerless_count == 0) return adopted;
  h.ownerless_count = 0;
  for (uint32_t slot = 0; slot < region_.slot_count(); ++slot) {
    SlotEntry& entry = region_.slot(slot);
    if (entry.dirty == 0 || entry.owner != kNone) continue;
    if (entry.orphan != 0) {  // cleared
      entry.dirty = 0;
      --h.dirty_count;
      Settle(region_, slot);
      continue;
    }
    entry.owner = region_.self();
    adopted.push_back({slot, entry.generation.load(std::memory_order_relaxed)});
  }
  return adopted;
}

// Its pins and its unfinished fillings; its dirty slots are nobody's.
void SlotTable::Reclaim(Region& region, uint32_t process) {
  for (std::atomic<uint32_t>& cell : region.process(process).pinned) cell.store(kNone);
  const uint64_t bit = uint64_t{1} << process;
  for (uint32_t slot = 0; slot < region.slot_count(); ++slot) {
    SlotEntry& entry = region.slot(slot);
    entry.waiters &= ~bit;
    if (entry.owner != process) continue;
    if (entry.dirty != 0) {
      entry.owner = kNone;
      ++region.header().ownerless_count;
    }
    if (StateOf(entry) != SlotState::kLoading) continue;
    entry.code = CS_CLOSED;
    SetState(entry, SlotState::kFailed);
    --region.header().loading_count;
    WakeWaiters(region, entry);
    Settle(region, slot);
  }
}

void SlotTable::Repair(Region& region) {
  RegionHeader& h = region.header();
  h.free = h.used = {kNone, kNone, 0};
  h.dirty_count = h.loading_count = h.ownerless_count = 0;
  for (uint64_t b = 0; b < h.bucket_count; ++b) region.bucket(b) = kNone;
  std::vector<uint32_t> used;
  for (uint32_t slot = 0; slot < region.slot_count(); ++slot) {
    SlotEntry& entry = region.slot(slot);
    entry.hash_next = entry.list_next = entry.list_previous = kNone;
    const SlotState state = StateOf(entry);
    if (state != SlotState::kReady) entry.dirty = 0;
    h.dirty_count += entry.dirty;
    h.ownerless_count += entry.dirty != 0 && entry.owner == kNone ? 1 : 0;
    h.loading_count += state == SlotState::kLoading ? 1 : 0;
    // Two slots of one block can't be: its second is linked only after the
    // first is unlinked. But a death in between may leave both states set.
    if (state != SlotState::kFree && entry.orphan == 0 && Find(region, entry.block) != kNone) {
      entry.orphan = 1;
    }
    if (state != SlotState::kFree && entry.orphan == 0) Link(region, slot);
    if (state == SlotState::kFree) {
      entry.orphan = entry.dirty = 0;
      entry.generation.fetch_add(1, std::memory_order_release);
      Append(region, h.free, slot);
    } else if (IsListed(entry)) {
      used.push_back(slot);
    }
  }
  std::sort(used.begin(), used.end(),
            [&](uint32_t a, uint32_t b) { return region.slot(a).tick < region.slot(b).tick; });
  for (const uint32_t slot : used) Append(region, h.used, slot);
}

std::vector<uint32_t> SlotTable::IntactDirty(Region& region) {
  std::vector<uint32_t> intact;
  for (uint32_t slot = 0; slot < region.slot_count(); ++slot) {
    const SlotEntry& entry = region.slot(slot);
    if (StateOf(entry) == SlotState::kReady && entry.dirty != 0 && entry.orphan == 0 &&
        Crc32c(0, region.bytes(slot), region.header().payload) == entry.checksum) {
      intact.push_back(slot);
    }
  }
  return intact;
}

}  // namespace cachestore
