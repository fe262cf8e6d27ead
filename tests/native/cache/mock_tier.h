// MockTier: a tier below the cache that does what a test tells it to: refuses,
// fails, holds until told, never answers. It moves bytes on threads of its own,
// and counts what it is asked for.
#ifndef CACHESTORE_TESTS_CACHE_MOCK_TIER_H_
#define CACHESTORE_TESTS_CACHE_MOCK_TIER_H_

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tier/tier.h"

namespace cachestore::test {

enum Direction : uint8_t { kLoad, kDump };

// Thread-safe. Blocks are of one shard.
class MockTier final : public Tier {
 public:
  using Answer = std::function<Code(const BlockId&)>;

  explicit MockTier(Geometry geometry);
  ~MockTier() override;

  // From now on requests are refused with this code; CS_OK: accepted again.
  void Refuse(Direction direction, Code code);
  // How shards end from now on. Asked on the mock's thread once the shard has
  // begun, so it may block. CS_OK, or no function: the bytes are moved, but of
  // what isn't stored.
  void End(Direction direction, Answer answer);
  void EndWith(Direction direction, Code code);
  // Accepted shards stay queued, until Cancel or Release.
  void Hold(Direction direction);
  void Release(Direction direction);
  size_t held(Direction direction) const;

  // What is stored: payloads.
  void Put(const BlockId& block, std::vector<uint8_t> payload);
  std::vector<uint8_t> Stored(const BlockId& block) const;  // empty: absent
  bool Has(const BlockId& block) const { return !Stored(block).empty(); }

  // Requests accepted, and their shards.
  size_t calls(Direction direction) const { return calls_[direction]; }
  size_t shards(Direction direction) const { return shards_[direction]; }
  size_t refused(Direction direction) const { return refused_[direction]; }
  size_t cancels() const { return cancels_; }
  // Dumps are taken for slots of this size, and all bytes of each are noted, the
  // padding included.
  void NoteSlots(uint64_t slot_size) { slot_size_ = slot_size; }
  std::vector<uint8_t> SlotOf(const BlockId& block) const;

  Status OpenPool(PoolOptions) override { return Status::Ok(); }
  void Lookup(uint32_t pool, std::span<const BlockId> blocks, std::span<uint8_t> present) override;
  size_t LookupPrefix(uint32_t pool, std::span<const BlockId> blocks) override;
  Status Load(const std::shared_ptr<Request>& request) override { return Start(request, kLoad); }
  Status Dump(const std::shared_ptr<Request>& request) override { return Start(request, kDump); }
  void Cancel(const std::shared_ptr<Request>& request, Code code) override;
  Status Clear() override;
  uint64_t Epoch() const override { return epoch_; }
  uint64_t LatestClear() const override { return epoch_; }
  void AddStats(cs_stats& stats) const override;
  void AddSideStats(cs_stats&) const override {}
  void Stop() override;
  void Close() override;

 private:
  struct Job {
    std::shared_ptr<Request> request;
    size_t shard = 0;
  };

  Status Start(const std::shared_ptr<Request>& request, Direction direction);
  void Run(Direction direction);
  Code Move(const Job& job, Direction direction);

  const Geometry geometry_;
  std::array<std::atomic<size_t>, 2> calls_{}, shards_{}, refused_{};
  std::atomic<size_t> cancels_{0};
  std::atomic<uint64_t> epoch_{1};
  std::atomic<uint64_t> slot_size_{0};

  mutable std::mutex mutex_;  // guards all below but the threads
  std::condition_variable work_;
  std::array<std::deque<Job>, 2> queues_;
  std::array<bool, 2> hold_{};
  std::array<Code, 2> refuse_{CS_OK, CS_OK};
  std::array<Answer, 2> answers_;
  std::map<BlockId, std::vector<uint8_t>> stored_, slots_;
  bool stopped_ = false;

  std::array<std::thread, 2> threads_;  // one a direction
};

}  // namespace cachestore::test

#endif  // CACHESTORE_TESTS_CACHE_MOCK_TIER_H_
