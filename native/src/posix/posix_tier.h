// PosixTier: blocks as files. Fans a request out into one job a shard over the
// load or the dump workers; looks up on the caller's thread where that is sure
// to end, on workers of its own elsewhere.
#ifndef CACHESTORE_POSIX_POSIX_TIER_H_
#define CACHESTORE_POSIX_POSIX_TIER_H_

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/event_ring.h"
#include "base/worker_pool.h"
#include "posix/collector.h"
#include "posix/shard_io.h"
#include "posix/upkeep.h"
#include "tier/admission.h"
#include "tier/tier.h"

namespace cachestore {

struct PosixOptions {
  std::vector<std::string> roots;  // absolute directories
  PoolOptions first;
  size_t load_workers = 1;
  size_t dump_workers = 1;
  int dump_nice = 0;       // added to the dump workers' nice value
  size_t queue_depth = 1;  // shards queued + running, per direction
  cs_direct direct = CS_DIRECT_OFF;
  cs_zero_copy zero_copy = CS_ZERO_COPY_AUTO;
  cs_verify verify = CS_VERIFY_ALWAYS;
  std::vector<uint64_t> capacities;  // of roots, bytes; 0: no limit
  uint64_t free_space_reserve = 0;   // bytes to leave free on each filesystem
  uint32_t high_watermark_percent = 97;
  uint32_t low_watermark_percent = 95;
  // How often uses of blocks are written to the times of their files.
  std::chrono::milliseconds use_interval{1000};
  // Between steps of evicting, which are bounded pieces of work.
  std::chrono::milliseconds evict_interval = Collector::kBusy;
  std::chrono::milliseconds timeout{1000};  // of lookups and clears off the caller's thread
};

class PosixTier final : public Tier {
 public:
  // `events` may be kept beyond Close by a worker left behind, and `env` too.
  static Result<std::unique_ptr<Tier>> Open(Env& env, std::shared_ptr<EventRing> events,
                                            PosixOptions options);
  ~PosixTier() override;

  Status OpenPool(PoolOptions options) override;
  void Lookup(uint32_t pool, std::span<const BlockId> blocks, std::span<uint8_t> present) override;
  size_t LookupPrefix(uint32_t pool, std::span<const BlockId> blocks) override;
  Status Load(const std::shared_ptr<Request>& request) override;
  Status Dump(const std::shared_ptr<Request>& request) override;
  void NoteUse(std::span<const BlockId> blocks, const BlockId* parent) override;
  void Cancel(const std::shared_ptr<Request>& request, Code code) override;
  Status Clear() override;
  uint64_t Epoch() const override;
  uint64_t LatestClear() const override;
  void AddStats(cs_stats& stats) const override;
  void AddSideStats(cs_stats& stats) const override;
  void Stop() override;
  void Close() override;

 private:
  struct Core;  // all that workers use: they may outlive the tier

  PosixTier(std::shared_ptr<Core> core, PosixOptions options);

  Status Admit(Admission& direction, const std::shared_ptr<Request>& request,
               std::shared_ptr<void> tier_data);
  Status Submit(WorkerPool& pool, const std::shared_ptr<Request>& request);
  // Lookups and clears go to workers: where a directory may hang, or isn't known yet.
  bool LooksAside() const;
  uint64_t LookupAside(uint32_t pool, std::span<const BlockId> blocks, std::span<uint8_t> present,
                       Request::Clock::time_point deadline);
  // Runs a request of lookups or clears to its end or the deadline.
  void RunAside(const std::shared_ptr<Request>& request, Request::Clock::time_point deadline);
  void CleanUp();

  const PosixOptions options_;
  const std::shared_ptr<Core> core_;
  const std::chrono::milliseconds timeout_;
  WorkerPool load_pool_;
  WorkerPool dump_pool_;
  std::unique_ptr<WorkerPool> aside_pool_;  // lookups and clears that may hang
  WorkerPool cleaning_pool_;                // one worker: removes trash
  Upkeep upkeep_;
};

}  // namespace cachestore

#endif  // CACHESTORE_POSIX_POSIX_TIER_H_
