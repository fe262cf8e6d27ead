// F27 and decision 3: a filesystem that hangs. Waits end at their limit, the
// memory handed back isn't touched by what completes later, a dump that was
// given up isn't published, and stuck workers don't use up the pool.
#include <filesystem>
#include <thread>

#include "fixture.h"
#include "harness.h"

namespace cachestore::test {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// A limit to run into, and what bounds a call that is bounded.
constexpr milliseconds kLimit{50};
constexpr std::chrono::seconds kBounded{8};

// A store on a filesystem that may hang, with four stored blocks.
struct Hanging {
  explicit Hanging(uint32_t shards = 1, uint64_t type = FaultEnv::kNfs) : setup({root.path()}) {
    setup.shards = shards;
    setup.timeout_ms = 100;
    env.SetFilesystemType(type);
    threads_before = ThreadCount();
    store = OpenOrFail(setup, env);
    WaitCleaned(setup, env);
    stored = std::make_unique<Pages>(setup, 0, 4);
    stored->Fill();
    EXPECT_TRUE(DumpAll(*store, *stored) == Repeated(4 * shards, CS_OK));
    stored->Poison();
    fresh = std::make_unique<Pages>(setup, 100, 4);
    fresh->Fill();
    threads = ThreadCount();
  }

  // After a gate has opened: the stuck workers are back, and their number is
  // what it was.
  void ExpectRecovered() {
    EXPECT_TRUE(Eventually([&] { return store->Stats().stuck_workers == 0; }));
    EXPECT_TRUE(env.WaitIdle());
    EXPECT_TRUE(Eventually([&] { return ThreadCount() == threads; }));
    EXPECT_EQ(store->Stats().load_outstanding, 0u);
    EXPECT_EQ(store->Stats().dump_outstanding, 0u);
    env.NoHooks();
    stored->Poison();
    EXPECT_TRUE(LoadAll(*store, *stored) == Repeated(stored->size(), CS_OK));
    EXPECT_TRUE(stored->HoldsAll());
  }

  void ExpectNothingDumped() {
    EXPECT_TRUE(LookupAll(*store, *fresh) == std::vector<uint8_t>(fresh->blocks(), 0));
    EXPECT_TRUE(Eventually([&] { return FilesBelow(TemporaryRoot(setup)).empty(); }));
    EXPECT_EQ(store->Stats().dump_timeout, fresh->size());
    fresh->Fill();
    EXPECT_TRUE(DumpAll(*store, *fresh) == Repeated(fresh->size(), CS_OK));
    fresh->Poison();
    EXPECT_TRUE(LoadAll(*store, *fresh) == Repeated(fresh->size(), CS_OK));
    EXPECT_TRUE(fresh->HoldsAll());
  }

  const TempDir root;
  FaultEnv env;
  StoreSetup setup;
  size_t threads_before = 0;
  size_t threads = 0;
  std::unique_ptr<Store> store;
  std::unique_ptr<Pages> stored;
  std::unique_ptr<Pages> fresh;
};

}  // namespace

// A load in a hung read, at each of its system calls: ended at its limit, its
// memory never written.
TEST(Hang, LoadEndsAtItsLimitAndWritesNothingLater) {
  for (const Op op : {Op::kOpenRead, Op::kStatFd, Op::kReadFull}) {
    for (const bool after : {false, true}) {
      Hanging h;
      Gate gate;
      if (after) {
        h.env.After(op, Holding(gate));
      } else {
        h.env.Before(op, Holding(gate));
      }
      const auto start = Clock::now();
      EXPECT_TRUE(LoadAll(*h.store, *h.stored, kLimit) == Repeated(4, CS_TIMEOUT));
      EXPECT_TRUE(Clock::now() - start >= kLimit);
      EXPECT_TRUE(Clock::now() - start < kBounded);
      EXPECT_EQ(h.store->Stats().stuck_workers, 2u);
      EXPECT_EQ(h.store->Stats().load_timeout, 4u);
      EXPECT_EQ(h.store->Stats().load_outstanding, 0u);
      // The memory is ours again: a late write is a race, or seen at once.
      h.stored->Poison();
      gate.Open();
      EXPECT_TRUE(Eventually([&] { return h.store->Stats().stuck_workers == 0; }));
      EXPECT_TRUE(h.env.WaitIdle());
      EXPECT_TRUE(h.stored->IsPoisoned());
      h.ExpectRecovered();
    }
  }
}

