#include "posix/upkeep.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "base/status.h"

namespace cachestore {
namespace {

using Clock = std::chrono::steady_clock;

// After a tick that threw, as for want of memory.
constexpr std::chrono::milliseconds kAfterFailure{1000};

}  // namespace

struct Upkeep::State {
  struct Root {
    std::mutex mutex;  // guards the three below
    std::condition_variable changed;
    bool begun = false;
    bool woken = false;
    bool stopping = false;
  };

  State(size_t count, Tick each) : roots(count), tick(std::move(each)) {}

  void Run(size_t index) {
    Root& root = roots[index];
    {
      const std::lock_guard lock(root.mutex);
      root.begun = true;
    }
    root.changed.notify_all();
    for (bool last = false; !last;) {
      std::chrono::milliseconds pause = kAfterFailure;
      {
        const std::lock_guard lock(root.mutex);
        root.woken = false;
        last = root.stopping;
      }
      (void)Thrown([&] { pause = tick(index, last); });
      if (last) return;
      std::unique_lock lock(root.mutex);
      root.changed.wait_for(lock, pause, [&] { return root.woken || root.stopping; });
    }
  }

  // Until the root's thread runs, or the deadline.
  void WaitBegun(size_t index, Clock::time_point deadline) {
    Root& root = roots[index];
    std::unique_lock lock(root.mutex);
    root.changed.wait_until(lock, deadline, [&] { return root.begun; });
  }

  void Wake(size_t index) {
    Root& root = roots[index];
    {
      const std::lock_guard lock(root.mutex);
      if (root.woken) return;
      root.woken = true;
    }
    root.changed.notify_all();
  }

  std::vector<Root> roots;
  const Tick tick;
};

Upkeep::Upkeep(size_t roots, Tick tick)
    : state_(std::make_shared<State>(roots, std::move(tick))),
      threads_("cs-upkeep", roots, [state = state_](WorkerPool::Job& job, WorkerPool::Scratch&) {
        state->Run(job.index);
        return false;
      }) {
  for (uint32_t i = 0; i < roots; ++i) (void)threads_.Submit({{nullptr, i}});
}

Upkeep::~Upkeep() {
  Stop();
  (void)Join(std::chrono::milliseconds(2000));
}

void Upkeep::Wake(size_t index) { state_->Wake(index); }

std::function<void()> Upkeep::Waker(size_t root) {
  // What is woken may own the waker.
  return [weak = std::weak_ptr<State>(state_), root] {
    if (const auto state = weak.lock()) state->Wake(root);
  };
}

void Upkeep::Stop() {
  for (State::Root& root : state_->roots) {
    {
      const std::lock_guard lock(root.mutex);
      root.stopping = true;
    }
    root.changed.notify_all();
  }
}

bool Upkeep::Join(std::chrono::milliseconds patience) {
  const auto deadline = Clock::now() + patience;
  // A thread that the system hasn't started yet would find its job dropped by Close.
  for (size_t i = 0; i < state_->roots.size(); ++i) state_->WaitBegun(i, deadline);
  (void)threads_.Close();
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  return threads_.Join(std::max(left, std::chrono::milliseconds(0)));
}

}  // namespace cachestore
