// CacheTier as a whole: what is in front of what, its end, and several of them
// on one region. load_queue_test.cc and dump_queue_test.cc have its requests.
#include "cache/cache_tier.h"

#include <atomic>
#include <iterator>
#include <random>
#include <thread>

#include "cache/cached_mock.h"
#include "cache/few_slots.h"
#include "cache/processes_region.h"
#include "harness.h"

namespace cachestore::test {
namespace {

StoreSetup Setup(std::vector<uint64_t> tensor_sizes = {5000, 137}) {
  StoreSetup setup;
  setup.tensor_sizes = std::move(tensor_sizes);
  return setup;
}

Pages Filled(const CachedMock& cached, uint64_t first, size_t n) {
  Pages pages(cached.setup, first, n);
  pages.Fill();
  return pages;
}

std::vector<uint8_t> Lookup(CachedMock& cached, const Pages& pages) {
  std::vector<uint8_t> present(pages.size(), 2);
  cached.tier->Lookup(0, pages.block_ids(), present);
  return present;
}

void Share(CachedMock& cached, const std::string& directory) {
  cached.options.shared = true;
  cached.options.directory = directory;
}

// As one more process of it would see it.
std::string InconsistencyOf(const CachedMock& cached) {
  RegionOptions options = FewSlots(1, cached.options.directory);
  options.fingerprint = cached.options.fingerprint;
  options.payload = cached.setup.payload();
  options.slot_size = (options.payload + 4095) / 4096 * 4096;
  const auto region = OpenRegion(options);
  return region == nullptr ? "not to be opened" : Inconsistency(*region);
}

}  // namespace

TEST(CacheTier, LooksInTheCacheAndBelow) {
  CachedMock cached(Setup(), 8);
  ASSERT_TRUE(cached.Open());
  const Pages pages = Filled(cached, 0, 10);
  EXPECT_TRUE(Lookup(cached, pages) == std::vector<uint8_t>(10, 0));
  EXPECT_EQ(cached.tier->LookupPrefix(0, pages.block_ids()), 0u);
  cached.below->Hold(kDump);
  EXPECT_TRUE(cached.Dump(Filled(cached, 0, 2)) == EndCodes(2, CS_OK));  // 0, 1: cached alone
  cached.Put(Filled(cached, 2, 2));                                      // 2, 3: below alone
  EXPECT_TRUE(cached.Dump(Filled(cached, 4, 1)) == EndCodes(1, CS_OK));
  cached.Put(Filled(cached, 6, 1));
  EXPECT_TRUE(Lookup(cached, pages) == std::vector<uint8_t>({1, 1, 1, 1, 1, 0, 1, 0, 0, 0}));
  EXPECT_EQ(cached.tier->LookupPrefix(0, pages.block_ids()), 5u);
  EXPECT_EQ(cached.Stats().lookup_blocks, 10u + 1u + 10u + 6u);
  EXPECT_EQ(cached.Stats().lookup_hits, 6u + 5u);
  // Neither one that is being loaded nor one that has failed is a hit.
  cached.below->Hold(kLoad);
  Pages loading(cached.setup, 7, 1);
  const auto asked = cached.Ask(kLoad, loading);
  EXPECT_TRUE(Eventually([&] { return cached.below->held(kLoad) == 1; }));
  EXPECT_TRUE(Lookup(cached, loading) == std::vector<uint8_t>(1, 0));
  cached.below->Release(kLoad);
  EXPECT_TRUE(cached.EndsOf(asked) == EndCodes(1, CS_NOT_FOUND));
  EXPECT_TRUE(Lookup(cached, loading) == std::vector<uint8_t>(1, 0));
  cached.below->Release(kDump);
}

TEST(CacheTier, RefusesWhatItCantServe) {
  CachedMock cached(Setup());
  cached.options.geometry.block_size = 2 * cached.options.geometry.shard_size;
  const auto several =
      CacheTier::Open(cached.options, std::make_unique<MockTier>(Geometry{}), cached.events);
  EXPECT_EQ(several.status().code(), CS_INVALID);
  EXPECT_NE(several.status().text().find("block_size"), std::string::npos);
  cached.options.geometry.block_size = cached.options.geometry.shard_size;
  cached.options.cpu_affinity = "every second one";
  const auto affinity =
      CacheTier::Open(cached.options, std::make_unique<MockTier>(Geometry{}), cached.events);
  EXPECT_EQ(affinity.status().code(), CS_INVALID);
}

TEST(CacheTier, CloseTriesAgainWhatFailed) {
  CachedMock cached(Setup());
  ASSERT_TRUE(cached.Open());
  cached.below->EndWith(kDump, CS_IO);
  const Pages pages = Filled(cached, 0, 5);
  EXPECT_TRUE(cached.Dump(pages) == EndCodes(5, CS_OK));
  EXPECT_TRUE(Eventually([&] { return cached.Stats().cache_store_failed == 5; }));
  cached.below->End(kDump, nullptr);
  cached.tier->Stop();
  cached.tier->Drain();
  const cs_stats stats = cached.Stats();
  EXPECT_EQ(stats.cache_stored, 5u);
  EXPECT_EQ(stats.cache_given_up, 0u);
  EXPECT_EQ(stats.cache_slots_dirty, 0u);
  for (size_t i = 0; i < 5; ++i) EXPECT_TRUE(cached.Stores(pages, i));
  EXPECT_FALSE(cached.HasEvent("not stored"));
}

// Bounded, and told.
TEST(CacheTier, CloseReportsWhatItCouldntStore) {
  enum Way { kFails, kRefuses, kNeverAnswers };
  for (const Way way : {kFails, kRefuses, kNeverAnswers}) {
    StoreSetup setup = Setup();
    setup.timeout_ms = 200;
    CachedMock cached(setup);
    ASSERT_TRUE(cached.Open());
    if (way == kFails) cached.below->EndWith(kDump, CS_IO);
    if (way == kNeverAnswers) cached.below->Hold(kDump);
    if (way == kRefuses) cached.below->EndWith(kDump, CS_IO);
    EXPECT_TRUE(cached.Dump(Filled(cached, 0, 5)) == EndCodes(5, CS_OK));
    if (way == kRefuses) {
      EXPECT_TRUE(Eventually([&] { return cached.Stats().cache_store_failed == 5; }));
      cached.below->Refuse(kDump, CS_INTERNAL);
    }
    cached.tier->Stop();
    cached.tier->Drain();
    EXPECT_EQ(cached.Stats().cache_stored, 0u);
    EXPECT_TRUE(cached.HasEvent("not be stored in time") || cached.Stats().cache_given_up == 5);
    cached.below->Release(kDump);
  }
}

TEST(CacheTier, LoadsUnderWayAreServedAtTheEnd) {
  CachedMock cached(Setup());
  ASSERT_TRUE(cached.Open());
  Pages pages = Filled(cached, 0, 6);
  cached.Put(pages);
  pages.Poison();
  cached.below->Hold(kLoad);
  const auto asked = cached.Ask(kLoad, pages);
  EXPECT_TRUE(Eventually([&] { return cached.below->held(kLoad) == 6; }));
  cached.tier->Stop();
  EXPECT_EQ(cached.Ask(kLoad, pages).started.code(), CS_CLOSED);
  EXPECT_EQ(cached.Ask(kDump, pages).started.code(), CS_CLOSED);
  cached.below->Release(kLoad);
  EXPECT_TRUE(cached.EndsOf(asked) == EndCodes(6, CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
  EXPECT_EQ(cached.Stats().load_outstanding, 0u);
}

// Pages that go by streaming stores, dumped by one and loaded by another as soon
// as they are there: through one mapping of the region, or through two.
TEST(CacheTier, WhatIsReadyIsWhole) {
  for (const bool two_mappings : {false, true}) {
    const TempDir root;
    StoreSetup setup = Setup({70000, 24, 40000});
    setup.timeout_ms = 60000;
    CachedMock writer(setup, 24);
    CachedMock reader(setup, 24);
    for (CachedMock* each : {&writer, &reader}) {
      Share(*each, root.path());
      each->options.fingerprint.fill(3);
    }
    ASSERT_TRUE(writer.Open());
    if (two_mappings) ASSERT_TRUE(reader.Open());
    CachedMock& reading = two_mappings ? reader : writer;
    constexpr uint64_t kRounds = 40;
    std::atomic<uint64_t> dumping{0};
    std::atomic<uint64_t> loaded{0};
    std::thread dumper([&] {
      for (uint64_t round = 0; round < kRounds; ++round) {
        dumping = round;
        EXPECT_TRUE(writer.Dump(Filled(writer, 4 * round, 4)) == EndCodes(4, CS_OK));
      }
      dumping = kRounds;
    });
    std::thread loader([&] {
      while (dumping < kRounds) {
        Pages pages(setup, 4 * dumping, 4);
        pages.Poison();
        const EndCodes codes = reading.Load(pages);
        for (size_t i = 0; i < codes.size(); ++i) {
          EXPECT_TRUE(codes[i] == CS_OK || codes[i] == CS_NOT_FOUND);
          EXPECT_TRUE(codes[i] == CS_OK ? pages.Holds(i) : pages.IsPoisoned(i));
          if (codes[i] == CS_OK) ++loaded;
        }
      }
    });
    dumper.join();
    loader.join();
    EXPECT_GT(loaded.load(), 0u);
    EXPECT_TRUE(writer.IsStored());
    EXPECT_EQ(InconsistencyOf(writer), "");
    EXPECT_EQ(reading.Stats().cache_slots, 24u);
  }
}

// Whatever fails, refuses or is given up, in a cache too small for it, that two
// share: every shard ends once, no byte is wrong, and nothing is left.
TEST(CacheTier, NothingIsLeftOfAnyFailure) {
  const TempDir root;
  StoreSetup setup = Setup({3000, 24});
  setup.copy_queue_depth = 24;
  setup.timeout_ms = 60000;
  std::vector<std::unique_ptr<CachedMock>> tiers;
  for (int i = 0; i < 2; ++i) {
    tiers.push_back(std::make_unique<CachedMock>(setup, 12));
    Share(*tiers[i], root.path());
    ASSERT_TRUE(tiers[i]->Open());
  }
  for (const auto& each : tiers) {
    for (const Direction direction : {kLoad, kDump}) {
      each->below->End(direction, [random = std::make_shared<std::mt19937_64>(5)](const BlockId&) {
        constexpr Code kCodes[] = {CS_OK, CS_OK, CS_OK, CS_OK, CS_IO, CS_CORRUPT, CS_NO_SPACE};
        return kCodes[(*random)() % std::size(kCodes)];
      });
    }
  }
  std::atomic<bool> over{false};
  std::thread switches([&] {
    std::mt19937_64 random(9);
    while (!over) {
      MockTier& below = *tiers[random() % 2]->below;
      const Direction direction = random() % 2 == 0 ? kLoad : kDump;
      below.Refuse(direction, random() % 4 == 0 ? CS_REFUSED : CS_OK);
      random() % 4 == 0 ? below.Hold(direction) : below.Release(direction);
      std::this_thread::yield();
    }
  });
  std::atomic<uint64_t> asked{0};
  std::atomic<uint64_t> good{0};
  std::vector<std::thread> threads;
  for (uint64_t self = 0; self < 6; ++self) {
    threads.emplace_back([&, self] {
      CachedMock& cached = *tiers[self % 2];
      std::mt19937_64 random(self);
      for (int round = 0; round < 60; ++round) {
        const size_t n = 1 + random() % 8;
        Pages pages(setup, random() % 30, n);
        const bool dump = random() % 2 == 0;
        dump ? pages.Fill() : pages.Poison();
        const std::chrono::milliseconds limit(random() % 4);
        const EndCodes codes = dump ? cached.Dump(pages, limit) : cached.Load(pages, limit);
        asked += n;
        for (size_t i = 0; i < n; ++i) {
          if (codes[i] == CS_OK) {
            EXPECT_TRUE(pages.Holds(i));
            ++good;
          }
        }
        EXPECT_TRUE(pages.GuardsIntact());
        pages.Fill(7);  // ours again: nobody writes to it any more
        EXPECT_TRUE(pages.HoldsAll(7));
        if (self == 0 && random() % 16 == 0) EXPECT_OK(cached.tier->Clear());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  over = true;
  switches.join();
  EXPECT_GT(good.load(), 0u);
  uint64_t requested = 0;
  for (const auto& each : tiers) {
    for (const Direction direction : {kLoad, kDump}) {
      each->below->End(direction, nullptr);
      each->below->Refuse(direction, CS_OK);
      each->below->Release(direction);
    }
    EXPECT_TRUE(each->IsIdle());
    const cs_stats stats = each->Stats();
    requested += stats.load_requested + stats.dump_requested;
    EXPECT_EQ(stats.load_requested, stats.load_ok + stats.load_absent + stats.load_corrupt +
                                        stats.load_failed + stats.load_timeout +
                                        stats.load_refused);
    EXPECT_EQ(stats.dump_requested, stats.dump_ok + stats.dump_existing + stats.dump_failed +
                                        stats.dump_no_space + stats.dump_timeout +
                                        stats.dump_refused);
  }
  EXPECT_EQ(requested, asked.load());
  for (const auto& each : tiers) {
    EXPECT_TRUE(each->IsStored());
    Pages pages = Filled(*each, 1000, 12);
    EXPECT_TRUE(each->Dump(pages) == EndCodes(12, CS_OK));
    pages.Poison();
    EXPECT_TRUE(each->Load(pages) == EndCodes(12, CS_OK));
    EXPECT_TRUE(pages.HoldsAll());
    EXPECT_TRUE(each->IsStored());
  }
  EXPECT_EQ(InconsistencyOf(*tiers[0]), "");
}

}  // namespace cachestore::test