// Stuck workers are replaced: others are served while they hang. Their number
// has a bound; then a request is refused at once.
TEST(Hang, OthersAreServedWhileWorkersHang) {
  Hanging h;
  Gate gate;
  const std::string hung = BlockPath(h.setup, IdOf(0));
  h.env.Before(Op::kReadFull, On(hung, Holding(gate)));
  size_t stuck = 0;
  for (; stuck < 20; ++stuck) {
    Result<cs_task> task = h.store->Load(h.stored->part(0, 1));
    if (!task.ok()) {
      EXPECT_EQ(task.status().code(), CS_REFUSED);
      break;
    }
    ASSERT_TRUE(gate.WaitArrived(stuck + 1));
    EXPECT_TRUE(WaitFor(*h.store, task.value(), 1, milliseconds(1)) == Repeated(1, CS_TIMEOUT));
    EXPECT_EQ(h.store->Stats().stuck_workers, stuck + 1);
    if (stuck + 1 < 10) {
      task = h.store->Load(h.stored->part(1, 3));
      ASSERT_OK(task);
      EXPECT_TRUE(WaitFor(*h.store, task.value(), 3) == Repeated(3, CS_OK));
    }
  }
  EXPECT_EQ(stuck, 10u);  // two workers, eight replacements
  const auto start = Clock::now();
  EXPECT_TRUE(LoadAll(*h.store, *h.stored) == Repeated(4, CS_REFUSED));
  EXPECT_TRUE(Clock::now() - start < kBounded);
  EXPECT_EQ(h.store->Stats().load_outstanding, 0u);
  // The other direction has workers of its own.
  EXPECT_TRUE(DumpAll(*h.store, *h.fresh) == Repeated(4, CS_OK));
  h.stored->Poison();
  gate.Open();
  EXPECT_TRUE(Eventually([&] { return h.store->Stats().stuck_workers == 0; }));
  EXPECT_TRUE(h.stored->IsPoisoned());
  h.ExpectRecovered();
}

// A dump that hangs after the gather, at each of its system calls but the
// rename: given up, it isn't published, leaves no file, and the caller's
// memory was free all along.
TEST(Hang, GivenUpDumpIsNotPublished) {
  for (const uint32_t shards : {1u, 3u}) {
    for (const Op op : {Op::kOpenWrite, Op::kWriteFull, Op::kClose, Op::kStat}) {
      for (const bool after : {false, true}) {
        Hanging h(shards);
        Gate gate;
        std::atomic<size_t> renames{0};
        h.env.Before(Op::kRename, [&](FaultEnv::Call&) {
          ++renames;
          return Status::Ok();
        });
        if (after) {
          h.env.After(op, Holding(gate));
        } else {
          h.env.Before(op, Holding(gate));
        }
        EXPECT_TRUE(DumpAll(*h.store, *h.fresh, kLimit) == Repeated(h.fresh->size(), CS_TIMEOUT));
        EXPECT_EQ(h.store->Stats().dump_outstanding, 0u);
        h.fresh->Poison();
        gate.Open();
        h.ExpectRecovered();
        EXPECT_EQ(renames.load(), 0u);
        h.ExpectNothingDumped();
      }
    }
  }
}

// Only the stat that comes right before the commitment hangs.
TEST(Hang, DumpGivenUpJustBeforeItsRename) {
  for (const uint32_t shards : {1u, 3u}) {
    Hanging h(shards);
    Gate gate;
    std::atomic<size_t> renames{0};
    h.env.Before(Op::kStat, On("/tmp/", On(h.setup.identity, [&](FaultEnv::Call& call) {
                                 if (call.path.starts_with(TemporaryRoot(h.setup))) gate.Pass();
                                 return Status::Ok();
                               })));
    h.env.Before(Op::kRename, [&](FaultEnv::Call&) {
      ++renames;
      return Status::Ok();
    });
    EXPECT_TRUE(DumpAll(*h.store, *h.fresh, kLimit) == Repeated(h.fresh->size(), CS_TIMEOUT));
    EXPECT_GT(gate.arrived(), 0u);
    gate.Open();
    h.ExpectRecovered();
    EXPECT_EQ(renames.load(), 0u);
    h.ExpectNothingDumped();
  }
}

