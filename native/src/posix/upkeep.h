// Upkeep: a thread for each storage root, for what nobody waits for: noting
// uses of blocks, making room, probing a directory that failed. A root that
// hangs holds up only its own.
//
// Thread-safe.
#ifndef CACHESTORE_POSIX_UPKEEP_H_
#define CACHESTORE_POSIX_UPKEEP_H_

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>

#include "base/worker_pool.h"

namespace cachestore {

class Upkeep {
 public:
  // Does a bounded piece of what is due for a root; the result is after how long
  // it wants to be called again, unless woken before. `last`: no call follows.
  // Must keep alive whatever it uses.
  using Tick = std::function<std::chrono::milliseconds(size_t root, bool last)>;

  Upkeep(size_t roots, Tick tick);
  ~Upkeep();  // Stop and Join

  // There is something to do. Cheap where it was said already.
  void Wake(size_t root);
  // Wake of this root, for those who may outlive this.
  std::function<void()> Waker(size_t root);
  // Lets each thread run its last tick, also one that hasn't run any.
  void Stop();
  // After Stop. False: a thread hangs, and is left behind with all it holds.
  bool Join(std::chrono::milliseconds patience);

 private:
  struct State;
  const std::shared_ptr<State> state_;
  WorkerPool threads_;
};

}  // namespace cachestore

#endif  // CACHESTORE_POSIX_UPKEEP_H_
