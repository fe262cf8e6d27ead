// PosixTier: how requests become jobs, what they cost, and what is left after
// errors. Hung filesystems: hang_test.cc; several shards: multi_shard_test.cc;
// full disks: space_test.cc.
#include "posix/posix_tier.h"

#include <sys/resource.h>

#include <filesystem>
#include <new>
#include <random>

#include "fixture.h"
#include "harness.h"

namespace cachestore::test {

// Fan-out: a request runs on as many workers as there are, in each direction,
// and neither takes from the other.
TEST(PosixTier, OneRequestUsesEveryWorkerOfItsDirection) {
  const TempDir root;
  StoreSetup setup({root.path()});
  setup.load_workers = 4;
  setup.dump_workers = 3;
  FaultEnv env;
  const auto store = OpenOrFail(setup, env);
  Pages stored(setup, 0, 12);
  stored.Fill();
  EXPECT_TRUE(DumpAll(*store, stored) == Repeated(12, CS_OK));
  Pages fresh(setup, 100, 12);
  fresh.Fill();

  Gate reads;
  Gate writes;
  env.Before(Op::kReadFull, Holding(reads));
  env.Before(Op::kWriteFull, Holding(writes));
  Result<cs_task> load = store->Load(stored.batch());
  ASSERT_OK(load);
  EXPECT_TRUE(reads.WaitArrived(4));
  Result<cs_task> dump = store->Dump(fresh.batch());
  ASSERT_OK(dump);
  EXPECT_TRUE(writes.WaitArrived(3));
  EXPECT_TRUE(reads.StaysAt(4));
  EXPECT_TRUE(writes.StaysAt(3));
  EXPECT_EQ(store->Stats().load_outstanding, 12u);
  EXPECT_EQ(store->Stats().dump_outstanding, 12u);
  // Held dumps don't hold loads, and the other way round.
  reads.Open();
  EXPECT_TRUE(WaitFor(*store, load.value(), 12) == Repeated(12, CS_OK));
  EXPECT_EQ(writes.arrived(), 3u);
  writes.Open();
  EXPECT_TRUE(WaitFor(*store, dump.value(), 12) == Repeated(12, CS_OK));
}

// Decision 5: of a request that doesn't fit, not one system call.
TEST(PosixTier, RefusedRequestDoesNoIo) {
  const TempDir root;
  StoreSetup setup({root.path()});
  setup.queue_depth = 8;
  FaultEnv env;
  const auto store = OpenOrFail(setup, env);
  WaitCleaned(setup, env);
  Pages stored(setup, 0, 8);
  stored.Fill();
  EXPECT_TRUE(DumpAll(*store, stored) == Repeated(8, CS_OK));
  Pages fresh(setup, 100, 8);
  fresh.Fill();
  for (const bool loads : {true, false}) {
    Gate gate;
    env.Before(loads ? Op::kReadFull : Op::kWriteFull, Holding(gate));
    const auto start = [&](size_t from, size_t n) {
      return loads ? store->Load(stored.part(from, n)) : store->Dump(fresh.part(from, n));
    };
    const auto outstanding = [&] {
      const cs_stats stats = store->Stats();
      return loads ? stats.load_outstanding : stats.dump_outstanding;
    };
    Result<cs_task> five = start(0, 5);
    ASSERT_OK(five);
    ASSERT_TRUE(gate.WaitArrived(2));
    env.ResetCounts();
    EXPECT_EQ(start(4, 4).status().code(), CS_REFUSED);
    EXPECT_EQ(outstanding(), 5u);
    EXPECT_EQ(env.calls(), 0u);
    Result<cs_task> three = start(5, 3);
    ASSERT_OK(three);
    // Of an accepted dump, the look for a clear.
    EXPECT_EQ(env.calls(), loads ? 0u : 1u);
    EXPECT_EQ(start(0, 1).status().code(), CS_REFUSED);
    EXPECT_EQ(env.calls(), loads ? 0u : 1u);
    gate.Open();
    EXPECT_TRUE(WaitFor(*store, five.value(), 5) == Repeated(5, CS_OK));
    EXPECT_TRUE(WaitFor(*store, three.value(), 3) == Repeated(3, CS_OK));
    EXPECT_EQ(outstanding(), 0u);
    env.NoHooks();
    Result<cs_task> eight = start(0, 8);
    ASSERT_OK(eight);
    EXPECT_TRUE(WaitFor(*store, eight.value(), 8) == Repeated(8, CS_OK));
  }
}

// Room comes back after failures and misses too.
TEST(PosixTier, RoomComesBackAfterFailures) {
  const TempDir root;
  StoreSetup setup({root.path()});
  setup.queue_depth = 8;
  FaultEnv env;
  const auto store = OpenOrFail(setup, env);
  Pages pages(setup, 0, 8);
  pages.Fill();
  for (int round = 0; round < 5; ++round) {
    EXPECT_TRUE(LoadAll(*store, pages) == Repeated(8, CS_NOT_FOUND));
    env.Before(Op::kWriteFull, Failing(CS_IO));
    EXPECT_TRUE(DumpAll(*store, pages) == Repeated(8, CS_IO));
    env.NoHooks();
    EXPECT_EQ(store->Stats().load_outstanding + store->Stats().dump_outstanding, 0u);
  }
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(8, CS_OK));
}

