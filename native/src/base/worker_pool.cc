#include "base/worker_pool.h"

#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace cachestore {

struct WorkerPool::State {
  struct Worker {
    std::thread thread;
    std::shared_ptr<bool> ended;  // guarded by State::mutex
  };

  State(std::string pool_name, size_t worker_count, Handler job_handler, int added_nice)
      : name(std::move(pool_name)),
        workers(static_cast<int64_t>(worker_count)),
        max_stuck(4 * workers),
        handler(std::move(job_handler)),
        nice(added_nice) {}

  const std::string name;
  const int64_t workers;
  const int64_t max_stuck;
  const Handler handler;
  const int nice;

  std::mutex mutex;  // guards all below
  std::condition_variable work;
  std::condition_variable worker_ended;
  std::deque<Job> queue;
  std::vector<Worker> threads;
  int64_t alive = 0;
  size_t idle = 0;
  // A worker can come back before NoteStuck has counted it: -1 for a moment.
  int64_t stuck = 0;
  bool closed = false;

  static void Run(const std::shared_ptr<State>& state, const std::shared_ptr<bool>& ended);
  static void Start(const std::shared_ptr<State>& state);
};

void WorkerPool::State::Run(const std::shared_ptr<State>& state,
                            const std::shared_ptr<bool>& ended) {
  if (state->nice > 0) {  // on Linux, of the calling thread
    (void)setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + state->nice);
  }
  Scratch scratch;
  std::unique_lock lock(state->mutex);
  for (;;) {
    ++state->idle;
    state->work.wait(lock, [&] { return state->closed || !state->queue.empty(); });
    --state->idle;
    if (state->queue.empty()) break;  // closed
    Job job = std::move(state->queue.front());
    state->queue.pop_front();
    const bool wake_next = !state->queue.empty() && state->idle > 0;
    lock.unlock();
    if (wake_next) state->work.notify_one();
    const bool given_up = state->handler(job, scratch);
    job.owner.reset();
    lock.lock();
    if (given_up) {
      --state->stuck;
      if (state->stuck >= 0 && state->alive - state->stuck > state->workers) break;  // replaced
    }
  }
  --state->alive;
  *ended = true;
  state->worker_ended.notify_all();
}

// Called with the mutex held.
void WorkerPool::State::Start(const std::shared_ptr<State>& state) {
  std::erase_if(state->threads, [](Worker& worker) {
    if (!*worker.ended) return false;
    worker.thread.join();  // it has released the mutex or is about to: no wait
    return true;
  });
  // A new thread inherits the signal mask: the process's signals are for the
  // threads of the process, not for ours.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  Worker worker{{}, std::make_shared<bool>(false)};
  try {
    worker.thread = std::thread([state, ended = worker.ended] { Run(state, ended); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(worker.thread.native_handle(), state->name.c_str());
  state->threads.push_back(std::move(worker));
  ++state->alive;
}

WorkerPool::WorkerPool(std::string name, size_t workers, Handler handler, int nice)
    : state_(std::make_shared<State>(std::move(name), workers, std::move(handler), nice)) {
  try {
    const std::lock_guard lock(state_->mutex);
    for (size_t i = 0; i < workers; ++i) State::Start(state_);
  } catch (...) {
    Close();
    Join(std::chrono::milliseconds(1000));
    throw;
  }
}

WorkerPool::~WorkerPool() {
  Close();
  Join(std::chrono::milliseconds(1000));
}

bool WorkerPool::Submit(std::vector<Job> jobs) {
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->closed || state_->alive <= state_->stuck) return false;
    const size_t queued = state_->queue.size();
    try {
      for (Job& job : jobs) state_->queue.push_back(std::move(job));
    } catch (...) {  // no memory: none of them
      state_->queue.resize(queued);
      throw;
    }
  }
  state_->work.notify_one();
  return true;
}

void WorkerPool::Remove(const void* owner) {
  std::deque<Job> removed;  // released after the mutex
  const std::lock_guard lock(state_->mutex);
  std::deque<Job> kept;
  for (Job& job : state_->queue) {
    (job.owner.get() == owner ? removed : kept).push_back(std::move(job));
  }
  state_->queue.swap(kept);
}

void WorkerPool::NoteStuck(size_t count) {
  const std::lock_guard lock(state_->mutex);
  state_->stuck += static_cast<int64_t>(count);
  while (!state_->closed && state_->alive - state_->stuck < state_->workers &&
         state_->alive < state_->workers + state_->max_stuck) {
    try {
      State::Start(state_);
    } catch (const std::system_error&) {
      return;  // fewer workers for now; the next stuck one tries again
    }
  }
}

size_t WorkerPool::stuck() const {
  const std::lock_guard lock(state_->mutex);
  return static_cast<size_t>(std::max<int64_t>(state_->stuck, 0));
}

std::vector<WorkerPool::Job> WorkerPool::Close() {
  std::vector<Job> dropped;
  {
    const std::lock_guard lock(state_->mutex);
    state_->closed = true;
    std::move(state_->queue.begin(), state_->queue.end(), std::back_inserter(dropped));
    state_->queue.clear();
  }
  state_->work.notify_all();
  return dropped;
}

bool WorkerPool::Join(std::chrono::milliseconds patience) {
  std::vector<State::Worker> threads;
  std::vector<bool> ended;
  bool all = false;
  {
    std::unique_lock lock(state_->mutex);
    // No threads, yet some alive: an earlier call has left them behind.
    state_->worker_ended.wait_for(lock, patience,
                                  [&] { return state_->alive == 0 || state_->threads.empty(); });
    all = state_->alive == 0;
    threads.swap(state_->threads);
    for (const State::Worker& worker : threads) ended.push_back(*worker.ended);
  }
  for (size_t i = 0; i < threads.size(); ++i) {
    if (ended[i]) {
      threads[i].thread.join();
    } else {
      threads[i].thread.detach();
    }
  }
  return all;
}

}  // namespace cachestore
