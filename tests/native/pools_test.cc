// Several pools in one store: their blocks, and what they share.
#include <algorithm>
#include <atomic>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "fault_env.h"
#include "fixture.h"
#include "harness.h"

namespace cachestore::test {
namespace {

namespace fs = std::filesystem;

// A store with a first pool and two more, of other sizes.
struct Three {
  explicit Three(const std::string& pipeline, Env& env = Env::Real(),
                 const std::function<void(StoreSetup&)>& change = {})
      : setups(3, StoreSetup({root.path()})) {
    setups[0].pipeline = pipeline;
    setups[0].identity = "model-1.kv";
    if (change) change(setups[0]);
    for (size_t i = 1; i < setups.size(); ++i) setups[i].roots = setups[0].roots;
    setups[1].identity = "model-1.indexer";
    setups[1].fingerprint = 2;
    setups[1].tensor_sizes = {8192, 8192, 4096};
    setups[2].identity = "model-1.mamba";
    setups[2].fingerprint = 3;
    setups[2].tensor_sizes = {7};
    store = OpenOrFail(setups[0], env);
  }
  bool OpenPools() {
    for (size_t i = 1; i < setups.size(); ++i) {
      const Result<uint32_t> opened = store->OpenPool(setups[i].PoolConfig());
      if (!EXPECT_OK(opened)) return false;
      EXPECT_EQ(opened.value(), i);
      setups[i].pool = opened.value();
    }
    return true;
  }
  std::vector<uint8_t> Lookup(uint32_t pool, const Pages& pages) const {
    std::vector<uint8_t> present(pages.blocks(), 2);
    EXPECT_OK(store->Lookup(pool, pages.block_ids(), present));
    return present;
  }