// The rename itself hangs, before or after it took effect: the block is taken
// back when it ends.
TEST(Hang, HungRenameIsTakenBack) {
  for (const uint32_t shards : {1u, 3u}) {
    for (const bool after : {false, true}) {
      Hanging h(shards);
      Gate gate;
      if (after) {
        h.env.After(Op::kRename, Holding(gate));
      } else {
        h.env.Before(Op::kRename, Holding(gate));
      }
      EXPECT_TRUE(DumpAll(*h.store, *h.fresh, kLimit) == Repeated(h.fresh->size(), CS_TIMEOUT));
      EXPECT_EQ(h.store->Stats().stuck_workers, 2u);
      gate.Open();
      h.ExpectRecovered();
      h.ExpectNothingDumped();
    }
  }
}

// ... unless somebody else has stored that block by then.
TEST(Hang, TakingBackSparesAnothersBlock) {
  Hanging h;
  Gate gate;
  h.env.After(Op::kRename, Holding(gate));
  Result<cs_task> task = h.store->Dump(h.fresh->part(0, 1));
  ASSERT_OK(task);
  ASSERT_TRUE(gate.WaitArrived(1));
  const std::string path = BlockPath(h.setup, IdOf(100));
  EXPECT_TRUE(WaitFor(*h.store, task.value(), 1, milliseconds(1)) == Repeated(1, CS_TIMEOUT));
  WriteFile(path + ".new", ReadFile(path));
  std::filesystem::rename(path + ".new", path);
  gate.Open();
  h.ExpectRecovered();
  EXPECT_TRUE(IsPresent(*h.store, IdOf(100)));
}

// Shards of one block that are written, one that hangs, others still queued.
TEST(Hang, HalfWrittenBlockIsGivenUpWhole) {
  Hanging h(4);
  Gate gate;
  h.env.Before(Op::kWriteFull, At(4096, Holding(gate)));
  EXPECT_TRUE(DumpAll(*h.store, *h.fresh, kLimit) == Repeated(16, CS_TIMEOUT));
  gate.Open();
  h.ExpectRecovered();
  h.ExpectNothingDumped();
}

// dump_existing counts what the waiter was told, not what came too late.
TEST(Hang, ExistingFoundTooLateIsATimeout) {
  Hanging h;
  h.stored->Fill();
  Gate gate;
  h.env.After(Op::kStat, Holding(gate));
  EXPECT_TRUE(DumpAll(*h.store, *h.stored, kLimit) == Repeated(4, CS_TIMEOUT));
  gate.Open();
  h.ExpectRecovered();
  EXPECT_EQ(h.store->Stats().dump_existing, 0u);
  EXPECT_EQ(h.store->Stats().dump_ok, 4u);
  EXPECT_EQ(h.store->Stats().dump_timeout, 4u);
}

// A request of many shards on a queue of that depth: room for the next one is
// there when the wait is over.
TEST(Hang, RoomComesBackAtTheLimit) {
  Hanging h;
  h.setup.queue_depth = 4;
  const auto store = OpenOrFail(h.setup, h.env);
  Gate gate;
  h.env.Before(Op::kReadFull, Holding(gate));
  for (int round = 0; round < 3; ++round) {
    EXPECT_TRUE(LoadAll(*store, *h.stored, milliseconds(1)) == Repeated(4, CS_TIMEOUT));
    EXPECT_EQ(store->Stats().load_outstanding, 0u);
  }
  gate.Open();
  EXPECT_TRUE(Eventually([&] { return store->Stats().stuck_workers == 0; }));
}

// On a filesystem whose I/O is sure to end, a running transfer is waited for
// beyond the limit, what is queued isn't; and after the wait nothing touches
// the memory.
TEST(Hang, SureTransferIsWaitedFor) {
  for (const bool loads : {true, false}) {
    Hanging h(1, 0);
    Pages& pages = loads ? *h.stored : *h.fresh;
    Gate gate;
    h.env.Before(loads ? Op::kReadFull : Op::kWriteFull, Holding(gate));
    Result<cs_task> task = loads ? h.store->Load(pages.batch()) : h.store->Dump(pages.batch());
    ASSERT_OK(task);
    ASSERT_TRUE(gate.WaitArrived(2));
    std::atomic<bool> returned{false};
    Codes codes(4, -1);
    const auto limit = Clock::now() + kLimit;
    std::thread waiter([&] {
      EXPECT_OK(h.store->Wait(task.value(), kLimit, codes));
      returned = true;
      pages.Poison();
    });
    // The queued ones end at the limit.
    EXPECT_TRUE(Eventually([&] {
      const cs_stats stats = h.store->Stats();
      return stats.load_timeout + stats.dump_timeout == 2;
    }));
    EXPECT_TRUE(Clock::now() >= limit);
    EXPECT_FALSE(returned.load());
    EXPECT_EQ(h.store->Stats().stuck_workers, 0u);
    gate.Open();
    waiter.join();
    size_t timeouts = 0;
    for (const int32_t code : codes) {
      // A dump that hadn't committed itself by its limit is given up.
      EXPECT_TRUE(code == (loads ? CS_OK : CS_TIMEOUT) || code == CS_TIMEOUT);
      timeouts += code == CS_TIMEOUT ? 1 : 0;
    }
    EXPECT_EQ(timeouts, loads ? 2u : 4u);
    EXPECT_TRUE(h.env.WaitIdle());
    EXPECT_TRUE(pages.IsPoisoned());
    if (!loads) {
      EXPECT_TRUE(LookupAll(*h.store, pages) == std::vector<uint8_t>(4, 0));
      EXPECT_TRUE(Eventually([&] { return FilesBelow(TemporaryRoot(h.setup)).empty(); }));
    }
    h.ExpectRecovered();
  }
}

