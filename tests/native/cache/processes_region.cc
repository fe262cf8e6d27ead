#include "cache/processes_region.h"

#include <cstring>
#include <filesystem>
#include <vector>

#include "base/aligned_buffer.h"
#include "cache/slot_table.h"
#include "harness.h"

namespace cachestore::test {
namespace {

SlotState StateOf(const SlotEntry& entry) { return entry.state.load(); }

bool IsListed(const SlotEntry& entry) {
  return (StateOf(entry) == SlotState::kReady && entry.dirty == 0) ||
         StateOf(entry) == SlotState::kFailed;
}

uint32_t& BucketOf(Region& region, const BlockId& block) {
  uint64_t hash;
  std::memcpy(&hash, block.data(), sizeof hash);
  return region.bucket(hash & (region.header().bucket_count - 1));
}

// A slot that is ready, clean and listed; kNone if there is none.
uint32_t AnyReady(Region& region) {
  for (uint32_t s = 0; s < region.slot_count(); ++s) {
    if (StateOf(region.slot(s)) == SlotState::kReady && region.slot(s).dirty == 0) return s;
  }
  return kNone;
}

uint32_t TakeFirstFree(Region& region) {
  List& free = region.header().free;
  const uint32_t slot = free.first;
  if (slot == kNone) return kNone;
  free.first = region.slot(slot).list_next;
  (free.first == kNone ? free.last : region.slot(free.first).list_previous) = kNone;
  --free.count;
  region.slot(slot).list_next = kNone;
  return slot;
}

std::string WrongList(Region& region, const List& list, const char* name,
                      std::vector<uint32_t>& seen) {
  uint32_t count = 0;
  uint32_t previous = kNone;
  for (uint32_t s = list.first; s != kNone; s = region.slot(s).list_next) {
    if (s >= region.slot_count()) return std::string(name) + " leads out of the table";
    if (region.slot(s).list_previous != previous) return std::string(name) + " is torn";
    if (++count > region.slot_count()) return std::string(name) + " is a ring";
    ++seen[s];
    previous = s;
  }
  if (count != list.count || list.last != previous) return std::string(name) + " is miscounted";
  return "";
}

}  // namespace

std::string SharedMemoryParent() {
  std::error_code error;
  return std::filesystem::is_directory("/dev/shm", error) ? "/dev/shm" : "";
}

RegionOptions RegionOptionsOf(const StoreSetup& setup) {
  RegionOptions options;
  options.directory = setup.buffer_directory;
  options.fingerprint.fill(setup.fingerprint);
  options.payload = setup.payload();
  options.slot_size = AlignUp(setup.shard_size == 0 ? setup.payload() : setup.shard_size);
  options.size_for = [capacity = setup.buffer_capacity](bool) { return capacity; };
  return options;
}

std::string RegionPath(const StoreSetup& setup) {
  return setup.buffer_directory + "/" + Region::FileName(RegionOptionsOf(setup).fingerprint);
}

std::unique_ptr<Region> AttachOrFail(const StoreSetup& setup) {
  Result<std::unique_ptr<Region>> region = Region::Open(
      RegionOptionsOf(setup), {[](Region&) {}, &SlotTable::Reclaim, &SlotTable::Repair});
  if (!EXPECT_OK(region)) return nullptr;
  return std::move(region.value());
}

std::unique_ptr<Region> AttachAtRest(const StoreSetup& setup) {
  auto region = AttachOrFail(setup);
  if (region == nullptr) return nullptr;
  EXPECT_TRUE(Eventually([&] {
    const RegionCounts counts = CountsOf(*region);
    return counts.loading == 0 && counts.dirty == 0 && counts.pins == 0;
  }));
  EXPECT_EQ(Inconsistency(*region), "");
  return region;
}

RegionCounts CountsOf(Region& region) {
  RegionCounts counts;
  const Region::Lock lock(region);
  if (!EXPECT_TRUE(lock.ok())) return counts;
  for (uint32_t s = 0; s < region.slot_count(); ++s) {
    const SlotEntry& entry = region.slot(s);
    switch (StateOf(entry)) {
      case SlotState::kFree:
        ++counts.free;
        break;
      case SlotState::kLoading:
        ++counts.loading;
        break;
      case SlotState::kReady:
        ++counts.ready;
        break;
      case SlotState::kFailed:
        ++counts.failed;
        break;
    }
    counts.dirty += entry.dirty;
    counts.orphans += entry.orphan;
  }
  for (uint32_t p = 0; p < kMaxProcesses; ++p) {
    const ProcessEntry& process = region.process(p);
    counts.processes += process.in_use;
    for (const auto& cell : process.pinned) counts.pins += cell.load() == kNone ? 0 : 1;
  }
  return counts;
}

std::string Inconsistency(Region& region) {
  const Region::Lock lock(region);
  if (!lock.ok()) return "the lock is not to be had";
  const RegionHeader& h = region.header();
  std::vector<uint32_t> listed(region.slot_count(), 0);
  std::vector<uint32_t> chained(region.slot_count(), 0);
  if (std::string wrong = WrongList(region, h.free, "free", listed); !wrong.empty()) return wrong;
  const std::vector<uint32_t> is_free = listed;
  if (std::string wrong = WrongList(region, h.used, "used", listed); !wrong.empty()) return wrong;
  for (uint64_t b = 0; b < h.bucket_count; ++b) {
    uint32_t length = 0;
    for (uint32_t s = region.bucket(b); s != kNone; s = region.slot(s).hash_next) {
      if (s >= region.slot_count()) return "a chain leads out of the table";
      if (++length > region.slot_count()) return "a chain is a ring";
      if (&BucketOf(region, region.slot(s).block) != &region.bucket(b)) return "a wrong chain";
      ++chained[s];
    }
  }
  uint32_t dirty = 0;
  uint32_t loading = 0;
  for (uint32_t s = 0; s < region.slot_count(); ++s) {
    const SlotEntry& entry = region.slot(s);
    const std::string name = "slot " + std::to_string(s);
    const bool free = StateOf(entry) == SlotState::kFree;
    if (free != (is_free[s] == 1)) return name + " is free by one account only";
    if (listed[s] != (free || IsListed(entry) ? 1u : 0u)) return name + " is in a wrong list";
    if (chained[s] != (free || entry.orphan != 0 ? 0u : 1u)) return name + " is wrongly chained";
    if (entry.dirty != 0 && StateOf(entry) != SlotState::kReady) return name + " is wrongly dirty";
    dirty += entry.dirty;
    loading += StateOf(entry) == SlotState::kLoading ? 1 : 0;
  }
  if (dirty != h.dirty_count) return "dirty slots are miscounted";
  if (loading != h.loading_count) return "slots being loaded are miscounted";
  return "";
}

bool Break(Region& region, Damage damage) {
  RegionHeader& h = region.header();
  const uint32_t ready = AnyReady(region);
  if (damage == Damage::kNothing) return true;
  if (ready == kNone) return false;
  SlotEntry& entry = region.slot(ready);
  switch (damage) {
    case Damage::kTakenFromFree:
      return TakeFirstFree(region) != kNone;
    case Damage::kTakenAndLinked:
    case Damage::kLoadingUncounted: {
      const uint32_t slot = TakeFirstFree(region);
      if (slot == kNone) return false;
      SlotEntry& taken = region.slot(slot);
      taken.block = IdOf(1u << 30);
      taken.owner = region.self();
      uint32_t& bucket = BucketOf(region, taken.block);
      taken.hash_next = bucket;
      bucket = slot;
      if (damage == Damage::kLoadingUncounted) taken.state.store(SlotState::kLoading);
      return true;
    }
    case Damage::kTakenFromUsed:
      (entry.list_previous == kNone ? h.used.first : region.slot(entry.list_previous).list_next) =
          entry.list_next;
      (entry.list_next == kNone ? h.used.last : region.slot(entry.list_next).list_previous) =
          entry.list_previous;
      return true;  // before its count
    case Damage::kReadyUncounted: {
      const uint32_t slot = TakeFirstFree(region);
      if (slot == kNone) return false;
      SlotEntry& taken = region.slot(slot);
      taken.block = IdOf(1u << 30);
      taken.owner = region.self();
      ++h.loading_count;  // as when it was claimed
      taken.state.store(SlotState::kReady);
      return true;
    }
    case Damage::kTornList:
      if (h.used.count < 2) return false;
      region.slot(region.slot(h.used.last).list_previous).list_next = kNone;
      return true;
    case Damage::kCutChain:
      BucketOf(region, entry.block) = kNone;
      return true;
    case Damage::kTwice: {
      const uint32_t slot = TakeFirstFree(region);
      if (slot == kNone) return false;
      SlotEntry& taken = region.slot(slot);
      taken.block = entry.block;
      taken.owner = region.self();
      taken.state.store(SlotState::kLoading);
      return true;
    }
    default:
      return false;
  }
}

}  // namespace cachestore::test
