// Uses of blocks, as a store notes them in the times of their files.
#include <algorithm>
#include <memory>
#include <vector>

#include "fault_env.h"
#include "fixture.h"
#include "harness.h"

namespace cachestore::test {
namespace {

StoreSetup Limited(const TempDir& root) {
  StoreSetup setup({root.path()});
  setup.capacities = {uint64_t{1} << 40};
  return setup;
}

uint64_t TimeOf(const StoreSetup& setup, uint64_t n) {
  const Result<FileInfo> info = Env::Real().Stat(BlockPath(setup, IdOf(n)));
  return EXPECT_OK(info) ? info.value().modified_ns : 0;
}

// Of `numbers` in the order of their files' times, the latest first.
using Numbers = std::vector<uint64_t>;
Numbers ByTime(const StoreSetup& setup, Numbers numbers) {
  std::sort(numbers.begin(), numbers.end(),
            [&](uint64_t a, uint64_t b) { return TimeOf(setup, a) > TimeOf(setup, b); });
  return numbers;
}

bool AllWritten(Store& store) {
  return Eventually([&] { return store.Stats().posix_uses_pending == 0; });
}

// Blocks `first` and so on, which follow block first - 1.
Codes LoadAfter(Store& store, const StoreSetup& setup, uint64_t first, size_t blocks) {
  Pages pages(setup, first, blocks);
  cs_batch batch = pages.batch();
  const BlockId before = IdOf(first - 1);
  batch.parent_id = before.data();
  const Result<cs_task> task = store.Load(batch);
  return task.ok() ? WaitFor(store, task.value(), blocks) : Repeated(blocks, task.status().code());
}

}  // namespace

// A request's first block is the one used last, new or there already; close
// writes what is pending.
TEST(UseTimes, ADumpIsAUse) {
  const TempDir root;
  const StoreSetup setup = Limited(root);
  {
    const auto store = OpenOrFail(setup);
    ASSERT_TRUE(store != nullptr);
    Pages pages(setup, 0, 6);
    pages.Fill();
    EXPECT_TRUE(DumpAll(*store, pages) == Repeated(6, CS_OK));
    store->Close();
    EXPECT_EQ(store->Stats().posix_uses_pending, 0u);
    EXPECT_EQ(store->Stats().posix_uses_dropped, 0u);
  }
  EXPECT_TRUE(ByTime(setup, {5, 3, 1, 0, 2, 4}) == Numbers({0, 1, 2, 3, 4, 5}));
  const auto store = OpenOrFail(setup);
  ASSERT_TRUE(store != nullptr);
  Pages again(setup, 2, 1);
  again.Fill();
  EXPECT_TRUE(DumpAll(*store, again) == Repeated(1, CS_OK));
  store->Close();
  EXPECT_TRUE(ByTime(setup, {5, 3, 1, 0, 2, 4}) == Numbers({2, 0, 1, 3, 4, 5}));
}

// The order goes on after a restart, and a prefix that was only looked up there
// outlives its tail.
TEST(UseTimes, ARestartKeepsTheOrder) {
  const TempDir root;
  const StoreSetup setup = Limited(root);
  {
    const auto store = OpenOrFail(setup);
    ASSERT_TRUE(store != nullptr);
    for (const uint64_t first : {uint64_t{0}, uint64_t{100}}) {
      Pages pages(setup, first, 4);
      pages.Fill();
      EXPECT_TRUE(DumpAll(*store, pages) == Repeated(4, CS_OK));
    }
  }
  const Numbers all = {0, 1, 2, 3, 100, 101, 102, 103};
  EXPECT_TRUE(ByTime(setup, all) == Numbers({100, 101, 102, 103, 0, 1, 2, 3}));
  {
    const auto store = OpenOrFail(setup);
    ASSERT_TRUE(store != nullptr);
    const Pages chain(setup, 0, 4);
    const Result<size_t> length = store->LookupPrefix(0, chain.block_ids());
    EXPECT_TRUE(length.ok() && length.value() == 4);
    Pages tail(setup, 2, 1);
    EXPECT_TRUE(LoadAll(*store, tail) == Repeated(1, CS_OK));
  }
  EXPECT_TRUE(ByTime(setup, all) == Numbers({0, 1, 2, 100, 101, 102, 103, 3}));
}

// While the store runs, within an interval; two stores of one directory see
// each other's uses there.
TEST(UseTimes, StoresShareTheTimes) {
  const TempDir root;
  const StoreSetup setup = Limited(root);
  const auto one = OpenOrFail(setup);
  const auto two = OpenOrFail(setup);
  ASSERT_TRUE(one != nullptr && two != nullptr);
  Pages pages(setup, 0, 4);
  pages.Fill();
  EXPECT_TRUE(DumpAll(*one, pages) == Repeated(4, CS_OK));
  EXPECT_TRUE(AllWritten(*one));
  EXPECT_TRUE(LoadAfter(*two, setup, 3, 1) == Repeated(1, CS_OK));
  EXPECT_TRUE(AllWritten(*two));
  // Block 2 comes before it, as the request said; what comes before that, the
  // other store doesn't know.
  EXPECT_TRUE(ByTime(setup, {0, 1, 2, 3}) == Numbers({2, 3, 0, 1}));
  EXPECT_TRUE(LoadAfter(*one, setup, 2, 1) == Repeated(1, CS_OK));
  EXPECT_TRUE(AllWritten(*one));
  EXPECT_TRUE(ByTime(setup, {0, 1, 2, 3}) == Numbers({0, 1, 2, 3}));
}

// Where nothing is evicted nothing is noted: not one system call.
TEST(UseTimes, NoLimitsNoTimes) {
  for (const char* pipeline : {"Posix", "Cache|Posix"}) {
    const TempDir root;
    StoreSetup setup({root.path()});
    setup.pipeline = pipeline;
    setup.share_buffer = false;
    FaultEnv env;
    const auto store = OpenOrFail(setup, env);
    ASSERT_TRUE(store != nullptr);
    Pages pages(setup, 0, 4);
    pages.Fill();
    EXPECT_TRUE(DumpAll(*store, pages) == Repeated(4, CS_OK));
    EXPECT_TRUE(LoadAll(*store, pages) == Repeated(4, CS_OK));
    EXPECT_EQ(store->Stats().posix_uses_pending, 0u);
    store->Close();
    EXPECT_EQ(env.calls(Op::kSetModified), 0u);
  }
}

// Blocks of several shards have one file, and one time.
TEST(UseTimes, OneTimeABlock) {
  const TempDir root;
  StoreSetup setup = Limited(root);
  setup.shards = 3;
  FaultEnv env;
  const auto store = OpenOrFail(setup, env);
  ASSERT_TRUE(store != nullptr);
  Pages pages(setup, 0, 3);
  pages.Fill();
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(9, CS_OK));
  store->Close();
  EXPECT_EQ(env.calls(Op::kSetModified), 3u);
  EXPECT_TRUE(ByTime(setup, {2, 0, 1}) == Numbers({0, 1, 2}));
}

