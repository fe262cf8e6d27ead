// F15, F16, F17: one of the processes that share a region is killed with
// SIGKILL, wherever that hurts. The others finish within a bound and with the
// right bytes; afterwards no slot is lost, and nothing dumped is either.
#include <chrono>
#include <memory>
#include <vector>

#include "cache/processes_store.h"

namespace cachestore::test {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kSlots = 160;
constexpr size_t kPages = 128;
constexpr size_t kOther = 1000;  // the first of pages that nothing else uses

// The killed rank comes back, as it does in life: then all that is dead has
// been reclaimed, no slot is lost, and every one can be replaced.
void ExpectRecovered(Place& place, StoreProcess& survivor) {
  const StoreProcess again(place.setup, place.watch);
  const auto region = AttachAtRest(place.setup);
  if (region == nullptr) return;
  const uint32_t slots = region->slot_count();
  EXPECT_EQ(CountsOf(*region).slots(), slots);
  place.Fill(kOther, slots);
  EXPECT_EQ(survivor.Load(kOther, slots).right, slots);
  place.watch.Reset();
  EXPECT_EQ(survivor.Load(kOther, slots).right, slots);
  EXPECT_EQ(place.watch.reads(), 0u);  // all of them are in slots
  EXPECT_EQ(Inconsistency(*region), "");
  const cs_stats stats = survivor.Stats();
  EXPECT_EQ(stats.load_outstanding + stats.dump_outstanding, 0u);
}

void ExpectAllRight(const StoreProcesses& processes, size_t from, size_t pages) {
  for (size_t i = from; i < processes.size(); ++i) {
    const Loaded loaded = processes[i]->EndLoad();
    EXPECT_EQ(loaded.right, pages);
    EXPECT_EQ(loaded.wrong, 0u);
  }
}

}  // namespace

// Inside a read of the storage, as the owner of all the slots that the others
// wait for.
TEST(Killed, OwningLoads) {
  Place place;
  place.SetSlots(kSlots);
  place.setup.peer_timeout_ms = 20000;  // the death is noticed, not waited out
  place.Fill(0, kPages);
  const StoreProcesses processes = place.Start(8);
  place.watch.HoldReads(true);
  processes[0]->StartLoad(0, kPages);
  EXPECT_TRUE(place.watch.WaitReadsInside(place.setup.load_workers));
  for (size_t i = 1; i < processes.size(); ++i) processes[i]->StartLoad(0, kPages);
  processes[0]->Kill();
  place.watch.HoldReads(false);
  const auto killed = Clock::now();
  ExpectAllRight(processes, 1, kPages);
  EXPECT_LT((Clock::now() - killed).count(), Clock::duration(std::chrono::seconds(15)).count());
  // Once more for what the dead one was reading, and no more.
  EXPECT_LE(place.watch.reads(), kPages + place.setup.load_workers);
  ExpectRecovered(place, *processes[1]);
}

// Holding the region's lock, at each place of a metadata change.
TEST(Killed, InsideTheLock) {
  for (int damage = 0; damage < static_cast<int>(Damage::kCount); ++damage) {
    Place place;
    place.SetSlots(40);
    place.Fill(0, 20);
    const StoreProcesses processes = place.Start(2);
    EXPECT_EQ(processes[1]->Load(0, 10).right, 10u);
    ASSERT_TRUE(processes[0]->TakeLock(static_cast<Damage>(damage)));
    processes[1]->StartLoad(0, 20);
    processes[0]->Kill();
    ExpectAllRight(processes, 1, 20);
    ExpectRecovered(place, *processes[1]);
  }
}

// The lock's owner dies while others wait for it, and one of them dies too.
TEST(Killed, InsideTheLockAndWaitingForIt) {
  Place place;
  place.SetSlots(40);
  place.Fill(0, 30);
  const StoreProcesses processes = place.Start(4);
  EXPECT_EQ(processes[1]->Load(0, 10).right, 10u);
  ASSERT_TRUE(processes[0]->TakeLock(Damage::kTornList));
  for (size_t i = 1; i < 4; ++i) processes[i]->StartLoad(0, 30);
  processes[1]->Kill();
  processes[0]->Kill();
  ExpectAllRight(processes, 2, 30);
  ExpectRecovered(place, *processes[2]);
}

// While it copies from a slot: the pin goes with it.
TEST(Killed, CopyingFromASlot) {
  Place place;
  place.SetSlots(40);
  place.Fill(0, 10);
  const StoreProcesses processes = place.Start(2);
  EXPECT_EQ(processes[1]->Load(0, 10).right, 10u);
  if (const std::string why = processes[0]->HoldCopy(/*load=*/true, 3); !why.empty()) SKIP(why);
  {
    const auto region = AttachOrFail(place.setup);
    if (region == nullptr) return;
    EXPECT_EQ(CountsOf(*region).pins, 1u);
  }
  processes[0]->Kill();
  EXPECT_EQ(processes[1]->Load(0, 10).right, 10u);
  ExpectRecovered(place, *processes[1]);
}

// While it gathers a page into a slot: who waits for that slot dumps the page
// itself, and who wants to load it isn't kept.
TEST(Killed, Gathering) {
  Place place;
  place.SetSlots(40);
  place.setup.peer_timeout_ms = 20000;
  const StoreProcesses processes = place.Start(3);
  if (const std::string why = processes[0]->HoldCopy(/*load=*/false, 3); !why.empty()) SKIP(why);
  processes[1]->StartDump(0, 10);
  processes[2]->StartLoad(3, 1);
  processes[0]->Kill();
  EXPECT_EQ(processes[1]->EndDump(), 10u);
  EXPECT_EQ(processes[2]->EndLoad().wrong, 0u);
  EXPECT_EQ(processes[2]->Load(0, 10).right, 10u);
  ExpectRecovered(place, *processes[1]);
  processes[1]->Close();
  processes[2]->Close();
  EXPECT_EQ(place.Stored(0, 10), 10u);
}

// Stopped, not dead, and killed later.
TEST(Killed, WhileStopped) {
  Place place;
  place.SetSlots(kSlots);
  place.setup.peer_timeout_ms = 20000;
  place.Fill(0, kPages);
  const StoreProcesses processes = place.Start(3);
  place.watch.HoldReads(true);
  processes[0]->StartLoad(0, kPages);
  EXPECT_TRUE(place.watch.WaitReadsInside(place.setup.load_workers));
  processes[0]->Stop();
  for (size_t i = 1; i < 3; ++i) processes[i]->StartLoad(0, kPages);
  place.watch.HoldReads(false);
  processes[0]->Kill();
  ExpectAllRight(processes, 1, kPages);
  ExpectRecovered(place, *processes[1]);
}

}  // namespace cachestore::test
