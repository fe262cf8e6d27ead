// Request: one accepted load or dump, and the one place where a shard's worker
// and its waiter agree on who may do what to the caller's memory.
//
// Every shard ends exactly once, in kDone. The waiter may give up (Cancel) at
// any time; what that does depends on the shard's phase:
//
//   kQueued      nobody works on it           -> ended at once
//   kTouching    a worker uses the caller's   -> waited for; the worker ends it
//                memory                          or, on leaving, finds it ended
//   kWorking     a worker uses memory of ours -> ended at once; worker left behind
//   kParked      its part is done, the block  -> ended at once
//                isn't
//   kPublishing  a worker makes the block     -> as kTouching where `sure`, else
//                visible                         ended, and the worker takes the
//                                                block back
//
// So after Cancel and Wait the caller's memory is free, and a dump whose
// waiter was failed is not published: BeginPublish and Cancel exclude each
// other.
//
// Thread-safe.
#ifndef CACHESTORE_TIER_REQUEST_H_
#define CACHESTORE_TIER_REQUEST_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "tier/geometry.h"

namespace cachestore {

// n shards; the tensors of shard i are the m addresses from i * m on.
struct Batch {
  std::vector<BlockId> blocks;
  std::vector<uint32_t> shard_indices;
  std::vector<uint8_t*> addresses;
  size_t tensors = 0;
  std::optional<BlockId> parent;  // the block before the first, if known
  bool is_chain = true;           // of one prefix: each block follows the one before
  uint32_t pool = 0;
  // Of a dump: Tier::Epoch when it was accepted higher up; none: it is accepted now.
  std::optional<uint64_t> epoch;

  size_t size() const { return blocks.size(); }
  std::span<uint8_t* const> tensors_of(size_t shard) const {
    return {addresses.data() + shard * tensors, tensors};
  }
};

class Request {
 public:
  using Clock = std::chrono::steady_clock;
  // Called once a shard, as it ends, before any waiter knows. Holds the
  // request's mutex: it must not block, nor call the request.
  using OnShard = std::function<void(size_t shard, Code code)>;

  // `on_done`: called once, when all shards have ended, by the thread that
  // ended the last one, without the mutex. For a tier that asks another one
  // and doesn't wait.
  explicit Request(Batch batch, std::function<void()> on_done = {});

  const Batch& batch() const { return batch_; }
  size_t size() const { return batch_.size(); }
  Clock::time_point created() const { return created_; }

  // The tier's, before it queues the first job: `on_shard`, and whatever else
  // it needs to know about the request.
  void Prepare(OnShard on_shard, std::shared_ptr<void> tier_data);
  void* tier_data() const { return tier_data_.get(); }

  // Worker's side. False: the shard has been ended by Cancel; leave it.
  [[nodiscard]] bool Begin(size_t shard, bool touches);
  [[nodiscard]] bool StopTouching(size_t shard);   // kTouching -> kWorking
  [[nodiscard]] bool StartTouching(size_t shard);  // kWorking -> kTouching
  [[nodiscard]] bool Park(size_t shard);           // kTouching, kWorking -> kParked
  // `shards` are those of one block: `runner` in kTouching or kWorking, the
  // rest in kParked. All go to kPublishing, or none (false).
  [[nodiscard]] bool BeginPublish(std::span<const size_t> shards, size_t runner, bool sure);
  // Where the shard's next I/O goes, in the tier's own terms.
  void NotePlace(size_t shard, const void* place) {
    places_[shard].store(place, std::memory_order_relaxed);
  }
  // False: Cancel was first, and `code` is without effect.
  bool Finish(size_t shard, Code code);
  // The same for all shards of a block, at once: no Cancel comes between. How
  // many of them it ended; 0: Cancel was first.
  size_t FinishAll(std::span<const size_t> shards, Code code);
  // The code of a shard that has ended.
  Code result(size_t shard);
  // Whether Cancel counted this shard's worker as left behind.
  bool left_behind(size_t shard);
  // Where its I/O went last; null: it has had none.
  const void* place(size_t shard) const { return places_[shard].load(std::memory_order_relaxed); }

  // For a job that will never run: ends the shard if nobody has begun it.
  void EndQueued(size_t shard, Code code);

  // Waiter's side. True: every shard has ended.
  bool WaitUntil(Clock::time_point deadline);
  void Wait();
  // Ends, with `code`, all that need not be waited for. Returns how many
  // workers were left behind in I/O on memory of their own.
  size_t Cancel(Code code);
  // After all has ended: one code a shard.
  const std::vector<Code>& results() const { return results_; }

 private:
  enum class Phase : uint8_t { kQueued, kTouching, kWorking, kParked, kPublishing, kDone };
  struct Shard {
    Phase phase = Phase::kQueued;
    bool is_runner = false;    // in kPublishing
    bool sure = false;         // in kPublishing
    bool left_behind = false;  // in kDone
  };

  class Held;  // holds the mutex, then calls on_done if it is due

  bool Move(size_t shard, Phase next);
  void End(size_t shard, Code code);

  const Clock::time_point created_ = Clock::now();
  const Batch batch_;
  const std::function<void()> on_done_;
  OnShard on_shard_;
  std::shared_ptr<void> tier_data_;
  std::vector<std::atomic<const void*>> places_;

  std::mutex mutex_;  // guards all below; results_ until all has ended
  std::condition_variable ended_;
  std::vector<Shard> shards_;
  std::vector<Code> results_;
  size_t pending_;
  bool done_is_due_ = false;
  Code cancelled_ = CS_OK;  // CS_OK: not cancelled
};

}  // namespace cachestore

#endif  // CACHESTORE_TIER_REQUEST_H_
