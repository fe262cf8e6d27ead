#include "host_copy/host_copy_executor.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "host_copy/system.h"

namespace cachestore {
namespace {

// OK: all of it can be copied, and *payload is the sum of the sizes.
Status CheckShard(const void* slot, uint64_t slot_size, std::span<uint8_t* const> tensors,
                  std::span<const uint64_t> sizes, uint64_t* payload) {
  if (slot == nullptr) return {CS_INVALID, "the slot's address is null"};
  if (tensors.size() != sizes.size()) {
    return {CS_INVALID, std::to_string(tensors.size()) + " tensor addresses for " +
                            std::to_string(sizes.size()) + " sizes"};
  }
  uint64_t sum = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (tensors[i] == nullptr) {
      return {CS_INVALID, "the address of tensor " + std::to_string(i) + " of " +
                              std::to_string(tensors.size()) + " is null"};
    }
    if (sizes[i] > slot_size - sum) {
      return {CS_INVALID, "tensor " + std::to_string(i) + " of " + std::to_string(sizes[i]) +
                              " bytes doesn't fit into the " + std::to_string(slot_size - sum) +
                              " left of the slot's " + std::to_string(slot_size)};
    }
    sum += sizes[i];
  }
  *payload = sum;
  return Status::Ok();
}

}  // namespace

struct HostCopyExecutor::Group {
  Group(size_t steps, Completion done) : pending(steps), completion(std::move(done)) {}

  std::atomic<size_t> pending;
  std::atomic<size_t> failed{0};
  const Completion completion;
};

HostCopyExecutor::HostCopyExecutor(HostCopyOptions options) : options_(std::move(options)) {
  if (options_.workers == 0) throw std::invalid_argument("a HostCopyExecutor without workers");
  try {
    threads_.reserve(options_.workers);
    for (size_t worker = 0; worker < options_.workers; ++worker) {
      threads_.push_back(StartThread(options_.name, [this, worker] { Run(worker); }));
      if (!options_.cpus.empty() && !PinThread(threads_.back(), options_.cpus)) pinned_ = false;
    }
  } catch (...) {
    Stop(false);
    throw;
  }
}

HostCopyExecutor::~HostCopyExecutor() { Stop(false); }

void HostCopyExecutor::Run(size_t worker) {
  std::unique_lock lock(mutex_);
  for (;;) {
    ++idle_;
    work_.wait(lock, [&] { return stopped_ || !queue_.empty(); });
    --idle_;
    if (queue_.empty()) return;  // stopped, and drained
    Batch& front = queue_.front();
    Step step = std::move(front.steps[front.next++]);
    const std::shared_ptr<Group> group = front.group;
    std::vector<Step> used_up;  // freed without the mutex
    if (front.next == front.steps.size()) {
      used_up = std::move(front.steps);
      queue_.pop_front();
    }
    --queued_;
    ++running_;
    lock.unlock();
    used_up.clear();
    const bool failed = Thrown([&] { step(worker); }) != CS_OK;
    step = nullptr;  // what it holds is let go before anybody learns that it has ended
    if (group != nullptr) End(*group, 1, failed);
    lock.lock();
    --running_;
    if (failed) ++failed_steps_;
  }
}

void HostCopyExecutor::End(Group& group, size_t ended, bool failed) {
  if (failed) group.failed.fetch_add(ended, std::memory_order_relaxed);
  // The last one sees what all steps did, and their failures.
  if (group.pending.fetch_sub(ended, std::memory_order_acq_rel) != ended) return;
  if (Thrown([&] { group.completion(group.failed.load(std::memory_order_relaxed)); }) == CS_OK) {
    return;
  }
  const std::lock_guard lock(mutex_);
  ++failed_steps_;
}

bool HostCopyExecutor::Push(Batch batch) {
  size_t wake = 0;
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return false;
    const size_t steps = batch.steps.size();
    if (steps == 0) return true;
    queue_.push_back(std::move(batch));
    queued_ += steps;
    wake = std::min(steps, idle_);
  }
  for (; wake > 0; --wake) work_.notify_one();
  return true;
}

bool HostCopyExecutor::Submit(std::vector<Step> steps) {
  return Push({std::move(steps), nullptr, 0});
}

bool HostCopyExecutor::Submit(std::vector<Step> steps, Completion completion) {
  const size_t count = steps.size();
  const auto group = std::make_shared<Group>(count, std::move(completion));
  if (!Push({std::move(steps), group, 0})) return false;
  if (count == 0) End(*group, 0, false);
  return true;
}

Status HostCopyExecutor::Gather(uint8_t* slot, uint64_t slot_size,
                                std::span<uint8_t* const> tensors, std::span<const uint64_t> sizes,
                                uint32_t* checksum) const {
  uint64_t payload = 0;
  Status status = CheckShard(slot, slot_size, tensors, sizes, &payload);
  if (!status.ok()) return status;
  uint32_t crc = 0;
  uint8_t* to = slot;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (checksum != nullptr) {
      crc = CopyBytesChecksummed(to, tensors[i], sizes[i], crc, options_.kernel);
    } else {
      CopyBytes(to, tensors[i], sizes[i], options_.kernel);
    }
    to += sizes[i];
  }
  std::memset(to, 0, slot_size - payload);
  if (checksum != nullptr) *checksum = crc;
  return Status::Ok();
}

Status HostCopyExecutor::Scatter(const uint8_t* slot, std::span<uint8_t* const> tensors,
                                 std::span<const uint64_t> sizes) const {
  uint64_t payload = 0;
  Status status = CheckShard(slot, UINT64_MAX, tensors, sizes, &payload);
  if (!status.ok()) return status;
  for (size_t i = 0; i < sizes.size(); ++i) {
    CopyBytes(tensors[i], slot, sizes[i], options_.kernel);
    slot += sizes[i];
  }
  return Status::Ok();
}

std::vector<HostCopyExecutor::Step> HostCopyExecutor::Stop(bool drain) {
  std::deque<Batch> taken;
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    if (!drain) {
      taken.swap(queue_);
      queued_ = 0;
    }
  }
  work_.notify_all();
  std::vector<Step> dropped;
  for (Batch& batch : taken) {
    const auto first = batch.steps.begin() + static_cast<std::ptrdiff_t>(batch.next);
    const auto count = static_cast<size_t>(batch.steps.end() - first);
    std::move(first, batch.steps.end(), std::back_inserter(dropped));
    if (batch.group != nullptr) End(*batch.group, count, true);
  }
  const std::lock_guard lock(join_mutex_);
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  return dropped;
}

uint64_t HostCopyExecutor::queued() const {
  const std::lock_guard lock(mutex_);
  return queued_;
}

uint64_t HostCopyExecutor::running() const {
  const std::lock_guard lock(mutex_);
  return running_;
}

uint64_t HostCopyExecutor::failed_steps() const {
  const std::lock_guard lock(mutex_);
  return failed_steps_;
}

}  // namespace cachestore
