// Store: the life of a handle: opening, shutting down and closing beside other
// calls. What its calls do: conformance.cc.
#include "store.h"

#include <algorithm>
#include <filesystem>
#include <thread>

#include "fault_env.h"
#include "fixture.h"
#include "harness.h"

namespace cachestore::test {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

// The whole way once, before anything finer.
TEST(Store, DumpThenLoadGivesTheBytesBack) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  const auto store = OpenOrFail(setup);
  ASSERT_TRUE(store != nullptr);
  Pages pages(setup, 0, 5);
  pages.Fill();
  EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(5, 0));
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(5, CS_OK));
  EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(5, 1));
  pages.Poison();
  EXPECT_TRUE(LoadAll(*store, pages) == Repeated(5, CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
  EXPECT_TRUE(pages.GuardsIntact());
}

// Threads and descriptors are those of before, attach after attach.
TEST(Store, OpenAndCloseLeaveNothing) {
  const TempDir root;
  StoreSetup setup({root.path(), root.path() + "/second"});
  const size_t threads = ThreadCount();
  const size_t descriptors = DescriptorCount();
  for (int round = 0; round < 20; ++round) {
    setup.zero_copy = round % 2 == 0 ? CS_ZERO_COPY_ALWAYS : CS_ZERO_COPY_NEVER;
    const auto store = OpenOrFail(setup);
    ASSERT_TRUE(store != nullptr);
    EXPECT_GT(ThreadCount(), threads);
    if (round % 3 == 0) store->Close();
  }
  EXPECT_TRUE(Eventually([&] { return ThreadCount() == threads; }));
  EXPECT_EQ(DescriptorCount(), descriptors);
}

// An open that fails half-way leaves nothing either.
TEST(Store, FailedOpenLeavesNothing) {
  const TempDir root;
  std::filesystem::create_directory(root.path() + "/good");
  std::filesystem::create_directory_symlink(root.path() + "/good", root.path() + "/again");
  const StoreSetup setup({root.path() + "/good", root.path() + "/again"});
  const size_t threads = ThreadCount();
  const size_t descriptors = DescriptorCount();
  const Result<std::unique_ptr<Store>> opened = setup.Open();
  EXPECT_FALSE(opened.ok());
  EXPECT_NE(opened.status().text().find(root.path() + "/again"), std::string::npos);
  EXPECT_EQ(ThreadCount(), threads);
  EXPECT_EQ(DescriptorCount(), descriptors);
  EXPECT_TRUE(Env::Real().List(root.path() + "/good/identity/tmp").value().empty());
}

// Shutdown ends every task; the handle and its results stay.
TEST(Store, ShutdownEndsTasksAndKeepsTheHandle) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  FaultEnv env;
  const auto store = OpenOrFail(setup, env);
  WaitCleaned(setup, env);
  Pages pages(setup, 0, 6);
  pages.Fill();
  Gate gate;
  env.Before(Op::kWriteFull, Holding(gate));
  Result<cs_task> task = store->Dump(pages.batch());
  ASSERT_OK(task);
  ASSERT_TRUE(gate.WaitArrived(2));
  std::thread opener([&] {
    EXPECT_TRUE(Eventually([&] { return store->Stats().dump_outstanding == 2; }));
    gate.Open();
  });
  store->Shutdown();
  opener.join();
  EXPECT_EQ(store->Stats().dump_outstanding, 0u);
  EXPECT_EQ(store->Stats().dump_ok, 2u);
  store->Shutdown();  // nothing more to do
  EXPECT_EQ(store->Dump(pages.batch()).status().code(), CS_CLOSED);
  EXPECT_EQ(store->Clear().code(), CS_CLOSED);
  const Codes codes = WaitFor(*store, task.value(), 6);
  EXPECT_EQ(std::count(codes.begin(), codes.end(), CS_OK), 2);
  EXPECT_EQ(std::count(codes.begin(), codes.end(), CS_CLOSED), 4);
}

