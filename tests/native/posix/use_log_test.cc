// The log of uses alone: which times which files get. In a store:
// use_times_test.cc.
#include "posix/use_log.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fault_env.h"
#include "fixture.h"
#include "harness.h"

namespace cachestore::test {
namespace {

// An Env whose clock is the test's.
class ClockEnv : public FaultEnv {
 public:
  uint64_t Now() override { return now; }
  uint64_t now = 1'000'000'000'000'000'000;  // in 2001
};

// A log over files that are named by their number; number n lies in root
// n % roots.
class Files {
 public:
  explicit Files(size_t count, UseLogOptions options = {}) : count_(count) {
    if (options.roots.empty()) options.roots = {true};
    options.interval = std::chrono::milliseconds(0);
    roots_ = options.roots.size();
    for (size_t n = 0; n < count; ++n) {
      number_[IdOf(n)] = n;
      WriteFile(Path(n), {1});
    }
    log_ = std::make_unique<UseLog>(
        env, options, [this](const BlockId& block) { return number_.at(block) % roots_; },
        [this](size_t, const BlockId& block, uint64_t time) {
          return env.SetModified(Path(number_.at(block)), time);
        });
  }

  UseLog& log() { return *log_; }
  std::string Path(size_t n) const { return dir_.path() + "/" + std::to_string(n) + "."; }

  static std::vector<BlockId> Ids(const std::vector<size_t>& numbers) {
    std::vector<BlockId> ids;
    for (const size_t n : numbers) ids.push_back(IdOf(n));
    return ids;
  }
  void Use(const std::vector<size_t>& numbers, int parent = -1) {
    const BlockId before = IdOf(static_cast<uint64_t>(parent));
    log_->Use(Ids(numbers), parent < 0 ? nullptr : &before);
  }
  // A request whose shards end with these codes, the last one first.
  void Serve(const std::vector<size_t>& numbers, std::vector<Code> codes = {}, int parent = -1,
             bool is_chain = true) {
    codes.resize(numbers.size(), CS_OK);
    Batch batch;
    batch.blocks = Ids(numbers);
    batch.is_chain = is_chain;
    if (parent >= 0) batch.parent = IdOf(static_cast<uint64_t>(parent));
    const auto following = log_->Follow(batch);
    ASSERT_TRUE(following != nullptr);
    for (size_t i = codes.size(); i-- > 0;) log_->Ended(*following, i, codes[i]);
  }
  void Flush() {
    for (size_t root = 0; root < roots_; ++root) (void)log_->Flush(root, /*last=*/true);
  }
  // The files that the log has given a time near to the test's clock, which is
  // far from the real one; the latest first.
  std::vector<size_t> Order() {
    std::vector<std::pair<uint64_t, size_t>> times;
    for (size_t n = 0; n < count_; ++n) {
      const Result<FileInfo> info = env.Stat(Path(n));
      if (!info.ok()) continue;
      const uint64_t time = info.value().modified_ns;
      if (time + kYear / 2 > env.now && time < env.now + kYear / 2) times.emplace_back(time, n);
    }
    std::sort(times.rbegin(), times.rend());
    std::vector<size_t> numbers;
    for (const auto& [time, n] : times) numbers.push_back(n);
    return numbers;
  }

  static constexpr uint64_t kYear = uint64_t{365} * 24 * 3600 * 1'000'000'000;
  ClockEnv env;

