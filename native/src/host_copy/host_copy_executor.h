// HostCopyExecutor: an unordered executor over several workers, with no order
// between jobs, so nobody relies on stream order. It is no device stream: two
// steps of one Submit run at the same time or in either order, and what has to
// come after a step is submitted by that step's end, or is its completion.
//
// It owns the copy workers, their start and stop and affinity, the copy kernel,
// gather and scatter, and completion. It knows no request, no slot and no
// backend.
//
// Its queue has no bound of its own: callers reserve room for all their shards
// before they submit, and give it back when a shard is terminal, so the
// reservation's depth is the bound.
//
// Workers are pinned to the whole set of CPUs, not each to one of it: a worker
// whose CPU is busy with others' work could not move, and its copies would
// hold up the request.
//
// Thread-safe.
#ifndef CACHESTORE_HOST_COPY_HOST_COPY_EXECUTOR_H_
#define CACHESTORE_HOST_COPY_HOST_COPY_EXECUTOR_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "host_copy/copy_kernel.h"

namespace cachestore {

struct HostCopyOptions {
  std::string name;       // of the threads, at most 15 characters
  size_t workers = 0;     // >= 1
  std::vector<int> cpus;  // of all workers; empty: no affinity
  CopyKernel kernel = CopyKernel::kAuto;
};

class HostCopyExecutor {
 public:
  // A step of one shard; `worker` is below workers(). Runs on a worker; must
  // not block on I/O, on a backend or on another process. May Submit. One that
  // throws is counted and otherwise as if it had returned: a step that can fail
  // reports that itself, to whom it concerns.
  using Step = std::function<void(size_t worker)>;
  // How many of the steps threw or were dropped by Stop.
  using Completion = std::function<void(size_t failed)>;

  // Throws std::system_error when the system has no thread for a worker, and
  // leaves none behind; std::invalid_argument without workers.
  explicit HostCopyExecutor(HostCopyOptions options);
  // Stop(false). The owner that has to answer for queued steps calls Stop before.
  ~HostCopyExecutor();
  HostCopyExecutor(const HostCopyExecutor&) = delete;
  HostCopyExecutor& operator=(const HostCopyExecutor&) = delete;

  // Queues all steps or none (false: stopped). Never blocks. Throws
  // std::bad_alloc, with nothing queued.
  [[nodiscard]] bool Submit(std::vector<Step> steps);
  // And calls `completion` once, when the last of the steps has ended: on the
  // worker that ended it, or in Stop; in Submit if there are no steps.
  [[nodiscard]] bool Submit(std::vector<Step> steps, Completion completion);

  // Synchronous: on the calling thread, which need not be a worker's. Nothing
  // is written unless the arguments are right: CS_INVALID names a null pointer,
  // unequal counts, or tensors larger together than the slot.

  // Copies the tensors, one after another, into consecutive bytes of `slot`,
  // and zeroes the rest. `checksum`, if not null: the CRC-32C of the tensors'
  // bytes in this order, without the zeroes.
  Status Gather(uint8_t* slot, uint64_t slot_size, std::span<uint8_t* const> tensors,
                std::span<const uint64_t> sizes, uint32_t* checksum) const;
  // The reverse. The slot has at least the sum of `sizes`.
  Status Scatter(const uint8_t* slot, std::span<uint8_t* const> tensors,
                 std::span<const uint64_t> sizes) const;

  // Takes no more; runs what is queued (drain), or drops and returns it, not
  // called; waits for what is running. Not from a worker. Again: what is still
  // queued then.
  std::vector<Step> Stop(bool drain);

  size_t workers() const { return options_.workers; }
  CopyKernel kernel() const { return options_.kernel; }
  // False: the system has refused the affinity for some worker.
  bool pinned() const { return pinned_; }
  // Steps, now. A step is running until its completion has returned.
  uint64_t queued() const;
  uint64_t running() const;
  // Steps and completions that threw, since the start.
  uint64_t failed_steps() const;

 private:
  struct Group;
  struct Batch {
    std::vector<Step> steps;
    std::shared_ptr<Group> group;  // null: no completion
    size_t next = 0;
  };

  void Run(size_t worker);
  bool Push(Batch batch);
  // Notes that `ended` steps of a group have ended.
  void End(Group& group, size_t ended, bool failed);

  const HostCopyOptions options_;
  bool pinned_ = true;  // since the constructor

  mutable std::mutex mutex_;  // guards all below
  std::condition_variable work_;
  std::deque<Batch> queue_;  // none without a step left
  size_t idle_ = 0;
  uint64_t queued_ = 0;
  uint64_t running_ = 0;
  uint64_t failed_steps_ = 0;
  bool stopped_ = false;

  std::mutex join_mutex_;  // guards threads_ after the constructor; taken without mutex_
  std::vector<std::thread> threads_;
};

}  // namespace cachestore

#endif  // CACHESTORE_HOST_COPY_HOST_COPY_EXECUTOR_H_
