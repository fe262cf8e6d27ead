// SlotTable: states, replacement, and what comes late. slot_repair_test.cc has
// what deaths leave, clear_test.cc clears.
#include "cache/slot_table.h"

#include <vector>

#include "cache/few_slots.h"
#include "cache/processes_region.h"
#include "fixture.h"
#include "harness.h"

namespace cachestore::test {
namespace {

// What a load by worker 0 does, up to the copy.
void FillByLoad(SlotTable& table, uint64_t block) {
  const Claim claim = table.ClaimForLoad(IdOf(block), 0, false);
  ASSERT_EQ(claim.kind, Claim::kClaimed);
  EXPECT_TRUE(table.PublishLoad(claim.ref));
}

SlotRef FillByDump(SlotTable& table, uint64_t block) {
  const Claim claim = table.ClaimForDump(IdOf(block));
  EXPECT_EQ(claim.kind, Claim::kClaimed);
  EXPECT_TRUE(table.PublishDump(claim.ref, 0, table.epoch()));
  return claim.ref;
}

void Use(SlotTable& table, uint64_t block) {
  EXPECT_EQ(table.ClaimForLoad(IdOf(block), 0, false).kind, Claim::kReady);
  table.Unpin(0);
}

bool IsReady(SlotTable& table, uint64_t block) {
  uint8_t present = 0;
  const BlockId id = IdOf(block);
  EXPECT_TRUE(table.Lookup({&id, 1}, {&present, 1}));
  return present == 1;
}

std::vector<BlockId> Ids(const std::vector<uint64_t>& blocks) {
  std::vector<BlockId> ids;
  for (const uint64_t block : blocks) ids.push_back(IdOf(block));
  return ids;
}

void Touch(SlotTable& table, const std::vector<uint64_t>& blocks) {
  table.Touch(Ids(blocks), nullptr);
}

void TouchAfter(SlotTable& table, uint64_t parent, const std::vector<uint64_t>& blocks) {
  const BlockId id = IdOf(parent);
  table.Touch(Ids(blocks), &id);
}

// Fills the table with others and tells in what order `blocks` go.
std::vector<uint64_t> OrderOfReplacement(SlotTable& table, std::vector<uint64_t> blocks) {
  std::vector<uint64_t> order;
  for (uint64_t other = 1000; !blocks.empty() && other < 1100; ++other) {
    FillByLoad(table, other);
    for (size_t i = 0; i < blocks.size();) {
      if (IsReady(table, blocks[i])) {
        ++i;
        continue;
      }
      order.push_back(blocks[i]);
      blocks.erase(blocks.begin() + static_cast<ptrdiff_t>(i));
    }
  }
  return order;
}

using Blocks = std::vector<uint64_t>;

}  // namespace

TEST(SlotTable, ASlotGoesThroughItsStates) {
  FewSlotsTable few(4);
  SlotTable& table = few.table;
  const Claim mine = table.ClaimForLoad(IdOf(1), 0, false);
  ASSERT_EQ(mine.kind, Claim::kClaimed);
  EXPECT_TRUE(table.block(mine.ref) == IdOf(1));
  EXPECT_TRUE(table.IsLoading(mine.ref));
  EXPECT_FALSE(IsReady(table, 1));  // being loaded is no hit
  for (const bool accept_failed : {false, true}) {
    const Claim other = table.ClaimForLoad(IdOf(1), 1, accept_failed);
    EXPECT_EQ(other.kind, Claim::kLoading);
    EXPECT_EQ(other.ref.slot, mine.ref.slot);
    EXPECT_EQ(other.ref.generation, mine.ref.generation);
  }
  EXPECT_EQ(table.ClaimForDump(IdOf(1)).kind, Claim::kLoading);
  EXPECT_EQ(table.Counts().loading, 1u);

  EXPECT_TRUE(table.PublishLoad(mine.ref));
  EXPECT_FALSE(table.IsLoading(mine.ref));
  EXPECT_TRUE(IsReady(table, 1));
  EXPECT_EQ(table.ClaimForDump(IdOf(1)).kind, Claim::kReady);
  EXPECT_EQ(table.ClaimForLoad(IdOf(1), 1, false).kind, Claim::kReady);
  EXPECT_EQ(few.region->process(few.region->self()).pinned[1].load(), mine.ref.slot);
  table.Unpin(1);
  EXPECT_EQ(few.region->process(few.region->self()).pinned[1].load(), kNone);

  // A failure is an answer to who waited for it; anybody else starts afresh.
  for (const bool by_dump : {false, true}) {
    const Claim failing = table.ClaimForLoad(IdOf(2), 0, false);
    ASSERT_EQ(failing.kind, Claim::kClaimed);
    EXPECT_TRUE(table.Fail(failing.ref, CS_IO));
    EXPECT_FALSE(table.IsLoading(failing.ref));
    EXPECT_FALSE(IsReady(table, 2));
    const Claim waiter = table.ClaimForLoad(IdOf(2), 0, true);
    EXPECT_EQ(waiter.kind, Claim::kFailed);
    EXPECT_EQ(waiter.code, CS_IO);
    const Claim again =
        by_dump ? table.ClaimForDump(IdOf(2)) : table.ClaimForLoad(IdOf(2), 0, false);
    ASSERT_EQ(again.kind, Claim::kClaimed);
    EXPECT_TRUE(table.Fail(again.ref, CS_IO));
  }
  const SlotRef dirty = FillByDump(table, 3);
  EXPECT_EQ(table.Counts().dirty, 1u);
  EXPECT_TRUE(table.Clean(dirty));
  EXPECT_EQ(table.Counts().dirty, 0u);
  EXPECT_TRUE(IsReady(table, 3));
  EXPECT_EQ(Inconsistency(*few.region), "");
}

TEST(SlotTable, ReplacesTheLeastRecentlyUsed) {
  FewSlotsTable few(4);
  for (const uint64_t block : {0, 1, 2, 3}) FillByLoad(few.table, block);
  Use(few.table, 0);
  Use(few.table, 2);
  EXPECT_TRUE(OrderOfReplacement(few.table, {0, 1, 2, 3}) == Blocks({1, 3, 0, 2}));
  EXPECT_EQ(Inconsistency(*few.region), "");
}

// A failed slot is of no use to anybody.
TEST(SlotTable, FailedSlotsGoFirst) {
  FewSlotsTable few(3);
  FillByLoad(few.table, 0);
  const Claim failing = few.table.ClaimForLoad(IdOf(1), 0, false);
  FillByLoad(few.table, 2);
  EXPECT_TRUE(few.table.Fail(failing.ref, CS_IO));
  FillByLoad(few.table, 3);
  EXPECT_TRUE(IsReady(few.table, 0) && IsReady(few.table, 2) && IsReady(few.table, 3));
}

TEST(SlotTable, APrefixOutlivesItsTail) {
  FewSlotsTable few(6);
  for (const uint64_t block : {3, 0, 2, 1, 8, 9}) FillByLoad(few.table, block);
  Touch(few.table, {0, 1, 2, 3});
  Touch(few.table, {8, 9});
  EXPECT_TRUE(OrderOfReplacement(few.table, {0, 1, 2, 3, 8, 9}) == Blocks({3, 2, 1, 0, 9, 8}));
  EXPECT_EQ(Inconsistency(*few.region), "");
}

// Also where requests come in pieces: a use of one is one of those it follows.
TEST(SlotTable, AUseIsPassedOnToTheBlocksBefore) {
  FewSlotsTable few(6);
  for (const uint64_t block : {0, 1, 2, 3, 4, 9}) FillByLoad(few.table, block);
  Touch(few.table, {0, 1});
  TouchAfter(few.table, 1, {2, 3});
  Touch(few.table, {9});
  TouchAfter(few.table, 3, {4});
  EXPECT_TRUE(OrderOfReplacement(few.table, {0, 1, 2, 3, 4, 9}) == Blocks({9, 4, 3, 2, 1, 0}));
}

TEST(SlotTable, AUseIsNotPassedOnToWhoeverTookTheSlot) {
  FewSlotsTable few(3);
  FillByLoad(few.table, 0);
  FillByLoad(few.table, 1);
  FillByLoad(few.table, 2);
  Touch(few.table, {0, 1});
  Use(few.table, 1);
  Use(few.table, 2);
  FillByLoad(few.table, 7);  // where 0 was, which 1 followed
  EXPECT_FALSE(IsReady(few.table, 0));
  Use(few.table, 2);
  Touch(few.table, {1});
  EXPECT_TRUE(OrderOfReplacement(few.table, {1, 2, 7}) == Blocks({7, 2, 1}));
}

// No chain is what it should be: bounded, and nothing breaks.
TEST(SlotTable, TouchesOfAnyShapeEnd) {
  FewSlotsTable few(4);
  for (const uint64_t block : {0, 1, 2, 3}) FillByLoad(few.table, block);
  Touch(few.table, {0, 1, 2});
  Touch(few.table, {2, 1, 0});
  TouchAfter(few.table, 0, {0});
  TouchAfter(few.table, 2, {2, 2, 2});
  Touch(few.table, {3, 3, 0, 3});
  TouchAfter(few.table, 3, {77});
  TouchAfter(few.table, 78, {77, 79});
  TouchAfter(few.table, 1, {});
  Touch(few.table, {});
  EXPECT_EQ(Inconsistency(*few.region), "");
  EXPECT_EQ(OrderOfReplacement(few.table, {0, 1, 2, 3}).size(), 4u);
}

TEST(SlotTable, PinnedAndDirtyAndLoadingAreNeverReplaced) {
  FewSlotsTable few(3);
  SlotTable& table = few.table;
  FillByLoad(table, 0);
  EXPECT_EQ(table.ClaimForLoad(IdOf(0), 2, false).kind, Claim::kReady);  // and stays pinned
  const SlotRef dirty = FillByDump(table, 1);
  const Claim loading = table.ClaimForLoad(IdOf(2), 0, false);
  ASSERT_EQ(loading.kind, Claim::kClaimed);
  EXPECT_EQ(table.ClaimForLoad(IdOf(3), 0, false).kind, Claim::kNoSlot);
  EXPECT_EQ(table.ClaimForDump(IdOf(3)).kind, Claim::kNoSlot);
  EXPECT_TRUE(IsReady(table, 0) && IsReady(table, 1));

  EXPECT_TRUE(table.Clean(dirty));
  FillByLoad(table, 3);
  EXPECT_FALSE(IsReady(table, 1));
  EXPECT_TRUE(IsReady(table, 0));
  Use(table, 3);
  table.Unpin(2);
  EXPECT_TRUE(table.PublishLoad(loading.ref));
  FillByLoad(table, 4);
  EXPECT_FALSE(IsReady(table, 0));
  EXPECT_EQ(Inconsistency(*few.region), "");
}

// The same where the block has to go because its dump was refused.
TEST(SlotTable, AReaderOfARevokedSlotKeepsIt) {
  for (const bool by_dump : {false, true}) {
    FewSlotsTable few(2);
    SlotTable& table = few.table;
    const SlotRef revoked = FillByDump(table, 0);
    EXPECT_EQ(table.ClaimForLoad(IdOf(0), 1, false).kind, Claim::kReady);
    EXPECT_TRUE(table.Revoke(revoked, CS_REFUSED));
    EXPECT_FALSE(IsReady(table, 0));
    const Claim again =
        by_dump ? table.ClaimForDump(IdOf(0)) : table.ClaimForLoad(IdOf(0), 0, false);
    ASSERT_EQ(again.kind, Claim::kClaimed);
    EXPECT_NE(again.ref.slot, revoked.slot);
    EXPECT_EQ(table.ClaimForLoad(IdOf(1), 0, false).kind, Claim::kNoSlot);
    EXPECT_EQ(Inconsistency(*few.region), "");
    table.Unpin(1);
    FillByLoad(table, 1);
    EXPECT_TRUE(table.PublishLoad(again.ref));
    EXPECT_TRUE(IsReady(table, 0) && IsReady(table, 1));
    EXPECT_EQ(Inconsistency(*few.region), "");
  }
}

TEST(SlotTable, LoadsHaveAReserve) {
  FewSlotsTable few(5, /*reserve=*/2);
  SlotTable& table = few.table;
  std::vector<SlotRef> dirty;
  for (const uint64_t block : {0, 1, 2}) dirty.push_back(FillByDump(table, block));
  EXPECT_EQ(table.ClaimForDump(IdOf(3)).kind, Claim::kNoSlot);
  FillByLoad(table, 10);
  FillByLoad(table, 11);
  EXPECT_EQ(table.ClaimForDump(IdOf(3)).kind, Claim::kNoSlot);
  FillByLoad(table, 12);  // in place of 10
  EXPECT_FALSE(IsReady(table, 10));
  // What is clean may be replaced by dumps, down to the reserve.
  EXPECT_TRUE(table.Clean(dirty[0]));
  FillByDump(table, 3);
  EXPECT_EQ(table.ClaimForDump(IdOf(4)).kind, Claim::kNoSlot);
  EXPECT_EQ(Inconsistency(*few.region), "");
}

TEST(SlotTable, DirtySlotsHaveABound) {
  FewSlotsTable few(8, 0, /*max_dirty=*/3);
  SlotTable& table = few.table;
  const SlotRef first = FillByDump(table, 0);
  FillByDump(table, 1);
  const Claim filling = table.ClaimForDump(IdOf(2));  // will be dirty: counts already
  ASSERT_EQ(filling.kind, Claim::kClaimed);
  EXPECT_EQ(table.ClaimForDump(IdOf(3)).kind, Claim::kNoSlot);
  EXPECT_EQ(table.ClaimForDump(IdOf(0)).kind, Claim::kReady);  // takes none
  FillByLoad(table, 4);
  EXPECT_TRUE(table.PublishDump(filling.ref, 0, table.epoch()));
  EXPECT_EQ(table.ClaimForDump(IdOf(3)).kind, Claim::kNoSlot);
  EXPECT_TRUE(table.Clean(first));
  FillByDump(table, 3);
  EXPECT_EQ(table.Counts().dirty, 3u);
}

// A change that found the mutex taken comes late: the slot may be another's.
TEST(SlotTable, AnEarlierUseOfASlotChangesNothing) {
  FewSlotsTable few(1);
  SlotTable& table = few.table;
  const Claim old = table.ClaimForDump(IdOf(0));
  ASSERT_EQ(old.kind, Claim::kClaimed);
  EXPECT_TRUE(table.Fail(old.ref, CS_IO));
  const auto late = [&] {
    EXPECT_TRUE(table.PublishLoad(old.ref));
    EXPECT_TRUE(table.PublishDump(old.ref, 1, table.epoch()));
    EXPECT_TRUE(table.Fail(old.ref, CS_IO));
    EXPECT_TRUE(table.Revoke(old.ref, CS_IO));
    EXPECT_TRUE(table.Clean(old.ref));
    EXPECT_FALSE(table.IsLoading(old.ref));
    EXPECT_EQ(Inconsistency(*few.region), "");
  };
  const Claim mine = table.ClaimForDump(IdOf(1));
  ASSERT_EQ(mine.kind, Claim::kClaimed);
  EXPECT_EQ(mine.ref.slot, old.ref.slot);
  late();
  EXPECT_TRUE(table.IsLoading(mine.ref));
  EXPECT_TRUE(table.PublishDump(mine.ref, 0, table.epoch()));
  late();
  EXPECT_TRUE(IsReady(table, 1));
  EXPECT_EQ(table.Counts().dirty, 1u);
  EXPECT_TRUE(table.Clean(mine.ref));
  late();
  EXPECT_TRUE(IsReady(table, 1));
}

// The store may have ended before the slot came to be published.
TEST(SlotTable, CleanWaitsForThePublish) {
  FewSlotsTable few(2);
  const Claim claim = few.table.ClaimForDump(IdOf(0));
  EXPECT_FALSE(few.table.Clean(claim.ref));
  EXPECT_TRUE(few.table.PublishDump(claim.ref, 0, few.table.epoch()));
  EXPECT_TRUE(few.table.Clean(claim.ref));
  EXPECT_EQ(few.table.Counts().dirty, 0u);

  // Refused before it came to be published.
  const Claim refused = few.table.ClaimForDump(IdOf(1));
  EXPECT_TRUE(few.table.Revoke(refused.ref, CS_REFUSED));
  EXPECT_TRUE(few.table.PublishDump(refused.ref, 0, few.table.epoch()));
  EXPECT_FALSE(IsReady(few.table, 1));
  EXPECT_EQ(few.table.Counts().dirty, 0u);
  EXPECT_EQ(few.table.Counts().loading, 0u);
  EXPECT_EQ(Inconsistency(*few.region), "");
}

TEST(SlotTable, AClearElsewhereIsFollowedOnce) {
  FewSlotsTable few(4);
  SlotTable& table = few.table;
  EXPECT_TRUE(table.Clear(77));
  FillByLoad(table, 0);
  const uint64_t epoch = table.epoch();
  EXPECT_TRUE(table.FollowClear(77) == SlotTable::Follow::kHadHeard);
  EXPECT_TRUE(IsReady(table, 0));
  EXPECT_EQ(table.epoch(), epoch);
  EXPECT_TRUE(table.FollowClear(78) == SlotTable::Follow::kCleared);
  EXPECT_FALSE(IsReady(table, 0));
  EXPECT_NE(table.epoch(), epoch);
  FillByLoad(table, 0);
  EXPECT_TRUE(table.FollowClear(78) == SlotTable::Follow::kHadHeard);
  EXPECT_TRUE(IsReady(table, 0));
}

TEST(SlotTable, AClearTakesWhatIsThereAndWhatIsUnderWay) {
  FewSlotsTable few(6);
  SlotTable& table = few.table;
  FillByLoad(table, 0);
  FillByLoad(table, 1);
  EXPECT_EQ(table.ClaimForLoad(IdOf(1), 1, false).kind, Claim::kReady);  // being read
  const SlotRef dirty = FillByDump(table, 2);
  const Claim loading = table.ClaimForLoad(IdOf(3), 0, false);
  const Claim dumping = table.ClaimForDump(IdOf(4));
  const uint64_t epoch = table.epoch();
  EXPECT_TRUE(table.Clear(77));
  EXPECT_EQ(few.region->header().latest_clear, 77u);
  EXPECT_NE(table.epoch(), epoch);
  for (const uint64_t block : {0, 1, 2, 3, 4}) EXPECT_FALSE(IsReady(table, block));
  EXPECT_EQ(Inconsistency(*few.region), "");
  // What is under way keeps its slots till it ends, unseen.
  EXPECT_TRUE(table.IsLoading(loading.ref));
  EXPECT_TRUE(table.PublishLoad(loading.ref));
  EXPECT_TRUE(table.PublishDump(dumping.ref, 0, epoch));
  const Claim late = table.ClaimForDump(IdOf(5));
  ASSERT_EQ(late.kind, Claim::kClaimed);
  EXPECT_TRUE(table.PublishDump(late.ref, 0, epoch));  // accepted before
  for (const uint64_t block : {0, 1, 2, 3, 4, 5}) EXPECT_FALSE(IsReady(table, block));
  EXPECT_EQ(table.Counts().dirty, 3u);
  EXPECT_EQ(Inconsistency(*few.region), "");

  // A new one of the same block isn't the old one's.
  FillByLoad(table, 2);
  EXPECT_TRUE(table.Clean(dirty));
  EXPECT_TRUE(IsReady(table, 2));
  EXPECT_TRUE(table.Clean(dumping.ref));
  EXPECT_TRUE(table.Clean(late.ref));
  EXPECT_EQ(Inconsistency(*few.region), "");
  // The one being read can't be had, all others can.
  for (uint64_t block = 10; block < 15; ++block) FillByLoad(table, block);
  for (uint64_t block = 10; block < 15; ++block) EXPECT_TRUE(IsReady(table, block));
  table.Unpin(1);
  FillByLoad(table, 15);
  for (uint64_t block = 10; block < 16; ++block) EXPECT_TRUE(IsReady(table, block));
  EXPECT_EQ(Inconsistency(*few.region), "");
}

}  // namespace cachestore::test
