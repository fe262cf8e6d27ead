#include "base/worker_pool.h"

#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "fault_env.h"
#include "harness.h"

namespace cachestore::test {
namespace {

using Job = WorkerPool::Job;
using Scratch = WorkerPool::Scratch;
using std::chrono::milliseconds;

std::vector<Job> Jobs(const std::shared_ptr<void>& owner, uint32_t n, uint32_t first = 0) {
  std::vector<Job> jobs;
  for (uint32_t i = 0; i < n; ++i) jobs.push_back({owner, first + i});
  return jobs;
}

}  // namespace

TEST(WorkerPool, OneWorkerRunsJobsInOrderAndLetsOwnersGo) {
  std::mutex mutex;
  std::vector<uint32_t> ran;
  WorkerPool pool("test", 1, [&](Job& job, Scratch&) {
    const std::lock_guard lock(mutex);
    ran.push_back(job.index);
    return false;
  });
  auto owner = std::make_shared<int>(0);
  const std::weak_ptr<int> watch = owner;
  ASSERT_TRUE(pool.Submit(Jobs(owner, 100)));
  owner.reset();
  EXPECT_TRUE(Eventually([&] { return watch.expired(); }));
  const std::lock_guard lock(mutex);
  ASSERT_EQ(ran.size(), 100u);
  for (uint32_t i = 0; i < 100; ++i) EXPECT_EQ(ran[i], i);
}

// As many at once as there are workers, no more.
TEST(WorkerPool, RunsOneJobAWorkerAtOnce) {
  Gate gate;
  WorkerPool pool("test", 3, [&](Job&, Scratch&) {
    gate.Pass();
    return false;
  });
  ASSERT_TRUE(pool.Submit(Jobs(nullptr, 2)));
  ASSERT_TRUE(gate.WaitArrived(2));
  ASSERT_TRUE(pool.Submit(Jobs(nullptr, 6)));
  EXPECT_TRUE(gate.WaitArrived(3));
  EXPECT_TRUE(gate.StaysAt(3));
  gate.Open();
  EXPECT_TRUE(gate.WaitArrived(8));
}

// c_api.h, rule 3: the process's signals aren't for our threads.
TEST(WorkerPool, WorkersAreNamedAndBlockSignals) {
  Gate done;
  std::atomic<bool> blocked{false};
  std::string name(32, '\0');
  WorkerPool pool("cs-test", 1, [&](Job&, Scratch&) {
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    blocked = sigismember(&mask, SIGTERM) == 1 && sigismember(&mask, SIGXFSZ) == 1;
    pthread_getname_np(pthread_self(), name.data(), name.size());
    done.Pass();
    return false;
  });
  sigset_t mask;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  EXPECT_EQ(sigismember(&mask, SIGTERM), 0);  // the maker's own mask is as it was
  ASSERT_TRUE(pool.Submit(Jobs(nullptr, 1)));
  ASSERT_TRUE(done.WaitArrived(1));
  done.Open();
  EXPECT_TRUE(blocked.load());
  EXPECT_EQ(std::string(name.c_str()), "cs-test");
}

// Only the workers, not the thread that made them.
TEST(WorkerPool, WorkersAreAsNiceAsAsked) {
  const int own = getpriority(PRIO_PROCESS, 0);
  for (const int nice : {0, 7}) {
    Gate done;
    std::atomic<int> value{-100};
    WorkerPool pool(
        "test", 1,
        [&](Job&, Scratch&) {
          value = getpriority(PRIO_PROCESS, 0);  // on Linux, the calling thread's
          done.Pass();
          return false;
        },
        nice);
    ASSERT_TRUE(pool.Submit(Jobs(nullptr, 1)));
    ASSERT_TRUE(done.WaitArrived(1));
    done.Open();
    EXPECT_EQ(value.load(), std::min(own + nice, 19));
  }
  EXPECT_EQ(getpriority(PRIO_PROCESS, 0), own);
}

TEST(WorkerPool, RemoveDropsOneOwnersQueuedJobs) {
  Gate gate;
  std::atomic<int> of_a{0};
  std::atomic<int> of_b{0};
  const auto a = std::make_shared<int>(0);
  const auto b = std::make_shared<int>(0);
  WorkerPool pool("test", 1, [&](Job& job, Scratch&) {
    gate.Pass();
    (job.owner == a ? of_a : of_b)++;
    return false;
  });
  ASSERT_TRUE(pool.Submit(Jobs(a, 5)));
  ASSERT_TRUE(gate.WaitArrived(1));
  ASSERT_TRUE(pool.Submit(Jobs(b, 5)));
  ASSERT_TRUE(pool.Submit(Jobs(a, 5)));
  pool.Remove(a.get());
  EXPECT_EQ(a.use_count(), 2);  // ours and the running job's
  gate.Open();
  EXPECT_TRUE(Eventually([&] { return of_b == 5 && b.use_count() == 1 && a.use_count() == 1; }));
  EXPECT_EQ(of_a.load(), 1);
}

TEST(WorkerPool, CloseHandsBackWhatIsQueued) {
  Gate gate;
  const auto owner = std::make_shared<int>(0);
  WorkerPool pool("test", 2, [&](Job&, Scratch&) {
    gate.Pass();
    return false;
  });
  ASSERT_TRUE(pool.Submit(Jobs(owner, 10)));
  ASSERT_TRUE(gate.WaitArrived(2));
  const std::vector<Job> queued = pool.Close();
  ASSERT_EQ(queued.size(), 8u);
  for (uint32_t i = 0; i < 8; ++i) EXPECT_EQ(queued[i].index, i + 2);
  EXPECT_FALSE(pool.Submit(Jobs(owner, 1)));
  EXPECT_EQ(pool.Close().size(), 0u);
  gate.Open();
  EXPECT_TRUE(pool.Join(milliseconds(10000)));
  EXPECT_EQ(gate.arrived(), 2u);
  EXPECT_EQ(owner.use_count(), 9);  // ours and the eight handed back
}

// F27: a stuck worker is replaced; back again, it makes room.
TEST(WorkerPool, ReplacesStuckWorkersUntilTheyReturn) {
  const size_t threads = ThreadCount();
  Gate hung;
  Gate passed;
  passed.Open();
  WorkerPool pool("test", 2, [&](Job& job, Scratch&) {
    (job.index == 0 ? hung : passed).Pass();
    return job.index == 0;
  });
  for (size_t round = 1; round <= 3; ++round) {
    ASSERT_TRUE(pool.Submit({{nullptr, 0}, {nullptr, 0}}));
    ASSERT_TRUE(hung.WaitArrived(2 * round));
    pool.NoteStuck(2);
    EXPECT_EQ(pool.stuck(), 2 * round);
    EXPECT_EQ(ThreadCount(), threads + 2 * round + 2);
    ASSERT_TRUE(pool.Submit({{nullptr, 1}}));
    EXPECT_TRUE(passed.WaitArrived(round));
  }
  hung.Open();
  EXPECT_TRUE(Eventually([&] { return pool.stuck() == 0; }));
  EXPECT_TRUE(Eventually([&] { return ThreadCount() == threads + 2; }));
  ASSERT_TRUE(pool.Submit({{nullptr, 1}}));
  EXPECT_TRUE(passed.WaitArrived(4));
  pool.Close();
  EXPECT_TRUE(pool.Join(milliseconds(10000)));
  EXPECT_TRUE(Eventually([&] { return ThreadCount() == threads; }));
}

// A worker that comes back before it is counted doesn't unbalance the count.
TEST(WorkerPool, StuckWorkerMayReturnBeforeItIsNoted) {
  const size_t threads = ThreadCount();
  Gate done;
  WorkerPool pool("test", 2, [&](Job& job, Scratch&) {
    done.Pass();
    return job.index == 0;
  });
  done.Open();
  for (int round = 0; round < 10; ++round) {
    const size_t seen = done.arrived();
    ASSERT_TRUE(pool.Submit({{nullptr, 0}, {nullptr, 0}, {nullptr, 1}}));
    ASSERT_TRUE(done.WaitArrived(seen + 3));
    pool.NoteStuck(2);
    EXPECT_TRUE(Eventually([&] { return pool.stuck() == 0; }));
    EXPECT_TRUE(Eventually([&] { return ThreadCount() == threads + 2; }));
  }
}

// Decision 5: replacements have a bound, and then work is refused at once.
TEST(WorkerPool, RefusesWorkWhenEveryWorkerIsStuck) {
  const size_t threads = ThreadCount();
  Gate hung;
  WorkerPool pool("test", 1, [&](Job&, Scratch&) {
    hung.Pass();
    return true;
  });
  size_t accepted = 0;
  while (accepted < 20 && pool.Submit({{nullptr, 0}})) {
    ++accepted;
    ASSERT_TRUE(hung.WaitArrived(accepted));
    pool.NoteStuck(1);
  }
  EXPECT_EQ(accepted, 5u);  // the worker and four replacements
  EXPECT_EQ(ThreadCount(), threads + 5);
  hung.Open();
  EXPECT_TRUE(Eventually([&] { return pool.stuck() == 0; }));
  EXPECT_TRUE(Eventually([&] { return ThreadCount() == threads + 1; }));
  EXPECT_TRUE(pool.Submit({{nullptr, 0}}));
  pool.NoteStuck(1);
}

// What a worker left behind uses lives as long as it does.
TEST(WorkerPool, JoinLeavesAStuckWorkerBehindOnce) {
  const size_t threads = ThreadCount();
  // Kept by the handler alone.
  auto gate = std::make_shared<Gate>();
  const std::weak_ptr<Gate> watch = gate;
  const auto start = std::chrono::steady_clock::now();
  {
    WorkerPool pool("test", 2, [gate](Job&, Scratch& scratch) {
      uint8_t* const memory = scratch.large.Get(5000);
      gate->Pass();
      memory[4999] = 1;  // still there
      return true;
    });
    ASSERT_TRUE(pool.Submit({{nullptr, 0}}));
    ASSERT_TRUE(gate->WaitArrived(1));
    pool.NoteStuck(1);
    pool.Close();
    EXPECT_FALSE(pool.Join(milliseconds(1)));
    EXPECT_FALSE(pool.Join(milliseconds(60000)));  // doesn't wait again
  }
  EXPECT_LT((std::chrono::steady_clock::now() - start).count(),
            std::chrono::nanoseconds(kWaitBound).count());
  EXPECT_FALSE(watch.expired());
  gate->Open();
  gate.reset();
  EXPECT_TRUE(Eventually([&] { return watch.expired(); }));
  EXPECT_TRUE(Eventually([&] { return ThreadCount() == threads; }));
}

}  // namespace cachestore::test
