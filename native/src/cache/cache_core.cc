#include "cache/cache_core.h"

#include <algorithm>
#include <string>
#include <utility>

namespace cachestore {
namespace {

// A dirty slot that can't be stored is tried this often, first after a second,
// then at doubled distances; then its block is only in the cache.
constexpr int kStoreAttempts = 6;
constexpr std::chrono::milliseconds kFirstRetry{1000};
constexpr std::chrono::milliseconds kReclaimPause{100};
// Of a dead process's blocks, how many are stored by one request; and when to
// try again, with half of them, what the tier below has no room for.
constexpr size_t kStorePiece = 64;
constexpr std::chrono::milliseconds kRefusedPause{100};

}  // namespace

CacheCore::CacheCore(Region& region, SlotTable& slots, Tier& below, const Geometry& geometry,
                     EventRing& events, std::chrono::milliseconds peer_patience,
                     std::chrono::milliseconds timeout)
    : region_(region),
      slots_(slots),
      below_(below),
      geometry_(geometry),
      payload_(geometry.payload()),
      events_(events),
      timeout_(timeout),
      waits_(std::make_unique<WaitList>(region, slots, peer_patience, [this] { Reclaim(); })) {}

void CacheCore::Reclaim() {
  // Before the look: what is cleared after it isn't stored.
  const uint64_t epoch = below_.Epoch();
  FollowClears();
  std::vector<SlotRef> slots = slots_.ReclaimDead();
  if (slots.empty()) return;
  events_.Add(CS_EVENT_INFO,
              "storing " + std::to_string(slots.size()) + " blocks of a process that is gone");
  for (size_t from = 0; from < slots.size(); from += kStorePiece) {
    const size_t to = std::min(from + kStorePiece, slots.size());
    Store(
        {slots.begin() + static_cast<ptrdiff_t>(from), slots.begin() + static_cast<ptrdiff_t>(to)},
        epoch);
  }
}

void CacheCore::ReclaimSoon() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(reclaim_armed_, true)) return;
  }
  const auto disarm = [this] {
    const std::lock_guard lock(mutex_);
    reclaim_armed_ = false;
  };
  const Code thrown = Thrown([&] {
    waits_->At(WaitList::Clock::now() + kReclaimPause, [this, disarm] {
      disarm();
      Reclaim();
    });
  });
  if (thrown != CS_OK) disarm();  // for the next time
}

void AddSlot(Batch& batch, const Region& region, uint32_t slot, const Geometry& geometry) {
  batch.tensors = geometry.tensor_sizes.size();
  batch.is_chain = false;  // slots come as they are done
  batch.blocks.push_back(region.slot(slot).block);
  batch.shard_indices.push_back(0);
  uint8_t* tensor = region.bytes(slot);
  for (const uint64_t size : geometry.tensor_sizes) {
    batch.addresses.push_back(tensor);
    tensor += size;
  }
}

// Compares with what this process has seen before and not only with the region, so
// that two processes that see different marks (a directory is out of use in one)
// don't clear it by turns.
void CacheCore::FollowClears() {
  const uint64_t latest = below_.LatestClear();
  if (followed_clear_.load(std::memory_order_acquire) == latest) return;
  const SlotTable::Follow followed = slots_.FollowClear(latest);
  if (followed == SlotTable::Follow::kLocked) return;  // next time
  followed_clear_.store(latest, std::memory_order_release);
  if (followed != SlotTable::Follow::kCleared) return;
  (void)Thrown(
      [&] { events_.Add(CS_EVENT_INFO, "the storage was cleared: so is the cache buffer"); });
}

void CacheCore::NoteUse(std::span<const BlockId> blocks, const std::optional<BlockId>& parent) {
  const BlockId* const before = parent ? &*parent : nullptr;
  slots_.Touch(blocks, before);
  below_.NoteUse(blocks, before);
}

Batch CacheCore::BatchOf(std::span<const SlotRef> slots) const {
  Batch batch;
  for (const SlotRef ref : slots) AddSlot(batch, region_, ref.slot, geometry_);
  return batch;
}

Result<std::shared_ptr<Request>> CacheCore::StartBelow(
    Batch batch, Status (Tier::*start)(const std::shared_ptr<Request>&), Done done) {
  uint64_t number = 0;
  std::shared_ptr<Request> request;
  bool arm = false;
  const auto prepare = [&] {
    const std::lock_guard lock(mutex_);
    number = next_below_++;
    request = std::make_shared<Request>(std::move(batch), [this, number, done = std::move(done)] {
      std::shared_ptr<Request> ended;
      {
        const std::lock_guard inner(mutex_);
        ended = std::move(below_requests_.extract(number).mapped().request);
      }
      done(ended->results());
    });
    arm = !std::exchange(watch_armed_, true);
    below_requests_.emplace(number, Below{request, WaitList::Clock::now() + timeout_});
  };
  Status started{CS_NO_MEMORY, "no memory for a request to the tier below"};
  // What throws had no effect; nothing may throw that had one.
  const Code thrown = Thrown([&] {
    prepare();
    if (arm) waits_->At(WaitList::Clock::now() + timeout_, [this] { CancelLate(); });
    started = (below_.*start)(request);
  });
  if (thrown == CS_OK && started.ok()) return request;
  const std::lock_guard lock(mutex_);
  below_requests_.erase(number);
  if (thrown != CS_OK && arm) watch_armed_ = false;  // for the next one to set it
  return started;
}

