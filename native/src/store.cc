#include "store.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "pipeline/pipeline.h"

namespace cachestore {
namespace {

// A caller that never waits for its tasks is refused before it fills memory.
constexpr size_t kMaxTasks = 65536;
// At close, running transfers may take this long at most (but for those that
// must be waited for).
constexpr std::chrono::milliseconds kClosePatience{5000};

}  // namespace

class Store::Call {
 public:
  enum class When { kOpen, kAlways };

  explicit Call(Store& store, When when = When::kOpen) : store_(store) {
    if (store_.IsForked()) return;  // whoever had the mutex isn't here
    const std::lock_guard lock(store_.mutex_);
    inside_ = when == When::kAlways || !store_.closing_;
    if (inside_) ++store_.calls_inside_;
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() {
    if (!inside_) return;
    const std::lock_guard lock(store_.mutex_);
    if (--store_.calls_inside_ == 0) store_.call_over_.notify_all();
  }

  Status status() const {
    if (inside_) return Status::Ok();
    return {CS_CLOSED, store_.IsForked() ? "the store was opened before this process was forked"
                                         : "the store is closed"};
  }

 private:
  Store& store_;
  bool inside_ = false;
};

// A task between its entry into the table and the tier's answer.
class Store::Starting {
 public:
  Starting(Store& store, cs_task task) : store_(store), task_(task) {}
  Starting(const Starting&) = delete;
  Starting& operator=(const Starting&) = delete;
  ~Starting() {
    const std::lock_guard lock(store_.mutex_);
    if (!keep_) store_.tasks_.erase(task_);
    if (--store_.starting_ == 0) store_.call_over_.notify_all();
  }
  void Keep() { keep_ = true; }

