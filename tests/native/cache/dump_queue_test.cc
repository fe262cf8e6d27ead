// Dumps through the cache, over a tier that fails at each step; load_queue_test.cc
// has the loads.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "base/aligned_buffer.h"
#include "cache/cached_mock.h"
#include "cache/few_slots.h"
#include "cache/held_page.h"
#include "harness.h"

namespace cachestore::test {
namespace {

StoreSetup Setup(std::vector<uint64_t> tensor_sizes = {5000, 137, 20000}) {
  StoreSetup setup;
  setup.tensor_sizes = std::move(tensor_sizes);
  return setup;
}

Pages Filled(const CachedMock& cached, uint64_t first, size_t n) {
  Pages pages(cached.setup, first, n);
  pages.Fill();
  return pages;
}

size_t Present(CachedMock& cached, const Pages& pages) {
  std::vector<uint8_t> present(pages.size(), 2);
  cached.tier->Lookup(0, pages.block_ids(), present);
  return static_cast<size_t>(std::count(present.begin(), present.end(), 1));
}

// Stored below, all of it and byte for byte.
void ExpectStored(CachedMock& cached, const Pages& pages) {
  EXPECT_TRUE(cached.IsStored());
  for (size_t i = 0; i < pages.size(); ++i) EXPECT_TRUE(cached.Stores(pages, i));
}

// Dumped again, all is as if nothing had been.
void ExpectServedAfresh(CachedMock& cached, Pages& pages) {
  EXPECT_TRUE(cached.IsIdle());
  pages.Fill();
  EXPECT_TRUE(cached.Dump(pages) == EndCodes(pages.size(), CS_OK));
  ExpectStored(cached, pages);
  pages.Poison();
  EXPECT_TRUE(cached.Load(pages) == EndCodes(pages.size(), CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
  EXPECT_TRUE(pages.GuardsIntact());
  EXPECT_TRUE(cached.IsIdle());
}

}  // namespace

// Contract: one request to the tier below for all shards of a dump.
TEST(DumpQueue, ADumpIsOneRequestBelow) {
  CachedMock cached(Setup());
  ASSERT_TRUE(cached.Open());
  Pages pages = Filled(cached, 0, 10);
  EXPECT_TRUE(cached.Dump(pages) == EndCodes(10, CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
  ExpectStored(cached, pages);
  EXPECT_EQ(cached.below->calls(kDump), 1u);
  EXPECT_EQ(cached.below->shards(kDump), 10u);
  // What is ready in the cache is no job any more.
  Pages more = Filled(cached, 8, 4);
  EXPECT_TRUE(cached.Dump(more) == EndCodes(4, CS_OK));
  ExpectStored(cached, more);
  EXPECT_EQ(cached.below->calls(kDump), 2u);
  EXPECT_EQ(cached.below->shards(kDump), 12u);
  const cs_stats stats = cached.Stats();
  EXPECT_EQ(stats.dump_ok, 12u);
  EXPECT_EQ(stats.dump_existing, 2u);
  EXPECT_EQ(stats.cache_dumped, 12u);
  EXPECT_EQ(stats.cache_stored, 12u);
  EXPECT_EQ(stats.dump_bytes, 12 * cached.setup.payload());
  EXPECT_EQ(cached.below->calls(kLoad), 0u);
}

// Contract: the payload that the tier below receives: tensor after tensor, then
// zeroes, whatever was in the slot before.
TEST(DumpQueue, ThePayloadAndItsPadding) {
  for (const std::vector<uint64_t>& sizes :
       {std::vector<uint64_t>{100, 37}, {4096, 1024, 4}, {70000, 3}, {4096}, {1}}) {
    const TempDir root;
    StoreSetup setup = Setup(sizes);
    setup.shard_size = AlignUp(setup.payload());
    CachedMock cached(setup, 8);
    cached.options.shared = true;
    cached.options.directory = root.path();
    ASSERT_TRUE(cached.Open());
    {
      RegionOptions options = FewSlots(8, root.path());
      options.fingerprint = cached.options.fingerprint;
      options.payload = setup.payload();
      options.slot_size = setup.shard_size;
      const auto region = OpenRegion(options);
      ASSERT_TRUE(region != nullptr);
      std::memset(region->bytes(0), 0xEE, 8 * setup.shard_size);
    }
    cached.below->NoteSlots(setup.shard_size);
    Pages pages = Filled(cached, 0, 5);
    EXPECT_TRUE(cached.Dump(pages) == EndCodes(5, CS_OK));
    ExpectStored(cached, pages);
    for (size_t i = 0; i < 5; ++i) {
      std::vector<uint8_t> expected = cached.PayloadOf(pages, i);
      expected.resize(setup.shard_size, 0);
      EXPECT_TRUE(cached.below->SlotOf(pages.block_ids()[i]) == expected);
    }
  }
}

// Contract: the waiter doesn't wait for the disk; closing does.
TEST(DumpQueue, TheWaiterDoesntWaitForTheStorage) {
  CachedMock cached(Setup());
  ASSERT_TRUE(cached.Open());
  cached.below->Hold(kDump);
  Pages pages = Filled(cached, 0, 6);
  EXPECT_TRUE(cached.Dump(pages) == EndCodes(6, CS_OK));
  EXPECT_EQ(cached.below->held(kDump), 6u);
  EXPECT_TRUE(cached.IsIdle());
  EXPECT_EQ(cached.Stats().cache_slots_dirty, 6u);
  EXPECT_EQ(Present(cached, pages), 6u);
  EXPECT_EQ(cached.tier->LookupPrefix(0, pages.block_ids()), 6u);
  pages.Poison();
  EXPECT_TRUE(cached.Load(pages) == EndCodes(6, CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
  EXPECT_EQ(cached.below->calls(kLoad), 0u);
  cached.tier->Stop();
  EXPECT_EQ(cached.Ask(kDump, pages).started.code(), CS_CLOSED);
  EXPECT_EQ(cached.Ask(kLoad, pages).started.code(), CS_CLOSED);
  std::atomic<bool> closed{false};
  std::thread closer([&] {
    cached.Close();
    closed = true;
  });
  EXPECT_EQ(cached.below->held(kDump), 6u);
  EXPECT_FALSE(closed);
  cached.below->Release(kDump);
  closer.join();
  for (size_t i = 0; i < 6; ++i) EXPECT_TRUE(cached.Stores(pages, i));
}

TEST(DumpQueue, EveryWorkerGathersAtOnce) {
  StoreSetup setup = Setup({8192});
  setup.copy_workers = 3;
  CachedMock cached(setup);
  ASSERT_TRUE(cached.Open());
  Pages pages = Filled(cached, 0, 3);
  std::vector<std::unique_ptr<HeldPage>> held;
  Batch batch = CachedMock::BatchOf(pages);
  for (size_t i = 0; i < 3; ++i) {
    const std::vector<uint8_t> bytes = cached.PayloadOf(pages, i);
    held.push_back(std::make_unique<HeldPage>(bytes.data(), bytes.size()));
    if (!held[i]->reason().empty()) SKIP("no memory to hold a copy on: " + held[i]->reason());
    batch.addresses[i] = held[i]->begin();
  }
  const auto asked = cached.Ask(kDump, std::move(batch));
  for (const auto& each : held) EXPECT_TRUE(each->WaitTouched());
  EXPECT_EQ(cached.Stats().cache_dump_running, 3u);
  EXPECT_EQ(cached.below->calls(kDump), 0u);
  EXPECT_TRUE(held[1]->LetGo());
  EXPECT_TRUE(Eventually([&] { return cached.Stats().cache_dump_running == 2; }));
  EXPECT_EQ(Present(cached, pages), 0u);  // not before all are gathered
  EXPECT_TRUE(held[0]->LetGo());
  EXPECT_TRUE(held[2]->LetGo());
  EXPECT_TRUE(cached.EndsOf(asked) == EndCodes(3, CS_OK));
  ExpectStored(cached, pages);
  EXPECT_EQ(cached.below->calls(kDump), 1u);
}

// Nobody waits for a slot while holding one.
TEST(DumpQueue, DumpsThatCrossDontWaitForEachOther) {
  StoreSetup setup = Setup({300});
  setup.peer_timeout_ms = 10 * static_cast<uint32_t>(kLong.count());
  setup.copy_workers = 4;
  CachedMock cached(setup, 400);
  ASSERT_TRUE(cached.Open());
  for (uint64_t round = 0; round < 40; ++round) {
    std::vector<std::thread> threads;
    for (const bool reversed : {false, true, false, true}) {
      threads.emplace_back([&, reversed] {
        Pages pages = Filled(cached, 100 * round, 16);
        Batch batch = CachedMock::BatchOf(pages);
        if (reversed) {
          std::reverse(batch.blocks.begin(), batch.blocks.end());
          std::reverse(batch.addresses.begin(), batch.addresses.end());
        }
        EXPECT_TRUE(cached.EndsOf(cached.Ask(kDump, std::move(batch))) == EndCodes(16, CS_OK));
      });
    }
    for (std::thread& thread : threads) thread.join();
    ExpectStored(cached, Filled(cached, 100 * round, 16));
  }
}

TEST(DumpQueue, ADumpOfWhatIsBeingLoadedJoinsItsOutcome) {
  for (const bool stored : {true, false}) {
    CachedMock cached(Setup());
    ASSERT_TRUE(cached.Open());
    Pages pages = Filled(cached, 0, 3);
    if (stored) cached.Put(pages);
    Pages loaded(cached.setup, 1, 1);
    loaded.Poison();
    cached.below->Hold(kLoad);
    const auto load = cached.Ask(kLoad, loaded);
    EXPECT_TRUE(Eventually([&] { return cached.below->held(kLoad) == 1; }));
    const auto dump = cached.Ask(kDump, pages);
    // The others don't wait with it.
    EXPECT_TRUE(Eventually([&] { return cached.Stats().dump_outstanding == 1; }));
    EXPECT_EQ(cached.below->shards(kDump), 2u);
    cached.below->Release(kLoad);
    EXPECT_TRUE(cached.EndsOf(dump) == EndCodes(3, CS_OK));
    EXPECT_TRUE(cached.EndsOf(load) == EndCodes(1, stored ? CS_OK : CS_NOT_FOUND));
    EXPECT_TRUE(stored ? loaded.HoldsAll() : loaded.IsPoisoned());
    ExpectStored(cached, pages);
    EXPECT_EQ(cached.below->shards(kDump), stored ? 2u : 3u);
    EXPECT_EQ(cached.Stats().dump_existing, stored ? 1u : 0u);
  }
}

// Contract point 5, step by step.

TEST(DumpQueue, RequestsThatDontFitAreRefused) {
  StoreSetup setup = Setup();
  setup.copy_queue_depth = 4;
  CachedMock cached(setup);
  ASSERT_TRUE(cached.Open());
  Pages pages = Filled(cached, 0, 5);
  EXPECT_TRUE(cached.Dump(pages) == EndCodes(5, CS_REFUSED));
  EXPECT_EQ(Present(cached, pages), 0u);
  EXPECT_EQ(cached.below->calls(kDump), 0u);
  EXPECT_EQ(cached.Stats().dump_refused, 5u);
  Pages four = Filled(cached, 0, 4);
  ExpectServedAfresh(cached, four);
}

TEST(DumpQueue, NullSourcesAndWrongNumbersOfThem) {
  CachedMock cached(Setup());
  ASSERT_TRUE(cached.Open());
  Pages pages = Filled(cached, 0, 4);
  Batch batch = CachedMock::BatchOf(pages);
  batch.addresses[1 * batch.tensors + 2] = nullptr;
  EXPECT_TRUE(cached.EndsOf(cached.Ask(kDump, batch)) ==
              EndCodes({CS_OK, CS_INVALID, CS_OK, CS_OK}));
  EXPECT_TRUE(cached.IsStored());
  EXPECT_EQ(Present(cached, pages), 3u);
  EXPECT_EQ(cached.below->shards(kDump), 3u);
  ExpectServedAfresh(cached, pages);

  Pages others = Filled(cached, 10, 3);
  for (const size_t tensors : {1, 2}) {
    batch = CachedMock::BatchOf(others);
    batch.tensors = tensors;
    EXPECT_TRUE(cached.EndsOf(cached.Ask(kDump, std::move(batch))) == EndCodes(3, CS_INVALID));
    EXPECT_EQ(Present(cached, others), 0u);
    EXPECT_TRUE(cached.IsStored());
  }
  ExpectServedAfresh(cached, others);
}

TEST(DumpQueue, TheTierBelowRefuses) {
  for (const Code code : {CS_REFUSED, CS_CLOSED, CS_INTERNAL}) {
    CachedMock cached(Setup());
    ASSERT_TRUE(cached.Open());
    Pages pages = Filled(cached, 0, 6);
    cached.below->Refuse(kDump, code);
    EXPECT_TRUE(cached.Dump(pages) == EndCodes(6, code));
    EXPECT_EQ(cached.below->refused(kDump), 1u);
    EXPECT_EQ(Present(cached, pages), 0u);
    EXPECT_TRUE(cached.IsStored());
    pages.Fill(7);  // ours again
    cached.below->Refuse(kDump, CS_OK);
    ExpectServedAfresh(cached, pages);
    EXPECT_EQ(cached.Stats().cache_given_up, 0u);
  }
}

TEST(DumpQueue, TheTierBelowFailsLater) {
  CachedMock cached(Setup());
  ASSERT_TRUE(cached.Open());
  Pages pages = Filled(cached, 0, 6);
  const BlockId bad = pages.block_ids()[3];
  cached.below->End(kDump, [=](const BlockId& id) { return id == bad ? CS_IO : CS_OK; });
  EXPECT_TRUE(cached.Dump(pages) == EndCodes(6, CS_OK));
  EXPECT_TRUE(Eventually([&] { return cached.Stats().cache_slots_dirty == 1; }));
  EXPECT_EQ(cached.Stats().cache_store_failed, 1u);
  EXPECT_EQ(Present(cached, pages), 6u);  // ready all the same
  EXPECT_FALSE(cached.below->Has(bad));
  pages.Poison();
  EXPECT_TRUE(cached.Load(pages) == EndCodes(6, CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
  EXPECT_EQ(cached.below->calls(kLoad), 0u);
  cached.below->End(kDump, nullptr);
  ExpectStored(cached, pages);  // by the next attempt
  EXPECT_EQ(cached.Stats().cache_stored, 6u);
  EXPECT_EQ(cached.Stats().cache_given_up, 0u);
  EXPECT_EQ(cached.below->shards(kDump), 7u);
}

TEST(DumpQueue, TheTierBelowNeverAnswers) {
  StoreSetup setup = Setup();
  setup.timeout_ms = 100;
  CachedMock cached(setup);
  ASSERT_TRUE(cached.Open());
  cached.below->Hold(kDump);
  Pages pages = Filled(cached, 0, 3);
  EXPECT_TRUE(cached.Dump(pages) == EndCodes(3, CS_OK));
  EXPECT_TRUE(Eventually([&] { return cached.Stats().cache_store_failed == 3; }));
  EXPECT_EQ(Present(cached, pages), 3u);
  EXPECT_EQ(cached.Stats().cache_slots_dirty, 3u);
  cached.below->Release(kDump);
  ExpectStored(cached, pages);
}

// Past the cache: written through, waited for, and failed as the tier below says.
TEST(DumpQueue, WithoutASlotADumpIsWrittenThrough) {
  CachedMock cached(Setup(), 1);
  ASSERT_TRUE(cached.Open());
  cached.below->Hold(kDump);
  Pages pages = Filled(cached, 0, 5);
  auto asked = cached.Ask(kDump, pages);
  EXPECT_TRUE(Eventually([&] { return cached.below->held(kDump) == 5; }));
  EXPECT_EQ(cached.below->calls(kDump), 2u);  // one out of the slot, one of all others
  EXPECT_EQ(cached.Stats().dump_outstanding, 4u);
  cached.below->Release(kDump);
  EXPECT_TRUE(cached.EndsOf(asked) == EndCodes(5, CS_OK));
  ExpectStored(cached, pages);
  EXPECT_EQ(cached.Stats().cache_dumped_direct, 4u);

  cached.below->Hold(kDump);  // the slot stays dirty
  Pages first = Filled(cached, 10, 1);
  EXPECT_TRUE(cached.Dump(first) == EndCodes(1, CS_OK));
  Pages next = Filled(cached, 20, 3);
  asked = cached.Ask(kDump, next);
  EXPECT_TRUE(Eventually([&] { return cached.below->held(kDump) == 4; }));
  const BlockId bad = next.block_ids()[1];
  cached.below->End(kDump, [=](const BlockId& id) { return id == bad ? CS_NO_SPACE : CS_OK; });
  cached.below->Release(kDump);
  EXPECT_TRUE(cached.EndsOf(asked) == EndCodes({CS_OK, CS_NO_SPACE, CS_OK}));
  EXPECT_EQ(cached.Stats().dump_no_space, 1u);
  EXPECT_TRUE(cached.IsStored());
  cached.below->End(kDump, nullptr);
  ExpectServedAfresh(cached, next);

  cached.below->Hold(kDump);
  Pages last = Filled(cached, 30, 1);
  EXPECT_TRUE(cached.Dump(last) == EndCodes(1, CS_OK));
  cached.below->Refuse(kDump, CS_REFUSED);
  Pages refused = Filled(cached, 40, 3);
  EXPECT_TRUE(cached.Dump(refused) == EndCodes(3, CS_REFUSED));
  EXPECT_TRUE(cached.IsIdle());
  cached.below->Refuse(kDump, CS_OK);
  cached.below->Release(kDump);
  ExpectStored(cached, last);
  ExpectServedAfresh(cached, refused);
}

TEST(DumpQueue, WaitersThatGiveUp) {
  CachedMock cached(Setup(), 1);
  ASSERT_TRUE(cached.Open());
  cached.below->Hold(kDump);
  Pages first = Filled(cached, 0, 1);
  EXPECT_TRUE(cached.Dump(first) == EndCodes(1, CS_OK));
  Pages pages = Filled(cached, 10, 3);  // past the cache
  const auto asked = cached.Ask(kDump, pages);
  EXPECT_TRUE(Eventually([&] { return cached.below->held(kDump) == 4; }));
  EXPECT_TRUE(cached.EndsOf(asked, std::chrono::milliseconds(1)) == EndCodes(3, CS_TIMEOUT));
  EXPECT_EQ(cached.below->cancels(), 1u);
  pages.Fill(7);
  cached.below->Release(kDump);
  ExpectStored(cached, first);
  for (const BlockId& id : pages.block_ids()) EXPECT_FALSE(cached.below->Has(id));
  ExpectServedAfresh(cached, pages);

  // Joined to a load.
  cached.below->Hold(kLoad);
  Pages loaded(cached.setup, 20, 1);
  const auto load = cached.Ask(kLoad, loaded);
  EXPECT_TRUE(Eventually([&] { return cached.below->held(kLoad) == 1; }));
  Pages joined = Filled(cached, 20, 1);
  EXPECT_TRUE(cached.Dump(joined, std::chrono::milliseconds(1)) == EndCodes(1, CS_TIMEOUT));
  joined.Fill(7);
  cached.below->Release(kLoad);
  EXPECT_TRUE(cached.EndsOf(load) == EndCodes(1, CS_NOT_FOUND));
  EXPECT_TRUE(cached.IsStored());
  EXPECT_FALSE(cached.below->Has(IdOf(20)));
  ExpectServedAfresh(cached, joined);
}

// In the midst of gathering: the copy is waited for, and nothing is published.
TEST(DumpQueue, WaitersThatGiveUpWhileTheirMemoryIsRead) {
  CachedMock cached(Setup({8192}));
  ASSERT_TRUE(cached.Open());
  Pages pages = Filled(cached, 0, 3);
  const std::vector<uint8_t> bytes = cached.PayloadOf(pages, 1);
  HeldPage held(bytes.data(), bytes.size());
  if (!held.reason().empty()) SKIP("no memory to hold a copy on: " + held.reason());
  Batch batch = CachedMock::BatchOf(pages);
  batch.addresses[1] = held.begin();
  const auto asked = cached.Ask(kDump, std::move(batch));
  ASSERT_TRUE(held.WaitTouched());
  EXPECT_TRUE(Eventually([&] { return cached.Stats().cache_dump_running == 1; }));
  cached.tier->Cancel(asked.request, CS_TIMEOUT);
  EXPECT_EQ(cached.Stats().dump_outstanding, 1u);  // not its memory's turn yet
  EXPECT_TRUE(held.LetGo());
  EXPECT_TRUE(cached.EndsOf(asked) == EndCodes(3, CS_TIMEOUT));
  EXPECT_TRUE(cached.IsStored());
  EXPECT_EQ(Present(cached, pages), 0u);
  EXPECT_EQ(cached.below->calls(kDump), 0u);
  ExpectServedAfresh(cached, pages);
}

}  // namespace cachestore::test
