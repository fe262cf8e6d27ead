// Collector: keeps a storage root within its limits by evicting the blocks used
// longest ago, of all identities in it.
//
// Of all stores that have a root open, of all processes and hosts, one collects:
// the one that holds the lock of <root>/collector/lock. The others try to take
// it, and get it when its holder is gone. The collector writes down what it
// knows (collector_state.h), and the others read that.
//
// What is used is what the latest pass over the directories saw, and what the
// stores say they have added since; a pass that nobody adds to makes it exact.
// When room is wanted, a whole pass finds the oldest files (oldest.h), and they
// are looked at again before they go: one that was used meanwhile stays. With a
// file go all others of the same block, of other pools and ranks: a part of a page
// is of no use without the rest.
//
// Thread-safe. Step and Close do nothing while another thread is in either.
#ifndef CACHESTORE_POSIX_COLLECTOR_H_
#define CACHESTORE_POSIX_COLLECTOR_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/event_ring.h"
#include "posix/block_walk.h"
#include "posix/collector_state.h"
#include "posix/directory.h"
#include "posix/oldest.h"
#include "posix/space.h"

namespace cachestore {

class Collector {
 public:
  // Work of one step, in system calls.
  static constexpr size_t kEntriesPerStep = 5000;
  static constexpr size_t kEvictionsPerStep = 2000;
  // How many files a whole pass remembers: 32 bytes each, twice.
  static constexpr size_t kOldest = 65536;
  // Between steps while there is work.
  static constexpr std::chrono::milliseconds kBusy{50};

  Collector(Env& env, EventRing& events, Directory& directory,
            std::chrono::milliseconds busy = kBusy);

  // A bounded piece of work; after how long to be called again.
  // `times_are_written`: of every use of a block up to now.
  std::chrono::milliseconds Step(bool times_are_written = true);
  std::chrono::milliseconds busy() const { return busy_; }
  // The next step would evict.
  bool wants_room() const { return wants_room_.load(std::memory_order_relaxed); }
  // The first steps, until this store knows what it may add; no longer than `patience`.
  void Begin(std::chrono::milliseconds patience);
  // The blocks of an identity have gone: look now.
  void NoteClear() { look_.store(true, std::memory_order_relaxed); }
  // Lets another store collect: this one can't at present.
  void Release();
  // Writes down what is known, and lets another store collect.
  void Close();

  bool collecting() const { return collecting_.load(std::memory_order_relaxed); }
  uint64_t evicted_blocks() const { return evicted_blocks_.load(std::memory_order_relaxed); }
  uint64_t evicted_bytes() const { return evicted_bytes_.load(std::memory_order_relaxed); }

 private:
  struct Writer {
    SpaceChanges changes;
    uint64_t granted = 0;  // what it may have added in all
    bool gone = false;     // its lock is free
    std::chrono::steady_clock::time_point next_probe{};
  };

  bool Collecting();
  void TryToCollect();
  bool HoldsLock();
  void StopCollecting();
  bool NoticeClears(const std::string& identity);
  // Of a store that doesn't collect.
  void Follow();
  void CompareLimits(const SpaceLimits& theirs);

  void CountChanges();
  void CountChangesOf(Writer& writer, const SpaceChanges& now);
  void ProbeWriter(Writer& writer, const std::string& lock);
  uint64_t Grant();
  void Look();
  void EndPass();
  void MeasureRoom();
  void Evict();
  size_t EvictBlock(const OldFile& file);
  Status Remove(const OldFile& file);
  void Tell();
  Result<CollectorState> ReadState();
  void Warn(std::string text);

  uint64_t Need() const;
  uint64_t AlmostFull() const;

  Env& env_;
  EventRing& events_;
  Directory& directory_;
  Space& space_;
  const SpaceLimits limits_;
  const std::string path_;  // <root>/collector
  const std::chrono::milliseconds busy_;
  std::atomic<bool> collecting_{false};
  std::atomic<bool> look_{false};
  std::atomic<bool> wants_room_{false};
  std::atomic<uint64_t> evicted_blocks_{0};
  std::atomic<uint64_t> evicted_bytes_{0};

  std::mutex stepping_;  // guards all below; held across I/O, so it is only ever tried
  FileCloser lock_;
  bool lockless_ = false;  // the filesystem has no locks: every store collects
  std::chrono::steady_clock::time_point next_try_{};
  std::string last_warning_;
  bool compared_ = false;  // the limits, with the present collector's

  std::optional<SpaceChanges> written_;  // ours, that a collector can read
  bool granted_ = false;                 // the collector knows of this store

  // While collecting.
  BlockWalk walk_;
  Oldest showing_{kOldest};
  std::chrono::steady_clock::time_point next_eviction_{};
  std::vector<OldFile> oldest_;  // the next to evict at the back
  bool whole_ = false;           // the pass at hand
  bool known_ = false;           // a pass has ended
  bool changed_ = false;         // something was added or removed during the pass
  uint64_t used_ = 0;
  uint64_t added_in_pass_ = 0;
  std::chrono::steady_clock::time_point next_look_{};
  std::map<std::string, Writer> writers_;   // all open stores, by the name of their directory
  uint64_t granted_to_others_ = 0;          // and not used yet
  bool first_count_ = false;                // since this store collects
  std::map<std::string, uint64_t> clears_;  // the mark of each identity's latest
  bool making_room_ = false;                // between the watermarks
  uint64_t wanted_ = 0;                     // bytes that dumps lacked, of all stores
  uint64_t free_ = UINT64_MAX;              // on the filesystem
  CollectorState told_;
};

}  // namespace cachestore

#endif  // CACHESTORE_POSIX_COLLECTOR_H_
