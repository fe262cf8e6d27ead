// F15, F17: one of the processes that share a region is stopped with SIGSTOP,
// and continued later. It keeps what it holds, since it may go on writing at
// any time; the others finish within a bound, past the cache if need be. What
// it writes late lands in no slot that means something else by then.
#include <chrono>
#include <memory>
#include <vector>

#include "cache/processes_store.h"

namespace cachestore::test {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kPages = 128;
constexpr size_t kOther = 1000;

size_t MillisecondsSince(Clock::time_point start) {
  return static_cast<size_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start).count());
}

// All the slots that nobody uses get other blocks, twice over.
void ReplaceAll(Place& place, StoreProcess& process) {
  const uint64_t slots = process.Stats().cache_slots;
  place.Fill(kOther, 2 * slots);
  for (int half = 0; half < 2; ++half) {
    EXPECT_EQ(process.Load(kOther + half * slots, slots).right, slots);
  }
}

// Nothing is held any more, and every slot can be used again, with the right
// bytes.
void ExpectAllInOrder(Place& place, const StoreProcesses& processes) {
  const auto region = AttachAtRest(place.setup);
  if (region == nullptr) return;
  const uint32_t slots = region->slot_count();
  place.Fill(kOther, slots);
  for (int round = 0; round < 2; ++round) {
    for (const auto& process : processes) {
      const Loaded loaded = process->Load(kOther, slots);
      EXPECT_EQ(loaded.right, slots);
      EXPECT_EQ(loaded.wrong, 0u);
    }
    if (round == 0) place.watch.Reset();
  }
  EXPECT_EQ(place.watch.reads(), 0u);  // the second time all of them were in slots
  EXPECT_EQ(Inconsistency(*region), "");
}

}  // namespace

// Every attempt at the lock is timed, and a whole request costs one such wait,
// not one for each of its pages.
TEST(Stopped, HoldingTheLock) {
  Place place;
  place.Fill(0, kPages);
  const StoreProcesses processes = place.Start(3);
  ASSERT_TRUE(processes[0]->TakeLock());
  processes[0]->Stop();
  const auto stopped = Clock::now();
  processes[1]->StartLoad(0, kPages);
  processes[2]->StartDump(200, kPages);
  EXPECT_EQ(processes[1]->EndLoad().right, kPages);
  EXPECT_EQ(processes[2]->EndDump(), kPages);
  EXPECT_EQ(processes[2]->Load(200, kPages).right, kPages);
  EXPECT_EQ(processes[1]->Lookup(0, kPages), kPages);
  EXPECT_LT(MillisecondsSince(stopped), 15000u);
  EXPECT_EQ(processes[1]->Stats().cache_direct, kPages);
  processes[0]->Continue();
  EXPECT_TRUE(processes[0]->GiveLock());
  ExpectAllInOrder(place, processes);
}

// The lock is gone just when slots that were filled are to be published.
TEST(Stopped, HoldingTheLockBetweenGatherAndPublish) {
  Place place;
  const StoreProcesses processes = place.Start(2);
  if (const std::string why = processes[1]->HoldCopy(/*load=*/false, 3); !why.empty()) SKIP(why);
  ASSERT_TRUE(processes[0]->TakeLock());
  processes[0]->Stop();
  EXPECT_TRUE(processes[1]->LetCopyGo());
  EXPECT_EQ(processes[1]->EndDump(), 1u);
  processes[0]->Continue();
  EXPECT_TRUE(processes[0]->GiveLock());
  EXPECT_EQ(processes[1]->Load(3, 1).right, 1u);
  EXPECT_TRUE(Eventually([&] { return place.Stored(3, 1) == 1; }));
  ExpectAllInOrder(place, processes);
}

// Just when what was read from the storage is to be published.
TEST(Stopped, HoldingTheLockBetweenReadAndPublish) {
  Place place;
  place.Fill(0, kPages);
  const StoreProcesses processes = place.Start(3);
  place.watch.HoldReads(true);
  processes[1]->StartLoad(0, kPages);
  processes[2]->StartLoad(0, kPages);
  EXPECT_TRUE(place.watch.WaitReadsInside(2));
  ASSERT_TRUE(processes[0]->TakeLock());
  processes[0]->Stop();
  const auto stopped = Clock::now();
  place.watch.HoldReads(false);
  EXPECT_EQ(processes[2]->EndLoad().right, kPages);
  EXPECT_EQ(processes[1]->EndLoad().right, kPages);
  EXPECT_LT(MillisecondsSince(stopped), 15000u);
  processes[0]->Continue();
  EXPECT_TRUE(processes[0]->GiveLock());
  ExpectAllInOrder(place, processes);
}