// ... and so is its rename: "timeout" would be a lie once it has begun.
TEST(Hang, SureRenameIsWaitedFor) {
  for (const uint32_t shards : {1u, 3u}) {
    Hanging h(shards, 0);
    Gate gate;
    h.env.Before(Op::kRename, Holding(gate));
    Result<cs_task> task = h.store->Dump(h.fresh->part(0, shards));
    ASSERT_OK(task);
    ASSERT_TRUE(gate.WaitArrived(1));
    std::atomic<bool> entered{false};
    Codes codes;
    std::thread waiter([&] {
      entered = true;
      codes = WaitFor(*h.store, task.value(), shards, milliseconds(1));
    });
    EXPECT_TRUE(Eventually([&] { return entered.load(); }));
    gate.Open();
    waiter.join();
    EXPECT_TRUE(codes == Repeated(shards, CS_OK));
    EXPECT_TRUE(IsPresent(*h.store, IdOf(100)));
  }
}

// Lookups and clears run on workers where they may hang, and have one limit
// for a whole call.
TEST(Hang, LookupIsBounded) {
  Hanging h;
  Pages many(h.setup, 0, 1000);  // they go in 8 pieces
  h.setup.timeout_ms = 300;
  const auto store = OpenOrFail(h.setup, h.env);
  Gate gate;
  h.env.Before(Op::kStat, Holding(gate));
  const auto start = Clock::now();
  EXPECT_TRUE(LookupAll(*store, many) == std::vector<uint8_t>(1000, 0));
  EXPECT_TRUE(Clock::now() - start < milliseconds(1000));
  // Again and again, until the directory is taken out of use: then at once.
  size_t stuck = store->Stats().stuck_workers;
  EXPECT_EQ(stuck, 2u);
  for (; store->Stats().posix_directories_out == 0 && stuck < 10; stuck += 2) {
    EXPECT_EQ(store->LookupPrefix(0, many.block_ids()).value(), 0u);
    EXPECT_EQ(store->Stats().stuck_workers, stuck + 2);
  }
  EXPECT_EQ(store->Stats().posix_directories_out, 1u);
  const auto refused = Clock::now();
  EXPECT_TRUE(LookupAll(*store, many) == std::vector<uint8_t>(1000, 0));
  EXPECT_TRUE(Clock::now() - refused < milliseconds(250));
  gate.Open();
  EXPECT_TRUE(Eventually([&] { return store->Stats().stuck_workers == 0; }));
  h.env.NoHooks();
  EXPECT_TRUE(
      Eventually([&] { return LookupAll(*store, *h.stored) == std::vector<uint8_t>(4, 1); }));
}

// A lookup that hangs half-way reports what it knows.
TEST(Hang, LookupReportsWhatItCouldTell) {
  Hanging h;
  Gate gate;
  h.env.Before(Op::kStat, On(BlockPath(h.setup, IdOf(2)), Holding(gate)));
  EXPECT_TRUE(LookupAll(*h.store, *h.stored) == std::vector<uint8_t>({1, 1, 0, 1}));
  EXPECT_EQ(h.store->LookupPrefix(0, h.stored->block_ids()).value(), 2u);
  gate.Open();
  h.ExpectRecovered();
}

