// Loads through the cache, over a tier that fails at each step; dump_queue_test.cc
// has the dumps. After each failure: nothing is left, and the next request is
// served.
#include <atomic>
#include <random>
#include <thread>

#include "cache/cached_mock.h"
#include "cache/held_page.h"
#include "harness.h"

namespace cachestore::test {
namespace {

StoreSetup Setup(std::vector<uint64_t> tensor_sizes = {5000, 137, 20000}) {
  StoreSetup setup;
  setup.tensor_sizes = std::move(tensor_sizes);
  return setup;
}

// The pages, stored below.
Pages StoredPages(CachedMock& cached, uint64_t first, size_t n) {
  Pages pages(cached.setup, first, n);
  pages.Fill();
  cached.Put(pages);
  pages.Poison();
  return pages;
}

// Asked again, all is as if nothing had been.
void ExpectServedAfresh(CachedMock& cached, Pages& pages) {
  EXPECT_TRUE(cached.IsIdle());
  pages.Poison();
  EXPECT_TRUE(cached.Load(pages) == EndCodes(pages.size(), CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
  EXPECT_TRUE(pages.GuardsIntact());
  EXPECT_TRUE(cached.IsIdle());
}

uint64_t LoadsEnded(const cs_stats& s) {
  return s.load_ok + s.load_absent + s.load_corrupt + s.load_failed + s.load_timeout +
         s.load_refused;
}

}  // namespace

TEST(LoadQueue, MissesAreLoadedAndHitsAskNobody) {
  CachedMock cached(Setup());
  ASSERT_TRUE(cached.Open());
  Pages pages = StoredPages(cached, 0, 10);
  EXPECT_TRUE(cached.Load(pages) == EndCodes(10, CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
  EXPECT_TRUE(pages.GuardsIntact());
  EXPECT_EQ(cached.below->calls(kLoad), 10u);  // each is a job of its own
  cached.below->EndWith(kLoad, CS_IO);
  pages.Poison();
  EXPECT_TRUE(cached.Load(pages) == EndCodes(10, CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
  EXPECT_EQ(cached.below->calls(kLoad), 10u);
  const cs_stats stats = cached.Stats();
  EXPECT_EQ(stats.cache_loaded, 10u);
  EXPECT_EQ(stats.cache_hit, 10u);
  EXPECT_EQ(stats.cache_direct, 0u);
  EXPECT_EQ(stats.load_bytes, 20 * cached.setup.payload());
  EXPECT_EQ(cached.below->calls(kDump), 0u);
}

TEST(LoadQueue, WhoeverWantsABlockWaitsForTheOneLoadOfIt) {
  CachedMock cached(Setup());
  ASSERT_TRUE(cached.Open());
  constexpr size_t kRequests = 8;
  std::vector<Pages> pages;
  for (size_t i = 0; i < kRequests; ++i) pages.push_back(StoredPages(cached, 5, 2));
  cached.below->Hold(kLoad);
  std::vector<CachedMock::Asked> asked;
  for (const Pages& each : pages) asked.push_back(cached.Ask(kLoad, each));
  EXPECT_TRUE(Eventually([&] { return cached.below->held(kLoad) == 2; }));
  EXPECT_TRUE(Eventually([&] { return cached.Stats().cache_load_running == 0; }));  // nobody blocks
  EXPECT_EQ(cached.Stats().load_outstanding, 2 * kRequests);
  cached.below->Release(kLoad);
  for (size_t i = 0; i < kRequests; ++i) {
    EXPECT_TRUE(cached.EndsOf(asked[i]) == EndCodes(2, CS_OK));
    EXPECT_TRUE(pages[i].HoldsAll());
  }
  EXPECT_EQ(cached.below->calls(kLoad), 2u);
  EXPECT_EQ(cached.Stats().cache_loaded, 2u);
  EXPECT_EQ(cached.Stats().cache_waited + cached.Stats().cache_hit, 2 * (kRequests - 1));
  EXPECT_TRUE(cached.IsIdle());
}

// And have its failure in common.
TEST(LoadQueue, TheOneLoadsFailureIsEverybodys) {
  CachedMock cached(Setup());
  ASSERT_TRUE(cached.Open());
  cached.below->Hold(kLoad);
  std::vector<Pages> pages;
  std::vector<CachedMock::Asked> asked;
  for (size_t i = 0; i < 4; ++i) pages.push_back(StoredPages(cached, 5, 1));
  for (const Pages& each : pages) asked.push_back(cached.Ask(kLoad, each));
  EXPECT_TRUE(Eventually([&] { return cached.below->held(kLoad) == 1; }));
  EXPECT_TRUE(Eventually([&] { return cached.Stats().cache_load_running == 0; }));
  EXPECT_TRUE(Eventually([&] { return cached.Stats().cache_load_queued == 0; }));
  cached.below->EndWith(kLoad, CS_CORRUPT);
  cached.below->Release(kLoad);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(cached.EndsOf(asked[i]) == EndCodes(1, CS_CORRUPT));
    EXPECT_TRUE(pages[i].IsPoisoned());
  }
  EXPECT_EQ(cached.below->calls(kLoad), 1u);
  EXPECT_EQ(cached.Stats().load_corrupt, 4u);
  cached.below->End(kLoad, nullptr);
  ExpectServedAfresh(cached, pages[0]);
}

// Contract: several load shards at once, as many as there are workers, each in
// the midst of its copy.
TEST(LoadQueue, EveryWorkerCopiesAtOnce) {
  StoreSetup setup = Setup({8192});
  setup.copy_workers = 3;
  CachedMock cached(setup);
  ASSERT_TRUE(cached.Open());
  Pages pages = StoredPages(cached, 0, 3);
  EXPECT_TRUE(cached.Load(pages) == EndCodes(3, CS_OK));
  const std::vector<uint8_t> zeroes(8192, 0);
  std::vector<std::unique_ptr<HeldPage>> held;
  Batch batch = CachedMock::BatchOf(pages);
  for (size_t i = 0; i < 3; ++i) {
    held.push_back(std::make_unique<HeldPage>(zeroes.data(), zeroes.size()));
    if (!held[i]->reason().empty()) SKIP("no memory to hold a copy on: " + held[i]->reason());
    batch.addresses[i] = held[i]->begin();
  }
  const auto asked = cached.Ask(kLoad, std::move(batch));
  for (const auto& each : held) EXPECT_TRUE(each->WaitTouched());
  EXPECT_EQ(cached.Stats().cache_load_running, 3u);
  for (const auto& each : held) EXPECT_TRUE(each->LetGo());
  EXPECT_TRUE(cached.EndsOf(asked) == EndCodes(3, CS_OK));
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(std::vector<uint8_t>(held[i]->begin(), held[i]->begin() + 8192) ==
                cached.PayloadOf(pages, i));
  }
  EXPECT_TRUE(cached.IsIdle());
}

TEST(LoadQueue, AbsentBlocksAreAbsentUntilTheyAreStored) {
  CachedMock cached(Setup());
  ASSERT_TRUE(cached.Open());
  Pages pages(cached.setup, 0, 4);
  pages.Poison();
  for (int round = 0; round < 2; ++round) {
    EXPECT_TRUE(cached.Load(pages) == EndCodes(4, CS_NOT_FOUND));
    EXPECT_TRUE(pages.IsPoisoned());
    EXPECT_TRUE(cached.IsIdle());
  }
  pages.Fill();
  cached.Put(pages);
  ExpectServedAfresh(cached, pages);
  EXPECT_EQ(cached.Stats().load_absent, 8u);
}

// Contract point 5, step by step.

TEST(LoadQueue, RequestsThatDontFitAreRefused) {
  StoreSetup setup = Setup();
  setup.copy_queue_depth = 4;
  CachedMock cached(setup);
  ASSERT_TRUE(cached.Open());
  Pages pages = StoredPages(cached, 0, 5);
  EXPECT_TRUE(cached.Load(pages) == EndCodes(5, CS_REFUSED));
  EXPECT_TRUE(pages.IsPoisoned());
  EXPECT_EQ(cached.below->calls(kLoad), 0u);
  // Nor beside one that is under way, hits included.
  Pages four = StoredPages(cached, 0, 4);
  EXPECT_TRUE(cached.Load(four) == EndCodes(4, CS_OK));
  cached.below->Hold(kLoad);
  Pages one = StoredPages(cached, 50, 1);
  const auto under_way = cached.Ask(kLoad, one);
  EXPECT_TRUE(Eventually([&] { return cached.below->held(kLoad) == 1; }));
  EXPECT_TRUE(cached.Load(four) == EndCodes(4, CS_REFUSED));
  cached.below->Release(kLoad);
  EXPECT_TRUE(cached.EndsOf(under_way) == EndCodes(1, CS_OK));
  ExpectServedAfresh(cached, four);
  EXPECT_EQ(cached.Stats().load_refused, 9u);
  EXPECT_EQ(LoadsEnded(cached.Stats()), cached.Stats().load_requested);
}

TEST(LoadQueue, NullDestinations) {
  CachedMock cached(Setup());
  ASSERT_TRUE(cached.Open());
  Pages pages = StoredPages(cached, 0, 4);
  for (const size_t tensor : {0, 2}) {
    Batch batch = CachedMock::BatchOf(pages);
    batch.addresses[1 * batch.tensors + tensor] = nullptr;
    EndCodes expected(4, CS_OK);
    expected[1] = CS_INVALID;
    EXPECT_TRUE(cached.EndsOf(cached.Ask(kLoad, std::move(batch))) == expected);
    EXPECT_TRUE(pages.IsPoisoned(1));
    ExpectServedAfresh(cached, pages);
    pages.Poison();
  }
  EXPECT_EQ(cached.below->calls(kLoad), 4u);  // the slot was good
}

TEST(LoadQueue, WrongNumberOfDestinations) {
  CachedMock cached(Setup());
  ASSERT_TRUE(cached.Open());
  Pages pages = StoredPages(cached, 0, 3);
  for (const size_t tensors : {1, 2}) {
    Batch batch = CachedMock::BatchOf(pages);
    batch.tensors = tensors;
    EXPECT_TRUE(cached.EndsOf(cached.Ask(kLoad, std::move(batch))) == EndCodes(3, CS_INVALID));
    EXPECT_TRUE(pages.IsPoisoned());
  }
  ExpectServedAfresh(cached, pages);
  EXPECT_EQ(cached.Stats().load_failed, 6u);
}

// The same where the load goes past the cache: no slot is to be had.
TEST(LoadQueue, WrongDestinationsPastTheCache) {
  CachedMock cached(Setup(), 1);
  ASSERT_TRUE(cached.Open());
  cached.below->Hold(kLoad);
  Pages first = StoredPages(cached, 0, 1);
  const auto holder = cached.Ask(kLoad, first);
  EXPECT_TRUE(Eventually([&] { return cached.below->held(kLoad) == 1; }));
  Pages pages = StoredPages(cached, 10, 2);
  Batch batch = CachedMock::BatchOf(pages);
  batch.addresses[0] = nullptr;
  const auto asked = cached.Ask(kLoad, std::move(batch));
  EXPECT_TRUE(Eventually([&] { return cached.below->held(kLoad) == 3; }));
  cached.below->Release(kLoad);
  EXPECT_TRUE(cached.EndsOf(asked) == EndCodes({CS_INVALID, CS_OK}));
  EXPECT_EQ(cached.Stats().cache_direct, 1u);  // what failed isn't loaded
  EXPECT_TRUE(cached.EndsOf(holder) == EndCodes(1, CS_OK));
  EXPECT_TRUE(pages.Holds(1));
  ExpectServedAfresh(cached, pages);
}

TEST(LoadQueue, TheTierBelowRefuses) {
  for (const Code code : {CS_REFUSED, CS_CLOSED, CS_INTERNAL}) {
    CachedMock cached(Setup());
    ASSERT_TRUE(cached.Open());
    Pages pages = StoredPages(cached, 0, 6);
    cached.below->Refuse(kLoad, code);
    EXPECT_TRUE(cached.Load(pages) == EndCodes(6, code));
    EXPECT_TRUE(pages.IsPoisoned());
    EXPECT_EQ(cached.below->refused(kLoad), 6u);
    cached.below->Refuse(kLoad, CS_OK);
    ExpectServedAfresh(cached, pages);
  }
}

TEST(LoadQueue, TheTierBelowFails) {
  for (const Code code : {CS_IO, CS_CORRUPT, CS_TIMEOUT, CS_NO_MEMORY, CS_INTERNAL}) {
    CachedMock cached(Setup());
    ASSERT_TRUE(cached.Open());
    Pages pages = StoredPages(cached, 0, 6);
    const BlockId bad = pages.block_ids()[3];
    cached.below->End(kLoad, [=](const BlockId& id) { return id == bad ? code : CS_OK; });
    EndCodes expected(6, CS_OK);
    expected[3] = code;
    EXPECT_TRUE(cached.Load(pages) == expected);
    for (size_t i = 0; i < 6; ++i) EXPECT_TRUE(i == 3 ? pages.IsPoisoned(i) : pages.Holds(i));
    cached.below->End(kLoad, nullptr);
    ExpectServedAfresh(cached, pages);
    EXPECT_EQ(cached.below->calls(kLoad), 7u);
  }
}

TEST(LoadQueue, TheTierBelowNeverAnswers) {
  StoreSetup setup = Setup();
  setup.timeout_ms = 100;
  CachedMock cached(setup);
  ASSERT_TRUE(cached.Open());
  cached.below->Hold(kLoad);
  Pages pages = StoredPages(cached, 0, 3);
  Pages same = StoredPages(cached, 0, 3);  // waits for the same loads
  const auto first = cached.Ask(kLoad, pages);
  const auto second = cached.Ask(kLoad, same);
  EXPECT_TRUE(cached.EndsOf(first) == EndCodes(3, CS_TIMEOUT));
  EXPECT_TRUE(cached.EndsOf(second) == EndCodes(3, CS_TIMEOUT));
  EXPECT_EQ(cached.below->cancels(), cached.below->calls(kLoad));
  EXPECT_TRUE(cached.IsIdle());
  cached.below->Release(kLoad);
  EXPECT_TRUE(pages.IsPoisoned());
  EXPECT_TRUE(same.IsPoisoned());
  ExpectServedAfresh(cached, pages);
}

// The same while it has the slot's memory in use: waited for, and then failed
// or good, as it ends.
TEST(LoadQueue, TheTierBelowAnswersLate) {
  StoreSetup setup = Setup();
  setup.timeout_ms = 50;
  CachedMock cached(setup);
  ASSERT_TRUE(cached.Open());
  Pages pages = StoredPages(cached, 0, 1);
  Gate gate;
  cached.below->End(kLoad, [&](const BlockId&) {
    gate.Pass();
    return CS_OK;
  });
  const auto asked = cached.Ask(kLoad, pages);
  ASSERT_TRUE(gate.WaitArrived(1));
  EXPECT_TRUE(Eventually([&] { return cached.below->cancels() == 1; }));
  EXPECT_EQ(cached.Stats().cache_slots_loading, 1u);
  gate.Open();
  EXPECT_TRUE(cached.EndsOf(asked) == EndCodes(1, CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
  ExpectServedAfresh(cached, pages);
}

// Who gives up has its memory back, and the load goes on for the others.
TEST(LoadQueue, WaitersThatGiveUp) {
  CachedMock cached(Setup());
  ASSERT_TRUE(cached.Open());
  cached.below->Hold(kLoad);
  Pages owner = StoredPages(cached, 0, 2);
  Pages waiter = StoredPages(cached, 0, 2);
  Pages patient = StoredPages(cached, 0, 2);
  const auto owning = cached.Ask(kLoad, owner);
  EXPECT_TRUE(Eventually([&] { return cached.below->held(kLoad) == 2; }));
  const auto waiting = cached.Ask(kLoad, waiter);
  const auto staying = cached.Ask(kLoad, patient);
  for (const auto& asked : {owning, waiting}) {
    EXPECT_TRUE(cached.EndsOf(asked, std::chrono::milliseconds(1)) == EndCodes(2, CS_TIMEOUT));
  }
  EXPECT_EQ(cached.Stats().load_outstanding, 2u);
  owner.Fill(7);
  waiter.Fill(7);
  cached.below->Release(kLoad);
  EXPECT_TRUE(cached.EndsOf(staying) == EndCodes(2, CS_OK));
  EXPECT_TRUE(patient.HoldsAll());
  EXPECT_TRUE(cached.IsIdle());
  EXPECT_TRUE(owner.HoldsAll(7));
  EXPECT_TRUE(waiter.HoldsAll(7));
  EXPECT_EQ(cached.below->calls(kLoad), 2u);
  ExpectServedAfresh(cached, owner);
  EXPECT_EQ(cached.below->calls(kLoad), 2u);
}

// Past the cache the tier below is on the waiter's memory: it is told.
TEST(LoadQueue, WaitersThatGiveUpPastTheCache) {
  CachedMock cached(Setup(), 1);
  ASSERT_TRUE(cached.Open());
  cached.below->Hold(kLoad);
  Pages first = StoredPages(cached, 0, 1);
  const auto holder = cached.Ask(kLoad, first);
  EXPECT_TRUE(Eventually([&] { return cached.below->held(kLoad) == 1; }));
  Pages pages = StoredPages(cached, 10, 3);
  const auto asked = cached.Ask(kLoad, pages);
  EXPECT_TRUE(Eventually([&] { return cached.below->held(kLoad) == 4; }));
  EXPECT_TRUE(cached.EndsOf(asked, std::chrono::milliseconds(1)) == EndCodes(3, CS_TIMEOUT));
  EXPECT_EQ(cached.below->cancels(), 3u);
  pages.Fill(7);
  cached.below->Release(kLoad);
  EXPECT_TRUE(cached.EndsOf(holder) == EndCodes(1, CS_OK));
  EXPECT_TRUE(cached.IsIdle());
  EXPECT_TRUE(pages.HoldsAll(7));
  ExpectServedAfresh(cached, pages);
}

// A block is in the storage, somebody dumps it once more and gives up: that is
// no failure of a load that waited for it.
TEST(LoadQueue, ADumpThatGivesUpFailsNoLoad) {
  StoreSetup setup = Setup({8192});
  setup.peer_timeout_ms = 60000;
  CachedMock cached(setup);
  ASSERT_TRUE(cached.Open());
  Pages pages = StoredPages(cached, 0, 2);
  const std::vector<uint8_t> bytes = cached.below->Stored(IdOf(1));
  HeldPage held(bytes.data(), bytes.size());
  if (!held.reason().empty()) SKIP("no memory to hold a copy on: " + held.reason());
  Pages dumped(cached.setup, 0, 2);
  dumped.Fill();
  Batch batch = CachedMock::BatchOf(dumped);
  batch.addresses[1] = held.begin();
  const auto dump = cached.Ask(kDump, std::move(batch));
  ASSERT_TRUE(held.WaitTouched());
  EXPECT_TRUE(Eventually([&] { return cached.Stats().cache_dump_running == 1; }));
  EXPECT_EQ(cached.Stats().cache_slots_loading, 2u);  // one gathered, one being gathered
  const auto load = cached.Ask(kLoad, pages);
  EXPECT_TRUE(Eventually([&] {
    const cs_stats stats = cached.Stats();
    return stats.cache_load_queued + stats.cache_load_running == 0;
  }));
  cached.tier->Cancel(dump.request, CS_TIMEOUT);
  EXPECT_TRUE(held.LetGo());
  EXPECT_TRUE(cached.EndsOf(dump) == EndCodes(2, CS_TIMEOUT));
  EXPECT_TRUE(cached.EndsOf(load) == EndCodes(2, CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
  EXPECT_EQ(cached.below->calls(kDump), 0u);
  ExpectServedAfresh(cached, pages);
}

// Eight threads at a narrow queue: whole requests or nothing, never over the
// depth, all room back at the end.
TEST(LoadQueue, ReservationUnderEightThreads) {
  constexpr uint64_t kDepth = 16;
  StoreSetup setup = Setup({300, 20});
  setup.copy_queue_depth = kDepth;
  CachedMock cached(setup, 32);
  ASSERT_TRUE(cached.Open());
  {
    const Pages all = StoredPages(cached, 0, 40);
  }
  std::atomic<bool> over{false};
  std::atomic<uint64_t> most{0};
  std::thread sampler([&] {
    while (!over) {
      const cs_stats stats = cached.Stats();
      EXPECT_LE(stats.load_outstanding, kDepth);
      EXPECT_LE(stats.dump_outstanding, kDepth);
      if (stats.load_outstanding > most) most = stats.load_outstanding;
    }
  });
  std::atomic<uint64_t> refused{0};
  std::atomic<uint64_t> asked{0};
  std::vector<std::thread> threads;
  for (uint64_t self = 0; self < 8; ++self) {
    threads.emplace_back([&, self] {
      std::mt19937_64 random(self);
      for (int round = 0; round < 100; ++round) {
        const size_t n = 1 + random() % 10;
        Pages pages(cached.setup, random() % 30, n);
        const bool dump = random() % 3 == 0;
        dump ? pages.Fill() : pages.Poison();
        const EndCodes codes = dump ? cached.Dump(pages) : cached.Load(pages);
        asked += n;
        if (codes == EndCodes(n, CS_REFUSED)) {
          refused += n;
          if (!dump) EXPECT_TRUE(pages.IsPoisoned());
          continue;
        }
        EXPECT_TRUE(codes == EndCodes(n, CS_OK));
        EXPECT_TRUE(pages.HoldsAll());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  over = true;
  sampler.join();
  EXPECT_GT(most.load(), 0u);
  EXPECT_TRUE(cached.IsIdle());
  const cs_stats stats = cached.Stats();
  EXPECT_EQ(stats.load_requested + stats.dump_requested, asked.load());
  EXPECT_EQ(stats.load_refused + stats.dump_refused, refused.load());
  EXPECT_EQ(LoadsEnded(stats), stats.load_requested);
  Pages full = StoredPages(cached, 0, kDepth);
  ExpectServedAfresh(cached, full);
}

}  // namespace cachestore::test
