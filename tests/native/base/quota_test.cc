#include "base/quota.h"

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "harness.h"

namespace cachestore::test {

// Decision 5: all of a request or none of it.
TEST(Quota, TakesAllOrNothing) {
  Quota quota(8);
  EXPECT_TRUE(quota.TryTake(5));
  EXPECT_FALSE(quota.TryTake(4));
  EXPECT_EQ(quota.taken(), 5u);
  EXPECT_TRUE(quota.TryTake(3));
  EXPECT_FALSE(quota.TryTake(1));
  EXPECT_TRUE(quota.TryTake(0));
  quota.GiveBack(8);
  EXPECT_EQ(quota.taken(), 0u);
  EXPECT_TRUE(quota.TryTake(8));
}

// A number near the type's limit doesn't wrap round.
TEST(Quota, RefusesHugeNumbers) {
  Quota quota(8);
  ASSERT_TRUE(quota.TryTake(3));
  for (const uint64_t n : {UINT64_MAX, UINT64_MAX - 2, uint64_t{1} << 63, uint64_t{9}}) {
    EXPECT_FALSE(quota.TryTake(n));
  }
  EXPECT_EQ(quota.taken(), 3u);
}

TEST(Quota, IsNeverExceededByConcurrentTakers) {
  Quota quota(10);
  std::atomic<uint64_t> held{0};
  std::atomic<bool> exceeded{false};
  std::vector<std::thread> threads;
  for (uint64_t self = 1; self <= 4; ++self) {
    threads.emplace_back([&, self] {
      for (int i = 0; i < 5000; ++i) {
        if (!quota.TryTake(self)) continue;
        if (held.fetch_add(self) + self > 10) exceeded = true;
        held.fetch_sub(self);
        quota.GiveBack(self);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(exceeded.load());
  EXPECT_EQ(quota.taken(), 0u);
}

}  // namespace cachestore::test
