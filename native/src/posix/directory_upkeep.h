// DirectoryUpkeep: what the upkeep of a store does for each of its directories:
// notes uses of blocks, makes room, and probes one that failed.
//
// Thread-safe, but for Tick: one thread for each directory.
#ifndef CACHESTORE_POSIX_DIRECTORY_UPKEEP_H_
#define CACHESTORE_POSIX_DIRECTORY_UPKEEP_H_

#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include "base/env.h"
#include "base/event_ring.h"
#include "cachestore/c_api.h"
#include "posix/collector.h"
#include "posix/shard_io.h"
#include "posix/use_log.h"

namespace cachestore {

class DirectoryUpkeep {
 public:
  // `io` must outlive it.
  DirectoryUpkeep(Env& env, EventRing& events, const ShardIo& io,
                  std::chrono::milliseconds use_interval);

  // The first steps where something is evicted, so that the first dump knows what
  // is used. Bounded by `patience`, unless a filesystem hangs.
  void Begin(std::chrono::milliseconds patience);
  // See Upkeep::Tick.
  std::chrono::milliseconds Tick(size_t directory, bool last);
  // What takes long ends soon.
  void Stop() { stopping_.store(true); }

  // Kept where something is evicted.
  UseLog& uses() { return *uses_; }
  // Whether something is evicted anywhere.
  bool evicts() const;
  void NoteClear(size_t directory);
  void AddStats(cs_stats& stats) const;

 private:
  using Clock = std::chrono::steady_clock;

  struct Tended {
    Directory* directory = nullptr;
    std::unique_ptr<Collector> collector;  // null: without limits
    Clock::time_point stepped{};           // the ticking thread's
  };

  void ProbeIfDue(Directory& directory);

  std::vector<Tended> directories_;
  std::unique_ptr<UseLog> uses_;
  std::atomic<bool> stopping_{false};
};

}  // namespace cachestore

#endif  // CACHESTORE_POSIX_DIRECTORY_UPKEEP_H_
