// DirectoryUpkeep: what the upkeep of a store does for each of its roots, and all
// pools there: notes uses of blocks, makes room, and probes one that failed.
//
// Thread-safe, but for Tick: one thread for each root; and AddPool: one at a time.
#ifndef CACHESTORE_POSIX_DIRECTORY_UPKEEP_H_
#define CACHESTORE_POSIX_DIRECTORY_UPKEEP_H_

#include <array>
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
  // `first`: of the first pool; it must outlive this.
  DirectoryUpkeep(Env& env, EventRing& events, const ShardIo& first,
                  std::chrono::milliseconds use_interval, std::chrono::milliseconds evict_interval);
  // A further pool, in the same roots; it must outlive this.
  void AddPool(const ShardIo& io);

  // The first steps where something is evicted, so that the first dump knows what
  // is used. Bounded by `patience`, unless a filesystem hangs.
  void Begin(std::chrono::milliseconds patience);
  // See Upkeep::Tick.
  std::chrono::milliseconds Tick(size_t root, bool last);
  // What takes long ends soon.
  void Stop() { stopping_.store(true); }

  // Kept where something is evicted.
  UseLog& uses() { return *uses_; }
  // Whether something is evicted anywhere.
  bool evicts() const;
  void NoteClear(size_t root);
  void AddStats(cs_stats& stats) const;

 private:
  using Clock = std::chrono::steady_clock;

  struct Tended {
    Directory* directory = nullptr;        // the first pool's
    std::unique_ptr<Collector> collector;  // null: without limits
    // The ticking thread's.
    Clock::time_point stepped{};
    Clock::time_point wanted_since{};  // room, and times were not all written
  };

  void ProbeIfDue(size_t root);
  Status Touch(size_t root, const BlockId& block, uint64_t time);
  std::vector<Directory*> DirectoriesIn(size_t root) const;

  Env& env_;
  std::array<const ShardIo*, kMaxPools> ios_{};
  std::atomic<size_t> pools_{0};
  std::vector<Tended> roots_;
  std::unique_ptr<UseLog> uses_;
  std::atomic<bool> stopping_{false};
};

}  // namespace cachestore

#endif  // CACHESTORE_POSIX_DIRECTORY_UPKEEP_H_