 private:
  const TempDir dir_;
  const size_t count_;
  size_t roots_ = 1;
  std::map<BlockId, size_t> number_;
  std::unique_ptr<UseLog> log_;
};

using Numbers = std::vector<size_t>;

Numbers Range(size_t from, size_t to) {
  Numbers numbers;
  for (; from < to; ++from) numbers.push_back(from);
  return numbers;
}

}  // namespace

// The first block of a request is the one used last, whatever order its shards
// end in.
TEST(UseLog, TheFirstBlockIsTheLatest) {
  Files files(5);
  files.Serve({0, 1, 2, 3, 4});
  EXPECT_EQ(files.log().pending(), 5u);
  EXPECT_EQ(files.env.calls(Op::kSetModified), 0u);
  files.Flush();
  EXPECT_TRUE(files.Order() == Numbers({0, 1, 2, 3, 4}));
  EXPECT_EQ(files.log().pending(), 0u);
  EXPECT_EQ(files.log().dropped(), 0u);
}

// A load that failed is no use; but what a block that was used follows, is.
TEST(UseLog, OnlyWhatEndedWellIsUsed) {
  Files files(5);
  files.Serve({0, 1, 2, 3, 4}, {CS_OK, CS_TIMEOUT, CS_OK, CS_NOT_FOUND, CS_CORRUPT});
  files.Flush();
  EXPECT_TRUE(files.Order() == Numbers({0, 1, 2}));
  Files none(3);
  none.Serve({0, 1, 2}, {CS_IO, CS_IO, CS_IO});
  EXPECT_EQ(none.log().pending(), 0u);
  none.Flush();
  EXPECT_EQ(none.env.calls(Op::kSetModified), 0u);
}

// A use of the tail is one of the whole prefix, over several requests, and
// after all that was used before.
TEST(UseLog, APrefixOutlivesItsTail) {
  Files files(9);
  files.Serve({0, 1, 2});
  files.Serve({3, 4}, {}, 2);
  files.Flush();
  EXPECT_TRUE(files.Order() == Numbers({0, 1, 2, 3, 4}));
  files.env.now += 1000;
  files.Serve({7, 8});
  files.Flush();
  EXPECT_TRUE(files.Order() == Numbers({7, 8, 0, 1, 2, 3, 4}));
  files.env.now += 1000;
  files.Serve({5}, {}, 4);
  files.Flush();
  EXPECT_TRUE(files.Order() == Numbers({0, 1, 2, 3, 4, 5, 7, 8}));
  // Of two tails of one prefix the latest comes first, in one interval too.
  files.Serve({6}, {}, 1);
  files.Serve({4}, {}, 3);
  files.Flush();
  EXPECT_TRUE(files.Order() == Numbers({0, 1, 2, 3, 4, 6, 5, 7, 8}));
}

// Lookups say what follows what; they are no uses.
TEST(UseLog, LookupsAreLinks) {
  Files files(6);
  files.log().Chain(Files::Ids({0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(files.log().pending(), 0u);
  files.Flush();
  EXPECT_EQ(files.env.calls(Op::kSetModified), 0u);
  files.Use({3});
  files.Flush();
  EXPECT_TRUE(files.Order() == Numbers({0, 1, 2, 3}));
}

// Blocks that only happen to be in one request aren't linked, and those that
// are known to be come in their own order.
TEST(UseLog, ABatchThatIsNoChain) {
  Files files(4);
  files.Serve({2, 0, 1}, {}, -1, /*is_chain=*/false);
  files.Flush();
  EXPECT_TRUE(files.Order() == Numbers({2, 0, 1}));
  files.env.now += Files::kYear;
  files.Use({1});
  files.Flush();
  EXPECT_TRUE(files.Order() == Numbers({1}));
  files.env.now += Files::kYear;
  files.log().Chain(Files::Ids({0, 1, 2, 3}));
  files.Serve({3, 1, 2, 0}, {}, -1, /*is_chain=*/false);
  files.Flush();
  EXPECT_TRUE(files.Order() == Numbers({0, 1, 2, 3}));
}

// Shards of one block, side by side, are one use.
TEST(UseLog, BlocksOfSeveralShards) {
  Files files(3);
  files.Serve({0, 0, 1, 1, 2, 2}, {CS_OK, CS_OK, CS_IO, CS_OK, CS_OK, CS_OK});
  files.Flush();
  EXPECT_TRUE(files.Order() == Numbers({0, 1, 2}));
  EXPECT_EQ(files.env.calls(Op::kSetModified), 3u);
}

// A prefix of many requests costs each file one call an interval.
TEST(UseLog, UsesOfOneBlockAreOne) {
  constexpr size_t kBlocks = 2000;
  Files files(kBlocks);
  for (size_t from = 0; from < kBlocks; from += 100) {
    files.Serve(Range(from, from + 100), {}, static_cast<int>(from) - 1);
  }
  files.Use({kBlocks - 1});
  EXPECT_EQ(files.log().pending(), kBlocks + 1);
  files.Flush();
  EXPECT_EQ(files.env.calls(Op::kSetModified), kBlocks);
  EXPECT_TRUE(files.Order() == Range(0, kBlocks));
}

// What is waiting is bounded; the oldest goes, and is counted.
TEST(UseLog, TheQueueIsBounded) {
  UseLogOptions options;
  options.max_queued = 50;
  Files files(40, options);
  for (size_t from = 0; from < 40; from += 10) files.Serve(Range(from, from + 10));
  EXPECT_EQ(files.log().dropped(), 20u);
  EXPECT_EQ(files.log().pending(), 20u);
  files.Flush();
  Numbers kept = Range(30, 40);
  for (const size_t n : Range(20, 30)) kept.push_back(n);
  EXPECT_TRUE(files.Order() == kept);
}

TEST(UseLog, WhatIsToBeWrittenIsBounded) {
  UseLogOptions options;
  options.max_pending = 15;
  Files files(40, options);
  files.Serve(Range(0, 20));
  files.Serve(Range(20, 30));
  files.Flush();
  EXPECT_EQ(files.log().dropped(), 15u);
  EXPECT_EQ(files.log().pending(), 0u);
  Numbers kept = Range(20, 30);  // the latest
  for (const size_t n : Range(0, 5)) kept.push_back(n);
  EXPECT_TRUE(files.Order() == kept);
}

// A circle of links, as of two requests that disagree, ends.
TEST(UseLog, ACircleEnds) {
  Files files(4);
  files.log().Chain(Files::Ids({0, 1, 2, 3}));
  files.Use({0}, 3);
  files.Use({2});
  files.Flush();
  EXPECT_EQ(files.Order().size(), 4u);
  EXPECT_EQ(files.env.calls(Op::kSetModified), 4u);
  files.Use({1}, 1);  // itself
  files.Flush();
  EXPECT_EQ(files.log().pending(), 0u);
}

// Of a longer prefix the nearest part.
TEST(UseLog, AWayBackIsBounded) {
  constexpr size_t kBlocks = 4200;
  Files files(kBlocks);
  files.log().Chain(Files::Ids(Range(0, kBlocks)));
  files.Use({kBlocks - 1});
  files.Flush();
  EXPECT_EQ(files.env.calls(Op::kSetModified), 4097u);
  EXPECT_TRUE(files.Order() == Range(kBlocks - 4097, kBlocks));
}

// Links are bounded too: the one that was asked for longest ago goes.
TEST(UseLog, LinksAreReplacedByAge) {
  ParentLinks links(0);  // one set
  for (size_t n = 1; n <= ParentLinks::kWays; ++n) links.Set(IdOf(n), IdOf(n - 1));
  ASSERT_TRUE(links.Find(IdOf(1)) != nullptr);
  links.Set(IdOf(100), IdOf(99));
  EXPECT_TRUE(links.Find(IdOf(2)) == nullptr);
  for (const size_t n : {size_t{1}, size_t{3}, ParentLinks::kWays, size_t{100}}) {
    const BlockId* const parent = links.Find(IdOf(n));
    ASSERT_TRUE(parent != nullptr);
    EXPECT_TRUE(*parent == IdOf(n - 1));
  }
  links.Set(IdOf(3), IdOf(50));
  EXPECT_TRUE(*links.Find(IdOf(3)) == IdOf(50));
  // In a large table hardly any is lost while it is a quarter full.
  ParentLinks large(14);
  for (size_t n = 1; n <= 4000; ++n) large.Set(IdOf(n), IdOf(n - 1));
  size_t lost = 0;
  for (size_t n = 1; n <= 4000; ++n) lost += large.Find(IdOf(n)) == nullptr ? 1 : 0;
  EXPECT_LE(lost, 8u);
}

// Times grow though the clock stands, or goes back.
TEST(UseLog, TimesOnlyGrow) {
  Files files(6);
  files.Serve({0, 1});
  files.Flush();
  files.Serve({2, 3});
  files.Flush();
  files.env.now -= 1'000'000'000;
  files.Serve({4, 5});
  files.Flush();
  EXPECT_TRUE(files.Order() == Numbers({4, 5, 2, 3, 0, 1}));
}

// A file that is gone is no error; any other failure is counted, and ends nothing.
TEST(UseLog, FailuresAreCounted) {
  Files files(5);
  ASSERT_EQ(std::remove(files.Path(1).c_str()), 0);
  files.env.Before(Op::kSetModified, On("/3.", Failing(CS_IO)));
  files.Serve({0, 1, 2, 3, 4});
  files.Flush();
  EXPECT_TRUE(files.Order() == Numbers({0, 2, 4}));
  EXPECT_EQ(files.log().dropped(), 1u);
  EXPECT_EQ(files.log().pending(), 0u);
}

TEST(UseLog, AClearForgets) {
  Files files(3);
  files.Serve({0, 1});
  files.log().Forget();
  EXPECT_EQ(files.log().pending(), 0u);
  files.Use({2});
  files.Flush();
  EXPECT_TRUE(files.Order() == Numbers({2}));
  EXPECT_EQ(files.env.calls(Op::kSetModified), 1u);
}

// A call does a bounded piece, and says that there is more.
TEST(UseLog, InPieces) {
  constexpr size_t kBlocks = 1500;
  Files files(kBlocks);
  files.Serve(Range(0, kBlocks));
  // On a busy machine the first piece's time may be over before its first file.
  EXPECT_TRUE(Eventually([&] {
    EXPECT_EQ(files.log().Flush(0, /*last=*/false).count(), 0);
    return files.env.calls(Op::kSetModified) > 0;
  }));
  const size_t first = files.env.calls(Op::kSetModified);
  EXPECT_LE(first, 512u);
  EXPECT_EQ(files.log().pending(), kBlocks - first);
  EXPECT_TRUE(files.Order() == Range(0, first));  // a prefix is never the older part
  // One that comes in between isn't lost.
  files.Use({kBlocks - 1});
  EXPECT_TRUE(Eventually([&] {
    (void)files.log().Flush(0, /*last=*/false);
    return files.log().pending() == 0;
  }));
  EXPECT_TRUE(files.Order() == Range(0, kBlocks));
}

// Once an interval.
TEST(UseLog, WaitsForItsTime) {
  ClockEnv env;
  const TempDir dir;
  UseLogOptions options;
  options.roots = {true, false};
  options.interval = std::chrono::hours(1);
  UseLog log(
      env, options, [](const BlockId&) { return size_t{0}; },
      [&](size_t, const BlockId&, uint64_t time) {
        return env.SetModified(dir.path() + "/none", time);
      });
  EXPECT_GT(log.Flush(0, false).count(), 3'000'000);
  log.Use(Files::Ids({1}), nullptr);
  EXPECT_GT(log.Flush(0, false).count(), 3'000'000);
  EXPECT_EQ(env.calls(Op::kSetModified), 0u);
  EXPECT_GT(log.Flush(1, false).count(), 3'000'000);  // nothing is kept there
  (void)log.Flush(0, true);
  EXPECT_EQ(env.calls(Op::kSetModified), 1u);
}

// Each root's upkeep writes what is its own; where nothing is evicted nothing
// is written.
TEST(UseLog, RootsAreApart) {
  UseLogOptions options;
  options.roots = {true, false, true};
  Files files(9, options);
  files.Serve(Range(0, 9));
  files.Flush();
  EXPECT_TRUE(files.Order() == Numbers({0, 2, 3, 5, 6, 8}));
  EXPECT_EQ(files.log().pending(), 0u);
  options.roots = {false};
  Files none(1, options);
  EXPECT_FALSE(none.log().keeps());
  EXPECT_TRUE(none.log().Follow(Batch{}) == nullptr);
  none.Use({0});
  none.log().Chain(Files::Ids({0, 0}));
  EXPECT_EQ(none.log().pending(), 0u);
}

// One that hangs holds up neither requests, nor a clear, nor the other roots.
TEST(UseLog, AHungRootHoldsUpOnlyItsOwn) {
  UseLogOptions options;
  options.roots = {true, true};
  Files files(6, options);
  Gate gate;
  files.env.Before(Op::kSetModified, On("/0.", Holding(gate)));
  files.Serve({0, 1, 2, 3});
  std::thread hung([&] { (void)files.log().Flush(0, /*last=*/false); });
  EXPECT_TRUE(gate.WaitArrived(1));
  files.Serve({4, 5}, {}, 3);
  (void)files.log().Flush(1, /*last=*/true);
  EXPECT_TRUE(files.Order() == Numbers({1, 3, 5}));
  files.log().Forget();
  EXPECT_EQ(files.log().pending(), 1u);  // the one that hangs
  gate.Open();
  hung.join();
  EXPECT_EQ(files.log().pending(), 0u);
}

// From many threads, while it is written and cleared: nothing is left over.
TEST(UseLog, ManyThreads) {
  constexpr size_t kBlocks = 64;
  UseLogOptions options;
  options.roots = {true, true};
  Files files(kBlocks, options);
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (size_t root = 0; root < 2; ++root) {
    threads.emplace_back([&, root] {
      while (!over.load()) (void)files.log().Flush(root, /*last=*/false);
    });
  }
  std::vector<std::thread> users;
  for (size_t t = 0; t < 3; ++t) {
    users.emplace_back([&, t] {
      for (size_t round = 0; round < 200; ++round) {
        files.Serve(Range(t * 16, t * 16 + 16));
        files.Use({kBlocks - 1}, static_cast<int>(round % 40));
        files.log().Chain(Files::Ids(Range(0, kBlocks)));
        if (t == 0 && round % 50 == 0) files.log().Forget();
      }
    });
  }
  for (std::thread& user : users) user.join();
  EXPECT_TRUE(Eventually([&] { return files.log().pending() == 0; }));
  over.store(true);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(files.log().dropped(), 0u);
}

}  // namespace cachestore::test
