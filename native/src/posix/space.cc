#include "posix/space.h"

#include <algorithm>
#include <string>

namespace cachestore {
namespace {

uint64_t Minus(uint64_t a, uint64_t b) { return a - std::min(a, b); }

}  // namespace

Status Space::Reserve(uint64_t bytes) {
  std::string limit;
  bool wanted = false;
  {
    const std::lock_guard lock(mutex_);
    if (!Fits(bytes)) {
      limit = "capacity of " + std::to_string(limits_.capacity) + " bytes";
    } else if (limits_.free_space_reserve > 0 &&
               Minus(Free(), reserved_ + bytes) < limits_.free_space_reserve) {
      limit = "free space of " + std::to_string(limits_.free_space_reserve) + " bytes to be left";
    }
    if (limit.empty()) {
      reserved_ += bytes;
    } else {
      wanted_ += bytes;
    }
    wanted = !limit.empty() || (limits_.capacity > 0 && Used() + reserved_ > limits_.high());
  }
  if (wanted && wake_) wake_();
  if (limit.empty()) return Status::Ok();
  full_.store(true, std::memory_order_relaxed);
  return {CS_NO_SPACE, "no room within the " + limit};
}

void Space::Release(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  reserved_ = Minus(reserved_, bytes);
}

void Space::BeginPublish(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  reserved_ = Minus(reserved_, bytes);
  publishing_ += bytes;
  changes_.added += bytes;
}

void Space::EndPublish(uint64_t bytes, bool is_there) {
  if (is_there) NoteRoom();
  const std::lock_guard lock(mutex_);
  publishing_ -= bytes;
  if (!is_there) changes_.removed += bytes;
}

uint64_t Space::publishing() const {
  const std::lock_guard lock(mutex_);
  return publishing_;
}

void Space::Remove(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  changes_.removed += bytes;
}

void Space::NoteFull(uint64_t bytes) {
  full_.store(true, std::memory_order_relaxed);
  if (!limits_.any()) return;
  {
    const std::lock_guard lock(mutex_);
    wanted_ += bytes;
    changes_.lacked += bytes;
  }
  if (wake_) wake_();
}

SpaceChanges Space::changes() const {
  const std::lock_guard lock(mutex_);
  return changes_;
}

uint64_t Space::TakeWanted() {
  const std::lock_guard lock(mutex_);
  return std::exchange(wanted_, 0);
}

void Space::Know(uint64_t used, uint64_t granted, const SpaceChanges& when) {
  const std::lock_guard lock(mutex_);
  known_used_ = used;
  known_when_ = when;
  granted_ = granted;
  grant_ = UINT64_MAX;
}

void Space::KnowGrant(uint64_t used, uint64_t grant, const SpaceChanges& when) {
  const std::lock_guard lock(mutex_);
  known_used_ = used;
  known_when_ = when;
  granted_ = 0;
  grant_ = grant;
}

void Space::KnowFree(const SpaceInfo& info) {
  const std::lock_guard lock(mutex_);
  known_free_ = info.available;
  free_when_ = changes_;
}

uint64_t Space::used() const {
  const std::lock_guard lock(mutex_);
  return Used();
}

uint64_t Space::Used() const {
  return Minus(known_used_ + (changes_.added - known_when_.added),
               changes_.removed - known_when_.removed);
}

bool Space::Fits(uint64_t bytes) const {
  if (limits_.capacity == 0) return true;
  if (grant_ != UINT64_MAX) return changes_.added + reserved_ + bytes <= grant_;
  return Used() + granted_ + reserved_ + bytes <= limits_.capacity;
}

uint64_t Space::Free() const {
  if (known_free_ == UINT64_MAX) return UINT64_MAX;
  return Minus(known_free_, changes_.added - free_when_.added);
}

}  // namespace cachestore