// Inside a read of the storage, into a slot. Its slots aren't given to anybody
// else, and what it still reads is right where it belongs.
TEST(Stopped, OwningALoad) {
  Place place;
  place.SetSlots(40);
  place.Fill(0, 30);
  const StoreProcesses processes = place.Start(3);
  place.watch.HoldReads(true);
  processes[0]->StartLoad(0, 20);
  EXPECT_TRUE(place.watch.WaitReadsInside(place.setup.load_workers));
  // Its other workers may still be claiming slots.
  EXPECT_TRUE(Eventually([&] { return processes[1]->Stats().cache_slots_loading == 20u; }));
  processes[0]->Stop();
  place.watch.HoldReads(false);
  const auto stopped = Clock::now();
  for (size_t i = 1; i < 3; ++i) processes[i]->StartLoad(0, 30);
  for (size_t i = 1; i < 3; ++i) EXPECT_EQ(processes[i]->EndLoad().right, 30u);
  EXPECT_LT(MillisecondsSince(stopped), 10 * place.setup.peer_timeout_ms);
  ReplaceAll(place, *processes[1]);
  EXPECT_EQ(processes[1]->Stats().cache_slots_loading, 20u);
  processes[0]->Continue();
  EXPECT_EQ(processes[0]->EndLoad().right, 20u);
  for (size_t i = 1; i < 3; ++i) EXPECT_EQ(processes[i]->Load(0, 30).right, 30u);
  ExpectAllInOrder(place, processes);
}

// While it copies from a slot: that slot's bytes stay what they are.
TEST(Stopped, CopyingFromASlot) {
  Place place;
  place.SetSlots(40);
  place.Fill(0, 10);
  const StoreProcesses processes = place.Start(2);
  EXPECT_EQ(processes[1]->Load(0, 10).right, 10u);
  if (const std::string why = processes[0]->HoldCopy(/*load=*/true, 3); !why.empty()) SKIP(why);
  processes[0]->Stop();
  ReplaceAll(place, *processes[1]);
  processes[0]->Continue();
  EXPECT_TRUE(processes[0]->LetCopyGo());
  const Loaded loaded = processes[0]->EndLoad();
  EXPECT_EQ(loaded.right, 1u);
  EXPECT_EQ(loaded.wrong, 0u);
  ExpectAllInOrder(place, processes);
}

// While it gathers a page into a slot: the others get that page neither from
// the slot nor, yet, from anywhere; one that dumps it writes it through.
TEST(Stopped, Gathering) {
  Place place;
  place.SetSlots(40);
  const StoreProcesses processes = place.Start(3);
  if (const std::string why = processes[0]->HoldCopy(/*load=*/false, 3); !why.empty()) SKIP(why);
  processes[0]->Stop();
  EXPECT_EQ(processes[1]->Lookup(3, 1), 0u);
  EXPECT_EQ(processes[1]->Load(3, 1).failed, 1u);
  EXPECT_EQ(processes[2]->Dump(0, 10), 10u);
  EXPECT_TRUE(Eventually([&] { return place.Stored(0, 10) == 10; }));
  EXPECT_EQ(processes[1]->Load(0, 10).right, 10u);
  ReplaceAll(place, *processes[1]);
  processes[0]->Continue();
  EXPECT_TRUE(processes[0]->LetCopyGo());
  EXPECT_EQ(processes[0]->EndDump(), 1u);
  EXPECT_EQ(processes[1]->Load(0, 10).right, 10u);
  ExpectAllInOrder(place, processes);
}

// With slots that it dumped and is storing.
TEST(Stopped, Storing) {
  Place place;
  place.SetSlots(40);
  const StoreProcesses processes = place.Start(2);
  place.watch.HoldWrites(true);
  EXPECT_EQ(processes[0]->Dump(0, 10), 10u);
  EXPECT_TRUE(place.watch.WaitWritesInside(1));
  processes[0]->Stop();
  place.watch.HoldWrites(false);
  EXPECT_EQ(processes[1]->Load(0, 10).right, 10u);
  ReplaceAll(place, *processes[1]);
  EXPECT_EQ(processes[1]->Load(0, 10).right, 10u);  // still there: only there
  EXPECT_EQ(processes[1]->Stats().cache_slots_dirty, 10u);
  processes[0]->Continue();
  EXPECT_TRUE(Eventually([&] { return place.Stored(0, 10) == 10; }));
  ExpectAllInOrder(place, processes);
}

// With nothing in hand: it is alive all the same, and its region stays.
TEST(Stopped, Idle) {
  Place place;
  place.SetSlots(40);
  StoreProcesses processes = place.Start(2);
  processes[0]->Stop();
  EXPECT_EQ(processes[1]->Dump(0, 10), 10u);
  processes[1]->Close();
  EXPECT_FALSE(place.IsClean());
  processes[0]->Continue();
  EXPECT_EQ(processes[0]->Load(0, 10).right, 10u);
  EXPECT_EQ(processes[0]->Stats().cache_hit, 10u);
  processes[0]->Close();
  EXPECT_TRUE(place.IsClean());
}

}  // namespace cachestore::test
