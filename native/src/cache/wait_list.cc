#include "cache/wait_list.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <utility>

#include "base/shared_memory.h"

namespace cachestore {
namespace {

constexpr std::chrono::milliseconds kIdle{3600 * 1000};

// Until `when`, rounded up: an early wake-up would find nothing to do.
std::chrono::milliseconds Until(WaitList::Clock::time_point when, WaitList::Clock::time_point now) {
  if (when <= now) return std::chrono::milliseconds(0);
  return std::chrono::duration_cast<std::chrono::milliseconds>(when - now) +
         std::chrono::milliseconds(1);
}

}  // namespace

WaitList::WaitList(Region& region, SlotTable& slots, std::chrono::milliseconds patience,
                   std::function<void()> reclaim)
    : region_(region), slots_(slots), patience_(patience), reclaim_(std::move(reclaim)) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  thread_ = std::thread([this] { Run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread_.native_handle(), "cs-cache-wait");
}

WaitList::~WaitList() { Close(); }

void WaitList::Wake() {
  std::atomic<uint32_t>& word = region_.process(region_.self()).wake;
  word.fetch_add(1, std::memory_order_release);
  FutexWake(word);
}

void WaitList::Add(SlotRef ref, Resume resume) {
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) {
      waits_.push_back({ref, Clock::now() + patience_, std::move(resume)});
      resume = nullptr;
    }
  }
  if (resume) return resume(false);
  // If it ended before it was in the list, nobody else will say so.
  if (slots_.IsLoading(ref)) {
    Wake();  // the thread may be asleep for longer than this wait is to last
  } else {
    Notify(ref);
  }
}

void WaitList::Notify(SlotRef ref) {
  std::vector<Wait> ended;
  {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < waits_.size();) {
      if (waits_[i].ref.slot == ref.slot && waits_[i].ref.generation == ref.generation) {
        ended.push_back(std::move(waits_[i]));
        waits_[i] = std::move(waits_.back());
        waits_.pop_back();
      } else {
        ++i;
      }
    }
  }
  for (Wait& wait : ended) wait.resume(true);
}

void WaitList::At(Clock::time_point when, std::function<void()> action) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    timers_.emplace(when, std::move(action));
    if (timers_.begin()->first != when) return;  // the thread wakes earlier anyhow
  }
  Wake();
}

void WaitList::Hurry() {
  {
    const std::lock_guard lock(mutex_);
    std::multimap<Clock::time_point, std::function<void()>> now;
    for (auto& [when, action] : timers_) now.emplace(Clock::time_point{}, std::move(action));
    timers_.swap(now);
  }
  Wake();
}

void WaitList::Later(std::function<bool()> attempt) {
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) {
      later_.push_back(std::move(attempt));
      attempt = nullptr;
    }
  }
  if (attempt) {
    (void)attempt();
  } else {
    Wake();
  }
}

size_t WaitList::waiting() const {
  const std::lock_guard lock(mutex_);
  return waits_.size();
}

std::vector<WaitList::Wait> WaitList::TakeEnded(Clock::time_point now) {
  std::vector<Wait> ended;
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < waits_.size();) {
    if (closed_ || waits_[i].deadline <= now || !slots_.IsLoading(waits_[i].ref)) {
      ended.push_back(std::move(waits_[i]));
      waits_[i] = std::move(waits_.back());
      waits_.pop_back();
    } else {
      ++i;
    }
  }
  return ended;
}

void WaitList::Run() {
  std::atomic<uint32_t>& word = region_.process(region_.self()).wake;
  Clock::time_point next_liveness = Clock::now() + kLiveness;
  for (;;) {
    const uint32_t seen = word.load(std::memory_order_acquire);
    Clock::time_point now = Clock::now();
    for (Wait& wait : TakeEnded(now)) wait.resume(!slots_.IsLoading(wait.ref));

    std::vector<std::function<void()>> due;
    std::vector<std::function<bool()>> again;
    bool closed;
    bool waiting;
    {
      const std::lock_guard lock(mutex_);
      closed = closed_;
      while (!timers_.empty() && timers_.begin()->first <= now) {
        due.push_back(std::move(timers_.begin()->second));
        timers_.erase(timers_.begin());
      }
      again.swap(later_);
      waiting = !waits_.empty();
    }
    if (!closed) {
      for (const auto& action : due) action();
    }
    std::erase_if(again, [](const auto& attempt) { return attempt(); });
    if (closed) {
      // And those that came between the look at the waits and the one at `closed_`.
      for (Wait& wait : TakeEnded(now)) wait.resume(!slots_.IsLoading(wait.ref));
      return;
    }
    if (waiting && now >= next_liveness) {
      reclaim_();
      next_liveness = now + kLiveness;
    }

    std::chrono::milliseconds sleep = kIdle;
    now = Clock::now();
    {
      const std::lock_guard lock(mutex_);
      std::move(again.begin(), again.end(), std::back_inserter(later_));
      if (!later_.empty()) sleep = kRetry;
      if (!waits_.empty()) sleep = std::min(sleep, Until(next_liveness, now));
      for (const Wait& wait : waits_) sleep = std::min(sleep, Until(wait.deadline, now));
      if (!timers_.empty()) sleep = std::min(sleep, Until(timers_.begin()->first, now));
    }
    if (sleep.count() > 0) FutexWait(word, seen, sleep);
  }
}

void WaitList::Close() {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  Wake();
  thread_.join();
}

}  // namespace cachestore
