// Tier: what a pipeline is made of. A tier knows this file and base/, no other
// tier.
//
// All calls are thread-safe but Close, which is the last one.
#ifndef CACHESTORE_TIER_TIER_H_
#define CACHESTORE_TIER_TIER_H_

#include <memory>
#include <span>

#include "base/status.h"
#include "cachestore/c_api.h"
#include "tier/request.h"

namespace cachestore {

class Tier {
 public:
  virtual ~Tier() = default;

  // Opens the next pool; one call at a time. Its number is given to other calls
  // once it is open.
  virtual Status OpenPool(PoolOptions options) = 0;

  // present[i] = 1 if blocks[i] is stored. Takes no pins and lists no
  // directory. Bounded; what can't be told in time counts as absent.
  virtual void Lookup(uint32_t pool, std::span<const BlockId> blocks,
                      std::span<uint8_t> present) = 0;
  // How many of the first blocks are stored without a gap.
  virtual size_t LookupPrefix(uint32_t pool, std::span<const BlockId> blocks) = 0;

  // Accept the whole request (OK: every shard of it ends exactly once, by a
  // worker or by Cancel) or none of it (no effect, no I/O). Never block.
  virtual Status Load(const std::shared_ptr<Request>& request) = 0;
  virtual Status Dump(const std::shared_ptr<Request>& request) = 0;

  // Blocks of a prefix, after `parent` if that is known, were used without this
  // tier, in all pools: for what replaces the least recently used. Cheap, never blocks.
  virtual void NoteUse(std::span<const BlockId>, const BlockId* /*parent*/) {}

  // Gives up an accepted request: see Request::Cancel. After Request::Wait,
  // which then is short, the caller's memory is free.
  virtual void Cancel(const std::shared_ptr<Request>& request, Code code) = 0;

  // Forgets every block of all pools. What was accepted for dumping before
  // isn't stored by it, here or in any other process: it ends well, as if it
  // had come just before the clear.
  virtual Status Clear() = 0;
  // Changes with every clear of the first pool that this process has made or
  // noticed, and notices one now where the look is sure to end. A dump of an earlier epoch is one
  // from before it (Batch::epoch).
  virtual uint64_t Epoch() const = 0;
  // The same for all processes and hosts, and lasting: the latest clear that
  // was made or noticed, as in Epoch.
  virtual uint64_t LatestClear() const = 0;

  virtual void AddStats(cs_stats& stats) const = 0;
  // Of these, what callers asked for of all pools but the first.
  virtual void AddSideStats(cs_stats& stats) const = 0;

  // Accepts nothing more; what is queued ends with CS_CLOSED, what is running
  // goes on.
  virtual void Stop() = 0;
  // After Stop, and when every request has ended: finishes what goes on behind
  // the callers' backs, within a limit of its own. Counters and events still work.
  virtual void Drain() {}
  // After Stop, and when every request has ended: joins the threads.
  virtual void Close() = 0;
};

}  // namespace cachestore

#endif  // CACHESTORE_TIER_TIER_H_
