// A clear and what is under way around it, on the cache tier. The rest:
// conformance.cc, posix/clear_test.cc.
#include <memory>
#include <utility>
#include <vector>

#include "fixture.h"
#include "harness.h"

namespace cachestore::test {
namespace {

StoreSetup SharedSetup(const TempDir& root) {
  StoreSetup setup({root.path() + "/store"});
  setup.pipeline = "Cache|Posix";
  setup.buffer_directory = root.path();
  return setup;
}

bool AreAbsent(Store& store, const Pages& pages) {
  return LookupAll(store, pages) == std::vector<uint8_t>(pages.size(), 0);
}

// Ready in the cache, on the way to the storage: gone from both, for good.
TEST(CacheClear, TakesBlocksThatAreBeingStored) {
  const TempDir root;
  const StoreSetup setup = SharedSetup(root);
  FaultEnv env;
  Pages before(setup, 0, 6);
  before.Fill();
  Pages after(setup, 100, 2);
  after.Fill();
  {
    const auto store = OpenOrFail(setup, env);
    ASSERT_TRUE(store != nullptr);
    Gate gate;
    env.Before(Op::kWriteFull, On("/tmp/", Holding(gate)));
    EXPECT_TRUE(DumpAll(*store, before) == Repeated(6, CS_OK));  // not waited for the storage
    ASSERT_TRUE(gate.WaitArrived(2));
    EXPECT_TRUE(LookupAll(*store, before) == std::vector<uint8_t>(6, 1));
    EXPECT_OK(store->Clear());
    EXPECT_TRUE(AreAbsent(*store, before));
    EXPECT_TRUE(DumpAll(*store, after) == Repeated(2, CS_OK));
    gate.Open();
    store->Close();
    const cs_stats stats = store->Stats();
    EXPECT_EQ(stats.cache_given_up, 0u);
  }
  const auto next = OpenOrFail(setup);
  ASSERT_TRUE(next != nullptr);
  EXPECT_TRUE(AreAbsent(*next, before));
  after.Poison();
  EXPECT_TRUE(LoadAll(*next, after) == Repeated(2, CS_OK));
  EXPECT_TRUE(after.HoldsAll());
}

// A dump that was accepted, and whose slot isn't ready yet.
void ClearBehindAccepted(bool by_dumper) {
  const TempDir root;
  StoreSetup setup = SharedSetup(root);
  setup.copy_workers = 1;
  FaultEnv env;
  const auto loading = OpenOrFail(setup, env);
  const auto dumping = OpenOrFail(setup);
  ASSERT_TRUE(loading != nullptr && dumping != nullptr);
  Pages page(setup, 7, 1);
  page.Fill();
  EXPECT_TRUE(DumpAll(*dumping, page) == Repeated(1, CS_OK));
  EXPECT_TRUE(Eventually([&] { return dumping->Stats().cache_slots_dirty == 0; }));
  EXPECT_OK(dumping->Clear());
  // Somebody loads block 7 and is held there, so that a dump of it must wait.
  Gate gate;
  env.Before(Op::kOpenRead, On("/blocks/", Holding(gate)));
  const Result<cs_task> load = loading->Load(page.batch());
  ASSERT_OK(load);
  ASSERT_TRUE(gate.WaitArrived(1));
  const Result<cs_task> dump = dumping->Dump(page.batch());
  ASSERT_OK(dump);
  EXPECT_TRUE(Eventually([&] {
    const cs_stats stats = dumping->Stats();
    return stats.cache_dump_queued + stats.cache_dump_running == 0;  // it waits
  }));
  EXPECT_OK((by_dumper ? dumping : loading)->Clear());
  gate.Open();
  EXPECT_TRUE(WaitFor(*loading, load.value(), 1) == Repeated(1, CS_NOT_FOUND));
  EXPECT_TRUE(WaitFor(*dumping, dump.value(), 1) == Repeated(1, CS_OK));
  EXPECT_TRUE(AreAbsent(*dumping, page));
  EXPECT_TRUE(AreAbsent(*loading, page));
  EXPECT_TRUE(Eventually([&] { return dumping->Stats().cache_slots_dirty == 0; }));
  EXPECT_TRUE(AreAbsent(*dumping, page));                      // nor was it stored
  EXPECT_TRUE(DumpAll(*dumping, page) == Repeated(1, CS_OK));  // but not a later one
  EXPECT_TRUE(LookupAll(*loading, page) == std::vector<uint8_t>(1, 1));
}

TEST(CacheClear, TakesDumpsThatAreAccepted) { ClearBehindAccepted(/*by_dumper=*/true); }
TEST(CacheClear, TakesDumpsThatOthersHaveAccepted) { ClearBehindAccepted(/*by_dumper=*/false); }

// What another process has in the region goes, too, and what it is storing.
TEST(CacheClear, TakesWhatOthersAreStoring) {
  const TempDir root;
  const StoreSetup setup = SharedSetup(root);
  FaultEnv env;
  const auto storing = OpenOrFail(setup, env);
  const auto clearing = OpenOrFail(setup);
  ASSERT_TRUE(storing != nullptr && clearing != nullptr);
  Pages pages(setup, 0, 4);
  pages.Fill();
  Gate gate;
  env.Before(Op::kWriteFull, On("/tmp/", Holding(gate)));
  EXPECT_TRUE(DumpAll(*storing, pages) == Repeated(4, CS_OK));
  ASSERT_TRUE(gate.WaitArrived(2));
  EXPECT_OK(clearing->Clear());
  gate.Open();
  EXPECT_TRUE(Eventually([&] { return storing->Stats().cache_slots_dirty == 0; }));
  EXPECT_TRUE(AreAbsent(*storing, pages));
  EXPECT_TRUE(AreAbsent(*clearing, pages));
}

// A store of the same storage with another buffer: as if on another host.
std::unique_ptr<Store> OpenElsewhere(const StoreSetup& setup, const TempDir& buffers) {
  StoreSetup other = setup;
  other.buffer_directory = buffers.path();
  return OpenOrFail(other);
}

// Stored, and ready in the buffer.
void DumpToTheStorage(Store& store, const Pages& pages) {
  EXPECT_TRUE(DumpAll(store, pages) == Repeated(pages.size(), CS_OK));
  EXPECT_TRUE(Eventually([&] { return store.Stats().cache_slots_dirty == 0; }));
}

// Whatever this process asks first, after a clear by whoever doesn't share its buffer.
TEST(CacheClear, ByAnotherHostIsFollowed) {
  enum First { kLookup, kPrefix, kLoad, kDump };
  for (const First first : {kLookup, kPrefix, kLoad, kDump}) {
    const TempDir root;
    const TempDir elsewhere;
    const StoreSetup setup = SharedSetup(root);
    const auto store = OpenOrFail(setup);
    const auto other = OpenElsewhere(setup, elsewhere);
    ASSERT_TRUE(store != nullptr && other != nullptr);
    Pages pages(setup, 0, 4);
    pages.Fill();
    DumpToTheStorage(*store, pages);
    EXPECT_OK(other->Clear());
    if (first == kLookup) {
      EXPECT_TRUE(AreAbsent(*store, pages));
    } else if (first == kPrefix) {
      const Result<size_t> length = store->LookupPrefix(0, pages.block_ids());
      ASSERT_OK(length);
      EXPECT_EQ(length.value(), 0u);
    } else if (first == kLoad) {
      EXPECT_TRUE(LoadAll(*store, pages) == Repeated(4, CS_NOT_FOUND));
    }
    DumpToTheStorage(*store, pages);  // anew: it isn't taken for what was there
    EXPECT_TRUE(LookupAll(*other, pages) == std::vector<uint8_t>(4, 1));
    EXPECT_EQ(store->Stats().cache_hit, 0u);
    pages.Poison();
    EXPECT_TRUE(LoadAll(*store, pages) == Repeated(4, CS_OK));
    EXPECT_TRUE(pages.HoldsAll());
    EXPECT_EQ(store->Stats().cache_hit, 4u);  // nothing more was forgotten
  }
}

// Nobody has asked for anything since: the next process to attach sees to it.
TEST(CacheClear, ByAnotherHostIsFollowedByWhoJoins) {
  const TempDir root;
  const TempDir elsewhere;
  const StoreSetup setup = SharedSetup(root);
  const auto idle = OpenOrFail(setup);
  const auto other = OpenElsewhere(setup, elsewhere);
  ASSERT_TRUE(idle != nullptr && other != nullptr);
  Pages pages(setup, 0, 4);
  pages.Fill();
  DumpToTheStorage(*idle, pages);
  EXPECT_EQ(idle->Stats().cache_slots - idle->Stats().cache_slots_free, 4u);
  EXPECT_OK(other->Clear());
  const auto joining = OpenOrFail(setup);
  ASSERT_TRUE(joining != nullptr);
  EXPECT_EQ(joining->Stats().cache_slots, joining->Stats().cache_slots_free);
  DumpToTheStorage(*joining, pages);
  EXPECT_TRUE(LookupAll(*idle, pages) == std::vector<uint8_t>(4, 1));  // not once more
}

// What one process has noticed, the next one doesn't clear again: neither one that
// notices later, nor one that names its directories in another order.
TEST(CacheClear, ByAnotherHostIsFollowedOnce) {
  const TempDir root;
  const TempDir elsewhere;
  StoreSetup setup = SharedSetup(root);
  setup.roots = {root.path() + "/a", root.path() + "/b"};
  StoreSetup reversed = setup;
  std::swap(reversed.roots[0], reversed.roots[1]);
  const auto first = OpenOrFail(setup);
  const auto second = OpenOrFail(setup);
  const auto other = OpenElsewhere(setup, elsewhere);
  ASSERT_TRUE(first != nullptr && second != nullptr && other != nullptr);
  EXPECT_OK(other->Clear());
  Pages pages(setup, 0, 8);
  pages.Fill();
  DumpToTheStorage(*first, pages);
  pages.Poison();
  EXPECT_TRUE(LoadAll(*second, pages) == Repeated(8, CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
  EXPECT_EQ(second->Stats().cache_hit, 8u);
  const auto third = OpenOrFail(reversed);
  ASSERT_TRUE(third != nullptr);
  EXPECT_TRUE(LoadAll(*third, pages) == Repeated(8, CS_OK));
  EXPECT_EQ(third->Stats().cache_hit, 8u);
}

}  // namespace
}  // namespace cachestore::test
