// WorkerPool: threads that run jobs of one kind, first come first served.
//
// A job that outlives its request (I/O in a hung filesystem) makes its worker
// stuck: the pool starts a replacement, up to a bound, so that one bad
// directory doesn't use up the workers. The stuck worker's memory is its own
// and is kept alive by it, also past the pool's end.
//
// Invariants, all under State::mutex:
//   alive - stuck <= workers, but for workers about to end;
//   alive <= workers + max_stuck;
//   a job is in the queue, or in the hands of one worker, or handed back.
#ifndef CACHESTORE_BASE_WORKER_POOL_H_
#define CACHESTORE_BASE_WORKER_POOL_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/aligned_buffer.h"

namespace cachestore {

class WorkerPool {
 public:
  // What a job is about; the handler knows the type behind `owner`.
  struct Job {
    std::shared_ptr<void> owner;
    uint32_t index = 0;
  };
  // Memory of one worker.
  struct Scratch {
    AlignedBuffer small;  // records and padding
    AlignedBuffer large;  // a bounced shard
  };
  // Runs a job. True: the job's request had been given up meanwhile (NoteStuck
  // counted this worker). Must keep alive whatever it uses.
  using Handler = std::function<bool(Job&, Scratch&)>;

  // `name` is shown by ps and top, at most 15 characters. `nice` is added to the
  // threads' nice value: of work that nobody waits for. Throws std::system_error
  // when the system has no thread for it.
  WorkerPool(std::string name, size_t workers, Handler handler, int nice = 0);
  ~WorkerPool();  // Close and Join, jobs dropped

  // Queues all jobs or none, and wakes one worker, which wakes the next: the
  // caller isn't kept from its CPU by all of them. False: stopped, or every
  // worker is stuck.
  [[nodiscard]] bool Submit(std::vector<Job> jobs);
  // Drops the queued jobs of `owner`.
  void Remove(const void* owner);
  // `count` workers were given up by their requests.
  void NoteStuck(size_t count);
  size_t stuck() const;

  // Takes no more jobs; returns the queued ones.
  std::vector<Job> Close();
  // After Close: waits for the running jobs. Workers still running after
  // `patience` are left behind; false if any are running now. Once workers
  // are left behind, further calls don't wait.
  bool Join(std::chrono::milliseconds patience);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace cachestore

#endif  // CACHESTORE_BASE_WORKER_POOL_H_
