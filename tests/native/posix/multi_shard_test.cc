// F01: a block of several shards is visible when all of them are written, and
// not before, whichever comes last.
#include <algorithm>
#include <thread>

#include "fixture.h"
#include "harness.h"

namespace cachestore::test {
namespace {

constexpr uint32_t kShards = 4;
constexpr uint64_t kStride = 4096;  // 137 bytes, padded

struct Block {
  explicit Block(uint64_t filesystem_type = 0) : setup({root.path()}) {
    setup.shards = kShards;
    setup.dump_workers = kShards;
    env.SetFilesystemType(filesystem_type);
    store = OpenOrFail(setup, env);
    WaitCleaned(setup, env);
    pages = std::make_unique<Pages>(setup, 1, 1);
    pages->Fill();
  }
  bool Visible() { return IsPresent(*store, IdOf(1)); }

  const TempDir root;
  FaultEnv env;
  StoreSetup setup;
  std::unique_ptr<Store> store;
  std::unique_ptr<Pages> pages;
};

// Holds the writes that `held` says, lets the others pass, and looks.
void HoldWrites(uint64_t type, const std::vector<uint64_t>& held) {
  Block block(type);
  Gate gate;
  Gate passed;
  passed.Open();
  block.env.Before(Op::kWriteFull, [&](FaultEnv::Call& call) {
    if (std::find(held.begin(), held.end(), call.offset) != held.end()) gate.Pass();
    return Status::Ok();
  });
  block.env.After(Op::kClose, [&](FaultEnv::Call&) {
    passed.Pass();
    return Status::Ok();
  });
  Result<cs_task> task = block.store->Dump(block.pages->batch());
  ASSERT_OK(task);
  ASSERT_TRUE(gate.WaitArrived(held.size()));
  ASSERT_TRUE(passed.WaitArrived(kShards - held.size()));
  EXPECT_FALSE(block.Visible());
  EXPECT_TRUE(passed.StaysAt(kShards - held.size()));  // nothing else is under way
  EXPECT_FALSE(block.Visible());
  EXPECT_EQ(block.store->LookupPrefix(0, block.pages->block_ids()).value(), 0u);
  gate.Open();
  EXPECT_TRUE(WaitFor(*block.store, task.value(), kShards) == Repeated(kShards, CS_OK));
  EXPECT_TRUE(block.Visible());
  block.env.NoHooks();
  block.pages->Poison();
  EXPECT_TRUE(LoadAll(*block.store, *block.pages) == Repeated(kShards, CS_OK));
  EXPECT_TRUE(block.pages->HoldsAll());
}

}  // namespace

TEST(MultiShard, AbsentWhileEveryPartButTheLastIsDelayed) {
  for (const uint64_t type : {uint64_t{0}, FaultEnv::kNfs}) {
    HoldWrites(type, {0, kStride, 2 * kStride});
  }
}

TEST(MultiShard, AbsentWhileTheLastPartIsDelayed) {
  for (const uint64_t type : {uint64_t{0}, FaultEnv::kNfs}) HoldWrites(type, {3 * kStride});
}

TEST(MultiShard, AbsentWhileAnyOnePartIsDelayed) {
  for (uint64_t shard = 0; shard < kShards; ++shard) HoldWrites(0, {shard * kStride});
}

// The record is a part too, and so is the rename.
TEST(MultiShard, AbsentUntilRecordAndRename) {
  for (const Op op : {Op::kWriteFull, Op::kRename}) {
    Block block;
    Gate gate;
    block.env.Before(op, op == Op::kRename ? Holding(gate) : At(kShards * kStride, Holding(gate)));
    Result<cs_task> task = block.store->Dump(block.pages->batch());
    ASSERT_TRUE(gate.WaitArrived(1));
    EXPECT_FALSE(block.Visible());
    gate.Open();
    EXPECT_TRUE(WaitFor(*block.store, task.value(), kShards) == Repeated(kShards, CS_OK));
    EXPECT_TRUE(block.Visible());
  }
}

// F03: one part that fails fails the block, all its shards alike.
TEST(MultiShard, OneFailedPartFailsTheBlock) {
  for (const uint64_t type : {uint64_t{0}, FaultEnv::kNfs}) {
    for (uint64_t part = 0; part <= kShards; ++part) {  // the last is the record
      for (const Code code : {CS_NO_SPACE, CS_IO}) {
        Block block(type);
        block.env.Before(Op::kWriteFull, At(part * kStride, Failing(code)));
        EXPECT_TRUE(DumpAll(*block.store, *block.pages) == Repeated(kShards, code));
        EXPECT_FALSE(block.Visible());
        EXPECT_TRUE(FilesBelow(TemporaryRoot(block.setup)).empty());
        block.env.NoHooks();
        EXPECT_TRUE(DumpAll(*block.store, *block.pages) == Repeated(kShards, CS_OK));
        EXPECT_TRUE(block.Visible());
      }
    }
  }
}

// ... and not its neighbours (decision 1).
TEST(MultiShard, FailedBlockSparesItsNeighbours) {
  Block block;
  Pages pages(block.setup, 1, 6);
  pages.Fill();
  std::atomic<int> left{1};
  block.env.Before(Op::kWriteFull, [&](FaultEnv::Call& call) {
    const bool fails = call.offset == 2 * kStride && left.fetch_sub(1) > 0;
    return fails ? Status(CS_IO, "injected") : Status::Ok();
  });
  const Codes codes = DumpAll(*block.store, pages);
  const std::vector<uint8_t> present = LookupAll(*block.store, pages);
  size_t failed = 0;
  for (size_t b = 0; b < 6; ++b) {
    failed += present[b] == 0 ? 1 : 0;
    for (size_t s = 0; s < kShards; ++s) {
      EXPECT_EQ(codes[b * kShards + s], present[b] == 1 ? CS_OK : CS_IO);
    }
  }
  EXPECT_EQ(failed, 1u);
}

// A block that appears meanwhile (another rank's) ends the dump well.
TEST(MultiShard, BlockThatAppearsMeanwhileIsExisting) {
  Block block;
  Gate gate;
  block.setup.dump_workers = 1;
  const auto slow = OpenOrFail(block.setup, block.env);
  block.env.Before(Op::kWriteFull, At(0, Holding(gate)));
  Result<cs_task> task = slow->Dump(block.pages->batch());
  ASSERT_OK(task);
  ASSERT_TRUE(gate.WaitArrived(1));
  const auto other = OpenOrFail(block.setup);
  EXPECT_TRUE(DumpAll(*other, *block.pages) == Repeated(kShards, CS_OK));
  gate.Open();
  EXPECT_TRUE(WaitFor(*slow, task.value(), kShards) == Repeated(kShards, CS_OK));
  EXPECT_EQ(slow->Stats().dump_existing, kShards);
  EXPECT_EQ(slow->Stats().dump_ok, 0u);
  EXPECT_TRUE(FilesBelow(TemporaryRoot(block.setup)).empty());
  EXPECT_TRUE(LoadAll(*slow, *block.pages) == Repeated(kShards, CS_OK));
}

// A close with one part written, one running and the rest queued: no wait for
// what can't come, nothing visible, nothing left.
TEST(MultiShard, CloseDropsAHalfWrittenBlockAtOnce) {
  for (const uint64_t type : {uint64_t{0}, FaultEnv::kNfs}) {
    Block block(type);
    block.setup.dump_workers = 1;
    block.setup.timeout_ms = 60000;
    auto store = OpenOrFail(block.setup, block.env);
    Gate gate;
    block.env.Before(Op::kWriteFull, At(kStride, Holding(gate)));
    Result<cs_task> task = store->Dump(block.pages->batch());
    ASSERT_OK(task);
    ASSERT_TRUE(gate.WaitArrived(1));
    const auto start = std::chrono::steady_clock::now();
    std::thread closer([&] { store->Close(); });
    EXPECT_TRUE(Eventually([&] { return store->Stats().dump_outstanding == 2; }));
    gate.Open();
    closer.join();
    EXPECT_TRUE(std::chrono::steady_clock::now() - start < std::chrono::seconds(4));
    EXPECT_TRUE(WaitFor(*store, task.value(), kShards) == Repeated(kShards, CS_CLOSED));
    EXPECT_EQ(store->Stats().dump_outstanding, 0u);
    EXPECT_FALSE(block.Visible());
    store.reset();
    EXPECT_TRUE(FilesBelow(TemporaryRoot(block.setup)).empty());
  }
}

}  // namespace cachestore::test
