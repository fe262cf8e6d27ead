// Request: who may do what to the caller's memory, in every phase (decision 3).
#include "tier/request.h"

#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "fault_env.h"
#include "harness.h"

namespace cachestore::test {
namespace {

Batch Empty(size_t shards) {
  Batch batch;
  batch.blocks.resize(shards);
  batch.shard_indices.resize(shards);
  return batch;
}

// A request of n shards that notes every end.
struct Noted {
  explicit Noted(size_t n) : request(Empty(n)), ends(n, 0) {
    request.Prepare([this](size_t shard, Code) { ++ends[shard]; }, nullptr);
  }
  bool Ended() { return request.WaitUntil(Request::Clock::time_point::min()); }
  Request request;
  std::vector<int> ends;
};

}  // namespace

TEST(Request, OfNothingHasEnded) {
  Noted noted(0);
  EXPECT_TRUE(noted.Ended());
  noted.request.Wait();
  EXPECT_EQ(noted.request.Cancel(CS_TIMEOUT), 0u);
}

TEST(Request, EndsWhenEveryShardHas) {
  Noted noted(3);
  for (const size_t shard : {2, 0, 1}) {
    EXPECT_FALSE(noted.Ended());
    EXPECT_EQ(noted.ends[shard], 0);
    ASSERT_TRUE(noted.request.Begin(shard, shard == 0));
    EXPECT_TRUE(noted.request.Finish(shard, shard == 1 ? CS_NOT_FOUND : CS_OK));
    EXPECT_EQ(noted.ends[shard], 1);
    EXPECT_EQ(noted.request.result(shard), shard == 1 ? CS_NOT_FOUND : CS_OK);
  }
  EXPECT_TRUE(noted.Ended());
  EXPECT_TRUE(noted.request.results() == std::vector<Code>({CS_OK, CS_NOT_FOUND, CS_OK}));
}

TEST(Request, ShardBeginsOnceAndEndsOnce) {
  Noted noted(1);
  ASSERT_TRUE(noted.request.Begin(0, true));
  EXPECT_FALSE(noted.request.Begin(0, true));
  EXPECT_TRUE(noted.request.Finish(0, CS_OK));
  EXPECT_FALSE(noted.request.Finish(0, CS_IO));
  EXPECT_FALSE(noted.request.Begin(0, false));
  EXPECT_FALSE(noted.request.StartTouching(0));
  EXPECT_FALSE(noted.request.StopTouching(0));
  EXPECT_FALSE(noted.request.Park(0));
  noted.request.EndQueued(0, CS_CLOSED);
  EXPECT_EQ(noted.request.Cancel(CS_TIMEOUT), 0u);
  EXPECT_EQ(noted.ends[0], 1);
  EXPECT_EQ(noted.request.results()[0], CS_OK);
}

TEST(Request, EndQueuedEndsOnlyWhatIsQueued) {
  Noted noted(2);
  ASSERT_TRUE(noted.request.Begin(0, false));
  noted.request.EndQueued(0, CS_CLOSED);
  noted.request.EndQueued(1, CS_CLOSED);
  EXPECT_EQ(noted.ends[0], 0);
  EXPECT_EQ(noted.ends[1], 1);
  EXPECT_FALSE(noted.request.Begin(1, false));
  EXPECT_TRUE(noted.request.Finish(0, CS_OK));
  EXPECT_TRUE(noted.request.results() == std::vector<Code>({CS_OK, CS_CLOSED}));
}

TEST(Request, CancelEndsQueuedShardsAtOnce) {
  Noted noted(2);
  EXPECT_EQ(noted.request.Cancel(CS_TIMEOUT), 0u);
  EXPECT_TRUE(noted.Ended());
  EXPECT_FALSE(noted.request.Begin(0, true));
  EXPECT_FALSE(noted.request.left_behind(0));
  EXPECT_TRUE(noted.request.results() == std::vector<Code>(2, CS_TIMEOUT));
}

// A worker on the caller's memory is waited for, whatever it does next.
TEST(Request, CancelWaitsForShardsThatTouch) {
  Noted noted(4);
  for (size_t shard = 0; shard < 4; ++shard) ASSERT_TRUE(noted.request.Begin(shard, true));
  EXPECT_EQ(noted.request.Cancel(CS_TIMEOUT), 0u);
  EXPECT_FALSE(noted.Ended());
  EXPECT_TRUE(noted.request.Finish(0, CS_OK));  // it was done after all
  EXPECT_FALSE(noted.request.StopTouching(1));  // found out on leaving
  EXPECT_FALSE(noted.request.Park(2));
  EXPECT_FALSE(noted.Ended());
  const size_t last[] = {3};
  EXPECT_FALSE(noted.request.BeginPublish(last, 3, true));
  EXPECT_TRUE(noted.Ended());
  EXPECT_TRUE(noted.request.results() ==
              std::vector<Code>({CS_OK, CS_TIMEOUT, CS_TIMEOUT, CS_TIMEOUT}));
  for (size_t shard = 0; shard < 4; ++shard) {
    EXPECT_EQ(noted.ends[shard], 1);
    EXPECT_FALSE(noted.request.left_behind(shard));
  }
}

// A worker on memory of ours is left behind and never gets to touch.
TEST(Request, CancelLeavesWorkingShardsBehind) {
  Noted noted(3);
  for (size_t shard = 0; shard < 3; ++shard) ASSERT_TRUE(noted.request.Begin(shard, false));
  ASSERT_TRUE(noted.request.StartTouching(1));
  ASSERT_TRUE(noted.request.StopTouching(1));
  EXPECT_TRUE(noted.request.Finish(2, CS_OK));
  EXPECT_EQ(noted.request.Cancel(CS_TIMEOUT), 2u);
  EXPECT_TRUE(noted.Ended());
  EXPECT_FALSE(noted.request.StartTouching(0));
  EXPECT_FALSE(noted.request.Finish(1, CS_OK));
  EXPECT_TRUE(noted.request.left_behind(0));
  EXPECT_TRUE(noted.request.left_behind(1));
  EXPECT_FALSE(noted.request.left_behind(2));
  EXPECT_TRUE(noted.request.results() == std::vector<Code>({CS_TIMEOUT, CS_TIMEOUT, CS_OK}));
}

TEST(Request, CancelEndsParkedShards) {
  Noted noted(2);
  ASSERT_TRUE(noted.request.Begin(0, true));
  ASSERT_TRUE(noted.request.Park(0));
  ASSERT_TRUE(noted.request.Begin(1, false));
  ASSERT_TRUE(noted.request.Park(1));
  EXPECT_EQ(noted.request.Cancel(CS_TIMEOUT), 0u);
  EXPECT_TRUE(noted.Ended());
  EXPECT_FALSE(noted.request.left_behind(0));
}

// The commitment to publish and the cancellation exclude each other.
TEST(Request, CancelBeforePublishForbidsIt) {
  Noted noted(2);
  const size_t block[] = {0, 1};
  ASSERT_TRUE(noted.request.Begin(0, true));
  ASSERT_TRUE(noted.request.Park(0));
  ASSERT_TRUE(noted.request.Begin(1, false));
  EXPECT_EQ(noted.request.Cancel(CS_TIMEOUT), 1u);
  EXPECT_FALSE(noted.request.BeginPublish(block, 1, false));
  EXPECT_TRUE(noted.request.results() == std::vector<Code>(2, CS_TIMEOUT));
}

TEST(Request, CancelWaitsForASurePublish) {
  Noted noted(3);
  const size_t block[] = {0, 2};
  ASSERT_TRUE(noted.request.Begin(0, true));
  ASSERT_TRUE(noted.request.Park(0));
  ASSERT_TRUE(noted.request.Begin(2, true));
  ASSERT_TRUE(noted.request.BeginPublish(block, 2, true));
  EXPECT_EQ(noted.request.Cancel(CS_TIMEOUT), 0u);
  EXPECT_FALSE(noted.Ended());
  EXPECT_EQ(noted.request.FinishAll(block, CS_OK), 2u);
  EXPECT_TRUE(noted.Ended());
  EXPECT_TRUE(noted.request.results() == std::vector<Code>({CS_OK, CS_TIMEOUT, CS_OK}));
}

// Only one worker runs the publication: only one is left behind.
TEST(Request, CancelLeavesAnUnsurePublishBehind) {
  Noted noted(2);
  const size_t block[] = {0, 1};
  ASSERT_TRUE(noted.request.Begin(0, false));
  ASSERT_TRUE(noted.request.Park(0));
  ASSERT_TRUE(noted.request.Begin(1, false));
  ASSERT_TRUE(noted.request.BeginPublish(block, 1, false));
  EXPECT_EQ(noted.request.Cancel(CS_TIMEOUT), 1u);
  EXPECT_TRUE(noted.Ended());
  EXPECT_EQ(noted.request.FinishAll(block, CS_OK), 0u);  // so it takes the block back
  EXPECT_FALSE(noted.request.left_behind(0));
  EXPECT_TRUE(noted.request.left_behind(1));
  EXPECT_TRUE(noted.request.results() == std::vector<Code>(2, CS_TIMEOUT));
}

// The shards of a block end with one result, however a cancellation falls.
TEST(Request, BlockEndsAsOne) {
  for (int round = 0; round < 300; ++round) {
    Noted noted(4);
    const size_t block[] = {0, 1, 2, 3};
    for (const size_t shard : block) {
      ASSERT_TRUE(noted.request.Begin(shard, false));
      if (shard != 3) ASSERT_TRUE(noted.request.Park(shard));
    }
    ASSERT_TRUE(noted.request.BeginPublish(block, 3, false));
    size_t ended = 9;
    std::thread worker([&] { ended = noted.request.FinishAll(block, CS_OK); });
    noted.request.Cancel(CS_TIMEOUT);
    noted.request.Wait();
    worker.join();
    EXPECT_TRUE(ended == 4 || ended == 0);
    EXPECT_TRUE(noted.request.results() == std::vector<Code>(4, ended == 4 ? CS_OK : CS_TIMEOUT));
  }
}

TEST(Request, SecondCancelChangesNothing) {
  Noted noted(2);
  ASSERT_TRUE(noted.request.Begin(0, true));
  EXPECT_EQ(noted.request.Cancel(CS_TIMEOUT), 0u);
  EXPECT_EQ(noted.request.Cancel(CS_CLOSED), 0u);
  EXPECT_FALSE(noted.request.StopTouching(0));
  EXPECT_TRUE(noted.request.results() == std::vector<Code>(2, CS_TIMEOUT));
}

// Ends are told before any waiter knows: room in the queue is free by then.
TEST(Request, TellsEndsBeforeWaiters) {
  for (int round = 0; round < 200; ++round) {
    Request request(Empty(2));
    std::atomic<int> told{0};
    request.Prepare([&](size_t, Code) { told.fetch_add(1, std::memory_order_relaxed); }, nullptr);
    std::thread worker([&] {
      for (size_t i = 0; i < 2; ++i) {
        if (request.Begin(i, false)) request.Finish(i, CS_OK);
      }
    });
    request.Wait();
    EXPECT_EQ(told.load(std::memory_order_relaxed), 2);
    worker.join();
  }
}

namespace {

// What a bounced or zero-copy dump or load does to its shards, by chance.
// `page` is the caller's memory: written only between Begin/StartTouching and
// leaving, so a race detector sees every breach.
void WorkOn(Request& request, std::span<const size_t> block, std::atomic<size_t>& remaining,
            size_t shard, std::vector<uint64_t>& page, std::mt19937_64& random,
            std::atomic<int64_t>& left_behind) {
  const bool zero_copy = random() % 2 == 0;
  const bool sure = random() % 2 == 0;
  const auto begun = request.Begin(shard, zero_copy);
  if (begun) {
    if (zero_copy) {
      page[shard] += 1;
    } else {
      if (random() % 4 == 0) std::this_thread::yield();
      if (request.StartTouching(shard)) {
        page[shard] += 1;
        (void)request.StopTouching(shard);
      }
    }
  }
  if (remaining.fetch_sub(1) != 1) {
    (void)request.Park(shard);
  } else if (request.BeginPublish(block, shard, sure)) {
    if (random() % 4 == 0) std::this_thread::yield();
    (void)request.FinishAll(block, CS_OK);
  }
  if (request.left_behind(shard)) left_behind.fetch_sub(1);
}

}  // namespace

// Seeded chaos: workers, a waiter that gives up at any moment, and a second
// one (close). Each shard ends once, the room comes back whole, those left
// behind are counted once, and after Wait the memory is the waiter's.
TEST(Request, StressEndsEveryShardExactlyOnce) {
  constexpr size_t kBlocks = 3;
  constexpr size_t kShards = 3;
  for (uint64_t seed = 0; seed < 250; ++seed) {
    Request request(Empty(kBlocks * kShards));
    std::atomic<int64_t> room{kBlocks * kShards};
    std::vector<int> ends(kBlocks * kShards, 0);
    request.Prepare(
        [&](size_t shard, Code) {
          ++ends[shard];
          room.fetch_sub(1);
        },
        nullptr);
    std::vector<uint64_t> page(kBlocks * kShards, 0);
    std::array<std::array<size_t, kShards>, kBlocks> blocks;
    std::array<std::atomic<size_t>, kBlocks> remaining;
    for (size_t b = 0; b < kBlocks; ++b) {
      remaining[b] = kShards;
      for (size_t s = 0; s < kShards; ++s) blocks[b][s] = b * kShards + s;
    }
    std::atomic<int64_t> left_behind{0};
    std::atomic<size_t> next{0};
    std::vector<std::thread> workers;
    for (uint64_t self = 0; self < 3; ++self) {
      workers.emplace_back([&, self] {
        std::mt19937_64 random(seed * 16 + self);
        for (size_t shard = next++; shard < page.size(); shard = next++) {
          const size_t b = shard / kShards;
          WorkOn(request, blocks[b], remaining[b], shard, page, random, left_behind);
        }
      });
    }
    std::mt19937_64 random(seed);
    // Not by yields: each may be another process's time slice.
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(random() % 200);
    while (std::chrono::steady_clock::now() < until) {
    }
    std::thread closer(
        [&] { left_behind.fetch_add(static_cast<int64_t>(request.Cancel(CS_CLOSED))); });
    left_behind.fetch_add(static_cast<int64_t>(request.Cancel(CS_TIMEOUT)));
    request.Wait();
    for (uint64_t& word : page) word = 7;  // ours again
    EXPECT_EQ(room.load(), 0);
    closer.join();
    for (std::thread& worker : workers) worker.join();
    EXPECT_EQ(left_behind.load(), 0);
    for (const int count : ends) EXPECT_EQ(count, 1);
    for (const uint64_t word : page) EXPECT_EQ(word, 7u);
    for (const auto& block : blocks) {
      const bool published = request.results()[block[0]] == CS_OK;
      for (const size_t shard : block) EXPECT_EQ(request.results()[shard] == CS_OK, published);
    }
  }
}

}  // namespace cachestore::test