  const TempDir root;
  std::vector<StoreSetup> setups;
  std::unique_ptr<Store> store;
};

size_t Files(const Three& three, size_t pool) {
  return FilesBelow(three.root.path() + "/" + three.setups[pool].identity + "/blocks").size();
}

}  // namespace

// The same ids, other bytes and sizes; one set of counters, exact.
TEST(Pools, KeepTheirOwnBlocks) {
  for (const char* const pipeline : {"Posix", "Cache|Posix"}) {
    Three three(pipeline);
    ASSERT_TRUE(three.store != nullptr);
    ASSERT_TRUE(three.OpenPools());
    std::vector<Pages> pages;
    uint64_t bytes = 0;
    for (const StoreSetup& setup : three.setups) {
      pages.emplace_back(setup, 0, 10);
      bytes += 10 * setup.payload();
    }
    for (uint32_t pool = 0; pool < 3; ++pool) {
      EXPECT_TRUE(three.Lookup(pool, pages[pool]) == std::vector<uint8_t>(10, 0));
      pages[pool].Fill(static_cast<uint8_t>(pool));
      EXPECT_TRUE(DumpAll(*three.store, pages[pool]) == Repeated(10, CS_OK));
      EXPECT_TRUE(three.Lookup(pool, pages[pool]) == std::vector<uint8_t>(10, 1));
      const Result<size_t> length = three.store->LookupPrefix(pool, pages[pool].block_ids());
      ASSERT_OK(length);
      EXPECT_EQ(length.value(), 10u);
    }
    for (uint32_t pool = 0; pool < 3; ++pool) {
      pages[pool].Poison();
      EXPECT_TRUE(LoadAll(*three.store, pages[pool]) == Repeated(10, CS_OK));
      EXPECT_TRUE(pages[pool].HoldsAll(static_cast<uint8_t>(pool)));
      EXPECT_TRUE(pages[pool].GuardsIntact());
    }
    for (uint32_t pool = 0; pool < 3; ++pool) {
      EXPECT_TRUE(DumpAll(*three.store, pages[pool]) == Repeated(10, CS_OK));  // is there
    }
    const cs_stats stats = three.store->Stats();
    EXPECT_EQ(stats.dump_requested, 60u);
    EXPECT_EQ(stats.dump_ok, 30u);
    EXPECT_EQ(stats.dump_existing, 30u);
    EXPECT_EQ(stats.dump_bytes, bytes);
    EXPECT_EQ(stats.load_ok, 30u);
    EXPECT_EQ(stats.load_bytes, bytes);
    EXPECT_EQ(stats.lookup_blocks, 90u);
    EXPECT_EQ(stats.lookup_hits, 60u);
    EXPECT_EQ(stats.load_outstanding + stats.dump_outstanding, 0u);
    EXPECT_OK(three.store->Clear());
    for (uint32_t pool = 0; pool < 3; ++pool) {
      EXPECT_TRUE(three.Lookup(pool, pages[pool]) == std::vector<uint8_t>(10, 0));
      EXPECT_EQ(Files(three, pool), 0u);
      pages[pool].Fill(static_cast<uint8_t>(pool));
      EXPECT_TRUE(DumpAll(*three.store, pages[pool]) == Repeated(10, CS_OK));
    }
    // In another life, too; pools may come in another order.
    three.store->Close();
    three.store = OpenOrFail(three.setups[0]);
    ASSERT_TRUE(three.store != nullptr);
    std::swap(three.setups[1], three.setups[2]);
    ASSERT_TRUE(three.OpenPools());
    for (uint32_t pool = 0; pool < 3; ++pool) {
      Pages again(three.setups[pool], 0, 10);
      EXPECT_TRUE(LoadAll(*three.store, again) == Repeated(10, CS_OK));
      EXPECT_TRUE(again.HoldsAll(static_cast<uint8_t>(pool == 0 ? 0 : 3 - pool)));
    }
    three.store->Close();
  }
}

// What isn't open is named; what can't be opened leaves the store as it was.
TEST(Pools, WrongOnesAreRefused) {
  Three three("Posix");
  ASSERT_TRUE(three.store != nullptr);
  Pages pages(three.setups[0], 0, 1);
  pages.Fill();
  uint8_t present = 2;
  EXPECT_EQ(three.store->Lookup(1, pages.block_ids(), {&present, 1}).code(), CS_INVALID);
  EXPECT_EQ(three.store->LookupPrefix(1, pages.block_ids()).status().code(), CS_INVALID);
  cs_batch batch = pages.batch();
  batch.pool = 1;
  EXPECT_EQ(three.store->Dump(batch).status().code(), CS_INVALID);
  EXPECT_EQ(three.store->Load(batch).status().code(), CS_INVALID);
  cs_pool_config config = three.setups[1].PoolConfig();
  config.identity_name = "../x";
  EXPECT_EQ(three.store->OpenPool(config).status().code(), CS_INVALID);
  config = three.setups[1].PoolConfig();
  config.shard_size = 1;
  EXPECT_EQ(three.store->OpenPool(config).status().code(), CS_INVALID);
  WriteFile(three.root.path() + "/a-file", {1});
  config = three.setups[1].PoolConfig();
  config.identity_name = "a-file";
  EXPECT_FALSE(three.store->OpenPool(config).ok());
  EXPECT_EQ(three.store->OpenPool(three.setups[0].PoolConfig()).status().code(), CS_INVALID);
  ASSERT_TRUE(three.OpenPools());
  EXPECT_EQ(three.store->OpenPool(three.setups[1].PoolConfig()).status().code(), CS_INVALID);
  EXPECT_TRUE(DumpAll(*three.store, pages) == Repeated(1, CS_OK));
  // A shard of another pool's sizes isn't this one's.
  batch.pool = 2;
  EXPECT_EQ(three.store->Dump(batch).status().code(), CS_INVALID);
  StoreSetup more = three.setups[1];
  for (uint32_t pool = 3; pool < kMaxPools; ++pool) {
    more.identity = "more-" + std::to_string(pool);
    const Result<uint32_t> opened = three.store->OpenPool(more.PoolConfig());
    ASSERT_OK(opened);
    EXPECT_EQ(opened.value(), pool);
  }
  more.identity = "one-too-many";
  EXPECT_EQ(three.store->OpenPool(more.PoolConfig()).status().code(), CS_INVALID);
  three.store->Close();
  EXPECT_EQ(three.store->OpenPool(more.PoolConfig()).status().code(), CS_CLOSED);
}

// A pool may come while others are in use.
TEST(Pools, OneComesLate) {
  for (const char* const pipeline : {"Posix", "Cache|Posix"}) {
    Three three(pipeline);
    ASSERT_TRUE(three.store != nullptr);
    std::atomic<bool> stop{false};
    std::thread busy([&] {
      Pages pages(three.setups[0], 0, 20);
      for (uint8_t round = 0; !stop.load(); ++round) {
        pages.Fill();
        EXPECT_TRUE(DumpAll(*three.store, pages) == Repeated(20, CS_OK));
        pages.Poison();
        EXPECT_TRUE(LoadAll(*three.store, pages) == Repeated(20, CS_OK));
        EXPECT_TRUE(pages.HoldsAll());
        (void)three.store->Stats();
      }
    });
    EXPECT_TRUE(three.OpenPools());
    std::vector<std::thread> users;
    for (const uint32_t pool : {1u, 2u}) {
      users.emplace_back([&, pool] {
        Pages pages(three.setups[pool], 0, 20);
        for (uint8_t round = 0; round < 5; ++round) {
          pages.Fill();
          EXPECT_TRUE(DumpAll(*three.store, pages) == Repeated(20, CS_OK));
          pages.Poison();
          EXPECT_TRUE(LoadAll(*three.store, pages) == Repeated(20, CS_OK));
          EXPECT_TRUE(pages.HoldsAll());
        }
      });
    }
    for (std::thread& user : users) user.join();
    stop.store(true);
    busy.join();
    three.store->Close();
  }
}

// One queue for all pools.
TEST(Pools, ShareTheQueue) {
  Three three("Posix", Env::Real(), [](StoreSetup& setup) { setup.queue_depth = 8; });
  ASSERT_TRUE(three.store != nullptr);
  ASSERT_TRUE(three.OpenPools());
  Pages nine(three.setups[1], 0, 9);
  nine.Fill();
  EXPECT_TRUE(DumpAll(*three.store, nine) == Repeated(9, CS_REFUSED));
  EXPECT_EQ(three.store->Stats().dump_refused, 9u);
  Pages eight(three.setups[1], 0, 8);
  eight.Fill();
  EXPECT_TRUE(DumpAll(*three.store, eight) == Repeated(8, CS_OK));
}

// A root is in use, or out of it, for all pools, and comes back for all.
TEST(Pools, ShareWhatADirectoryIsGoodFor) {
  const TempDir other;
  FaultEnv env;
  Three three("Posix", env, [&](StoreSetup& setup) { setup.roots.push_back(other.path()); });
  ASSERT_TRUE(three.store != nullptr);
  ASSERT_TRUE(three.OpenPools());
  std::vector<Pages> pages;
  for (const StoreSetup& setup : three.setups) {
    pages.emplace_back(setup, 0, 20);
    pages.back().Fill();
    EXPECT_TRUE(DumpAll(*three.store, pages.back()) == Repeated(20, CS_OK));
  }
  // The parts of a block lie in the same directory.
  EXPECT_GT(Files(three, 0), 0u);
  EXPECT_EQ(Files(three, 0), Files(three, 1));
  EXPECT_EQ(Files(three, 0), Files(three, 2));
  const auto fails = [&](FaultEnv::Call& call) {
    if (!call.path.starts_with(three.root.path())) return Status::Ok();
    return Status::FromErrno(EIO, "call", call.path);
  };
  for (const Op op : {Op::kStat, Op::kOpenRead, Op::kOpenWrite}) env.Before(op, fails);
  for (uint32_t pool = 0; pool < 3; ++pool) (void)three.Lookup(pool, pages[pool]);
  EXPECT_EQ(three.store->Stats().posix_directories_out, 1u);
  EXPECT_EQ(three.store->Stats().posix_directories, 2u);
  EXPECT_EQ(three.store->Clear().code(), CS_IO);  // owed there
  env.NoHooks();
  EXPECT_TRUE(Eventually([&] { return three.store->Stats().posix_directories_out == 0; }));
  for (uint32_t pool = 0; pool < 3; ++pool) {
    EXPECT_TRUE(three.Lookup(pool, pages[pool]) == std::vector<uint8_t>(20, 0));
    EXPECT_TRUE(DumpAll(*three.store, pages[pool]) == Repeated(20, CS_OK));
    EXPECT_TRUE(three.Lookup(pool, pages[pool]) == std::vector<uint8_t>(20, 1));
  }
  three.store->Close();
}

// One capacity for all pools; what goes, goes with all its parts.
TEST(Pools, ShareTheSpace) {
  // A block of all three takes 8192 + 24576 + 8192 bytes.
  constexpr uint64_t kBlock = 40960;
  Three three("Posix", Env::Real(), [](StoreSetup& setup) {
    setup.capacities = {20 * kBlock};
    setup.high_watermark_percent = 90;
    setup.low_watermark_percent = 80;
  });
  ASSERT_TRUE(three.store != nullptr);
  ASSERT_TRUE(three.OpenPools());
  const auto dump = [&](uint64_t first, uint64_t end) {
    for (uint64_t block = first; block < end; ++block) {
      for (const uint32_t pool : {1u, 2u, 0u}) {
        Pages one(three.setups[pool], block, 1);
        one.Fill();
        EXPECT_TRUE(Eventually([&] { return DumpAll(*three.store, one) == Codes{CS_OK}; }));
      }
      EXPECT_LE(three.store->Stats().posix_used_bytes, 20 * kBlock);
    }
  };
  dump(0, 40);
  EXPECT_TRUE(Eventually([&] { return three.store->Stats().posix_uses_pending == 0; }));
  // By their files alone all of pool 1's would go before any of another.
  for (const uint32_t pool : {1u, 2u, 0u}) {
    for (uint64_t block = 0; block < 40; ++block) {
      const uint64_t second = (pool == 0 ? 200 : 100 * pool) + block;
      (void)Env::Real().SetModified(BlockPath(three.setups[pool], IdOf(block)),
                                    second * 1'000'000'000);
    }
  }
  dump(40, 46);
  EXPECT_GT(three.store->Stats().evicted_blocks, 0u);
  // Each that is there is whole.
  EXPECT_TRUE(Eventually(
      [&] { return Files(three, 0) == Files(three, 1) && Files(three, 0) == Files(three, 2); }));
  for (uint64_t block = 0; block < 46; ++block) {
    std::vector<uint8_t> there;
    for (uint32_t pool = 0; pool < 3; ++pool) {
      there.push_back(three.Lookup(pool, Pages(three.setups[pool], block, 1))[0]);
    }
    EXPECT_TRUE(there == std::vector<uint8_t>(3, there[0]));
  }
  EXPECT_EQ(three.Lookup(0, Pages(three.setups[0], 45, 1))[0], 1);
  three.store->Close();
}

}  // namespace cachestore::test
