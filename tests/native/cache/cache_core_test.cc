// CacheCore: dirty slots and how they come to be stored.
#include "cache/cache_core.h"

#include <atomic>
#include <cstring>

#include "cache/few_slots.h"
#include "cache/mock_tier.h"
#include "cache/processes_region.h"
#include "fault_env.h"
#include "fixture.h"
#include "harness.h"

namespace cachestore::test {
namespace {

const Geometry kGeometry = {{3000, 1000}, 4000, 4000};

struct Core {
  explicit Core(std::chrono::milliseconds timeout = kLong)
      : few(16),
        below(kGeometry),
        core(*few.region, few.table, below, kGeometry, events, kLong, timeout) {}
  ~Core() {
    core.Close();
    below.Stop();
    below.Close();
  }

  std::vector<SlotRef> Dirty(uint64_t first, uint64_t n) {
    std::vector<SlotRef> refs;
    for (uint64_t block = first; block < first + n; ++block) {
      const Claim claim = few.table.ClaimForDump(IdOf(block));
      EXPECT_EQ(claim.kind, Claim::kClaimed);
      std::memset(few.table.bytes(claim.ref), static_cast<int>(block), kSlotSize);
      EXPECT_TRUE(few.table.PublishDump(claim.ref, 0, few.table.epoch()));
      refs.push_back(claim.ref);
    }
    return refs;
  }
  size_t CountEvents(const std::string& text) {
    size_t count = 0;
    while (const auto event = events.Take()) {
      count += event->text.find(text) != std::string::npos ? 1 : 0;
    }
    return count;
  }
  bool IsStored() { return core.WaitStored(std::chrono::steady_clock::now() + kWaitBound); }

  FewSlotsTable few;
  EventRing events;
  MockTier below;
  CacheCore core;
};

}  // namespace

// A slot that can't be stored is tried again, later each time, and in the end is
// no more than a cached one.
TEST(CacheCore, AttemptsToStoreHaveABound) {
  Core under_test;
  CacheCore& core = under_test.core;
  under_test.below.EndWith(kDump, CS_IO);
  core.Store(under_test.Dirty(1, 2), under_test.below.Epoch());
  EXPECT_TRUE(Eventually([&] { return core.counters().store_failed == 2; }));
  EXPECT_EQ(under_test.few.table.Counts().dirty, 2u);
  EXPECT_EQ(core.counters().given_up.load(), 0u);
  // The timers are hurried, or this took half a minute.
  EXPECT_TRUE(Eventually([&] {
    core.waits().Hurry();
    return core.counters().given_up == 2;
  }));
  EXPECT_TRUE(under_test.IsStored());  // nothing is on its way
  EXPECT_EQ(core.counters().given_up.load(), 2u);
  EXPECT_EQ(core.counters().stored.load(), 0u);
  EXPECT_EQ(core.counters().store_failed.load(), 2u * 6);
  EXPECT_EQ(under_test.below.calls(kDump), 6u);
  EXPECT_EQ(under_test.few.table.Counts().dirty, 0u);
  EXPECT_EQ(under_test.few.table.ClaimForDump(IdOf(1)).kind, Claim::kReady);
  EXPECT_EQ(under_test.CountEvents("not stored"), 1u);
  EXPECT_EQ(Inconsistency(*under_test.few.region), "");
}

// Only those that failed are tried again.
TEST(CacheCore, ALaterAttemptStoresTheRest) {
  Core under_test;
  CacheCore& core = under_test.core;
  std::atomic<int> failing{3};
  under_test.below.End(kDump, [&](const BlockId& id) {
    return id == IdOf(2) && --failing >= 0 ? CS_NO_SPACE : CS_OK;
  });
  core.Store(under_test.Dirty(1, 4), under_test.below.Epoch());
  EXPECT_TRUE(Eventually([&] {
    core.waits().Hurry();
    return core.counters().stored == 4;
  }));
  EXPECT_TRUE(under_test.IsStored());
  EXPECT_EQ(core.counters().store_failed.load(), 3u);
  EXPECT_EQ(core.counters().given_up.load(), 0u);
  EXPECT_EQ(under_test.below.shards(kDump), 4u + 3u);
  EXPECT_TRUE(under_test.below.Stored(IdOf(2)) == std::vector<uint8_t>(4000, 2));
  EXPECT_EQ(under_test.few.table.Counts().dirty, 0u);
}

// More than the tier below has room for goes in smaller requests.
TEST(CacheCore, RefusedStoresAreHalved) {
  Core under_test;
  CacheCore& core = under_test.core;
  under_test.below.Refuse(kDump, CS_REFUSED);
  core.Store(under_test.Dirty(1, 5), under_test.below.Epoch());
  EXPECT_EQ(under_test.below.refused(kDump), 1u);
  EXPECT_EQ(core.storing(), 5u);
  under_test.below.Refuse(kDump, CS_OK);
  EXPECT_TRUE(under_test.IsStored());
  EXPECT_EQ(under_test.below.calls(kDump), 2u);
  EXPECT_EQ(under_test.below.shards(kDump), 5u);
  EXPECT_EQ(core.counters().stored.load(), 5u);
  EXPECT_EQ(core.counters().store_failed.load(), 0u);
}

TEST(CacheCore, WaitsForWhatIsBeingStored) {
  Core under_test;
  CacheCore& core = under_test.core;
  under_test.below.Hold(kDump);
  EXPECT_OK(core.StoreOnce(under_test.Dirty(1, 3), under_test.below.Epoch()));
  EXPECT_FALSE(core.WaitStored(std::chrono::steady_clock::now()));
  EXPECT_EQ(core.storing(), 3u);
  under_test.below.Refuse(kDump, CS_INTERNAL);
  EXPECT_EQ(core.StoreOnce(under_test.Dirty(4, 1), under_test.below.Epoch()).code(), CS_INTERNAL);
  EXPECT_EQ(core.storing(), 3u);  // the caller's to deal with
  under_test.below.Release(kDump);
  EXPECT_TRUE(under_test.IsStored());
  EXPECT_EQ(under_test.few.table.Counts().dirty, 1u);
}

// What was accepted before a clear isn't stored by it.
TEST(CacheCore, StoresOfAnEarlierEpochAreNone) {
  Core under_test;
  const uint64_t before = under_test.below.Epoch();
  const std::vector<SlotRef> refs = under_test.Dirty(1, 3);
  EXPECT_OK(under_test.below.Clear());
  under_test.core.Store(refs, before);
  EXPECT_TRUE(under_test.IsStored());
  for (uint64_t block = 1; block < 4; ++block) EXPECT_FALSE(under_test.below.Has(IdOf(block)));
  EXPECT_EQ(under_test.few.table.Counts().dirty, 0u);
}

}  // namespace cachestore::test
