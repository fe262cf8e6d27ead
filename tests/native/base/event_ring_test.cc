#include "base/event_ring.h"

#include <thread>
#include <vector>

#include "harness.h"

namespace cachestore::test {

TEST(EventRing, GivesTheOldestFirst) {
  EventRing ring;
  EXPECT_FALSE(ring.Take().has_value());
  ring.Add(CS_EVENT_INFO, "a");
  ring.Add(CS_EVENT_ERROR, "b");
  auto event = ring.Take();
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->text, "a");
  EXPECT_EQ(event->level, CS_EVENT_INFO);
  event = ring.Take();
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->text, "b");
  EXPECT_EQ(event->level, CS_EVENT_ERROR);
  EXPECT_FALSE(ring.Take().has_value());
}

// Decision 9: bounded, and what is lost is counted.
TEST(EventRing, DropsTheNewestWhenFull) {
  EventRing ring;
  for (int i = 0; i < 300; ++i) ring.Add(CS_EVENT_INFO, std::to_string(i));
  EXPECT_EQ(ring.dropped(), 300u - 256u);
  for (int i = 0; i < 256; ++i) {
    const auto event = ring.Take();
    ASSERT_TRUE(event.has_value());
    EXPECT_EQ(event->text, std::to_string(i));
  }
  EXPECT_FALSE(ring.Take().has_value());
  ring.Add(CS_EVENT_INFO, "again");
  EXPECT_TRUE(ring.Take().has_value());
}

TEST(EventRing, LosesNothingUncountedBetweenThreads) {
  EventRing ring;
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) ring.Add(CS_EVENT_INFO, "x");
    });
  }
  uint64_t taken = 0;
  for (int i = 0; i < 2000; ++i) taken += ring.Take().has_value() ? 1 : 0;
  for (std::thread& thread : threads) thread.join();
  while (ring.Take().has_value()) ++taken;
  EXPECT_EQ(taken + ring.dropped(), 3000u);
}

}  // namespace cachestore::test