// What the cache serves is used too, in its order, and no file is read for it.
TEST(UseTimes, HitsOfTheCacheAreUses) {
  const TempDir root;
  StoreSetup setup = Limited(root);
  setup.pipeline = "Cache|Posix";
  setup.share_buffer = false;
  const auto store = OpenOrFail(setup);
  ASSERT_TRUE(store != nullptr);
  for (const uint64_t first : {uint64_t{0}, uint64_t{100}}) {
    Pages pages(setup, first, 4);
    pages.Fill();
    EXPECT_TRUE(DumpAll(*store, pages) == Repeated(4, CS_OK));
    EXPECT_TRUE(Eventually([&] { return store->Stats().cache_slots_dirty == 0; }));
    EXPECT_TRUE(AllWritten(*store));
  }
  const Numbers all = {0, 1, 2, 3, 100, 101, 102, 103};
  EXPECT_TRUE(ByTime(setup, all) == Numbers({100, 101, 102, 103, 0, 1, 2, 3}));
  EXPECT_TRUE(LoadAfter(*store, setup, 2, 2) == Repeated(2, CS_OK));
  store->Close();
  EXPECT_EQ(store->Stats().storage_loads, 0u);
  EXPECT_TRUE(ByTime(setup, all) == Numbers({0, 1, 2, 3, 100, 101, 102, 103}));
}

// What is cleared isn't noted any more.
TEST(UseTimes, AClearForgets) {
  const TempDir root;
  const StoreSetup setup = Limited(root);
  FaultEnv env;
  Gate gate;
  const auto store = OpenOrFail(setup, env);
  ASSERT_TRUE(store != nullptr);
  env.Before(Op::kSetModified, Holding(gate));
  Pages pages(setup, 0, 4);
  pages.Fill();
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(4, CS_OK));
  ASSERT_TRUE(gate.WaitArrived(1));  // one is being written
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(4, CS_OK));
  EXPECT_OK(store->Clear());
  EXPECT_EQ(store->Stats().posix_uses_pending, 1u);
  gate.Open();
  store->Close();
  EXPECT_EQ(store->Stats().posix_uses_pending, 0u);
  EXPECT_EQ(env.calls(Op::kSetModified), 1u);
}

// A time that hangs holds up no request, and not the end.
TEST(UseTimes, AHungTimeHoldsUpNothing) {
  const TempDir root;
  const StoreSetup setup = Limited(root);
  Gate gate;
  FaultEnv env;
  const size_t threads = ThreadCount();
  const auto store = OpenOrFail(setup, env);
  ASSERT_TRUE(store != nullptr);
  env.Before(Op::kSetModified, Holding(gate));
  Pages pages(setup, 0, 4);
  pages.Fill();
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(4, CS_OK));
  ASSERT_TRUE(gate.WaitArrived(1));
  for (int i = 0; i < 3; ++i) {
    pages.Poison();
    EXPECT_TRUE(LoadAll(*store, pages) == Repeated(4, CS_OK));
    EXPECT_TRUE(pages.HoldsAll());
    EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(4, 1));
  }
  store->Close();  // leaves the thread behind
  EXPECT_EQ(gate.arrived(), 1u);
  gate.Open();
  EXPECT_TRUE(Eventually([&] { return ThreadCount() <= threads; }));
}

}  // namespace cachestore::test
