#include "tier/request.h"

#include <cassert>
#include <utility>

namespace cachestore {

class Request::Held {
 public:
  explicit Held(Request& request) : request_(request), lock_(request.mutex_) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    const bool due = std::exchange(request_.done_is_due_, false);
    lock_.unlock();
    if (due && request_.on_done_) request_.on_done_();
  }

 private:
  Request& request_;
  std::unique_lock<std::mutex> lock_;
};

Request::Request(Batch batch, std::function<void()> on_done)
    : batch_(std::move(batch)),
      on_done_(std::move(on_done)),
      places_(batch_.size()),
      shards_(batch_.size()),
      results_(batch_.size(), CS_INTERNAL),
      pending_(batch_.size()) {}

void Request::Prepare(OnShard on_shard, std::shared_ptr<void> tier_data) {
  on_shard_ = std::move(on_shard);
  tier_data_ = std::move(tier_data);
}

bool Request::Begin(size_t shard, bool touches) {
  const Held held(*this);
  if (shards_[shard].phase != Phase::kQueued) return false;
  shards_[shard].phase = touches ? Phase::kTouching : Phase::kWorking;
  return true;
}

bool Request::StopTouching(size_t shard) {
  const Held held(*this);
  return Move(shard, Phase::kWorking);
}

bool Request::StartTouching(size_t shard) {
  const Held held(*this);
  return Move(shard, Phase::kTouching);
}

bool Request::Park(size_t shard) {
  const Held held(*this);
  return Move(shard, Phase::kParked);
}

// With the mutex held. A shard in kTouching outlives Cancel: it ends here, as
// soon as its worker is ready to leave the caller's memory.
bool Request::Move(size_t shard, Phase next) {
  if (shards_[shard].phase == Phase::kDone) return false;
  if (cancelled_ != CS_OK) {
    End(shard, cancelled_);
    return false;
  }
  shards_[shard].phase = next;
  return true;
}

bool Request::BeginPublish(std::span<const size_t> shards, size_t runner, bool sure) {
  const Held held(*this);
  if (cancelled_ != CS_OK) {
    for (const size_t shard : shards) {
      if (shards_[shard].phase != Phase::kDone) End(shard, cancelled_);
    }
    return false;
  }
  for (const size_t shard : shards) {
    shards_[shard] = {Phase::kPublishing, shard == runner, sure, false};
  }
  return true;
}

bool Request::Finish(size_t shard, Code code) {
  const Held held(*this);
  if (shards_[shard].phase == Phase::kDone) return false;
  End(shard, code);
  return true;
}

size_t Request::FinishAll(std::span<const size_t> shards, Code code) {
  const Held held(*this);
  size_t ended = 0;
  for (const size_t shard : shards) {
    if (shards_[shard].phase == Phase::kDone) continue;
    End(shard, code);
    ++ended;
  }
  return ended;
}

Code Request::result(size_t shard) {
  const Held held(*this);
  return results_[shard];
}

void Request::EndQueued(size_t shard, Code code) {
  const Held held(*this);
  if (shards_[shard].phase == Phase::kQueued) End(shard, code);
}

bool Request::left_behind(size_t shard) {
  const Held held(*this);
  return shards_[shard].left_behind;
}

// With the mutex held.
void Request::End(size_t shard, Code code) {
  assert(shards_[shard].phase != Phase::kDone);
  shards_[shard].phase = Phase::kDone;
  results_[shard] = code;
  if (on_shard_) on_shard_(shard, code);
  if (--pending_ > 0) return;
  done_is_due_ = true;
  ended_.notify_all();
}

bool Request::WaitUntil(Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  return ended_.wait_until(lock, deadline, [&] { return pending_ == 0; });
}

void Request::Wait() {
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [&] { return pending_ == 0; });
}

size_t Request::Cancel(Code code) {
  const Held held(*this);
  if (cancelled_ != CS_OK) return 0;  // what it left is waited for
  cancelled_ = code;
  size_t left_behind = 0;
  for (size_t i = 0; i < shards_.size(); ++i) {
    switch (shards_[i].phase) {
      case Phase::kDone:
      case Phase::kTouching:
        break;
      case Phase::kQueued:
      case Phase::kParked:
        End(i, code);
        break;
      case Phase::kWorking:
        End(i, code);
        shards_[i].left_behind = true;
        break;
      case Phase::kPublishing:
        if (shards_[i].sure) break;
        End(i, code);
        shards_[i].left_behind = shards_[i].is_runner;
        break;
    }
    if (shards_[i].left_behind) ++left_behind;
  }
  return left_behind;
}

}  // namespace cachestore
