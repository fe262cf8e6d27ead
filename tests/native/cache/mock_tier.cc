#include "cache/mock_tier.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace cachestore::test {

MockTier::MockTier(Geometry geometry) : geometry_(std::move(geometry)) {
  for (const Direction direction : {kLoad, kDump}) {
    threads_[direction] = std::thread([this, direction] { Run(direction); });
  }
}

MockTier::~MockTier() {
  Stop();
  Close();
}

void MockTier::Refuse(Direction direction, Code code) {
  const std::lock_guard lock(mutex_);
  refuse_[direction] = code;
}

void MockTier::End(Direction direction, Answer answer) {
  const std::lock_guard lock(mutex_);
  answers_[direction] = std::move(answer);
}

void MockTier::EndWith(Direction direction, Code code) {
  End(direction, [code](const BlockId&) { return code; });
}

void MockTier::Hold(Direction direction) {
  const std::lock_guard lock(mutex_);
  hold_[direction] = true;
}

void MockTier::Release(Direction direction) {
  const std::lock_guard lock(mutex_);
  hold_[direction] = false;
  work_.notify_all();
}

size_t MockTier::held(Direction direction) const {
  const std::lock_guard lock(mutex_);
  return hold_[direction] ? queues_[direction].size() : 0;
}

void MockTier::Put(const BlockId& block, std::vector<uint8_t> payload) {
  const std::lock_guard lock(mutex_);
  stored_[block] = std::move(payload);
}

std::vector<uint8_t> MockTier::Stored(const BlockId& block) const {
  const std::lock_guard lock(mutex_);
  const auto found = stored_.find(block);
  return found == stored_.end() ? std::vector<uint8_t>() : found->second;
}

std::vector<uint8_t> MockTier::SlotOf(const BlockId& block) const {
  const std::lock_guard lock(mutex_);
  const auto found = slots_.find(block);
  return found == slots_.end() ? std::vector<uint8_t>() : found->second;
}

void MockTier::Lookup(uint32_t, std::span<const BlockId> blocks, std::span<uint8_t> present) {
  for (size_t i = 0; i < blocks.size(); ++i) present[i] = Has(blocks[i]) ? 1 : 0;
}

size_t MockTier::LookupPrefix(uint32_t, std::span<const BlockId> blocks) {
  size_t length = 0;
  while (length < blocks.size() && Has(blocks[length])) ++length;
  return length;
}

Status MockTier::Start(const std::shared_ptr<Request>& request, Direction direction) {
  const std::lock_guard lock(mutex_);
  if (stopped_) return {CS_CLOSED, "the mock is closing"};
  if (refuse_[direction] != CS_OK) {
    ++refused_[direction];
    return {refuse_[direction], "refused, as the test wants it"};
  }
  ++calls_[direction];
  shards_[direction] += request->size();
  for (size_t i = 0; i < request->size(); ++i) queues_[direction].push_back({request, i});
  work_.notify_all();
  return Status::Ok();
}

void MockTier::Run(Direction direction) {
  std::unique_lock lock(mutex_);
  std::deque<Job>& queue = queues_[direction];
  for (;;) {
    work_.wait(lock, [&] { return stopped_ || (!queue.empty() && !hold_[direction]); });
    if (queue.empty()) return;
    Job job = std::move(queue.front());
    queue.pop_front();
    const Answer answer = answers_[direction];
    const bool stopped = stopped_;
    lock.unlock();
    if (stopped) {
      job.request->EndQueued(job.shard, CS_CLOSED);
    } else if (job.request->Begin(job.shard, /*touches=*/true)) {
      Code code = answer ? answer(job.request->batch().blocks[job.shard]) : CS_OK;
      if (code == CS_OK) code = Move(job, direction);
      (void)job.request->Finish(job.shard, code);
    }
    job = {};
    lock.lock();
  }
}

Code MockTier::Move(const Job& job, Direction direction) {
  const Batch& batch = job.request->batch();
  const BlockId& block = batch.blocks[job.shard];
  const auto tensors = batch.tensors_of(job.shard);
  if (tensors.size() != geometry_.tensor_sizes.size() ||
      std::find(tensors.begin(), tensors.end(), nullptr) != tensors.end()) {
    return CS_INVALID;
  }
  if (direction == kLoad) {
    const std::vector<uint8_t> payload = Stored(block);
    if (payload.empty()) return CS_NOT_FOUND;
    const uint8_t* from = payload.data();
    for (size_t t = 0; t < tensors.size(); ++t) {
      std::memcpy(tensors[t], from, geometry_.tensor_sizes[t]);
      from += geometry_.tensor_sizes[t];
    }
    return CS_OK;
  }
  std::vector<uint8_t> payload;
  for (size_t t = 0; t < tensors.size(); ++t) {
    payload.insert(payload.end(), tensors[t], tensors[t] + geometry_.tensor_sizes[t]);
  }
  const uint64_t slot_size = slot_size_;
  const std::vector<uint8_t> slot(tensors[0], tensors[0] + slot_size);
  const std::lock_guard lock(mutex_);
  if (batch.epoch && *batch.epoch != epoch_) return CS_OK;  // from before a clear
  stored_.emplace(block, std::move(payload));
  if (slot_size != 0) slots_[block] = slot;
  return CS_OK;
}

void MockTier::Cancel(const std::shared_ptr<Request>& request, Code code) {
  ++cancels_;
  (void)request->Cancel(code);
}

Status MockTier::Clear() {
  const std::lock_guard lock(mutex_);
  ++epoch_;
  stored_.clear();
  return Status::Ok();
}

void MockTier::AddStats(cs_stats& stats) const {
  stats.load_ok += shards_[kLoad];
  stats.dump_ok += shards_[kDump];
}

void MockTier::Stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  work_.notify_all();
}

void MockTier::Close() {
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

}  // namespace cachestore::test