// A task that nobody waits for doesn't hold up a close, and its memory is free
// afterwards.
TEST(Store, CloseEndsTasksThatNobodyWaitsFor) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  const auto store = OpenOrFail(setup);
  Pages pages(setup, 0, 50);
  pages.Fill();
  for (int i = 0; i < 5; ++i) ASSERT_OK(store->Dump(pages.batch()));
  store->Close();
  pages.Poison();
  EXPECT_EQ(store->Stats().dump_outstanding, 0u);
}

// Requests that start while the store shuts down are accepted and ended, or
// refused: no room is given back twice, and nobody waits out a time limit.
TEST(Store, ShutdownBesideStartingRequests) {
  const TempDir root;
  StoreSetup setup({root.path()});
  setup.timeout_ms = 60000;
  for (int round = 0; round < 40; ++round) {
    FaultEnv env;
    const auto store = OpenOrFail(setup, env);
    std::atomic<int> running{0};
    std::vector<std::thread> threads;
    for (uint64_t self = 0; self < 3; ++self) {
      threads.emplace_back([&, self] {
        Pages pages(setup, 10 * self, 3);
        ++running;
        for (;;) {
          Result<cs_task> task =
              self == 0 ? store->Load(pages.batch()) : store->Dump(pages.batch());
          if (!task.ok()) {
            EXPECT_EQ(task.status().code(), CS_CLOSED);
            return;
          }
          for (const int32_t code : WaitFor(*store, task.value(), 3)) {
            EXPECT_TRUE(code == CS_OK || code == CS_CLOSED || code == CS_NOT_FOUND);
          }
        }
      });
    }
    EXPECT_TRUE(Eventually([&] { return running == 3; }));
    const auto start = Clock::now();
    if (round % 2 == 0) store->Shutdown();
    store->Close();
    EXPECT_TRUE(Clock::now() - start < std::chrono::seconds(4));
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(store->Stats().load_outstanding, 0u);
    EXPECT_EQ(store->Stats().dump_outstanding, 0u);
  }
}

// A Shutdown that is under way on another thread is waited for by Close.
TEST(Store, CloseWaitsForAShutdownInside) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  FaultEnv env;
  auto store = OpenOrFail(setup, env);
  WaitCleaned(setup, env);
  Pages pages(setup, 0, 2);
  Gate gate;
  env.Before(Op::kWriteFull, Holding(gate));
  ASSERT_OK(store->Dump(pages.batch()));
  ASSERT_TRUE(gate.WaitArrived(2));
  std::thread first([&] { store->Shutdown(); });
  EXPECT_TRUE(Eventually([&] { return store->Clear().code() == CS_CLOSED; }));
  std::atomic<bool> closed{false};
  std::thread second([&] {
    store->Close();
    closed = true;
    store.reset();
  });
  Gate never;
  EXPECT_TRUE(never.StaysAt(0));  // a moment, to be wrong in
  EXPECT_FALSE(closed.load());
  gate.Open();
  first.join();
  second.join();
  EXPECT_TRUE(closed.load());
}

// A caller that never waits is refused before it fills memory.
TEST(Store, TasksThatNobodyWaitsForHaveABound) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  const auto store = OpenOrFail(setup);
  const cs_batch empty = {0, nullptr, nullptr, 2, nullptr, nullptr, nullptr, 0};
  cs_task first = 0;
  Status refused;
  size_t accepted = 0;
  for (; accepted < 100000; ++accepted) {
    Result<cs_task> task = store->Load(empty);
    if (!task.ok()) {
      refused = task.status();
      break;
    }
    if (first == 0) first = task.value();
  }
  EXPECT_EQ(refused.code(), CS_REFUSED);
  EXPECT_EQ(accepted, 65536u);
  EXPECT_OK(store->Wait(first, std::chrono::milliseconds(0), {}));
  EXPECT_OK(store->Load(empty));
}

}  // namespace cachestore::test
