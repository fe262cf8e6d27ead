// The upkeep's threads: each runs a last tick, whenever it is stopped.
#include "posix/upkeep.h"

#include <atomic>
#include <memory>

#include "fault_env.h"
#include "harness.h"

namespace cachestore::test {

using std::chrono::milliseconds;

// Stopped before the system has started its threads, as a short-lived store on
// a busy host is: what was noted is still written.
TEST(Upkeep, StoppedAtOnceRunsItsLastTick) {
  constexpr size_t kRoots = 3;
  for (int round = 0; round < 200; ++round) {
    std::atomic<size_t> last_ticks = 0;
    Upkeep upkeep(kRoots, [&](size_t, bool last) {
      last_ticks += last ? 1 : 0;
      return milliseconds(1000);
    });
    upkeep.Stop();
    ASSERT_TRUE(upkeep.Join(milliseconds(30000)));
    ASSERT_EQ(last_ticks.load(), kRoots);
  }
}

TEST(Upkeep, AWakeIsATickAtOnce) {
  std::atomic<size_t> ticks = 0;
  Upkeep upkeep(2, [&](size_t root, bool last) {
    ticks += root == 1 && !last ? 1 : 0;
    return milliseconds(3600 * 1000);
  });
  EXPECT_TRUE(Eventually([&] { return ticks == 1; }));
  upkeep.Wake(1);
  EXPECT_TRUE(Eventually([&] { return ticks == 2; }));
  upkeep.Waker(1)();
  EXPECT_TRUE(Eventually([&] { return ticks == 3; }));
}

// A root that hangs is left behind; another's last tick is run.
TEST(Upkeep, AHungRootHoldsUpNoOther) {
  auto hang = std::make_shared<std::atomic<bool>>(true);
  auto last_ticks = std::make_shared<std::atomic<size_t>>(0);
  {
    Upkeep upkeep(2, [hang, last_ticks](size_t root, bool last) {
      if (root == 0) {
        EXPECT_TRUE(Eventually([&] { return !*hang; }));
      }
      *last_ticks += last ? 1 : 0;
      return milliseconds(1);
    });
    upkeep.Stop();
    EXPECT_TRUE(!upkeep.Join(milliseconds(100)));
    EXPECT_TRUE(Eventually([&] { return *last_ticks == 1; }));
    *hang = false;
  }
  EXPECT_TRUE(Eventually([&] { return *last_ticks == 2; }));
}

}  // namespace cachestore::test
