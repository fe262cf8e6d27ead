// The conformance suite on the Cache tier over the Posix tier, which the
// connector doesn't offer yet.
#include "conformance.h"

namespace cachestore::test {
namespace {

std::unique_ptr<Pipeline> Private() {
  auto pipeline = std::make_unique<Pipeline>();
  pipeline->setup.roots = {pipeline->root.path()};
  pipeline->setup.pipeline = "Cache|Posix";
  pipeline->setup.share_buffer = false;
  pipeline->setup.tensor_sizes = {100, 37, 5000};
  return pipeline;
}

std::unique_ptr<Pipeline> Shared() {
  auto pipeline = Private();
  pipeline->setup.share_buffer = true;
  pipeline->setup.buffer_directory = pipeline->root.path() + "/shm";
  (void)Env::Real().MakeDirectory(pipeline->setup.buffer_directory);
  return pipeline;
}

// A region smaller than one batch.
std::unique_ptr<Pipeline> Tiny() {
  auto pipeline = Private();
  pipeline->setup.buffer_capacity = 64 << 10;
  return pipeline;
}

// Those that can be run on blocks of one shard, which is what a slot holds, and
// that don't look for the storage's own workers.
#define CACHE_TESTS(Suite, make)                    \
  CONFORMANCE_TEST(Suite, make, RoundTrip)          \
  CONFORMANCE_TEST(Suite, make, LookupAndPrefix)    \
  CONFORMANCE_TEST(Suite, make, ResultsInOrder)     \
  CONFORMANCE_TEST(Suite, make, SeenByTheNextStore) \
  CONFORMANCE_TEST(Suite, make, Clear)              \
  CONFORMANCE_TEST(Suite, make, NothingToDo)        \
  CONFORMANCE_TEST(Suite, make, TasksAreWaitedForOnce)

CACHE_TESTS(CachePrivate, Private)
CONFORMANCE_TEST(CachePrivate, Private, ExistingIsNotWritten)
CACHE_TESTS(CacheShared, Shared)
CACHE_TESTS(CacheTiny, Tiny)

}  // namespace
}  // namespace cachestore::test
