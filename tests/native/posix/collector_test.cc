// Capacity: what is used, what is evicted, by whom.
#include "posix/collector.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "cache/processes.h"
#include "fault_env.h"
#include "fixture.h"
#include "harness.h"

namespace cachestore::test {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kFile = 8192;  // of a block of StoreSetup's tensors

StoreSetup SetupOf(const std::string& root, uint64_t blocks, uint32_t high = 90,
                   uint32_t low = 80) {
  StoreSetup setup({root});
  setup.capacities = {blocks * kFile};
  setup.high_watermark_percent = high;
  setup.low_watermark_percent = low;
  return setup;
}

cs_stats StatsOf(Store& store) { return store.Stats(); }

size_t Dump(Store& store, const StoreSetup& setup, uint64_t first, size_t n) {
  Pages pages(setup, first, n);
  pages.Fill();
  const Codes codes = DumpAll(store, pages);
  return static_cast<size_t>(std::count(codes.begin(), codes.end(), CS_OK));
}

bool Loads(Store& store, const StoreSetup& setup, uint64_t block) {
  Pages pages(setup, block, 1);
  return LoadAll(store, pages) == Codes{CS_OK} && pages.HoldsAll();
}

size_t BlockFiles(const std::string& root) {
  size_t files = 0;
  for (const std::string& path : FilesBelow(root)) {
    files += path.find("/blocks/") != std::string::npos ? 1 : 0;
  }
  return files;
}

bool UsedBecomes(Store& store, uint64_t blocks) {
  const bool became = Eventually([&] { return StatsOf(store).posix_used_bytes == blocks * kFile; });
  if (!became) EXPECT_EQ(StatsOf(store).posix_used_bytes, blocks * kFile);
  return became;
}

bool UsesWritten(Store& store) {
  return Eventually([&] { return StatsOf(store).posix_uses_pending == 0; });
}

std::vector<std::string> Warnings(Store& store) {
  std::vector<std::string> texts;
  while (const auto event = store.NextEvent()) {
    if (event->level != CS_EVENT_INFO) texts.push_back(event->text);
  }
  return texts;
}

bool Collects(Store& store) {
  return Eventually([&] { return StatsOf(store).posix_collecting == 1; });
}

TEST(Capacity, UsageIsRightAfterEverything) {
  TempDir root;
  const StoreSetup setup = SetupOf(root.path(), 1000);
  {
    auto store = OpenOrFail(setup);
    ASSERT_TRUE(store != nullptr);
    EXPECT_EQ(Dump(*store, setup, 0, 20), 20u);
    EXPECT_TRUE(UsedBecomes(*store, 20));
    EXPECT_EQ(Dump(*store, setup, 0, 20), 20u);  // existing
    EXPECT_TRUE(UsedBecomes(*store, 20));
    for (uint64_t i = 0; i < 3; ++i) fs::remove(BlockPath(setup, IdOf(i)));
    EXPECT_TRUE(UsedBecomes(*store, 17));
    fs::remove_all(fs::path(BlockPath(setup, IdOf(5))).parent_path());
    EXPECT_TRUE(UsedBecomes(*store, 16));
    EXPECT_EQ(StatsOf(*store).posix_capacity_bytes, 1000 * kFile);
  }
  {
    auto store = OpenOrFail(setup);
    ASSERT_TRUE(store != nullptr);
    EXPECT_TRUE(UsedBecomes(*store, 16));
    // A damaged block is removed by the load that finds it.
    WriteFile(BlockPath(setup, IdOf(10)), std::vector<uint8_t>(kFile));
    EXPECT_TRUE(!Loads(*store, setup, 10));
    EXPECT_TRUE(UsedBecomes(*store, 15));
    EXPECT_OK(store->Clear());
    EXPECT_TRUE(UsedBecomes(*store, 0));
    EXPECT_EQ(Dump(*store, setup, 100, 2), 2u);
    EXPECT_TRUE(UsedBecomes(*store, 2));
    EXPECT_EQ(StatsOf(*store).evicted_blocks, 0u);
  }
}

// One that a pass sees before its dump has ended isn't counted again when it ends.
TEST(Capacity, ABlockCountsOnce) {
  TempDir root;
  const StoreSetup setup = SetupOf(root.path(), 1000);
  FaultEnv env;
  auto store = OpenOrFail(setup, env);
  ASSERT_TRUE(store != nullptr);
  EXPECT_EQ(Dump(*store, setup, 0, 5), 5u);
  EXPECT_TRUE(UsedBecomes(*store, 5));
  Gate gate;
  env.After(Op::kRename, On("/blocks/", Holding(gate)));
  Pages page(setup, 5, 1);
  page.Fill();
  const Result<cs_task> dump = store->Dump(page.batch());
  EXPECT_OK(dump);
  EXPECT_TRUE(gate.WaitArrived(1));
  EXPECT_TRUE(UsedBecomes(*store, 6));
  gate.Open();
  EXPECT_TRUE(WaitFor(*store, dump.value(), 1) == Repeated(1, CS_OK));
  EXPECT_EQ(StatsOf(*store).posix_used_bytes, 6 * kFile);
}

TEST(Capacity, EveryIdentityOfARootCounts) {
  TempDir root;
  const StoreSetup setup = SetupOf(root.path(), 1000);
  StoreSetup other = setup;
  other.identity = "other";
  other.fingerprint = 2;
  auto store = OpenOrFail(setup);
  auto second = OpenOrFail(other);
  ASSERT_TRUE(store != nullptr && second != nullptr);
  Dump(*store, setup, 0, 4);
  Dump(*second, other, 0, 3);
  EXPECT_TRUE(UsedBecomes(*store, 7));
  EXPECT_TRUE(UsedBecomes(*second, 7));
  EXPECT_EQ(StatsOf(*store).posix_collecting + StatsOf(*second).posix_collecting, 1u);
  EXPECT_OK(second->Clear());
  EXPECT_TRUE(UsedBecomes(*store, 4));
}

TEST(Capacity, TheOldestGoFirst) {
  TempDir root;
  const StoreSetup setup = SetupOf(root.path(), 20, 80, 50);  // above 16, down to 10
  auto store = OpenOrFail(setup);
  ASSERT_TRUE(store != nullptr && Collects(*store));
  for (uint64_t i = 0; i < 16; ++i) {
    EXPECT_EQ(Dump(*store, setup, i, 1), 1u);
  }
  EXPECT_TRUE(Loads(*store, setup, 0));
  EXPECT_TRUE(Loads(*store, setup, 3));
  EXPECT_TRUE(UsesWritten(*store));
  EXPECT_EQ(Dump(*store, setup, 16, 1), 1u);
  EXPECT_TRUE(UsedBecomes(*store, 10));
  std::string left;
  for (uint64_t i = 0; i < 17; ++i) {
    if (IsPresent(*store, IdOf(i))) left += std::to_string(i) + " ";
  }
  EXPECT_EQ(left, "0 3 9 10 11 12 13 14 15 16 ");
  EXPECT_EQ(StatsOf(*store).evicted_blocks, 7u);
  EXPECT_EQ(StatsOf(*store).evicted_bytes, 7 * kFile);
}

TEST(Capacity, RecencySurvivesARestart) {
  TempDir root;
  StoreSetup setup = SetupOf(root.path(), 1000);
  {
    auto store = OpenOrFail(setup);
    ASSERT_TRUE(store != nullptr);
    for (uint64_t i = 0; i < 8; ++i) EXPECT_EQ(Dump(*store, setup, i, 1), 1u);
    EXPECT_TRUE(Loads(*store, setup, 1));
  }
  setup = SetupOf(root.path(), 8, 75, 25);
  auto store = OpenOrFail(setup);
  ASSERT_TRUE(store != nullptr);
  EXPECT_TRUE(UsedBecomes(*store, 2));
  EXPECT_TRUE(IsPresent(*store, IdOf(1)));
  EXPECT_TRUE(IsPresent(*store, IdOf(7)));
}

TEST(Capacity, IsNeverExceeded) {
  TempDir root;
  const StoreSetup setup = SetupOf(root.path(), 32);
  auto store = OpenOrFail(setup);
  ASSERT_TRUE(store != nullptr && Collects(*store));
  size_t stored = 0;
  size_t most = 0;
  for (uint64_t i = 0; i < 40; ++i) {
    stored += Dump(*store, setup, i * 8, 8);
    most = std::max(most, BlockFiles(root.path()));
    if (i % 4 == 3) {
      EXPECT_TRUE(Eventually(
          [&] { return StatsOf(*store).posix_used_bytes <= setup.capacities[0] * 9 / 10; }));
    }
  }
  EXPECT_TRUE(most <= 32);
  EXPECT_TRUE(most >= 24);
  const cs_stats stats = StatsOf(*store);
  EXPECT_EQ(stats.dump_ok, stored);
  EXPECT_EQ(stats.dump_no_space, 320 - stored);
  EXPECT_TRUE(stored >= 40);
  EXPECT_TRUE(Eventually(
      [&] { return StatsOf(*store).evicted_blocks + BlockFiles(root.path()) == stored; }));
}

// All that a second process does: opens the store, and dumps what it is told to.
ROLE(Writer) {
  const StoreSetup setup = SetupOf(arguments[0], std::stoull(arguments[1]));
  auto store = OpenOrFail(setup);
  if (store == nullptr) return 1;
  while (const auto line = HearParent()) {
    if (*line == "collects") {
      TellParent(std::to_string(StatsOf(*store).posix_collecting));
    } else if (*line == "used") {
      TellParent(std::to_string(StatsOf(*store).posix_used_bytes / kFile));
    } else {
      TellParent(std::to_string(Dump(*store, setup, std::stoull(*line), 8)));
    }
  }
  return 0;
}

TEST(Capacity, IsOneForAllProcesses) {
  TempDir root;
  const StoreSetup setup = SetupOf(root.path(), 64);
  auto store = OpenOrFail(setup);
  ASSERT_TRUE(store != nullptr && Collects(*store));
  Process a("Writer", {root.path(), "64"});
  Process b("Writer", {root.path(), "64"});
  size_t most = 0;
  uint64_t next = 0;
  for (int round = 0; round < 12; ++round) {
    for (Process* const process : {&a, &b}) {
      process->Say(std::to_string(next));
      next += 8;
    }
    Dump(*store, setup, next, 8);
    next += 8;
    a.Hear();
    b.Hear();
    most = std::max(most, BlockFiles(root.path()));
  }
  EXPECT_TRUE(most <= 64);
  EXPECT_EQ(a.Ask("collects"), "0");
  EXPECT_EQ(b.Ask("collects"), "0");
  EXPECT_TRUE(Eventually([&] {
    const auto files = std::to_string(BlockFiles(root.path()));
    return StatsOf(*store).posix_used_bytes / kFile == BlockFiles(root.path()) &&
           a.Ask("used") == files;
  }));
}

// Stores that never write hold grants: the one that does gets room all the same.
TEST(Capacity, IdleStoresStopNobody) {
  TempDir root;
  const StoreSetup setup = SetupOf(root.path(), 64);
  auto collecting = OpenOrFail(setup);
  ASSERT_TRUE(collecting != nullptr && Collects(*collecting));
  auto idle = OpenOrFail(setup);
  auto other = OpenOrFail(setup);
  auto writing = OpenOrFail(setup);
  ASSERT_TRUE(idle != nullptr && other != nullptr && writing != nullptr);
  uint64_t next = 0;
  size_t stored = 0;
  EXPECT_TRUE(Eventually([&] {
    stored += Dump(*writing, setup, next, 8);
    next += 8;
    return stored > 100;
  }));
  EXPECT_TRUE(StatsOf(*collecting).evicted_blocks > 0);
  EXPECT_TRUE(BlockFiles(root.path()) <= 64);
  // Its directory is deleted under it: the collector must learn of it again.
  // The stores may make it again meanwhile.
  EXPECT_TRUE(Eventually([&] {
    std::error_code error;
    fs::remove_all(root.path() + "/identity", error);
    return !error;
  }));
  EXPECT_TRUE(Eventually([&] { return Dump(*writing, setup, next += 8, 8) > 0; }));
}

TEST(Collector, IsTakenOverFromAKilledProcess) {
  TempDir root;
  const StoreSetup setup = SetupOf(root.path(), 40);
  Process first("Writer", {root.path(), "40"});
  ASSERT_TRUE(Eventually([&] { return first.Ask("collects") == "1"; }));
  auto store = OpenOrFail(setup);
  ASSERT_TRUE(store != nullptr);
  EXPECT_EQ(first.Ask("0"), "8");
  EXPECT_TRUE(UsedBecomes(*store, 8));
  EXPECT_EQ(StatsOf(*store).posix_collecting, 0u);
  first.Kill();
  EXPECT_TRUE(Collects(*store));
  uint64_t next = 8;
  EXPECT_TRUE(Eventually([&] {
    Dump(*store, setup, next += 8, 8);
    return StatsOf(*store).evicted_blocks > 0;
  }));
}

TEST(Collector, DifferentLimitsAreReported) {
  TempDir root;
  const StoreSetup setup = SetupOf(root.path(), 100);
  auto store = OpenOrFail(setup);
  ASSERT_TRUE(store != nullptr && Collects(*store));
  Dump(*store, setup, 0, 8);
  auto other = OpenOrFail(SetupOf(root.path(), 4));
  ASSERT_TRUE(other != nullptr);
  std::vector<std::string> texts;
  EXPECT_TRUE(Eventually([&] {
    for (std::string& text : Warnings(*other)) texts.push_back(std::move(text));
    return !texts.empty();
  }));
  ASSERT_TRUE(!texts.empty());
  EXPECT_TRUE(texts[0].find("limits") != std::string::npos);
  EXPECT_TRUE(texts[0].find(std::to_string(4 * kFile)) != std::string::npos);
  EXPECT_TRUE(texts[0].find(std::to_string(100 * kFile)) != std::string::npos);
  // It evicts nothing.
  EXPECT_TRUE(UsedBecomes(*other, 8));
  EXPECT_EQ(StatsOf(*other).evicted_blocks, 0u);
}

TEST(Collector, WhatIsNotABlockStays) {
  TempDir root;
  TempDir outside;
  StoreSetup setup = SetupOf(root.path(), 10, 80, 10);
  const std::string victim =
      outside.path() + "/blocks/" + std::string(3, 'a') + "/" + std::string(32, 'a');
  fs::create_directories(fs::path(victim).parent_path());
  WriteFile(victim, std::vector<uint8_t>(kFile));
  fs::create_symlink(outside.path(), root.path() + "/linked");
  fs::create_directories(root.path() + "/identity/blocks/abc");
  const std::string text = root.path() + "/identity/blocks/abc/notes.txt";
  WriteFile(text, std::vector<uint8_t>(kFile));
  const std::string misplaced =
      root.path() + "/identity/blocks/abc/" + std::string(32, 'f');  // belongs into fff
  WriteFile(misplaced, std::vector<uint8_t>(kFile));
  fs::create_symlink(victim, root.path() + "/identity/blocks/abc/abc" + std::string(29, '0'));
  auto store = OpenOrFail(setup);
  ASSERT_TRUE(store != nullptr && Collects(*store));
  EXPECT_EQ(Dump(*store, setup, 0, 9), 9u);
  EXPECT_TRUE(UsedBecomes(*store, 1));
  EXPECT_TRUE(fs::exists(victim));
  EXPECT_TRUE(fs::exists(text));
  EXPECT_TRUE(fs::exists(misplaced));
}

TEST(Collector, AReaderKeepsWhatIsEvicted) {
  TempDir root;
  const StoreSetup setup = SetupOf(root.path(), 10, 80, 10);
  FaultEnv env;
  auto store = OpenOrFail(setup, env);
  ASSERT_TRUE(store != nullptr && Collects(*store));
  EXPECT_EQ(Dump(*store, setup, 0, 2), 2u);
  EXPECT_TRUE(UsesWritten(*store));
  Gate gate;
  const std::string block = fs::path(BlockPath(setup, IdOf(0))).filename();
  env.Before(Op::kReadFull, On(block, Holding(gate)));
  Pages pages(setup, 0, 1);
  const cs_batch batch = pages.batch();
  const Result<cs_task> task = store->Load(batch);
  ASSERT_OK(task);
  ASSERT_TRUE(gate.WaitArrived(1));
  EXPECT_EQ(Dump(*store, setup, 2, 7), 7u);
  EXPECT_TRUE(Eventually([&] { return !fs::exists(BlockPath(setup, IdOf(0))); }));
  gate.Open();
  EXPECT_EQ(WaitFor(*store, task.value(), 1), Codes{CS_OK});
  EXPECT_TRUE(pages.HoldsAll());
}

TEST(Collector, AFullDiskMakesRoomWhereThatIsAllowed) {
  for (const bool allowed : {false, true}) {
    TempDir root;
    StoreSetup setup = SetupOf(root.path(), 1000);
    if (!allowed) setup.capacities.clear();
    FaultEnv env;
    auto store = OpenOrFail(setup, env);
    ASSERT_TRUE(store != nullptr);
    EXPECT_EQ(Dump(*store, setup, 0, 8), 8u);
    if (allowed) EXPECT_TRUE(UsedBecomes(*store, 8));
    env.Before(Op::kWriteFull, On(TemporaryRoot(setup), FailingTimes(CS_NO_SPACE, 1)));
    EXPECT_EQ(Dump(*store, setup, 8, 1), 0u);
    EXPECT_EQ(StatsOf(*store).dump_no_space, 1u);
    EXPECT_TRUE(Loads(*store, setup, 7));
    if (allowed) {
      EXPECT_TRUE(Eventually([&] { return StatsOf(*store).evicted_blocks == 1; }));
    } else {
      EXPECT_EQ(StatsOf(*store).posix_directories_full, 1u);
    }
    EXPECT_EQ(Dump(*store, setup, 8, 1), 1u);
    EXPECT_EQ(StatsOf(*store).posix_directories_full, 0u);
    EXPECT_EQ(StatsOf(*store).evicted_blocks, allowed ? 1u : 0u);
  }
}

// The one that finds the disk full needn't be the one that collects.
TEST(Collector, AFullDiskThatAnotherStoreFindsMakesRoom) {
  TempDir root;
  const StoreSetup setup = SetupOf(root.path(), 1000);
  auto collecting = OpenOrFail(setup);
  ASSERT_TRUE(collecting != nullptr && Collects(*collecting));
  FaultEnv env;
  auto store = OpenOrFail(setup, env);
  ASSERT_TRUE(store != nullptr);
  EXPECT_EQ(Dump(*store, setup, 0, 8), 8u);
  EXPECT_TRUE(UsedBecomes(*collecting, 8));
  // Nothing that allocates succeeds, until there is room.
  std::atomic<bool> full{true};
  env.Before(Op::kWriteFull, [&](FaultEnv::Call& call) {
    const bool allocates = !call.path.ends_with("/lock");
    return full && allocates ? Status(CS_NO_SPACE, "injected") : Status::Ok();
  });
  EXPECT_EQ(Dump(*store, setup, 8, 2), 0u);
  EXPECT_EQ(StatsOf(*store).dump_no_space, 2u);
  EXPECT_EQ(StatsOf(*store).posix_directories_full, 1u);
  EXPECT_EQ(StatsOf(*store).posix_collecting, 0u);
  EXPECT_TRUE(Eventually([&] { return StatsOf(*collecting).evicted_blocks == 2; }));
  EXPECT_TRUE(UsedBecomes(*store, 6));
  EXPECT_EQ(StatsOf(*store).posix_directories_full, 1u);
  // It is looked for without a dump, too.
  full = false;
  EXPECT_TRUE(Eventually([&] { return StatsOf(*store).posix_directories_full == 0; }));
  EXPECT_EQ(Dump(*store, setup, 8, 2), 2u);
  EXPECT_EQ(StatsOf(*collecting).evicted_blocks, 2u);
}

// A filesystem with room for so many blocks.
class SmallDisk : public FaultEnv {
 public:
  SmallDisk(std::string root, uint64_t blocks) : root_(std::move(root)), total_(blocks * kFile) {}
  Result<SpaceInfo> Space(const std::string&) override {
    return SpaceInfo{total_, total_ - std::min(total_, BlockFiles(root_) * kFile)};
  }

