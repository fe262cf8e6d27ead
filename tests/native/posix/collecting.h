// A root as its collector sees it: without a store or threads, a step at a time.
#ifndef CACHESTORE_TESTS_POSIX_COLLECTING_H_
#define CACHESTORE_TESTS_POSIX_COLLECTING_H_

#include "base/env.h"
#include "base/event_ring.h"
#include "posix/collector.h"
#include "posix/directory.h"

namespace cachestore::test {

struct Collecting {
  explicit Collecting(const DirectoryOptions& options, Env& env = Env::Real())
      : directory(env, events, options),
        opened(directory.Open().ok()),
        collector(env, events, directory) {}
  ~Collecting() {
    collector.Close();
    directory.Close();
  }
  void Step(int times = 1) {
    for (int i = 0; i < times; ++i) (void)collector.Step();
  }
  uint64_t evicted() const { return collector.evicted_blocks(); }

  EventRing events;
  Directory directory;
  const bool opened;
  Collector collector;
};

}  // namespace cachestore::test

#endif  // CACHESTORE_TESTS_POSIX_COLLECTING_H_
