// UseLog: when blocks were used, kept as the times of their files, so that it
// survives restarts and is shared by all processes and hosts. Written behind
// the requests, once an interval.
//
// A use is a load or a dump that ended well. Those of one request count from
// its last block to its first, and after these the blocks that the first one
// follows, as far as that is known: a prefix outlives its tail. The times only
// grow from one use to the next, whatever the clock does.
//
// What comes in is a list of requests; once an interval the upkeep of some root
// turns it into times of blocks, one for each block, the latest, and the upkeep
// of each root writes those of its own. A root that hangs holds up no other.
//
// Thread-safe. Never blocks for longer than a few operations on memory, but in
// Flush.
#ifndef CACHESTORE_POSIX_USE_LOG_H_
#define CACHESTORE_POSIX_USE_LOG_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/env.h"
#include "posix/parent_links.h"
#include "tier/request.h"

namespace cachestore {

struct UseLogOptions {
  std::vector<bool> roots;  // for each, whether its blocks' uses are kept
  std::chrono::milliseconds interval{1000};
  // What may wait, in blocks: requests, 16 bytes a block; times of one root's
  // blocks, 80 bytes each. What is too much is dropped: the oldest requests,
  // the oldest times of an interval.
  size_t max_queued = size_t{1} << 17;
  size_t max_pending = size_t{1} << 17;
  unsigned link_bits = 18;  // 8 MiB of links; see ParentLinks
};

class UseLog {
 public:
  using Milliseconds = std::chrono::milliseconds;
  using RootOf = std::function<size_t(const BlockId&)>;
  // Sets the time of use, in ns since 1970, of what a block has in a root.
  using Touch = std::function<Status(size_t root, const BlockId&, uint64_t time)>;
  // A request whose uses will be noted.
  struct Following;

  UseLog(Env& env, UseLogOptions options, RootOf root_of, Touch touch);
  ~UseLog();

  // Whether any root's uses are kept. If not, nothing here does anything.
  bool keeps() const { return links_ != nullptr; }

  // For a request that begins; null if nothing is kept, or for want of memory.
  std::shared_ptr<Following> Follow(const Batch& batch);
  // A shard of it has ended. One at a time; the last one makes the uses count.
  void Ended(Following& following, size_t shard, Code code);
  // A request that was served without the files: they count as used.
  void Use(std::span<const BlockId> blocks, const BlockId* parent);
  // Each block follows the one before. No use.
  void Chain(std::span<const BlockId> blocks);
  // Whatever is not written yet isn't any more.
  void Forget();

  // For a root's upkeep: writes what is due, a bounded piece of it, or with
  // `last` all that can be written in a second. `now`: all is due. When to be
  // called again; 0: there is more.
  Milliseconds Flush(size_t root, bool last, bool now = false);

  uint64_t pending() const { return pending_.load(std::memory_order_relaxed); }
  uint64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }

 private:
  struct IdHash {
    size_t operator()(const BlockId& block) const noexcept {
      uint64_t halves[2];
      std::memcpy(halves, block.data(), sizeof halves);
      // Also for ids that aren't hashes, as a test's: no sum of the two that could cancel out.
      const uint64_t mixed = (halves[0] ^ (halves[0] >> 32)) * 0xbf58476d1ce4e5b9u;
      return static_cast<size_t>((mixed ^ (mixed >> 29) ^ halves[1]) * 0x94d049bb133111ebu);
    }
  };
  struct Entry;
  struct Root;
  struct Order;  // blocks by use, the latest first
  using Clock = std::chrono::steady_clock;

  void Add(std::list<Entry>& one);
  void Digest();
  void Learn(const Entry& entry);
  void AddTo(Order& order, const BlockId& block);
  void Assign(const Order& order);
  void TakePiece(Root& root);
  void Write(size_t index, Root& root, const BlockId& block);

  Env& env_;
  const UseLogOptions options_;
  const RootOf root_of_;
  const Touch touch_;
  const std::unique_ptr<ParentLinks> links_;  // guarded by digest_mutex_; null: nothing is kept
  const std::vector<std::unique_ptr<Root>> roots_;
  std::atomic<uint64_t> pending_{0};
  std::atomic<uint64_t> dropped_{0};

  std::mutex mutex_;        // guards the two below
  std::list<Entry> queue_;  // the latest first
  size_t queued_ = 0;

  std::mutex digest_mutex_;  // guards the next; taken before mutex_ and a root's
  uint64_t last_ns_ = 0;     // of the times given
};

}  // namespace cachestore

#endif  // CACHESTORE_POSIX_USE_LOG_H_
