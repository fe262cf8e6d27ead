// What a process dumped into the region and hadn't stored when it went: whoever
// is there, or comes, stores it.
#include <algorithm>
#include <memory>
#include <vector>

#include "cache/processes_store.h"

namespace cachestore::test {
namespace {

constexpr size_t kPages = 20;

// A process that is gone, killed while it was storing `pages` from `first` on.
void DumpAndDie(Place& place, size_t first, size_t pages) {
  StoreProcess dumper(place.setup, place.watch);
  place.watch.Reset();
  place.watch.HoldWrites(true);
  EXPECT_EQ(dumper.Dump(first, pages), pages);
  EXPECT_TRUE(place.watch.WaitWritesInside(1));
  EXPECT_EQ(place.Stored(first, pages), 0u);
  dumper.Kill();
  place.watch.HoldWrites(false);
}

bool EventuallyStored(const Place& place, size_t first, size_t pages) {
  return Eventually([&] { return place.Stored(first, pages) == pages; });
}

}  // namespace

// The survivor serves the pages all the while.
TEST(Dirty, StoredByWhoComesNext) {
  Place place;
  StoreProcess survivor(place.setup, place.watch);
  DumpAndDie(place, 0, kPages);
  EXPECT_EQ(survivor.Load(0, kPages).right, kPages);
  const StoreProcess next(place.setup, place.watch);
  EXPECT_TRUE(EventuallyStored(place, 0, kPages));
  const auto region = AttachOrFail(place.setup);
  if (region == nullptr) return;
  EXPECT_TRUE(Eventually([&] { return CountsOf(*region).dirty == 0; }));
  EXPECT_EQ(CountsOf(*region).ready, kPages);
}

// A survivor that wants the slots that the dead one's pages are in.
TEST(Dirty, StoredByWhoNeedsTheSlots) {
  Place place;
  place.SetSlots(16);
  place.Fill(100, 64);
  StoreProcess survivor(place.setup, place.watch);
  DumpAndDie(place, 0, 5);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(survivor.Load(100 + 16 * i, 16).right, 16u);
  EXPECT_EQ(survivor.Dump(10, 5), 5u);  // as many as may be dirty, were it not for those
  EXPECT_TRUE(EventuallyStored(place, 0, 5));
}

// A survivor that has nothing to do with them, as it leaves.
TEST(Dirty, StoredByTheLastToLeave) {
  Place place;
  StoreProcess survivor(place.setup, place.watch);
  DumpAndDie(place, 0, kPages);
  survivor.Close();
  EXPECT_EQ(place.Stored(0, kPages), kPages);
  EXPECT_TRUE(place.IsClean());
}

// Nobody is left: whoever starts next stores the pages before it discards the
// region.
TEST(Dirty, StoredByWhoFindsAnAbandonedRegion) {
  Place place;
  DumpAndDie(place, 0, kPages);
  EXPECT_FALSE(place.IsClean());
  StoreProcess next(place.setup, place.watch);
  EXPECT_EQ(place.Stored(0, kPages), kPages);
  EXPECT_NE(next.Events().find("stored 20 of 20 blocks"), std::string::npos);
  EXPECT_EQ(next.Load(0, kPages).right, kPages);
  EXPECT_EQ(next.Stats().cache_loaded, kPages);  // from the storage, and a new region
}

// Cleared meanwhile by whoever doesn't share the region: nobody stores them, neither who is
// there nor who comes next.
TEST(Dirty, ClearedElsewhereIsNotStored) {
  for (const bool survivor : {false, true}) {
    Place place;
    std::unique_ptr<StoreProcess> there;
    if (survivor) there = std::make_unique<StoreProcess>(place.setup, place.watch);
    DumpAndDie(place, 0, kPages);
    {
      const TempDir elsewhere;
      StoreSetup other = place.setup;
      other.buffer_directory = elsewhere.path();
      const auto store = OpenOrFail(other);
      ASSERT_TRUE(store != nullptr);
      EXPECT_OK(store->Clear());
    }
    StoreProcess next(place.setup, place.watch);
    EXPECT_EQ(next.Load(0, kPages).failed, kPages);
    EXPECT_EQ(next.Dump(100, 1), 1u);
    EXPECT_TRUE(EventuallyStored(place, 100, 1));
    if (survivor) there->Close();
    next.Close();
    EXPECT_EQ(place.Stored(0, kPages), 0u);
  }
}

// Bytes that changed since they were dumped are not stored.
TEST(Dirty, DamagedIsNotStored) {
  Place place;
  DumpAndDie(place, 0, kPages);
  {
    StoreSetup setup = place.setup;
    const std::string path = RegionPath(setup);
    std::vector<uint8_t> bytes = ReadFile(path);
    const auto& header = *reinterpret_cast<const RegionHeader*>(bytes.data());
    const auto* slots = reinterpret_cast<const SlotEntry*>(bytes.data() + header.slots_offset);
    uint32_t slot = 0;
    while (slots[slot].block != IdOf(7)) ++slot;
    bytes[header.data_offset + slot * header.slot_size + 5001] ^= 1;
    WriteFile(path, bytes);
  }
  StoreProcess next(place.setup, place.watch);
  EXPECT_EQ(place.Stored(0, kPages), kPages - 1);
  EXPECT_EQ(place.Stored(7, 1), 0u);
  EXPECT_EQ(next.Load(7, 1).failed, 1u);
}

// More pages than the storage takes in one request.
TEST(Dirty, MoreThanTheStorageTakesAtOnce) {
  for (const bool survivor : {false, true}) {
    Place place;
    place.setup.queue_depth = 8;
    std::unique_ptr<StoreProcess> there;
    if (survivor) there = std::make_unique<StoreProcess>(place.setup, place.watch);
    StoreProcesses dumpers = place.Start(3);
    place.watch.HoldWrites(true);
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(dumpers[i]->Dump(8 * i, 8), 8u);
    EXPECT_TRUE(place.watch.WaitWritesInside(3));
    for (const auto& dumper : dumpers) dumper->Kill();
    place.watch.HoldWrites(false);
    const StoreProcess next(place.setup, place.watch);
    EXPECT_TRUE(EventuallyStored(place, 0, 24));
  }
}

// A process whose storage fails leaves in good order: the others try.
TEST(Dirty, LeftByOneThatCouldNotStore) {
  Place place;
  place.setup.timeout_ms = 1000;  // and so its Close
  StoreProcess survivor(place.setup, place.watch);
  StoreProcess leaver(place.setup, place.watch);
  place.watch.FailWritesOf(leaver.process().pid());
  EXPECT_EQ(leaver.Dump(0, kPages), kPages);
  EXPECT_EQ(place.Stored(0, kPages), 0u);
  leaver.Close();
  EXPECT_EQ(survivor.Load(0, kPages).right, kPages);
  survivor.Close();
  EXPECT_EQ(place.Stored(0, kPages), kPages);
}

// All places are in use, one of them by a dead process: who takes its place
// takes its pages over.
TEST(Dirty, StoredByWhoTakesTheDeadOnesPlace) {
  Place place;
  std::vector<std::unique_ptr<Region>> regions;
  for (uint32_t p = 0; p + 1 < kMaxProcesses; ++p) regions.push_back(AttachOrFail(place.setup));
  DumpAndDie(place, 0, kPages);
  const StoreProcess next(place.setup, place.watch);
  EXPECT_TRUE(EventuallyStored(place, 0, kPages));
  EXPECT_TRUE(Eventually([&] { return CountsOf(*regions[0]).dirty == 0; }));
}

}  // namespace cachestore::test
