// Processes that share a region and live: each page is read from the storage
// once, whoever asks for it; another identity's processes have nothing to do
// with them.
#include <memory>
#include <vector>

#include "cache/processes_store.h"

namespace cachestore::test {
namespace {

constexpr size_t kProcesses = 8;
constexpr size_t kPages = 128;

}  // namespace

// The reads are held until every process has asked, so that all want the same
// pages at the same time.
TEST(Processes, ColdPagesAreReadOnceBetweenAll) {
  Place place;
  place.Fill(0, kPages);
  const StoreProcesses processes = place.Start(kProcesses);
  place.watch.HoldReads(true);
  for (const auto& process : processes) process->StartLoad(0, kPages);
  EXPECT_TRUE(place.watch.WaitReadsInside(1));
  place.watch.HoldReads(false);
  uint64_t direct = 0;
  for (const auto& process : processes) {
    const Loaded loaded = process->EndLoad();
    EXPECT_EQ(loaded.right, kPages);
    EXPECT_EQ(loaded.wrong, 0u);
    const cs_stats stats = process->Stats();
    EXPECT_EQ(stats.cache_hit + stats.cache_waited + stats.cache_loaded + stats.cache_direct,
              kPages);
    EXPECT_EQ(stats.load_outstanding, 0u);
    direct += stats.cache_direct;
  }
  EXPECT_EQ(direct, 0u);
  for (size_t n = 0; n < kPages; ++n) EXPECT_EQ(place.watch.reads(n), 1u);
  const auto region = AttachOrFail(place.setup);
  if (region == nullptr) return;
  const RegionCounts counts = CountsOf(*region);
  EXPECT_EQ(counts.ready, kPages);
  EXPECT_EQ(counts.loading + counts.failed + counts.dirty + counts.pins, 0u);
  EXPECT_EQ(counts.processes, kProcesses + 1);
  EXPECT_EQ(Inconsistency(*region), "");
}

// What one process dumps, the others have from memory, and lookups say so.
TEST(Processes, DumpedPagesAreSharedFromMemory) {
  Place place;
  const StoreProcesses processes = place.Start(3);
  EXPECT_EQ(processes[0]->Dump(0, 20), 20u);
  for (const auto& process : processes) {
    EXPECT_EQ(process->Lookup(0, 21), 20u);
    EXPECT_EQ(process->Load(0, 20).right, 20u);
    EXPECT_EQ(process->Stats().cache_hit, 20u);
  }
  EXPECT_EQ(place.watch.reads(), 0u);
  for (const auto& process : processes) process->Close();
  EXPECT_EQ(place.Stored(0, 20), 20u);
  EXPECT_TRUE(place.IsClean());
}

// F20: nothing that a lookup does keeps a slot from being replaced.
TEST(Processes, LookupsPinNothing) {
  Place place;
  place.SetSlots(40);
  place.Fill(0, 120);
  const StoreProcesses processes = place.Start(2);
  EXPECT_EQ(processes[0]->Load(0, 40).right, 40u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(processes[0]->Lookup(0, 40), 40u);
    EXPECT_EQ(processes[1]->Lookup(0, 40), 40u);
  }
  const auto region = AttachOrFail(place.setup);
  if (region == nullptr) return;
  EXPECT_EQ(CountsOf(*region).pins, 0u);
  EXPECT_EQ(processes[1]->Load(40, 40).right, 40u);
  EXPECT_EQ(processes[1]->Load(80, 40).right, 40u);
  EXPECT_EQ(processes[1]->Stats().cache_direct, 0u);
}

// F18: more processes than slots, each wanting pages of its own: what gets no
// slot goes past the cache, and everybody ends.
TEST(Processes, FullRegionIsPassedBy) {
  Place place;
  place.SetSlots(4);
  place.Fill(0, 4 * 32);
  const StoreProcesses processes = place.Start(4);
  place.watch.HoldReads(true);
  for (size_t i = 0; i < 4; ++i) processes[i]->StartLoad(32 * i, 32);
  EXPECT_TRUE(place.watch.WaitReadsInside(4));
  place.watch.HoldReads(false);
  uint64_t direct = 0;
  for (const auto& process : processes) {
    EXPECT_EQ(process->EndLoad().right, 32u);
    direct += process->Stats().cache_direct;
  }
  EXPECT_GT(direct, 0u);
  const auto region = AttachOrFail(place.setup);
  if (region == nullptr) return;
  EXPECT_EQ(CountsOf(*region).loading, 0u);
  EXPECT_EQ(Inconsistency(*region), "");
}

// F19: slow stores keep dumps from taking all slots; loads find some.
TEST(Processes, SlowDumpsLeaveSlotsForLoads) {
  Place place;
  place.SetSlots(16);
  place.Fill(100, 2);
  const StoreProcesses processes = place.Start(2);
  place.watch.HoldWrites(true);
  processes[0]->StartDump(0, 40);
  EXPECT_TRUE(place.watch.WaitWritesInside(1));
  EXPECT_EQ(processes[1]->Load(100, 2).right, 2u);
  EXPECT_EQ(processes[1]->Stats().cache_loaded, 2u);
  EXPECT_EQ(processes[1]->Stats().cache_direct, 0u);
  place.watch.HoldWrites(false);
  EXPECT_EQ(processes[0]->EndDump(), 40u);
}

// Other bytes for the same block ids, and other files: no region in common.
TEST(Processes, IdentitiesNeverShare) {
  Place place;
  StoreSetup other = place.setup;
  other.identity = "other";
  other.fingerprint = 2;
  StoreProcess one(place.setup, place.watch);
  StoreProcess two(other, place.watch);
  EXPECT_EQ(one.Dump(0, 10), 10u);
  EXPECT_EQ(two.Lookup(0, 10), 0u);
  EXPECT_EQ(two.Load(0, 10).failed, 10u);
  EXPECT_EQ(FilesBelow(place.shared.path()).size(), 2u);
  // Neither's end takes anything from the other.
  two.Close();
  EXPECT_EQ(FilesBelow(place.shared.path()), std::vector<std::string>{RegionPath(place.setup)});
  EXPECT_EQ(one.Load(0, 10).right, 10u);
}

// The same identity with another page size is an error, not wrong bytes.
TEST(Processes, AnotherPageSizeIsRefused) {
  Place place;
  StoreProcess one(place.setup, place.watch);
  StoreSetup other = place.setup;
  other.tensor_sizes = {5000, 308};
  StoreProcess two(other, place.watch, /*open=*/false);
  EXPECT_NE(two.Open().find("another identity or page size"), std::string::npos);
  EXPECT_EQ(one.Dump(0, 10), 10u);
}

// All places are taken: one more process is told so, until one leaves.
TEST(Processes, OneTooManyIsRefused) {
  Place place;
  std::vector<std::unique_ptr<Region>> regions;
  for (uint32_t p = 0; p < kMaxProcesses; ++p) regions.push_back(AttachOrFail(place.setup));
  StoreProcess late(place.setup, place.watch, /*open=*/false);
  EXPECT_NE(late.Open().find("has its 64 processes already"), std::string::npos);
  regions.pop_back();
  EXPECT_EQ(late.Open(), "");
  EXPECT_EQ(late.Dump(0, 3), 3u);
}

}  // namespace cachestore::test