// F08: at most two system calls a block, and no directory is read.
TEST(PosixTier, LookupIsCheapAndListsNothing) {
  for (const uint64_t type : {uint64_t{0}, FaultEnv::kNfs}) {
    const TempDir root;
    StoreSetup setup({root.path()});
    FaultEnv env;
    env.SetFilesystemType(type);
    const auto store = OpenOrFail(setup, env);
    WaitCleaned(setup, env);
    Pages pages(setup, 0, 100);
    pages.Fill();
    Result<cs_task> task = store->Dump(pages.part(0, 50));
    EXPECT_TRUE(WaitFor(*store, task.value(), 50) == Repeated(50, CS_OK));
    env.ResetCounts();
    std::vector<uint8_t> expected(100, 0);
    std::fill(expected.begin(), expected.begin() + 50, uint8_t{1});
    EXPECT_TRUE(LookupAll(*store, pages) == expected);
    EXPECT_LE(env.calls(), 2u * 100u);
    EXPECT_EQ(env.calls(Op::kList), 0u);
    EXPECT_EQ(env.calls(Op::kOpenRead), 0u);
    env.ResetCounts();
    EXPECT_EQ(store->LookupPrefix(0, pages.block_ids()).value(), 50u);
    EXPECT_LE(env.calls(), 2u * 100u);
    // Neither does a load or a dump.
    EXPECT_TRUE(LoadAll(*store, pages) != Repeated(100, CS_OK));
    EXPECT_TRUE(DumpAll(*store, pages) == Repeated(100, CS_OK));
    EXPECT_EQ(env.calls(Op::kList), 0u);
  }
}

// F08: block files lie in a fan-out, not in one flat directory.
TEST(PosixTier, BlocksLieInAFanOut) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  const auto store = OpenOrFail(setup);
  Pages pages(setup, 0, 200);
  pages.Fill();
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(200, CS_OK));
  size_t directories = 0;
  for (const auto& entry : std::filesystem::directory_iterator(root.path() + "/identity/blocks")) {
    EXPECT_TRUE(entry.is_directory());
    ++directories;
  }
  EXPECT_GT(directories, 150u);
  EXPECT_EQ(FilesBelow(root.path() + "/identity/blocks").size(), 200u);
}

// F03: whatever fails in a dump, its result isn't "stored", the lookup says
// so too, nothing is left behind, and the next one works.
TEST(PosixTier, FailedDumpLeavesNothing) {
  for (const uint64_t type : {uint64_t{0}, FaultEnv::kNfs}) {
    for (const Op op : {Op::kOpenWrite, Op::kWriteFull, Op::kClose, Op::kRename}) {
      for (const Code code : {CS_IO, CS_NO_SPACE, CS_NO_MEMORY, CS_NOT_FOUND}) {
        const TempDir root;
        const StoreSetup setup({root.path()});
        FaultEnv env;
        env.SetFilesystemType(type);
        const auto store = OpenOrFail(setup, env);
        WaitCleaned(setup, env);
        Pages pages(setup, 0, 3);
        pages.Fill();
        env.Before(op, Failing(code));
        EXPECT_TRUE(DumpAll(*store, pages) == Repeated(3, code == CS_NOT_FOUND ? CS_IO : code));
        env.NoHooks();
        EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(3, 0));
        EXPECT_TRUE(FilesBelow(TemporaryRoot(setup)).empty());
        EXPECT_EQ(store->Stats().dump_ok, 0u);
        EXPECT_TRUE(DumpAll(*store, pages) == Repeated(3, CS_OK));
        EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(3, 1));
      }
    }
  }
}

