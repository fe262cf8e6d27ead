// CachedMock: a cache tier over a MockTier, and a caller's requests to it.
#ifndef CACHESTORE_TESTS_CACHE_CACHED_MOCK_H_
#define CACHESTORE_TESTS_CACHE_CACHED_MOCK_H_

#include <chrono>
#include <memory>
#include <vector>

#include "cache/cache_tier.h"
#include "cache/mock_tier.h"
#include "fixture.h"

namespace cachestore::test {

class CachedMock {
 public:
  // A private cache of `slots` blocks. Change `options`, then Open.
  explicit CachedMock(StoreSetup store_setup = StoreSetup(), size_t slots = 64);
  ~CachedMock();

  [[nodiscard]] bool Open();
  void Close();

  StoreSetup setup;  // for Pages
  CacheOptions options;
  std::shared_ptr<EventRing> events = std::make_shared<EventRing>();
  std::unique_ptr<Tier> tier;
  MockTier* below = nullptr;  // the tier's

  // A request by itself, so that it may be wrong.
  struct Asked {
    std::shared_ptr<Request> request;
    Status started;
  };
  Asked Ask(Direction direction, Batch batch);
  Asked Ask(Direction direction, const Pages& pages) { return Ask(direction, BatchOf(pages)); }
  // Waits, then gives up. The refusal's code, if it was refused, for every shard.
  std::vector<Code> EndsOf(const Asked& asked, std::chrono::milliseconds timeout = kLong);
  std::vector<Code> Load(const Pages& pages, std::chrono::milliseconds timeout = kLong) {
    return EndsOf(Ask(kLoad, pages), timeout);
  }
  std::vector<Code> Dump(const Pages& pages, std::chrono::milliseconds timeout = kLong) {
    return EndsOf(Ask(kDump, pages), timeout);
  }

  cs_stats Stats() const;
  // Soon: nothing queued, running, outstanding or being filled.
  [[nodiscard]] bool IsIdle() const;
  // Soon: nothing dirty either.
  [[nodiscard]] bool IsStored() const;
  // Whether some event has this text in it. Takes all there are.
  bool HasEvent(const std::string& text);

  static Batch BatchOf(const Pages& pages);
  std::vector<uint8_t> PayloadOf(const Pages& pages, size_t shard) const;
  // Stores the pages below.
  void Put(const Pages& pages);
  // Whether what is stored below of the page is what it holds.
  bool Stores(const Pages& pages, size_t shard) const;
};

using EndCodes = std::vector<Code>;

// The bytes of a region of `slots` slots.
uint64_t RegionBytes(uint64_t slots, uint64_t slot_size);

}  // namespace cachestore::test

#endif  // CACHESTORE_TESTS_CACHE_CACHED_MOCK_H_