 private:
  const std::string root_;
  const uint64_t total_;
};

TEST(Collector, LeavesTheReserveFree) {
  TempDir root;
  StoreSetup setup({root.path()});
  setup.free_space_reserve = 10 * kFile;
  SmallDisk env(root.path(), 30);
  auto store = OpenOrFail(setup, env);
  ASSERT_TRUE(store != nullptr && Collects(*store));
  for (uint64_t i = 0; i < 12; ++i) {
    Dump(*store, setup, i * 4, 4);
    EXPECT_TRUE(BlockFiles(root.path()) <= 20);
    EXPECT_TRUE(Eventually([&] { return BlockFiles(root.path()) <= 19; }));
  }
  EXPECT_TRUE(StatsOf(*store).evicted_blocks > 0);
  EXPECT_TRUE(Eventually([&] { return Dump(*store, setup, 100, 1) == 1; }));
  EXPECT_TRUE(Loads(*store, setup, 100));
}

TEST(Collector, ItsDirectoryComesBack) {
  TempDir root;
  const StoreSetup setup = SetupOf(root.path(), 10, 80, 50);
  auto store = OpenOrFail(setup);
  ASSERT_TRUE(store != nullptr && Collects(*store));
  fs::remove_all(root.path() + "/collector");
  EXPECT_TRUE(Eventually([&] { return fs::exists(root.path() + "/collector/lock"); }));
  WriteFile(root.path() + "/collector/state", {'x'});
  EXPECT_EQ(Dump(*store, setup, 0, 9), 9u);
  EXPECT_TRUE(UsedBecomes(*store, 5));
}

// A directory of block files that can't be read keeps nobody from the others.
TEST(Collector, GoesOnBesideWhatCantBeLookedAt) {
  TempDir root;
  const StoreSetup setup = SetupOf(root.path(), 10, 80, 50);
  fs::create_directories(root.path() + "/identity/blocks/000");
  FaultEnv env;
  env.Before(Op::kList, On("/blocks/000", Failing(CS_IO)));
  auto store = OpenOrFail(setup, env);
  ASSERT_TRUE(store != nullptr && Collects(*store));
  EXPECT_EQ(Dump(*store, setup, 0, 9), 9u);
  EXPECT_TRUE(UsedBecomes(*store, 5));
}

TEST(Collector, WithoutLimitsThereIsNone) {
  TempDir root;
  StoreSetup setup({root.path()});
  FaultEnv env;
  {
    auto store = OpenOrFail(setup, env);
    ASSERT_TRUE(store != nullptr);
    Dump(*store, setup, 0, 4);
    EXPECT_EQ(StatsOf(*store).posix_collecting, 0u);
  }
  EXPECT_TRUE(!fs::exists(root.path() + "/collector"));
  EXPECT_EQ(env.calls(Op::kSetModified), 0u);
}

}  // namespace
}  // namespace cachestore::test
