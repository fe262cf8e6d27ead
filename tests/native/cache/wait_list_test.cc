#include "cache/wait_list.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "cache/few_slots.h"
#include "fault_env.h"
#include "fixture.h"
#include "harness.h"

namespace cachestore::test {
namespace {

using std::chrono::milliseconds;

// The voluntary switches of the threads that wait lists have: how often they
// have gone to sleep.
uint64_t SleepsOfWaitThreads() {
  uint64_t sleeps = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream comm(task.path() / "comm");
    std::string name;
    std::getline(comm, name);
    if (name != "cs-cache-wait") continue;
    std::ifstream status(task.path() / "status");
    for (std::string line; std::getline(status, line);) {
      const std::string field = "voluntary_ctxt_switches:";
      if (line.rfind(field, 0) == 0) sleeps += std::stoull(line.substr(field.size()));
    }
  }
  return sleeps;
}

struct Waiting {
  explicit Waiting(milliseconds patience = milliseconds(60000), const std::string& directory = "")
      : region(OpenRegion(FewSlots(8, directory))),
        table(*region, 0, 8),
        list(std::make_unique<WaitList>(*region, table, patience, [this] { ++reclaims; })) {}
  ~Waiting() { list.reset(); }

  Claim Loading(uint64_t block) { return table.ClaimForLoad(IdOf(block), 0, false); }
  // Notes how the wait ended: 1 in time, 2 not.
  void Add(SlotRef ref, std::atomic<int>& outcome) {
    list->Add(ref, [&outcome](bool in_time) {
      EXPECT_EQ(outcome.load(), 0);  // once
      outcome = in_time ? 1 : 2;
    });
  }

  std::atomic<int> reclaims{0};
  const std::unique_ptr<Region> region;
  SlotTable table;
  std::unique_ptr<WaitList> list;
};

}  // namespace

TEST(WaitList, NotifyEndsTheWaitsForThatUseOfTheSlot) {
  Waiting waiting;
  const Claim one = waiting.Loading(1);
  const Claim two = waiting.Loading(2);
  std::atomic<int> first{0};
  std::atomic<int> second{0};
  std::atomic<int> other{0};
  waiting.Add(one.ref, first);
  waiting.Add(one.ref, second);
  waiting.Add(two.ref, other);
  EXPECT_EQ(waiting.list->waiting(), 3u);
  EXPECT_TRUE(waiting.table.PublishLoad(one.ref));
  waiting.list->Notify({one.ref.slot, one.ref.generation + 1});  // another use of it
  waiting.list->Notify(one.ref);  // on this thread, unless the list's was faster
  EXPECT_TRUE(Eventually([&] { return first == 1 && second == 1; }));
  EXPECT_EQ(other.load(), 0);
  EXPECT_EQ(waiting.list->waiting(), 1u);
  EXPECT_TRUE(waiting.table.Fail(two.ref, CS_IO));
  waiting.list->Notify(two.ref);
  EXPECT_TRUE(Eventually([&] { return other == 1; }));
}

TEST(WaitList, WhatHasEndedIsNotWaitedFor) {
  Waiting waiting;
  const Claim claim = waiting.Loading(1);
  EXPECT_TRUE(waiting.table.PublishLoad(claim.ref));
  std::atomic<int> outcome{0};
  waiting.Add(claim.ref, outcome);
  EXPECT_EQ(outcome.load(), 1);
  EXPECT_EQ(waiting.list->waiting(), 0u);
}

// The other end is another process's: the futex in the region wakes us.
TEST(WaitList, IsWokenByOtherProcesses) {
  const TempDir root;
  Waiting waiting(milliseconds(60000), root.path());
  const auto theirs = OpenRegion(FewSlots(8, root.path()));
  ASSERT_TRUE(theirs != nullptr);
  SlotTable their_table(*theirs, 0, 8);
  for (uint64_t round = 0; round < 20; ++round) {
    const Claim filling = their_table.ClaimForDump(IdOf(round));
    ASSERT_EQ(filling.kind, Claim::kClaimed);
    const Claim claim = waiting.Loading(round);
    ASSERT_EQ(claim.kind, Claim::kLoading);
    std::atomic<int> outcome{0};
    waiting.Add(claim.ref, outcome);
    EXPECT_TRUE(round % 2 == 0 ? their_table.PublishDump(filling.ref, 0, their_table.epoch())
                               : their_table.Fail(filling.ref, CS_IO));
    if (round % 2 == 0) EXPECT_TRUE(their_table.Clean(filling.ref));
    EXPECT_TRUE(Eventually([&] { return outcome == 1; }));
  }
}

TEST(WaitList, AWaitIsOverAfterItsTime) {
  Waiting waiting(milliseconds(20));
  const Claim claim = waiting.Loading(1);
  std::atomic<int> outcome{0};
  waiting.Add(claim.ref, outcome);
  EXPECT_TRUE(Eventually([&] { return outcome != 0; }));
  EXPECT_EQ(outcome.load(), 2);
  EXPECT_EQ(waiting.list->waiting(), 0u);
}