TEST(Hang, ClearIsBounded) {
  Hanging h;
  Gate gate;
  h.env.Before(Op::kRename, Holding(gate));
  const auto start = Clock::now();
  EXPECT_EQ(h.store->Clear().code(), CS_TIMEOUT);
  EXPECT_TRUE(Clock::now() - start < kBounded);
  gate.Open();
  EXPECT_TRUE(Eventually([&] { return h.store->Stats().stuck_workers == 0; }));
  EXPECT_OK(h.store->Clear());
  EXPECT_TRUE(LookupAll(*h.store, *h.stored) == std::vector<uint8_t>(4, 0));
}

// Close and the end of a store on a hung filesystem: bounded, every wait
// returns, no call is made into the filesystem; what is left behind goes when
// the filesystem is back.
TEST(Hang, CloseIsBoundedAndLeavesNothingForEver) {
  const size_t descriptors = DescriptorCount();
  size_t threads = 0;
  FaultEnv* env = nullptr;
  Hanging h;
  env = &h.env;
  threads = h.threads_before;
  Gate gate;
  for (size_t i = 0; i + 1 < kOpCount; ++i) {
    h.env.Before(static_cast<Op>(i), Holding(gate));
  }
  Result<cs_task> load = h.store->Load(h.stored->batch());
  Result<cs_task> dump = h.store->Dump(h.fresh->batch());
  ASSERT_OK(load);
  ASSERT_OK(dump);
  ASSERT_TRUE(gate.WaitArrived(4));
  Codes codes;
  std::thread waiter([&] { codes = WaitFor(*h.store, load.value(), 4); });
  const auto start = Clock::now();
  h.store->Close();
  waiter.join();
  EXPECT_TRUE(codes == Repeated(4, CS_CLOSED));
  EXPECT_TRUE(WaitFor(*h.store, dump.value(), 4) == Repeated(4, CS_CLOSED));
  h.store.reset();
  EXPECT_TRUE(Clock::now() - start < kBounded);
  h.stored->Poison();
  h.fresh->Poison();
  gate.Open();
  EXPECT_TRUE(Eventually([&] { return ThreadCount() <= threads; }));
  EXPECT_TRUE(h.env.WaitIdle());
  EXPECT_TRUE(h.stored->IsPoisoned());
  EXPECT_TRUE(h.fresh->IsPoisoned());
  EXPECT_EQ(DescriptorCount(), descriptors);
  env->NoHooks();
  const auto store = OpenOrFail(h.setup, h.env);
  EXPECT_TRUE(LookupAll(*store, *h.fresh) == std::vector<uint8_t>(4, 0));
  EXPECT_TRUE(LookupAll(*store, *h.stored) == std::vector<uint8_t>(4, 1));
  EXPECT_TRUE(Eventually([&] { return FilesBelow(TemporaryRoot(h.setup)).empty(); }));
}

// The same for a store that has nothing to do, whose filesystem hangs unseen.
TEST(Hang, CloseOfAnIdleStoreIsBounded) {
  FaultEnv env;
  const TempDir root;
  StoreSetup setup({root.path()});
  env.SetFilesystemType(FaultEnv::kNfs);
  const size_t threads = ThreadCount();
  auto store = OpenOrFail(setup, env);
  ASSERT_TRUE(store != nullptr);
  WaitCleaned(setup, env);
  Gate gate;
  for (size_t i = 0; i + 1 < kOpCount; ++i) env.Before(static_cast<Op>(i), Holding(gate));
  const auto start = Clock::now();
  store->Close();
  store.reset();
  EXPECT_TRUE(Clock::now() - start < kBounded);
  EXPECT_GT(gate.arrived(), 0u);
  gate.Open();
  EXPECT_TRUE(Eventually([&] { return ThreadCount() <= threads; }));
}

// A directory that hangs from the first call on: an error that names it.
TEST(Hang, OpenIsBounded) {
  FaultEnv env;
  const TempDir root;
  StoreSetup setup({root.path()});
  setup.timeout_ms = 200;
  const size_t threads = ThreadCount();
  Gate gate;
  for (size_t i = 0; i + 1 < kOpCount; ++i) env.Before(static_cast<Op>(i), Holding(gate));
  const auto start = Clock::now();
  const Result<std::unique_ptr<Store>> opened = setup.Open(env);
  EXPECT_TRUE(Clock::now() - start < kBounded);
  EXPECT_EQ(opened.status().code(), CS_TIMEOUT);
  EXPECT_NE(opened.status().text().find(root.path()), std::string::npos);
  gate.Open();
  EXPECT_TRUE(Eventually([&] { return ThreadCount() <= threads; }));
}

}  // namespace cachestore::test
