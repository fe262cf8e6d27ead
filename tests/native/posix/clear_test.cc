// What a clear does to the dumps that are under way. The rest: conformance.cc.
#include <filesystem>
#include <fstream>
#include <thread>

#include "fixture.h"
#include "harness.h"

namespace cachestore::test {

// A dump accepted before a clear isn't published after it: not one that is being
// written, and not one that is still queued. One accepted afterwards is.
TEST(Clear, TakesDumpsThatAreUnderWay) {
  const TempDir root;
  StoreSetup setup({root.path()});
  FaultEnv env;
  const auto store = OpenOrFail(setup, env);
  WaitCleaned(setup, env);
  Pages before(setup, 0, 6);  // two workers: four of them are queued
  before.Fill();
  Gate gate;
  env.Before(Op::kWriteFull, Holding(gate));
  const Result<cs_task> dump = store->Dump(before.batch());
  ASSERT_OK(dump);
  ASSERT_TRUE(gate.WaitArrived(2));
  EXPECT_OK(store->Clear());
  Pages after(setup, 100, 2);
  after.Fill();
  const Result<cs_task> later = store->Dump(after.batch());
  ASSERT_OK(later);
  gate.Open();
  EXPECT_TRUE(WaitFor(*store, dump.value(), 6) == Repeated(6, CS_OK));
  EXPECT_TRUE(WaitFor(*store, later.value(), 2) == Repeated(2, CS_OK));
  EXPECT_TRUE(LookupAll(*store, before) == std::vector<uint8_t>(6, 0));
  EXPECT_TRUE(LookupAll(*store, after) == std::vector<uint8_t>(2, 1));
  after.Poison();
  EXPECT_TRUE(LoadAll(*store, after) == Repeated(2, CS_OK));
  EXPECT_TRUE(after.HoldsAll());
}

// The same where another process, or another host, clears.
TEST(Clear, TakesDumpsOfOtherProcesses) {
  const TempDir root;
  StoreSetup setup({root.path()});
  FaultEnv env;
  const auto store = OpenOrFail(setup, env);
  const auto other = OpenOrFail(setup);
  WaitCleaned(setup, env);
  for (uint64_t round = 0; round < 3; ++round) {
    Pages before(setup, 10 * round, 6);
    before.Fill();
    Gate gate;
    env.Before(Op::kWriteFull, Holding(gate));
    const Result<cs_task> dump = store->Dump(before.batch());
    ASSERT_OK(dump);
    ASSERT_TRUE(gate.WaitArrived(2));
    EXPECT_OK(other->Clear());
    gate.Open();
    EXPECT_TRUE(WaitFor(*store, dump.value(), 6) == Repeated(6, CS_OK));
    EXPECT_TRUE(LookupAll(*store, before) == std::vector<uint8_t>(6, 0));
    // Noticed now, and what comes later is stored.
    EXPECT_TRUE(DumpAll(*store, before) == Repeated(6, CS_OK));
    EXPECT_TRUE(LookupAll(*other, before) == std::vector<uint8_t>(6, 1));
  }
}

// Nothing of a store that was idle while others cleared is taken for older. Where
// the look for a clear may hang, it goes with a lookup, which comes before.
TEST(Clear, TakesNoDumpThatComesAfterAnothersClear) {
  const TempDir root;
  const TempDir second;
  StoreSetup setup({root.path(), second.path()});
  for (const cs_zero_copy zero_copy : {CS_ZERO_COPY_AUTO, CS_ZERO_COPY_NEVER}) {
    setup.zero_copy = zero_copy;
    const auto store = OpenOrFail(setup);
    const auto other = OpenOrFail(setup);
    for (uint64_t round = 0; round < 3; ++round) {
      Pages pages(setup, 10 * round, 6);
      pages.Fill();
      EXPECT_OK(other->Clear());
      if (zero_copy == CS_ZERO_COPY_NEVER) {
        EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(6, 0));
      }
      EXPECT_TRUE(DumpAll(*store, pages) == Repeated(6, CS_OK));
      EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(6, 1));
      EXPECT_TRUE(LookupAll(*other, pages) == std::vector<uint8_t>(6, 1));
    }
  }
}

// Between the rename and the look after it.
TEST(Clear, TakesABlockThatItsRenameHasMissed) {
  const TempDir root;
  StoreSetup setup({root.path()});
  FaultEnv env;
  const auto store = OpenOrFail(setup, env);
  const auto other = OpenOrFail(setup);
  Pages pages(setup, 0, 1);
  pages.Fill();
  env.Before(Op::kRename, On("/blocks/", [&](FaultEnv::Call&) {
               env.NoHooks();
               EXPECT_OK(other->Clear());
               return Status::Ok();
             }));
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(1, CS_OK));
  EXPECT_TRUE(LookupAll(*other, pages) == std::vector<uint8_t>(1, 0));
}

// Files made at once can have the same time, by the clock's tick.
void WaitForAnotherFileTime(const TempDir& root) {
  const auto time_of_new = [path = root.path() + "/tick"] {
    std::ofstream(path) << "x";
    return std::filesystem::last_write_time(path);
  };
  const auto first = time_of_new();
  EXPECT_TRUE(Eventually([&] { return time_of_new() != first; }));
}

// Nor is such a block taken for stored by what comes after the clear.
TEST(Clear, TakesNothingThatComesWhileItTakesSuchABlock) {
  const TempDir root;
  StoreSetup setup({root.path()});
  FaultEnv env;
  const auto store = OpenOrFail(setup, env);
  const auto other = OpenOrFail(setup);
  Pages pages(setup, 0, 1);
  pages.Fill();
  Gate gate;
  env.Before(Op::kRename, On("/blocks/", [&](FaultEnv::Call&) {
               env.NoHooks();
               WaitForAnotherFileTime(root);
               EXPECT_OK(other->Clear());
               env.Before(Op::kStat, On("/cleared", Holding(gate)));
               return Status::Ok();
             }));
  const Result<cs_task> dump = store->Dump(pages.batch());
  ASSERT_OK(dump);
  ASSERT_TRUE(gate.WaitArrived(1));
  // Not for those either who ask, or load.
  EXPECT_TRUE(LookupAll(*other, pages) == std::vector<uint8_t>(1, 0));
  EXPECT_TRUE(LoadAll(*other, pages) == Repeated(1, CS_NOT_FOUND));
  pages.Fill();
  EXPECT_TRUE(DumpAll(*other, pages) == Repeated(1, CS_OK));
  gate.Open();
  EXPECT_TRUE(WaitFor(*store, dump.value(), 1) == Repeated(1, CS_OK));
  EXPECT_TRUE(LookupAll(*other, pages) == std::vector<uint8_t>(1, 1));
  pages.Poison();
  EXPECT_TRUE(LoadAll(*other, pages) == Repeated(1, CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
}

}  // namespace cachestore::test