// An exception in a worker (no memory) is one shard's error, not the process's
// end; what was open is closed, what was touched is given back.
TEST(PosixTier, ExceptionsInWorkersAreErrors) {
  for (const uint64_t type : {uint64_t{0}, FaultEnv::kNfs}) {
    const TempDir root;
    StoreSetup setup({root.path()});
    setup.shards = 2;
    FaultEnv env;
    env.SetFilesystemType(type);
    const auto store = OpenOrFail(setup, env);
    WaitCleaned(setup, env);
    Pages pages(setup, 0, 3);
    pages.Fill();
    const size_t descriptors = DescriptorCount();
    const auto throwing = [](FaultEnv::Call&) -> Status { throw std::bad_alloc(); };
    for (const Op op : {Op::kStat, Op::kOpenWrite, Op::kWriteFull, Op::kRename}) {
      env.Before(op, throwing);
      EXPECT_TRUE(DumpAll(*store, pages) == Repeated(6, CS_NO_MEMORY));
      env.NoHooks();
      EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(3, 0));
    }
    EXPECT_TRUE(DumpAll(*store, pages) == Repeated(6, CS_OK));
    for (const Op op : {Op::kOpenRead, Op::kStatFd, Op::kReadFull}) {
      env.Before(op, throwing);
      EXPECT_TRUE(LoadAll(*store, pages) == Repeated(6, CS_NO_MEMORY));
      env.NoHooks();
    }
    EXPECT_TRUE(LoadAll(*store, pages) == Repeated(6, CS_OK));
    EXPECT_EQ(DescriptorCount(), descriptors);
    EXPECT_EQ(store->Stats().load_outstanding + store->Stats().dump_outstanding, 0u);
  }
}

// F11: directories that vanish under an open store come back with the next
// dump.
TEST(PosixTier, DeletedDirectoriesAreMadeAgain) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  const auto store = OpenOrFail(setup);
  uint64_t first = 0;
  for (const char* deleted : {"/identity/blocks/*", "/identity/blocks", "/identity/tmp/*",
                              "/identity/tmp", "/identity", ""}) {
    Pages pages(setup, first, 4);
    first += 4;
    pages.Fill();
    EXPECT_TRUE(DumpAll(*store, pages) == Repeated(4, CS_OK));
    std::string path = root.path() + deleted;
    if (path.ends_with("*")) {
      path.resize(path.size() - 1);
      for (const auto& entry : std::filesystem::directory_iterator(path)) {
        std::filesystem::remove_all(entry.path());
      }
    } else {
      std::filesystem::remove_all(path);
    }
    Pages others(setup, 1000 + first, 4);
    others.Fill();
    EXPECT_TRUE(LoadAll(*store, others) == Repeated(4, CS_NOT_FOUND));
    EXPECT_TRUE(DumpAll(*store, others) == Repeated(4, CS_OK));
    EXPECT_TRUE(LookupAll(*store, others) == std::vector<uint8_t>(4, 1));
    EXPECT_TRUE(LoadAll(*store, others) == Repeated(4, CS_OK));
    EXPECT_TRUE(others.HoldsAll());
  }
}

