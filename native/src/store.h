// Store: what a handle of the C interface stands for: a pipeline, its pools, the
// tasks that are not waited for yet, and who is inside a call.
//
// In a forked child it is inert: every call fails, Close does nothing.
//
// Thread-safe; Close is the last call.
#ifndef CACHESTORE_STORE_H_
#define CACHESTORE_STORE_H_

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>

#include "base/env.h"
#include "base/event_ring.h"
#include "base/status.h"
#include "cachestore/c_api.h"
#include "tier/tier.h"

namespace cachestore {

class Store {
 public:
  static Result<std::unique_ptr<Store>> Open(const cs_config& config, Env& env);
  ~Store();

  Result<uint32_t> OpenPool(const cs_pool_config& config);
  Status Lookup(uint32_t pool, std::span<const BlockId> blocks, std::span<uint8_t> present);
  Result<size_t> LookupPrefix(uint32_t pool, std::span<const BlockId> blocks);
  Result<cs_task> Load(const cs_batch& batch) { return Start(batch, &Tier::Load); }
  Result<cs_task> Dump(const cs_batch& batch) { return Start(batch, &Tier::Dump); }
  Status Wait(cs_task task, std::chrono::milliseconds timeout, std::span<int32_t> results);
  Status Clear();
  cs_stats Stats();
  std::optional<EventRing::Event> NextEvent();

  // Refuses new calls, ends every accepted request, and has the tiers finish.
  void Shutdown();
  // Shutdown, then waits until no call is inside and joins the threads.
  void Close();

 private:
  class Call;      // counts a thread as inside, unless the store is closing
  class Starting;  // counts a task as one that the tier hasn't answered for

  Store(std::unique_ptr<Tier> tier, PoolOptions first, std::shared_ptr<EventRing> events,
        std::chrono::milliseconds timeout);

  // CS_INVALID unless it is open.
  Status CheckPool(uint32_t pool) const;
  Result<Batch> BatchOf(const cs_batch& batch) const;
  Result<cs_task> Start(const cs_batch& batch,
                        Status (Tier::*start)(const std::shared_ptr<Request>&));
  // Waits for a request to end by the deadline, then makes it end.
  void End(const std::shared_ptr<Request>& request, Request::Clock::time_point deadline, Code late);

  bool IsForked() const;

  std::unique_ptr<Tier> tier_;  // the same for all of our life
  // Those below pools_ don't change any more.
  std::array<Geometry, kMaxPools> geometries_;
  std::atomic<uint32_t> pools_{1};  // open ones
  const std::shared_ptr<EventRing> events_;
  const std::chrono::milliseconds timeout_;
  const uint32_t forks_;  // ForkCount at Open

  std::mutex opening_pool_;           // held while one is opened; guards the next
  std::set<std::string> identities_;  // names of the pools' directories

  std::mutex mutex_;  // guards all below
  std::condition_variable call_over_;
  size_t calls_inside_ = 0;
  size_t starting_ = 0;
  bool closing_ = false;
  cs_task next_task_ = 1;
  std::unordered_map<cs_task, std::shared_ptr<Request>> tasks_;
};

}  // namespace cachestore

#endif  // CACHESTORE_STORE_H_
