// Space: how much of a storage root is used, as far as this store knows, and
// whether another block may be added.
//
// What is used is known from whoever collects (collector.h). All stores together
// stay within the capacity because each but the collector's adds no more than
// the collector has granted it, and the collector grants no more than there is,
// and counts what it has granted as used.
//
// Thread-safe.
#ifndef CACHESTORE_POSIX_SPACE_H_
#define CACHESTORE_POSIX_SPACE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>

#include "base/env.h"
#include "base/status.h"

namespace cachestore {

// Of a storage root: all identities in it.
struct SpaceLimits {
  uint64_t capacity = 0;            // bytes; 0: no limit
  uint64_t free_space_reserve = 0;  // bytes to leave free on its filesystem; 0: none
  uint32_t high_watermark_percent = 97;
  uint32_t low_watermark_percent = 95;

  bool any() const { return capacity > 0 || free_space_reserve > 0; }
  uint64_t high() const { return PercentOf(high_watermark_percent); }
  uint64_t low() const { return PercentOf(low_watermark_percent); }
  bool operator==(const SpaceLimits&) const = default;

 private:
  uint64_t PercentOf(uint32_t percent) const {
    return capacity / 100 * percent + capacity % 100 * percent / 100;
  }
};

// What one store has published and removed since it was opened, and what its dumps
// had no room for on the filesystem, in bytes.
struct SpaceChanges {
  uint64_t added = 0;
  uint64_t removed = 0;
  uint64_t lacked = 0;

  bool operator==(const SpaceChanges&) const = default;
};

class Space {
 public:
  // `wake`: called when room is wanted; cheap, and calls nothing here.
  explicit Space(const SpaceLimits& limits)
      : limits_(limits), grant_(limits.capacity > 0 ? 0 : UINT64_MAX) {}
  void OnWanted(std::function<void()> wake) { wake_ = std::move(wake); }  // before the first dump

  const SpaceLimits& limits() const { return limits_; }

  // Before a block is written: CS_NO_SPACE, with the limit, if it doesn't fit.
  // Then exactly one of Release and BeginPublish.
  Status Reserve(uint64_t bytes);
  void Release(uint64_t bytes);
  // It counts before it gets its name: what whoever collects sees in the directory has
  // been counted. Then exactly one EndPublish.
  void BeginPublish(uint64_t bytes);
  void EndPublish(uint64_t bytes, bool is_there);
  // What has been counted and may have no name yet.
  uint64_t publishing() const;
  // This store has removed a block other than by eviction.
  void Remove(uint64_t bytes);
  // The filesystem had no room, which whoever collects is told, or has some again.
  void NoteFull(uint64_t bytes);
  void NoteRoom() {
    if (full_.load(std::memory_order_relaxed)) full_.store(false, std::memory_order_relaxed);
  }
  bool full() const { return full_.load(std::memory_order_relaxed); }

  SpaceChanges changes() const;
  // The collector's part. Bytes that dumps lacked since the last call.
  uint64_t TakeWanted();
  // `used` is right for what this store had added by `when`. Where it collects:
  // other stores may add `granted` bytes.
  void Know(uint64_t used, uint64_t granted, const SpaceChanges& when);
  // Where another one collects: this one may add `grant` bytes in all.
  void KnowGrant(uint64_t used, uint64_t grant, const SpaceChanges& when);
  void KnowFree(const SpaceInfo& info);
  // As dumps see it, without what is being written.
  uint64_t used() const;

 private:
  uint64_t Used() const;            // with mutex_ held
  uint64_t Free() const;            // likewise
  bool Fits(uint64_t bytes) const;  // likewise

  const SpaceLimits limits_;
  std::function<void()> wake_;
  std::atomic<bool> full_{false};

  mutable std::mutex mutex_;  // guards all below
  SpaceChanges changes_;
  uint64_t reserved_ = 0;  // being written
  uint64_t publishing_ = 0;
  uint64_t wanted_ = 0;
  uint64_t known_used_ = 0;
  uint64_t granted_ = 0;  // to others
  uint64_t grant_;        // to this one; UINT64_MAX: it collects
  SpaceChanges known_when_;
  uint64_t known_free_ = UINT64_MAX;  // UINT64_MAX: not known
  SpaceChanges free_when_;
};

// Room that was reserved for one block, given back unless the block is there then.
class Reservation {
 public:
  Reservation() = default;
  ~Reservation() {
    if (space_ != nullptr) space_->Release(bytes_);
  }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  Status Take(Space& space, uint64_t bytes) {
    Status reserved = space.Reserve(bytes);
    if (reserved.ok()) space_ = &space;
    bytes_ = bytes;
    return reserved;
  }
  // `publish` says whether the block is there now.
  template <typename Rename>
  Result<bool> Publish(Rename publish) {
    if (space_ == nullptr) return publish();
    struct Publishing {
      Space& space;
      uint64_t bytes;
      bool is_there = false;
      ~Publishing() { space.EndPublish(bytes, is_there); }
    } publishing{*std::exchange(space_, nullptr), bytes_};
    publishing.space.BeginPublish(bytes_);
    Result<bool> published = publish();
    publishing.is_there = published.ok() && published.value();
    return published;
  }

 private:
  Space* space_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace cachestore

#endif  // CACHESTORE_POSIX_SPACE_H_
