// What a clear does to the dumps that are under way. The rest: conformance.cc.
#include <functional>
#include <memory>
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

// Two stores of one directory, and a page that the first one dumps.
struct TwoStores {
  TwoStores() { pages.Fill(); }
  // What comes about when its block is about to be renamed.
  void AtRename(const std::function<void()>& then) {
    env.Before(Op::kRename, On("/blocks/", [this, then](FaultEnv::Call&) {
                 env.NoHooks();
                 then();
                 return Status::Ok();
               }));
  }

  const TempDir root;
  StoreSetup setup{{root.path()}};
  FaultEnv env;
  const std::unique_ptr<Store> store = OpenOrFail(setup, env);
  const std::unique_ptr<Store> other = OpenOrFail(setup);
  Pages pages{setup, 0, 1};
};

// Between the look for a clear and the rename.
TEST(Clear, TakesABlockThatItsLookHasMissed) {
  TwoStores two;
  two.AtRename([&] { EXPECT_OK(two.other->Clear()); });
  EXPECT_TRUE(DumpAll(*two.store, two.pages) == Repeated(1, CS_OK));
  EXPECT_TRUE(LookupAll(*two.other, two.pages) == std::vector<uint8_t>(1, 0));
  EXPECT_TRUE(Eventually(
      [&] { return FilesBelow(two.root.path() + "/" + two.setup.identity + "/trash").empty(); }));
}

// Such a block is never there: nobody finds it, or takes it for stored, neither who
// was there when it was cleared nor who comes later.
TEST(Clear, ALateRenameIsOfNoBlockThatIsThere) {
  TwoStores two;
  Gate gate;
  two.env.Before(Op::kRename, On("/blocks/", [&](FaultEnv::Call&) { return two.other->Clear(); }));
  // It is there, or gone with its directory.
  two.env.After(Op::kRename, On("/blocks/", Holding(gate)));
  two.env.Before(Op::kUnlink, On("/tmp/", Holding(gate)));
  const Result<cs_task> dump = two.store->Dump(two.pages.batch());
  ASSERT_OK(dump);
  ASSERT_TRUE(gate.WaitArrived(1));
  const auto newcomer = OpenOrFail(two.setup);
  for (Store* const store : {two.store.get(), two.other.get(), newcomer.get()}) {
    EXPECT_TRUE(LookupAll(*store, two.pages) == std::vector<uint8_t>(1, 0));
    EXPECT_TRUE(LoadAll(*store, two.pages) == Repeated(1, CS_NOT_FOUND));
  }
  two.pages.Fill();
  EXPECT_TRUE(DumpAll(*newcomer, two.pages) == Repeated(1, CS_OK));
  gate.Open();
  EXPECT_TRUE(WaitFor(*two.store, dump.value(), 1) == Repeated(1, CS_OK));
  for (Store* const store : {two.store.get(), two.other.get(), newcomer.get()}) {
    EXPECT_TRUE(LookupAll(*store, two.pages) == std::vector<uint8_t>(1, 1));
    two.pages.Poison();
    EXPECT_TRUE(LoadAll(*store, two.pages) == Repeated(1, CS_OK));
    EXPECT_TRUE(two.pages.HoldsAll());
  }
}

// Nor does such a dump take a block along that was stored between the clear and its own
// rename: by another store, or by the same one.
TEST(Clear, ALateRenameReplacesNothing) {
  for (const bool same : {false, true}) {
    TwoStores two;
    Store& later = same ? *two.store : *two.other;
    const std::string path = BlockPath(two.setup, IdOf(0));
    Result<FileInfo> stored{FileInfo{}};
    two.AtRename([&] {
      EXPECT_OK(later.Clear());
      EXPECT_TRUE(DumpAll(later, two.pages) == Repeated(1, CS_OK));
      stored = Env::Real().Stat(path);
      ASSERT_OK(stored);
    });
    EXPECT_TRUE(DumpAll(*two.store, two.pages) == Repeated(1, CS_OK));
    const Result<FileInfo> there = Env::Real().Stat(path);
    ASSERT_OK(there);
    EXPECT_TRUE(there.value().IsSameFile(stored.value()));
    for (Store* const store : {two.store.get(), two.other.get()}) {
      EXPECT_TRUE(LookupAll(*store, two.pages) == std::vector<uint8_t>(1, 1));
      two.pages.Poison();
      EXPECT_TRUE(LoadAll(*store, two.pages) == Repeated(1, CS_OK));
      EXPECT_TRUE(two.pages.HoldsAll());
    }
  }
}

// A clock of files that stands still, as between two ticks: what is written gets the
// time it has there, unless that is set.
void StopClock(FaultEnv& env) {
  const uint64_t now = Env::Real().Now();
  env.Before(Op::kStat, On("/tmp/", [now](FaultEnv::Call& call) {
               const Result<FileInfo> info = Env::Real().Stat(call.path);
               const bool is_set = info.ok() && info.value().modified_ns <= now + 100;
               if (info.ok() && !is_set) EXPECT_OK(Env::Real().SetModified(call.path, now));
               return Status::Ok();
             }));
}

// A file of one clear may have the number that the one before had.
TEST(Clear, IsToldFromTheOneBeforeInTheSameTick) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  FaultEnv env;
  const auto one = OpenOrFail(setup, env);
  const auto two = OpenOrFail(setup, env);
  ASSERT_TRUE(one != nullptr && two != nullptr);
  Pages pages(setup, 0, 1);
  StopClock(env);
  uint64_t last = 0;
  for (int round = 0; round < 20; ++round) {
    EXPECT_OK((round % 2 == 0 ? one : two)->Clear());
    const Result<FileInfo> mark = Env::Real().Stat(root.path() + "/" + setup.identity + "/cleared");
    ASSERT_OK(mark);
    EXPECT_TRUE(mark.value().modified_ns > last);
    last = mark.value().modified_ns;
    for (Store* const store : {one.get(), two.get()}) {
      EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(1, 0));
    }
    pages.Fill();
    EXPECT_TRUE(DumpAll(*one, pages) == Repeated(1, CS_OK));
    for (Store* const store : {one.get(), two.get()}) {
      EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(1, 1));
      pages.Poison();
      EXPECT_TRUE(LoadAll(*store, pages) == Repeated(1, CS_OK));
      EXPECT_TRUE(pages.HoldsAll());
    }
  }
}

}  // namespace cachestore::test
