#include "host_copy/host_copy_executor.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <latch>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/checksum.h"
#include "fault_env.h"
#include "harness.h"
#include "host_copy/system.h"

namespace cachestore::test {
namespace {

using Steps = std::vector<HostCopyExecutor::Step>;

HostCopyOptions Options(size_t workers, CopyKernel kernel = CopyKernel::kAuto) {
  return {"cs-test", workers, {}, kernel};
}

Steps Repeat(size_t n, const HostCopyExecutor::Step& step) { return Steps(n, step); }

// Tensors of one shard, each in memory of its own.
struct Tensors {
  explicit Tensors(std::vector<uint64_t> tensor_sizes) : sizes(std::move(tensor_sizes)) {
    uint8_t byte = 1;
    for (const uint64_t size : sizes) {
      memory.emplace_back(size + 1);  // a tensor of no bytes has an address, too
      for (uint8_t& b : memory.back()) b = byte = static_cast<uint8_t>(byte * 5 + 3);
    }
    for (auto& tensor : memory) addresses.push_back(tensor.data());
  }
  uint64_t payload() const { return std::accumulate(sizes.begin(), sizes.end(), uint64_t{0}); }

  std::vector<uint64_t> sizes;
  std::vector<std::vector<uint8_t>> memory;
  std::vector<uint8_t*> addresses;
};

const std::vector<std::vector<uint64_t>> kShards = {
    {100, 37},                        // K and V
    {65536, 8192, 515, 1},            // with an index and scales
    {4096},                           // one, and no padding
    {7, 0, 40000},                    // one is empty
    std::vector<uint64_t>(61, 1152),  // a tensor for each layer
    {(1 << 20) + 24, 70000},
};

}  // namespace

TEST(HostCopyExecutor, GatherAndScatterGiveTheTensorsBack) {
  for (const CopyKernel kernel : {CopyKernel::kAuto, CopyKernel::kMemcpy, CopyKernel::kStreaming}) {
    HostCopyExecutor executor(Options(1, kernel));
    for (const auto& sizes : kShards) {
      Tensors tensors(sizes);
      const uint64_t slot_size = (tensors.payload() + 4095) / 4096 * 4096;
      std::vector<uint8_t> slot(slot_size + 16, 0xEE);
      uint32_t checksum = 0;
      ASSERT_OK(
          executor.Gather(slot.data(), slot_size, tensors.addresses, tensors.sizes, &checksum));

      // Tensor after tensor, then zeroes, and nothing beyond.
      std::vector<uint8_t> expected;
      for (size_t i = 0; i < sizes.size(); ++i) {
        const uint8_t* const tensor = tensors.addresses[i];
        expected.insert(expected.end(), tensor, tensor + sizes[i]);
      }
      EXPECT_EQ(checksum, Crc32c(0, expected.data(), expected.size()));
      expected.resize(slot_size, 0);
      expected.resize(slot_size + 16, 0xEE);
      EXPECT_TRUE(slot == expected);

      Tensors back(sizes);
      for (auto& tensor : back.memory) std::fill(tensor.begin(), tensor.end(), uint8_t{0xDD});
      ASSERT_OK(executor.Scatter(slot.data(), back.addresses, back.sizes));
      for (size_t i = 0; i < sizes.size(); ++i) {
        EXPECT_TRUE(
            std::equal(back.addresses[i], back.addresses[i] + sizes[i], tensors.addresses[i]));
        EXPECT_EQ(back.memory[i].back(), 0xDD);
      }

      std::vector<uint8_t> again(slot_size + 16, 0xEE);
      ASSERT_OK(
          executor.Gather(again.data(), slot_size, tensors.addresses, tensors.sizes, nullptr));
      EXPECT_TRUE(again == slot);
    }
  }
}

TEST(HostCopyExecutor, WrongShardsAreRefusedAndNothingIsWritten) {
  HostCopyExecutor executor(Options(1));
  Tensors tensors({100, 37, 5});
  std::vector<uint8_t> slot(4096, 0xEE);
  const auto refused = [](const Status& status, const std::string& names) {
    EXPECT_EQ(status.code(), CS_INVALID);
    EXPECT_NE(status.text().find(names), std::string::npos);
  };
  refused(executor.Gather(nullptr, 4096, tensors.addresses, tensors.sizes, nullptr), "slot");
  refused(executor.Scatter(nullptr, tensors.addresses, tensors.sizes), "slot");

  refused(executor.Gather(slot.data(), 141, tensors.addresses, tensors.sizes, nullptr), "tensor 2");
  std::vector<uint64_t> huge = tensors.sizes;
  huge[1] = UINT64_MAX - 50;  // the sum overflows
  refused(executor.Gather(slot.data(), 4096, tensors.addresses, huge, nullptr), "tensor 1");
  refused(executor.Scatter(slot.data(), tensors.addresses, huge), "tensor 1");

  const std::span<uint8_t* const> two(tensors.addresses.data(), 2);
  refused(executor.Gather(slot.data(), 4096, two, tensors.sizes, nullptr), "2 tensor addresses");
  refused(executor.Scatter(slot.data(), two, tensors.sizes), "2 tensor addresses");

  std::vector<uint8_t*> with_null = tensors.addresses;
  with_null[2] = nullptr;
  uint32_t checksum = 42;
  refused(executor.Gather(slot.data(), 4096, with_null, tensors.sizes, &checksum), "tensor 2 of 3");
  const std::vector<uint8_t> before = tensors.memory[0];
  refused(executor.Scatter(slot.data(), with_null, tensors.sizes), "tensor 2 of 3");

  EXPECT_EQ(checksum, 42u);
  EXPECT_TRUE(slot == std::vector<uint8_t>(4096, 0xEE));
  EXPECT_TRUE(tensors.memory[0] == before);
}

// Contract: several shards at once. As many as there are workers, no more.
TEST(HostCopyExecutor, RunsAStepAWorkerAtOnce) {
  constexpr size_t kWorkers = 4;
  HostCopyExecutor executor(Options(kWorkers));
  Gate gate;
  std::mutex mutex;
  std::set<size_t> seen;
  ASSERT_TRUE(executor.Submit(Repeat(2 * kWorkers, [&](size_t worker) {
    {
      const std::lock_guard lock(mutex);
      seen.insert(worker);
    }
    gate.Pass();
  })));
  ASSERT_TRUE(gate.WaitArrived(kWorkers));
  EXPECT_TRUE(gate.StaysAt(kWorkers));
  EXPECT_EQ(executor.running(), kWorkers);
  EXPECT_EQ(executor.queued(), kWorkers);
  {
    const std::lock_guard lock(mutex);
    EXPECT_TRUE(seen == (std::set<size_t>{0, 1, 2, 3}));
  }
  gate.Open();
  EXPECT_TRUE(Eventually([&] { return executor.running() == 0 && executor.queued() == 0; }));
  EXPECT_EQ(gate.arrived(), 2 * kWorkers);
}

// Shards gathered at the same time by different workers, each right.
TEST(HostCopyExecutor, ShardsOfOneRequestAreCopiedAtOnce) {
  constexpr size_t kWorkers = 3;
  constexpr size_t kShardCount = 48;
  HostCopyExecutor executor(Options(kWorkers));
  const std::vector<uint64_t> sizes = {40000, 777, 20000};
  constexpr uint64_t kSlot = 61440;
  std::vector<Tensors> shards;
  for (size_t i = 0; i < kShardCount; ++i) {
    shards.emplace_back(sizes);
    shards.back().memory[1][0] = static_cast<uint8_t>(i);
  }
  std::vector<uint8_t> slots(kShardCount * kSlot);
  std::vector<uint32_t> checksums(kShardCount);
  std::latch together(kWorkers);
  std::atomic<size_t> good{0};
  Gate done;
  Steps steps;
  for (size_t i = 0; i < kShardCount; ++i) {
    steps.push_back([&, i](size_t) {
      if (i < kWorkers) together.arrive_and_wait();
      const Status status =
          executor.Gather(&slots[i * kSlot], kSlot, shards[i].addresses, sizes, &checksums[i]);
      if (status.ok()) ++good;
    });
  }
  // The completion sees all that the steps did.
  size_t failed = 99;
  ASSERT_TRUE(executor.Submit(std::move(steps), [&](size_t f) {
    failed = f;
    for (size_t i = 0; i < kShardCount; ++i) {
      EXPECT_EQ(checksums[i], Crc32c(0, &slots[i * kSlot], 60777));
      EXPECT_EQ(slots[i * kSlot + 40000], static_cast<uint8_t>(i));
    }
    done.Open();
    done.Pass();
  }));
  ASSERT_TRUE(done.WaitArrived(1));
  EXPECT_EQ(failed, 0u);
  EXPECT_EQ(good.load(), kShardCount);
}

TEST(HostCopyExecutor, AStepMaySubmit) {
  HostCopyExecutor executor(Options(1));
  Gate done;
  done.Open();
  ASSERT_TRUE(executor.Submit(Repeat(
      3, [&](size_t) { EXPECT_TRUE(executor.Submit(Repeat(2, [&](size_t) { done.Pass(); }))); })));
  EXPECT_TRUE(done.WaitArrived(6));
}

TEST(HostCopyExecutor, CompletionIsCalledOnceForManySubmitters) {
  HostCopyExecutor executor(Options(3));
  constexpr size_t kThreads = 4;
  constexpr size_t kRequests = 200;
  std::atomic<size_t> ran{0};
  std::atomic<size_t> completed{0};
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (size_t i = 0; i < kRequests; ++i) {
        EXPECT_TRUE(executor.Submit(Repeat(i % 5, [&](size_t) { ++ran; }), [&](size_t failed) {
          EXPECT_EQ(failed, 0u);
          ++completed;
        }));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(executor.Stop(true).empty());
  EXPECT_EQ(ran.load(), kThreads * kRequests / 5 * (0 + 1 + 2 + 3 + 4));
  EXPECT_EQ(completed.load(), kThreads * kRequests);
}

TEST(HostCopyExecutor, AStepThatThrowsIsCounted) {
  HostCopyExecutor executor(Options(2));
  Gate done;
  done.Open();
  size_t failed = 0;
  Steps steps = Repeat(3, [](size_t) { throw std::runtime_error("a step"); });
  steps.push_back([](size_t) {});
  steps.push_back([](size_t) { throw 1; });
  ASSERT_TRUE(executor.Submit(std::move(steps), [&](size_t f) {
    failed = f;
    done.Pass();
    throw std::bad_alloc();
  }));
  ASSERT_TRUE(done.WaitArrived(1));
  EXPECT_EQ(failed, 4u);
  // The workers are there still.
  ASSERT_TRUE(executor.Submit(Repeat(4, [&](size_t) { done.Pass(); })));
  EXPECT_TRUE(executor.Stop(true).empty());
  EXPECT_EQ(done.arrived(), 5u);
  EXPECT_EQ(executor.failed_steps(), 5u);  // four steps, one completion
  EXPECT_EQ(executor.running(), 0u);
}

// What a step holds is let go with the step, before its completion.
TEST(HostCopyExecutor, StepsAreLetGo) {
  HostCopyExecutor executor(Options(1));
  auto held = std::make_shared<int>(0);
  const std::weak_ptr<int> watch = held;
  std::atomic<bool> gone{false};
  Steps steps;
  steps.push_back([held](size_t) {});
  held.reset();
  ASSERT_TRUE(executor.Submit(std::move(steps), [&](size_t) { gone = watch.expired(); }));
  executor.Stop(true);
  EXPECT_TRUE(gone.load());
}

TEST(HostCopyExecutor, StopWithDrainRunsWhatIsQueued) {
  HostCopyExecutor executor(Options(2));
  Gate gate;
  std::atomic<size_t> ran{0};
  ASSERT_TRUE(executor.Submit(Repeat(10, [&](size_t) {
    gate.Pass();
    ++ran;
  })));
  ASSERT_TRUE(gate.WaitArrived(2));
  std::thread stopper([&] { EXPECT_TRUE(executor.Stop(true).empty()); });
  EXPECT_TRUE(Eventually([&] { return !executor.Submit({}); }));
  EXPECT_FALSE(executor.Submit(Repeat(1, [&](size_t) { ++ran; })));
  gate.Open();
  stopper.join();
  EXPECT_EQ(ran.load(), 10u);
  EXPECT_EQ(executor.queued() + executor.running(), 0u);
  EXPECT_TRUE(executor.Stop(false).empty());
}

// What is running ends; the rest comes back uncalled, and its completion is told.
TEST(HostCopyExecutor, StopWithoutDrainHandsBackWhatIsQueued) {
  HostCopyExecutor executor(Options(2));
  Gate gate;
  std::atomic<size_t> ran{0};
  std::atomic<size_t> completions{0};
  std::atomic<size_t> failed{0};
  const HostCopyExecutor::Step step = [&](size_t) {
    gate.Pass();
    ++ran;
  };
  const HostCopyExecutor::Completion completion = [&](size_t f) {
    ++completions;
    failed += f;
  };
  ASSERT_TRUE(executor.Submit(Repeat(5, step), completion));
  ASSERT_TRUE(gate.WaitArrived(2));
  ASSERT_TRUE(executor.Submit(Repeat(4, step), completion));
  ASSERT_TRUE(executor.Submit(Repeat(3, step)));
  Steps dropped;
  std::thread stopper([&] { dropped = executor.Stop(false); });
  // The request of which nothing ran is completed before the running one ends.
  EXPECT_TRUE(Eventually([&] { return completions == 1; }));
  EXPECT_EQ(failed.load(), 4u);
  gate.Open();
  stopper.join();
  EXPECT_EQ(dropped.size(), 10u);
  EXPECT_EQ(ran.load(), 2u);
  EXPECT_EQ(completions.load(), 2u);
  EXPECT_EQ(failed.load(), 7u);
  EXPECT_EQ(executor.queued() + executor.running(), 0u);
  for (const auto& each : dropped) each(0);  // whole steps
  EXPECT_EQ(ran.load(), 12u);
  EXPECT_FALSE(executor.Submit(Repeat(1, step)));
  EXPECT_FALSE(executor.Submit({}, completion));
  EXPECT_EQ(completions.load(), 2u);
}

// A drain that takes too long for its owner is cut short by a second Stop.
TEST(HostCopyExecutor, ASecondStopDropsWhatTheFirstDrains) {
  HostCopyExecutor executor(Options(1));
  Gate gate;
  ASSERT_TRUE(executor.Submit(Repeat(5, [&](size_t) { gate.Pass(); })));
  ASSERT_TRUE(gate.WaitArrived(1));
  std::thread first([&] { EXPECT_TRUE(executor.Stop(true).empty()); });
  EXPECT_TRUE(Eventually([&] { return !executor.Submit({}); }));
  std::thread second([&] { EXPECT_EQ(executor.Stop(false).size(), 4u); });
  EXPECT_TRUE(Eventually([&] { return executor.queued() == 0; }));
  gate.Open();
  first.join();
  second.join();
  EXPECT_EQ(gate.arrived(), 1u);
}

// c_api.h, rule 3: the process's signals aren't for our threads.
TEST(HostCopyExecutor, WorkersAreNamedAndBlockSignals) {
  const size_t threads = ThreadCount();
  {
    HostCopyExecutor executor({"cs-h2h-much-too-long", 2, {}, CopyKernel::kAuto});
    std::atomic<size_t> blocked{0};
    std::atomic<size_t> named{0};
    EXPECT_TRUE(executor.Submit(Repeat(4, [&](size_t) {
      sigset_t mask;
      pthread_sigmask(SIG_SETMASK, nullptr, &mask);
      if (sigismember(&mask, SIGTERM) == 1 && sigismember(&mask, SIGXFSZ) == 1) ++blocked;
      char name[32] = {};
      // The name is given to a thread that runs already.
      if (Eventually([&] {
            pthread_getname_np(pthread_self(), name, sizeof(name));
            return std::string(name) == "cs-h2h-much-too";
          })) {
        ++named;
      }
    })));
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    EXPECT_EQ(sigismember(&mask, SIGTERM), 0);  // the maker's own mask is as it was
    executor.Stop(true);
    EXPECT_EQ(blocked.load(), 4u);
    EXPECT_EQ(named.load(), 4u);
  }
  EXPECT_TRUE(Eventually([&] { return ThreadCount() <= threads; }));
}

TEST(HostCopyExecutor, WorkersArePinnedToTheWholeSet) {
  const std::vector<int> allowed = AllowedCpus();
  ASSERT_FALSE(allowed.empty());
  const std::vector<int> last = {allowed.back()};
  for (const std::vector<int>& cpus : {last, allowed}) {
    HostCopyExecutor executor({"cs-test", 3, cpus, CopyKernel::kAuto});
    EXPECT_TRUE(executor.pinned());
    std::atomic<size_t> right{0};
    ASSERT_TRUE(executor.Submit(Repeat(6, [&](size_t) {
      if (AllowedCpus() == cpus) ++right;
    })));
    executor.Stop(true);
    EXPECT_EQ(right.load(), 6u);
  }
  EXPECT_TRUE(AllowedCpus() == allowed);  // the maker's own
}

// CPUs that aren't there: the workers work where they can.
TEST(HostCopyExecutor, AnAffinityThatIsRefusedIsTold) {
  HostCopyExecutor executor({"cs-test", 2, {60000}, CopyKernel::kAuto});
  EXPECT_FALSE(executor.pinned());
  std::atomic<size_t> ran{0};
  ASSERT_TRUE(executor.Submit(Repeat(4, [&](size_t) { ++ran; })));
  executor.Stop(true);
  EXPECT_EQ(ran.load(), 4u);
}

TEST(HostCopyExecutor, WithoutWorkersThereIsNone) {
  bool thrown = false;
  try {
    HostCopyExecutor executor(Options(0));
  } catch (const std::invalid_argument&) {
    thrown = true;
  }
  EXPECT_TRUE(thrown);
}

}  // namespace cachestore::test