// F09: errors and exceptions of every operation, a thousand rounds, under a
// low limit: no descriptor is lost.
TEST(PosixTier, DescriptorsStayFlatOverAThousandRoundsOfErrors) {
  const TempDir root;
  StoreSetup setup({root.path()});
  setup.shards = 2;
  FaultEnv env;
  auto store = OpenOrFail(setup, env);
  WaitCleaned(setup, env);
  const size_t descriptors = DescriptorCount();
  struct rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const struct rlimit low = {descriptors + 24, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  std::mt19937_64 random(1);
  size_t failed = 0;
  size_t fine = 0;
  for (int round = 0; round < 1000; ++round) {
    const Op op = static_cast<Op>(static_cast<size_t>(round) % (kOpCount - 1));
    static constexpr Code kCodes[] = {CS_IO,      CS_NO_SPACE, CS_NOT_FOUND,
                                      CS_INVALID, CS_REFUSED,  CS_NO_MEMORY};
    const Code code = kCodes[random() % std::size(kCodes)];
    // A close throws nothing: it frees.
    if (random() % 8 == 0 && op != Op::kClose) {
      env.Before(op, [](FaultEnv::Call&) -> Status { throw std::bad_alloc(); });
    } else {
      env.Before(op, FailingTimes(code, 1 + random() % 3));
    }
    Pages pages(setup, random() % 50, 2);
    pages.Fill();
    const bool opening = round % 50 == 49;
    if (opening) {
      store.reset();
      // May fail, and may throw: what c_api.cc catches.
      try {
        Result<std::unique_ptr<Store>> opened = setup.Open(env);
        if (opened.ok()) store = std::move(opened.value());
      } catch (const std::bad_alloc&) {
      }
      if (store == nullptr) {
        env.NoHooks();
        store = OpenOrFail(setup, env);
      }
    }
    for (const Codes& codes : {DumpAll(*store, pages), LoadAll(*store, pages)}) {
      for (const int32_t each : codes) (each == CS_OK ? fine : failed) += 1;
    }
    env.NoHooks();
    if (round % 10 == 0) EXPECT_OK(store->Clear());
    while (store->NextEvent().has_value()) continue;
  }
  EXPECT_GT(failed, 300u);
  EXPECT_GT(fine, 1000u);
  setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_TRUE(Eventually([&] { return DescriptorCount() == descriptors; }));
}

// F34, as far as it is the native side's: absent, damaged and loaded are three
// counters, and a scripted run gives exact numbers.
TEST(PosixTier, CountersAreExact) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  FaultEnv env;
  const auto store = OpenOrFail(setup, env);
  Pages pages(setup, 0, 10);
  pages.Fill();
  Result<cs_task> task = store->Dump(pages.part(0, 6));
  (void)WaitFor(*store, task.value(), 6);
  env.Before(Op::kWriteFull, Failing(CS_NO_SPACE));
  task = store->Dump(pages.part(4, 4));  // two of them are stored
  (void)WaitFor(*store, task.value(), 4);
  env.NoHooks();
  std::vector<uint8_t> bytes = ReadFile(BlockPath(setup, IdOf(2)));
  bytes[0] ^= 1;
  WriteFile(BlockPath(setup, IdOf(2)), bytes);
  (void)LookupAll(*store, pages);
  (void)LoadAll(*store, pages);
  env.Before(Op::kReadFull, Failing(CS_IO));
  task = store->Load(pages.part(0, 1));
  (void)WaitFor(*store, task.value(), 1);
  const cs_stats stats = store->Stats();
  EXPECT_EQ(stats.dump_requested, 10u);
  EXPECT_EQ(stats.dump_ok, 6u);
  EXPECT_EQ(stats.dump_existing, 2u);
  EXPECT_EQ(stats.dump_no_space, 2u);
  EXPECT_EQ(stats.dump_failed, 0u);
  EXPECT_EQ(stats.dump_bytes, 6u * 137u);
  EXPECT_EQ(stats.lookup_blocks, 10u);
  EXPECT_EQ(stats.lookup_hits, 6u);
  EXPECT_EQ(stats.load_requested, 11u);
  EXPECT_EQ(stats.load_ok, 5u);
  EXPECT_EQ(stats.load_corrupt, 1u);
  EXPECT_EQ(stats.load_absent, 4u);
  EXPECT_EQ(stats.load_failed, 1u);
  EXPECT_EQ(stats.load_bytes, 5u * 137u);
}

}  // namespace cachestore::test