 private:
  Store& store_;
  const cs_task task_;
  bool keep_ = false;
};

Result<std::unique_ptr<Store>> Store::Open(const cs_config& config, Env& env) {
  auto events = std::make_shared<EventRing>();
  Result<std::unique_ptr<Tier>> tier = OpenPipeline(config, env, events);
  if (!tier.ok()) return tier.status();
  Result<PoolOptions> pool = PoolOf(config);
  if (!pool.ok()) return pool.status();
  return std::unique_ptr<Store>(new Store(std::move(tier.value()), std::move(pool.value()),
                                          std::move(events),
                                          std::chrono::milliseconds(config.timeout_ms)));
}

Store::Store(std::unique_ptr<Tier> tier, PoolOptions first, std::shared_ptr<EventRing> events,
             std::chrono::milliseconds timeout)
    : tier_(std::move(tier)), events_(std::move(events)), timeout_(timeout), forks_(ForkCount()) {
  geometries_[0] = std::move(first.geometry);
  identities_.insert(std::move(first.identity_name));
}

Store::~Store() {
  // The threads that it would join aren't here.
  if (IsForked()) (void)tier_.release();
}

bool Store::IsForked() const { return forks_ != ForkCount(); }

Result<uint32_t> Store::OpenPool(const cs_pool_config& config) {
  const Call call(*this);
  if (!call.status().ok()) return call.status();
  Result<PoolOptions> options = PoolOf(config);
  if (!options.ok()) return options.status();
  const std::lock_guard opening(opening_pool_);
  const uint32_t pool = pools_.load(std::memory_order_relaxed);
  if (pool == kMaxPools) {
    return Status(CS_INVALID, "a store has " + std::to_string(kMaxPools) + " pools at most");
  }
  const std::string name = options.value().identity_name;
  if (identities_.contains(name)) {
    return Status(CS_INVALID, "identity_name is " + name + "; a pool of that name is open");
  }
  geometries_[pool] = options.value().geometry;
  // Nothing fails once the tier has counted it.
  const auto known = identities_.insert(name).first;
  Status opened{CS_NO_MEMORY, "no memory to open a pool"};
  (void)Thrown([&] { opened = tier_->OpenPool(std::move(options.value())); });
  if (!opened.ok()) {
    identities_.erase(known);
    return opened;
  }
  pools_.store(pool + 1, std::memory_order_release);
  return pool;
}

Status Store::CheckPool(uint32_t pool) const {
  const uint32_t pools = pools_.load(std::memory_order_acquire);
  if (pool < pools) return Status::Ok();
  return {CS_INVALID, "pool is " + std::to_string(pool) + "; the store has pools 0 to " +
                          std::to_string(pools - 1)};
}

Status Store::Lookup(uint32_t pool, std::span<const BlockId> blocks, std::span<uint8_t> present) {
  const Call call(*this);
  if (!call.status().ok()) return call.status();
  if (Status open = CheckPool(pool); !open.ok()) return open;
  tier_->Lookup(pool, blocks, present);
  return Status::Ok();
}

Result<size_t> Store::LookupPrefix(uint32_t pool, std::span<const BlockId> blocks) {
  const Call call(*this);
  if (!call.status().ok()) return call.status();
  if (Status open = CheckPool(pool); !open.ok()) return open;
  return tier_->LookupPrefix(pool, blocks);
}

Result<Batch> Store::BatchOf(const cs_batch& batch) const {
  if (Status open = CheckPool(batch.pool); !open.ok()) return open;
  const Geometry& geometry = geometries_[batch.pool];
  const size_t tensors = geometry.tensor_sizes.size();
  if (batch.n > 0 &&
      (batch.block_ids == nullptr || batch.addresses == nullptr || batch.sizes == nullptr)) {
    return Status(CS_INVALID, "block_ids, addresses or sizes is null");
  }
  if (batch.m != tensors) {
    return Status(CS_INVALID, "m is " + std::to_string(batch.m) + "; a shard has " +
                                  std::to_string(tensors) + " tensors");
  }
  Batch copy;
  copy.pool = batch.pool;
  copy.tensors = tensors;
  if (batch.parent_id != nullptr) {
    std::memcpy(copy.parent.emplace().data(), batch.parent_id, copy.parent->size());
  }
  copy.blocks.resize(batch.n);
  copy.shard_indices.resize(batch.n);
  copy.addresses.resize(batch.n * tensors);
  for (size_t i = 0; i < batch.n; ++i) {
    std::memcpy(copy.blocks[i].data(), batch.block_ids + 16 * i, 16);
    if (batch.shard_indices != nullptr) copy.shard_indices[i] = batch.shard_indices[i];
    if (copy.shard_indices[i] >= geometry.shards()) {
      return Status(CS_INVALID, "shard_indices[" + std::to_string(i) + "] is " +
                                    std::to_string(copy.shard_indices[i]) + "; a block has " +
                                    std::to_string(geometry.shards()) + " shards");
    }
    for (size_t t = 0; t < tensors; ++t) {
      const size_t at = i * tensors + t;
      if (batch.addresses[at] == 0) {
        return Status(CS_INVALID, "addresses[" + std::to_string(at) + "] is null");
      }
      if (batch.sizes[at] != geometry.tensor_sizes[t]) {
        return Status(CS_INVALID, "sizes[" + std::to_string(at) + "] is " +
                                      std::to_string(batch.sizes[at]) + "; that tensor has " +
                                      std::to_string(geometry.tensor_sizes[t]) + " bytes");
      }
      copy.addresses[at] = reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(batch.addresses[at]));
    }
  }
  return copy;
}

Result<cs_task> Store::Start(const cs_batch& batch,
                             Status (Tier::*start)(const std::shared_ptr<Request>&)) {
  const Call call(*this);
  if (!call.status().ok()) return call.status();
  Result<Batch> copy = BatchOf(batch);
  if (!copy.ok()) return copy.status();
  const auto request = std::make_shared<Request>(std::move(copy.value()));
  // In the table before it starts: there it can't fail any more.
  cs_task task = 0;
  {
    const std::lock_guard lock(mutex_);
    if (tasks_.size() >= kMaxTasks) {
      return Status(CS_REFUSED, std::to_string(kMaxTasks) + " tasks are not waited for");
    }
    task = next_task_++;
    tasks_.emplace(task, request);
    ++starting_;
  }
  Starting starting(*this, task);
  if (request->size() > 0) {
    if (Status started = (tier_.get()->*start)(request); !started.ok()) return started;
  }
  starting.Keep();
  return task;
}

Status Store::Wait(cs_task task, std::chrono::milliseconds timeout, std::span<int32_t> results) {
  const auto deadline = Request::Clock::now() + timeout;
  // Also while closing: the caller's memory is in use until the task has ended.
  const Call call(*this, Call::When::kAlways);
  if (!call.status().ok()) return call.status();
  std::shared_ptr<Request> request;
  {
    const std::lock_guard lock(mutex_);
    const auto found = tasks_.find(task);
    if (found == tasks_.end()) {
      return {CS_INVALID, "task " + std::to_string(task) + " is unknown or waited for already"};
    }
    if (results.size() != found->second->size()) {
      return {CS_INVALID, "n is " + std::to_string(results.size()) + "; the task has " +
                              std::to_string(found->second->size()) + " shards"};
    }
    // The entry stays until the end: Close looks for what is unfinished here.
    request = found->second;
  }
  End(request, deadline, CS_TIMEOUT);
  std::copy(request->results().begin(), request->results().end(), results.begin());
  const std::lock_guard lock(mutex_);
  tasks_.erase(task);
  return Status::Ok();
}

void Store::End(const std::shared_ptr<Request>& request, Request::Clock::time_point deadline,
                Code late) {
  if (request->WaitUntil(deadline)) return;
  tier_->Cancel(request, late);
  request->Wait();
}

Status Store::Clear() {
  const Call call(*this);
  if (!call.status().ok()) return call.status();
  return tier_->Clear();
}

cs_stats Store::Stats() {
  cs_stats stats = {};
  if (IsForked()) return stats;
  tier_->AddStats(stats);
  stats.dropped_events = events_->dropped();
  return stats;
}

std::optional<EventRing::Event> Store::NextEvent() {
  return IsForked() ? std::nullopt : events_->Take();
}

void Store::Shutdown() {
  // Inside, for a Close that comes meanwhile.
  const Call call(*this, Call::When::kAlways);
  if (!call.status().ok()) return;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closing_, true)) return;
  }
  tier_->Stop();
  std::vector<std::shared_ptr<Request>> unfinished;
  {
    // A call that was inside may still be starting a request: the table is
    // whole once the tier, which never blocks, has accepted or refused it.
    std::unique_lock lock(mutex_);
    call_over_.wait(lock, [&] { return starting_ == 0; });
    for (const auto& [task, request] : tasks_) unfinished.push_back(request);
  }
  const auto deadline = Request::Clock::now() + std::min(timeout_, kClosePatience);
  for (const auto& request : unfinished) End(request, deadline, CS_CLOSED);
  tier_->Drain();
}

void Store::Close() {
  if (IsForked()) return;
  Shutdown();
  {
    std::unique_lock lock(mutex_);
    call_over_.wait(lock, [&] { return calls_inside_ == 0; });
  }
  tier_->Close();
}

}  // namespace cachestore