// Comes again as long as anything is asked of the tier below.
void CacheCore::CancelLate() {
  std::vector<std::shared_ptr<Request>> late;
  const auto now = WaitList::Clock::now();
  WaitList::Clock::time_point next{};
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [number, below] : below_requests_) {
      if (below.deadline <= now) {
        late.push_back(below.request);
      } else {
        next = below.deadline;
        break;
      }
    }
    // What was cancelled and isn't over is on memory that must be waited for.
    if (next == WaitList::Clock::time_point{} && !below_requests_.empty()) next = now + timeout_;
    watch_armed_ = next != WaitList::Clock::time_point{};
  }
  for (const auto& request : late) below_.Cancel(request, CS_TIMEOUT);
  if (next != WaitList::Clock::time_point{}) waits_->At(next, [this] { CancelLate(); });
}

// Does a change of metadata now, or, while a stopped process holds the mutex,
// as soon as it can.
template <typename Change>
void CacheCore::Do(SlotRef ref, Change change) {
  if (change()) return waits_->Notify(ref);
  waits_->Later([this, ref, change] {
    if (!change()) return false;
    waits_->Notify(ref);
    return true;
  });
}

void CacheCore::PublishLoad(SlotRef ref) {
  Do(ref, [=, this] { return slots_.PublishLoad(ref); });
}

void CacheCore::PublishDump(SlotRef ref, uint32_t checksum, uint64_t epoch) {
  Do(ref, [=, this] { return slots_.PublishDump(ref, checksum, epoch); });
}

void CacheCore::Fail(SlotRef ref, Code code) {
  Do(ref, [=, this] { return slots_.Fail(ref, code); });
}

void CacheCore::Revoke(SlotRef ref, Code code) {
  Do(ref, [=, this] { return slots_.Revoke(ref, code); });
}

void CacheCore::Clean(SlotRef ref) {
  Do(ref, [=, this] { return slots_.Clean(ref); });
}

Status CacheCore::StoreOnce(const std::vector<SlotRef>& slots, uint64_t epoch, int attempt) {
  Batch batch = BatchOf(slots);
  batch.epoch = epoch;
  Done ended = [this, slots, epoch, attempt](const std::vector<Code>& codes) {
    EndStored(slots, codes, epoch, attempt);
  };
  {
    const std::lock_guard lock(mutex_);
    storing_ += slots.size();
  }
  const auto started = StartBelow(std::move(batch), &Tier::Dump, std::move(ended));
  if (started.ok()) return Status::Ok();
  Uncount(slots.size());
  return started.status();
}

void CacheCore::Store(std::vector<SlotRef> slots, uint64_t epoch, int attempt) {
  if (slots.empty()) return;
  const Status started = StoreOnce(slots, epoch, attempt);
  if (started.ok()) return;
  {
    const std::lock_guard lock(mutex_);
    storing_ += slots.size();  // EndStored takes them off
  }
  if (started.code() != CS_REFUSED) {
    EndStored(slots, std::vector<Code>(slots.size(), started.code()), epoch, attempt);
    return;
  }
  waits_->At(WaitList::Clock::now() + kRefusedPause, [this, slots, epoch, attempt] {
    const auto half = slots.begin() + static_cast<ptrdiff_t>((slots.size() + 1) / 2);
    Store({slots.begin(), half}, epoch, attempt);
    Store({half, slots.end()}, epoch, attempt);
    Uncount(slots.size());  // Store counts them again
  });
}

// Takes the slots off `storing_`, unless they are to be tried again.
void CacheCore::EndStored(const std::vector<SlotRef>& slots, const std::vector<Code>& codes,
                          uint64_t epoch, int attempt) {
  std::vector<SlotRef> again;
  for (size_t i = 0; i < slots.size(); ++i) {
    if (codes[i] == CS_OK) {
      counters_.stored.fetch_add(1, std::memory_order_relaxed);
      Clean(slots[i]);
    } else {
      counters_.store_failed.fetch_add(1, std::memory_order_relaxed);
      again.push_back(slots[i]);
    }
  }
  bool closing;
  {
    const std::lock_guard lock(mutex_);
    closing = finishing_;
  }
  const bool give_up = closing || attempt + 1 >= kStoreAttempts;
  if (give_up && !again.empty()) {
    counters_.given_up.fetch_add(again.size(), std::memory_order_relaxed);
    events_.Add(CS_EVENT_WARNING,
                "not stored, and only in the cache: " + std::to_string(again.size()) + " blocks");
    if (!closing) {
      for (const SlotRef ref : again) Clean(ref);
    }  // else they stay dirty, and are for other processes to store
  }
  // Last: whoever waits for it reads counters and events then.
  Uncount(slots.size() - (give_up ? 0 : again.size()));
  if (give_up || again.empty()) return;
  const auto pause = kFirstRetry * (1 << attempt);
  waits_->At(WaitList::Clock::now() + pause, [this, again, epoch, attempt] {
    Store(again, epoch, attempt + 1);
    Uncount(again.size());  // Store counts them again
  });
  {
    const std::lock_guard lock(mutex_);
    closing = finishing_;
  }
  if (closing) waits_->Hurry();  // it has begun since we looked
}

void CacheCore::Uncount(size_t slots) {
  const std::lock_guard lock(mutex_);
  storing_ -= slots;
  if (storing_ == 0) stored_.notify_all();
}

size_t CacheCore::storing() const {
  const std::lock_guard lock(mutex_);
  return storing_;
}

bool CacheCore::WaitStored(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  return stored_.wait_until(lock, deadline, [&] { return storing_ == 0; });
}

void CacheCore::FinishStoring() {
  {
    const std::lock_guard lock(mutex_);
    finishing_ = true;
  }
  waits_->Hurry();
}

void CacheCore::Close() {
  waits_->Close();
  std::vector<std::shared_ptr<Request>> unfinished;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [number, below] : below_requests_) unfinished.push_back(below.request);
  }
  for (const auto& request : unfinished) {
    below_.Cancel(request, CS_CLOSED);
    request->Wait();
  }
}

}  // namespace cachestore