// Others may die while they are waited for, and only then is that looked at.
TEST(WaitList, LooksForTheDeadWhileItWaits) {
  Waiting waiting;
  const Claim claim = waiting.Loading(1);
  std::atomic<int> outcome{0};
  EXPECT_EQ(waiting.reclaims.load(), 0);
  waiting.Add(claim.ref, outcome);
  EXPECT_TRUE(Eventually([&] { return waiting.reclaims >= 2; }));
  EXPECT_EQ(outcome.load(), 0);
}

TEST(WaitList, TimersRunInTheirOrder) {
  Waiting waiting;
  std::mutex mutex;
  std::vector<int> order;
  const auto now = WaitList::Clock::now();
  for (const int n : {3, 1, 2}) {
    waiting.list->At(now + milliseconds(15 * n), [&, n] {
      EXPECT_TRUE(WaitList::Clock::now() >= now + milliseconds(15 * n));
      const std::lock_guard lock(mutex);
      order.push_back(n);
    });
  }
  EXPECT_TRUE(Eventually([&] {
    const std::lock_guard lock(mutex);
    return order.size() == 3;
  }));
  EXPECT_TRUE(order == std::vector<int>({1, 2, 3}));
  bool late = false;
  waiting.list->At(WaitList::Clock::now() + std::chrono::hours(1), [&] { late = true; });
  waiting.list->Close();
  waiting.list->At(WaitList::Clock::now(), [&] { late = true; });
  EXPECT_FALSE(late);
}

TEST(WaitList, TimersRunAtOnceWhereTheyAreHurried) {
  Waiting waiting;
  std::atomic<int> ran{0};
  for (const int hours : {1, 2}) {
    waiting.list->At(WaitList::Clock::now() + std::chrono::hours(hours), [&] { ++ran; });
  }
  EXPECT_EQ(ran.load(), 0);
  waiting.list->Hurry();
  EXPECT_TRUE(Eventually([&] { return ran == 2; }));
}

TEST(WaitList, ChangesAreTriedUntilTheySucceed) {
  Waiting waiting;
  std::atomic<int> tries{0};
  waiting.list->Later([&] { return ++tries == 3; });
  EXPECT_TRUE(Eventually([&] { return tries == 3; }));
  std::atomic<int> never{0};
  waiting.list->Later([&] {
    ++never;
    return false;
  });
  EXPECT_TRUE(Eventually([&] { return never >= 2; }));
  waiting.list->Close();
  const int at_close = never;
  EXPECT_EQ(tries.load(), 3);
  // Afterwards on the caller's thread.
  std::atomic<int> after{0};
  waiting.list->Later([&] {
    ++after;
    return false;
  });
  EXPECT_EQ(after.load(), 1);
  EXPECT_EQ(never.load(), at_close);
}

TEST(WaitList, CloseEndsEveryWait) {
  Waiting waiting;
  const Claim claim = waiting.Loading(1);
  std::vector<std::atomic<int>> outcomes(4);
  for (auto& outcome : outcomes) waiting.Add(claim.ref, outcome);
  waiting.list->Close();
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome.load(), 2);
  EXPECT_EQ(waiting.list->waiting(), 0u);
  std::atomic<int> late{0};
  waiting.Add(claim.ref, late);
  EXPECT_EQ(late.load(), 2);
}

// Also those that come between the thread's look at the waits and the one at
// whether it is to end.
TEST(WaitList, CloseEndsWaitsThatComeMeanwhile) {
  Waiting waiting(milliseconds(20));
  const Claim claim = waiting.Loading(1);
  std::atomic<size_t> added{0};
  std::atomic<size_t> ended{0};
  waiting.list->Add(claim.ref, [&](bool) {
    // On the list's thread, between the two: until the list is found closed.
    const auto bound = WaitList::Clock::now() + kWaitBound;
    for (bool closed = false; !closed && WaitList::Clock::now() < bound;) {
      ++added;
      const size_t before = ended;
      waiting.list->Add(claim.ref, [&](bool in_time) {
        EXPECT_FALSE(in_time);
        ++ended;
      });
      closed = ended != before;
    }
  });
  EXPECT_TRUE(Eventually([&] { return added > 0; }));
  waiting.list->Close();
  EXPECT_EQ(ended.load(), added.load());
}

TEST(WaitList, SleepsWhileThereIsNothingToDo) {
  Waiting waiting;
  // One end of everything it does, so that it has been awake.
  std::atomic<bool> ran{false};
  waiting.list->At(WaitList::Clock::now(), [&] { ran = true; });
  EXPECT_TRUE(Eventually([&] { return ran.load(); }));
  EXPECT_TRUE(Eventually([] { return SleepsOfWaitThreads() > 0; }));
  const uint64_t before = SleepsOfWaitThreads();
  std::this_thread::sleep_for(milliseconds(500));
  // It wakes up at no interval; one, if it was still going to sleep just now.
  EXPECT_LE(SleepsOfWaitThreads(), before + 1);
  EXPECT_EQ(waiting.reclaims.load(), 0);
}

}  // namespace cachestore::test
