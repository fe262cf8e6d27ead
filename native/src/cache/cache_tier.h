// CacheTier: host memory in front of another tier, shared by the processes of a
// host. A block is read from below once, not once per process, and one just
// dumped is served from memory.
#ifndef CACHESTORE_CACHE_CACHE_TIER_H_
#define CACHESTORE_CACHE_CACHE_TIER_H_

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/event_ring.h"
#include "cache/cache_core.h"
#include "cache/dump_queue.h"
#include "cache/load_queue.h"
#include "cache/region.h"
#include "cache/slot_table.h"
#include "host_copy/host_copy_executor.h"
#include "tier/tier.h"

namespace cachestore {

struct CacheOptions {
  Geometry geometry;
  std::array<uint8_t, 32> fingerprint{};
  bool shared = true;
  std::string directory = "/dev/shm";
  uint64_t capacity = 0;  // bytes; 0: a fraction of what is free, and a private buffer if need be
  size_t workers = 4;     // copy workers, of loads and as many again of dumps
  uint64_t queue_depth = 1024;                   // shards queued + running, per direction
  std::string cpu_affinity = "auto";             // of the copy workers: see host_copy/affinity.h
  std::chrono::milliseconds timeout{30000};      // of what is asked of the tier below
  std::chrono::milliseconds peer_timeout{5000};  // for another process to fill a slot
  uint32_t dirty_percent = 50;                   // of the slots that may be dirty
};

class CacheTier final : public Tier {
 public:
  static Result<std::unique_ptr<Tier>> Open(CacheOptions options, std::unique_ptr<Tier> below,
                                            std::shared_ptr<EventRing> events);
  ~CacheTier() override;

  // Only the first pool is cached: the others are the tier below's.
  Status OpenPool(PoolOptions options) override { return below_->OpenPool(std::move(options)); }
  void Lookup(uint32_t pool, std::span<const BlockId> blocks, std::span<uint8_t> present) override;
  size_t LookupPrefix(uint32_t pool, std::span<const BlockId> blocks) override;
  Status Load(const std::shared_ptr<Request>& request) override {
    return IsBelows(*request) ? below_->Load(request) : loads_.Load(request);
  }
  Status Dump(const std::shared_ptr<Request>& request) override {
    return IsBelows(*request) ? below_->Dump(request) : dumps_.Dump(request);
  }
  void Cancel(const std::shared_ptr<Request>& request, Code code) override;
  Status Clear() override;
  uint64_t Epoch() const override { return slots_.epoch(); }
  uint64_t LatestClear() const override { return below_->LatestClear(); }
  void AddStats(cs_stats& stats) const override;
  void AddSideStats(cs_stats& stats) const override { below_->AddSideStats(stats); }
  void Stop() override;
  void Drain() override;
  void Close() override;

 private:
  CacheTier(CacheOptions options, std::unique_ptr<Region> region, std::unique_ptr<Tier> below,
            std::shared_ptr<EventRing> events, const std::vector<int>& cpus);

  static bool IsBelows(const Request& request) { return request.batch().pool != 0; }
  static Result<std::unique_ptr<Region>> OpenRegion(const CacheOptions& options, Tier& below,
                                                    EventRing& events);
  static void Rescue(const CacheOptions& options, Region& region, Tier& below, EventRing& events);

  const CacheOptions options_;
  const std::shared_ptr<EventRing> events_;
  const std::unique_ptr<Tier> below_;
  const std::unique_ptr<Region> region_;
  mutable SlotTable slots_;
  mutable CacheCore core_;
  HostCopyExecutor load_executor_;
  HostCopyExecutor dump_executor_;
  LoadQueue loads_;
  DumpQueue dumps_;
  std::atomic<uint64_t> lookups_{0};
  std::atomic<uint64_t> lookup_hits_{0};
  std::atomic<bool> drained_{false};
  std::atomic<bool> closed_{false};
};

}  // namespace cachestore

#endif  // CACHESTORE_CACHE_CACHE_TIER_H_
