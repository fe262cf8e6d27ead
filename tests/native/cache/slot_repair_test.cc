// SlotTable: what a death leaves, in the middle of a change or between two.
#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "base/checksum.h"
#include "cache/few_slots.h"
#include "cache/processes_region.h"
#include "cache/slot_table.h"
#include "fixture.h"
#include "harness.h"

namespace cachestore::test {
namespace {

void Repair(Region& region) {
  const Region::Lock lock(region);
  ASSERT_TRUE(lock.ok());
  SlotTable::Repair(region);
}

SlotRef Dumped(SlotTable& table, uint64_t block, uint32_t checksum = 0) {
  const Claim claim = table.ClaimForDump(IdOf(block));
  EXPECT_EQ(claim.kind, Claim::kClaimed);
  EXPECT_TRUE(table.PublishDump(claim.ref, checksum, table.epoch()));
  return claim.ref;
}

void Loaded(SlotTable& table, uint64_t block) {
  const Claim claim = table.ClaimForLoad(IdOf(block), 0, false);
  ASSERT_EQ(claim.kind, Claim::kClaimed);
  EXPECT_TRUE(table.PublishLoad(claim.ref));
}

std::vector<uint8_t> ReadyOf(SlotTable& table, uint64_t blocks) {
  std::vector<BlockId> ids;
  for (uint64_t block = 0; block < blocks; ++block) ids.push_back(IdOf(block));
  std::vector<uint8_t> present(blocks, 0);
  EXPECT_TRUE(table.Lookup(ids, present));
  return present;
}

// All that lists, chains and counts say is garbage.
void Scramble(Region& region, std::mt19937_64& random) {
  const Region::Lock lock(region);
  ASSERT_TRUE(lock.ok());
  const auto any = [&]() -> uint32_t {
    switch (random() % 4) {
      case 0:
        return kNone;
      case 1:
        return static_cast<uint32_t>(random());
      default:
        return static_cast<uint32_t>(random() % region.slot_count());
    }
  };
  RegionHeader& h = region.header();
  h.free = {any(), any(), any()};
  h.used = {any(), any(), any()};
  h.dirty_count = any();
  h.loading_count = any();
  h.ownerless_count = any();
  for (uint64_t b = 0; b < h.bucket_count; ++b) region.bucket(b) = any();
  for (uint32_t s = 0; s < region.slot_count(); ++s) {
    SlotEntry& entry = region.slot(s);
    entry.hash_next = any();
    entry.list_next = any();
    entry.list_previous = any();
  }
}

// Everything a caller may do, in any order, against a model of it; and every now
// and then a repair that finds nothing but states and blocks.
void RandomHistory(uint64_t seed, uint32_t slots, bool with_repairs) {
  constexpr uint64_t kBlocks = 24;
  FewSlotsTable few(slots, slots / 8, std::max(slots / 2, 1u));
  SlotTable& table = few.table;
  std::mt19937_64 random(seed);
  std::vector<std::pair<SlotRef, bool>> filling;  // and whether it is a dump
  std::vector<SlotRef> dirty;
  std::map<uint32_t, std::pair<SlotRef, BlockId>> pinned;  // by worker
  uint64_t epoch = table.epoch();
  const auto take = [&](auto& from) {
    std::swap(from[random() % from.size()], from.back());
    const auto taken = from.back();
    from.pop_back();
    return taken;
  };
  for (int step = 0; step < 1500; ++step) {
    const BlockId block = IdOf(random() % kBlocks);
    const uint32_t worker = static_cast<uint32_t>(random() % kWorkers);
    switch (random() % 12) {
      case 0:
      case 1:
      case 2: {
        if (pinned.count(worker) != 0) break;
        const Claim claim = table.ClaimForLoad(block, worker, random() % 2 == 0);
        if (claim.kind == Claim::kReady) pinned[worker] = {claim.ref, block};
        if (claim.kind == Claim::kClaimed) filling.push_back({claim.ref, false});
        break;
      }
      case 3:
      case 4: {
        const Claim claim = table.ClaimForDump(block);
        if (claim.kind == Claim::kClaimed) filling.push_back({claim.ref, true});
        break;
      }
      case 5:
      case 6: {
        if (filling.empty()) break;
        const auto [ref, is_dump] = take(filling);
        if (random() % 4 == 0) {
          EXPECT_TRUE(table.Fail(ref, CS_IO));
        } else if (is_dump) {
          EXPECT_TRUE(table.PublishDump(ref, 0, epoch));
          dirty.push_back(ref);
        } else {
          EXPECT_TRUE(table.PublishLoad(ref));
        }
        break;
      }
      case 7: {
        if (dirty.empty()) break;
        const SlotRef ref = take(dirty);
        EXPECT_TRUE(random() % 4 == 0 ? table.Revoke(ref, CS_REFUSED) : table.Clean(ref));
        break;
      }
      case 8:
      case 9:
        table.Unpin(worker);
        pinned.erase(worker);
        break;
      case 10: {
        std::vector<BlockId> chain;
        for (uint64_t n = random() % 5; n > 0; --n) chain.push_back(IdOf(random() % kBlocks));
        table.Touch(chain, random() % 2 == 0 ? &block : nullptr);
        break;
      }
      default:
        if (random() % 8 == 0) {
          EXPECT_TRUE(table.Clear(1));
        }
        if (random() % 2 == 0) epoch = table.epoch();
        break;
    }
    if (with_repairs && step % 50 == 0) {
      const std::vector<uint8_t> ready = ReadyOf(table, kBlocks);
      const SlotCounts before = table.Counts();
      Scramble(*few.region, random);
      Repair(*few.region);
      EXPECT_TRUE(ReadyOf(table, kBlocks) == ready);
      const SlotCounts after = table.Counts();
      EXPECT_EQ(after.free, before.free);
      EXPECT_EQ(after.used, before.used);
      EXPECT_EQ(after.dirty, before.dirty);
      EXPECT_EQ(after.loading, before.loading);
    }
    // What somebody reads, stores or fills is nobody else's.
    for (const auto& [reader, what] : pinned) {
      EXPECT_EQ(few.region->slot(what.first.slot).generation.load(), what.first.generation);
      EXPECT_TRUE(table.block(what.first) == what.second);
      EXPECT_FALSE(table.IsLoading(what.first));
    }
    for (const SlotRef ref : dirty) {
      EXPECT_EQ(few.region->slot(ref.slot).generation.load(), ref.generation);
      EXPECT_EQ(few.region->slot(ref.slot).dirty, 1u);
    }
    for (const auto& [ref, is_dump] : filling) EXPECT_TRUE(table.IsLoading(ref));
    EXPECT_EQ(table.Counts().loading, filling.size());
    EXPECT_EQ(table.Counts().dirty, dirty.size());
    const std::string wrong = Inconsistency(*few.region);
    EXPECT_EQ(wrong, "");
    if (!wrong.empty()) return;
  }
  // And in the end all slots are there.
  for (const auto& [ref, is_dump] : filling) EXPECT_TRUE(table.Fail(ref, CS_IO));
  for (const SlotRef ref : dirty) EXPECT_TRUE(table.Clean(ref));
  for (uint32_t worker = 0; worker < kWorkers; ++worker) table.Unpin(worker);
  for (uint64_t block = 100; block < 100 + slots; ++block) {
    EXPECT_EQ(table.ClaimForLoad(IdOf(block), 0, false).kind, Claim::kClaimed);
  }
  EXPECT_EQ(table.ClaimForLoad(IdOf(99), 0, false).kind, Claim::kNoSlot);
}

}  // namespace

TEST(SlotTable, AnyHistoryKeepsItsInvariants) {
  for (const uint32_t slots : {1, 3, 8, 20}) {
    for (uint64_t seed = 0; seed < 2; ++seed) RandomHistory(seed, slots, false);
  }
}

TEST(SlotRepair, RebuildsAllFromStatesAndBlocks) {
  for (const uint32_t slots : {1, 3, 8, 20}) {
    for (uint64_t seed = 0; seed < 2; ++seed) RandomHistory(100 + seed, slots, true);
  }
}

TEST(SlotRepair, EveryStateThatADeathLeaves) {
  for (int damage = 0; damage < static_cast<int>(Damage::kCount); ++damage) {
    FewSlotsTable few(8);
    SlotTable& table = few.table;
    for (uint64_t block = 0; block < 3; ++block) Loaded(table, block);
    const SlotRef dirty = Dumped(table, 3);
    const Claim loading = table.ClaimForLoad(IdOf(4), 0, false);
    {
      const Region::Lock lock(*few.region);
      ASSERT_TRUE(lock.ok());
      EXPECT_TRUE(Break(*few.region, static_cast<Damage>(damage)));
      SlotTable::Repair(*few.region);
    }
    EXPECT_EQ(Inconsistency(*few.region), "");
    // None but those of the broken change is lost.
    EXPECT_TRUE(ReadyOf(table, 5) == std::vector<uint8_t>({1, 1, 1, 1, 0}));
    EXPECT_TRUE(table.IsLoading(loading.ref));
    EXPECT_TRUE(table.PublishLoad(loading.ref));
    EXPECT_TRUE(table.Clean(dirty));
    // What the dead one had comes back with its death.
    {
      const Region::Lock lock(*few.region);
      ASSERT_TRUE(lock.ok());
      SlotTable::Reclaim(*few.region, few.region->self());
    }
    for (const SlotRef ref : table.ReclaimDead()) EXPECT_TRUE(table.Clean(ref));
    for (uint64_t block = 10; block < 18; ++block) Loaded(table, block);
    EXPECT_EQ(table.Counts().used, 8u);
    EXPECT_EQ(Inconsistency(*few.region), "");
  }
}

// Before the state that gives the slot a meaning, and after the one that takes it.
TEST(SlotRepair, HalfDoneChangesOfAState) {
  FewSlotsTable few(6);
  SlotTable& table = few.table;
  // A publish, before kReady.
  const Claim publishing = table.ClaimForDump(IdOf(0));
  few.region->slot(publishing.ref.slot).dirty = 1;
  // A clean, before the count and the list.
  const SlotRef cleaned = Dumped(table, 1);
  few.region->slot(cleaned.slot).dirty = 0;
  // A release, before the new generation.
  Loaded(table, 2);
  uint32_t released = 0;
  while (table.block({released, 0}) != IdOf(2)) ++released;
  const SlotRef old{released, few.region->slot(released).generation.load()};
  few.region->slot(released).state.store(SlotState::kFree);
  // A clear, before the mark.
  const SlotRef unlinked = Dumped(table, 3);
  for (uint64_t b = 0; b < few.region->header().bucket_count; ++b) {
    if (few.region->bucket(b) == unlinked.slot) few.region->bucket(b) = kNone;
  }
  // A failure, before the count.
  const Claim failing = table.ClaimForLoad(IdOf(4), 0, false);
  few.region->slot(failing.ref.slot).state.store(SlotState::kFailed);

  Repair(*few.region);
  EXPECT_EQ(Inconsistency(*few.region), "");
  EXPECT_TRUE(ReadyOf(table, 5) == std::vector<uint8_t>({0, 1, 0, 1, 0}));
  EXPECT_NE(few.region->slot(released).generation.load(), old.generation);
  const SlotCounts counts = table.Counts();
  EXPECT_EQ(counts.loading, 1u);
  EXPECT_EQ(counts.dirty, 1u);
  EXPECT_EQ(counts.used, 2u);
  EXPECT_EQ(counts.free, 2u);
  EXPECT_TRUE(table.PublishDump(publishing.ref, 0, table.epoch()));
  EXPECT_TRUE(table.Clean(publishing.ref));
  EXPECT_TRUE(table.Clean(unlinked));
  EXPECT_EQ(Inconsistency(*few.region), "");
}

// Whoever dies with the mutex: the next one repairs, and goes on.
TEST(SlotRepair, ComesWithTheMutexOfTheDead) {
#ifdef __SANITIZE_THREAD__
  SKIP("thread sanitizer takes a mutex of a thread that has ended for one that it still holds");
#endif
  FewSlotsTable few(4);
  Loaded(few.table, 1);
  std::thread([&] {
    // A robust mutex takes the end of its thread for a death.
    ASSERT_EQ(pthread_mutex_lock(&few.region->header().mutex), 0);
    EXPECT_TRUE(Break(*few.region, Damage::kTakenFromUsed));
  }).join();
  EXPECT_TRUE(ReadyOf(few.table, 2) == std::vector<uint8_t>({0, 1}));
  EXPECT_EQ(Inconsistency(*few.region), "");
}

TEST(SlotReclaim, GivesBackWhatTheDeadHeld) {
  FewSlotsTable few(8);
  SlotTable& table = few.table;
  Region& region = *few.region;
  constexpr uint32_t kDead = 9;
  const SlotRef dirty = Dumped(table, 1);
  const SlotRef cleared = Dumped(table, 2);
  EXPECT_TRUE(table.Clear(1));
  const SlotRef kept = Dumped(table, 3);
  const Claim loading = table.ClaimForLoad(IdOf(4), 0, false);
  const Claim ours = table.ClaimForLoad(IdOf(5), 0, false);
  EXPECT_EQ(table.ClaimForLoad(IdOf(4), 0, false).kind, Claim::kLoading);  // we wait for it
  Loaded(table, 6);
  uint32_t read = 0;
  while (table.block({read, 0}) != IdOf(6)) ++read;
  region.process(kDead).in_use = 1;
  region.process(kDead).workers = kWorkers;
  region.process(kDead).pinned[2].store(read);
  for (const uint32_t slot : {dirty.slot, cleared.slot, kept.slot, loading.ref.slot}) {
    region.slot(slot).owner = kDead;
  }
  region.slot(ours.ref.slot).waiters = uint64_t{1} << kDead;
  const uint32_t wakes = region.process(region.self()).wake.load();

  const std::vector<SlotRef> adopted = table.ReclaimDead();
  ASSERT_EQ(adopted.size(), 1u);  // what was cleared isn't stored
  EXPECT_EQ(adopted[0].slot, kept.slot);
  EXPECT_EQ(adopted[0].generation, kept.generation);
  EXPECT_EQ(region.slot(kept.slot).owner, region.self());
  EXPECT_EQ(region.process(kDead).in_use, 0u);
  EXPECT_EQ(region.process(kDead).pinned[2].load(), kNone);
  EXPECT_EQ(region.slot(ours.ref.slot).waiters, 0u);
  EXPECT_GT(region.process(region.self()).wake.load(), wakes);
  const Claim waited = table.ClaimForLoad(IdOf(4), 0, true);
  EXPECT_EQ(waited.kind, Claim::kFailed);
  EXPECT_EQ(waited.code, CS_CLOSED);
  EXPECT_TRUE(table.IsLoading(ours.ref));
  EXPECT_EQ(table.Counts().dirty, 1u);
  EXPECT_EQ(Inconsistency(region), "");
  EXPECT_TRUE(table.ReclaimDead().empty());  // once
}

TEST(SlotReclaim, TakesNothingFromTheLiving) {
  const TempDir root;
  const auto ours = OpenRegion(FewSlots(8, root.path()));
  ASSERT_TRUE(ours != nullptr);
  SlotTable table(*ours, 0, 8);
  {
    const auto theirs = OpenRegion(FewSlots(8, root.path()));
    ASSERT_TRUE(theirs != nullptr);
    EXPECT_NE(theirs->self(), ours->self());
    EXPECT_TRUE(ours->IsAlive(theirs->self()));
    SlotTable their_table(*theirs, 0, 8);
    const SlotRef dirty = Dumped(their_table, 1);
    const Claim loading = their_table.ClaimForLoad(IdOf(2), 0, false);
    EXPECT_TRUE(table.ReclaimDead().empty());
    EXPECT_TRUE(their_table.IsLoading(loading.ref));
    EXPECT_EQ(ours->slot(dirty.slot).owner, theirs->self());
  }
  // It has left: what it couldn't store is anybody's, what it loaded has failed.
  const std::vector<SlotRef> adopted = table.ReclaimDead();
  ASSERT_EQ(adopted.size(), 1u);
  EXPECT_TRUE(table.block(adopted[0]) == IdOf(1));
  EXPECT_EQ(table.Counts().loading, 0u);
  EXPECT_EQ(Inconsistency(*ours), "");
}

TEST(SlotReclaim, OnlyIntactDirtySlotsAreSaved) {
  FewSlotsTable few(8);
  SlotTable& table = few.table;
  Region& region = *few.region;
  for (uint32_t slot = 0; slot < 8; ++slot) {
    std::memset(region.bytes(slot), static_cast<int>(slot + 1), kSlotSize);
  }
  const auto checksum = [&](uint32_t slot) { return Crc32c(0, region.bytes(slot), kPayload); };
  std::vector<SlotRef> refs;
  for (uint64_t block = 0; block < 6; ++block) {
    const Claim claim = table.ClaimForDump(IdOf(block));
    refs.push_back(claim.ref);
    if (block == 5) continue;  // being filled
    EXPECT_TRUE(table.PublishDump(claim.ref, checksum(claim.ref.slot), table.epoch()));
  }
  EXPECT_TRUE(table.Clean(refs[1]));
  region.bytes(refs[2].slot)[kPayload - 1] ^= 1;
  region.bytes(refs[3].slot)[kPayload] ^= 1;  // padding
  region.slot(refs[4].slot).orphan = 1;
  std::vector<uint32_t> intact = SlotTable::IntactDirty(region);
  std::sort(intact.begin(), intact.end());
  std::vector<uint32_t> expected = {refs[0].slot, refs[3].slot};
  std::sort(expected.begin(), expected.end());
  EXPECT_TRUE(intact == expected);
}

}  // namespace cachestore::test
