// The conformance suite on the Cache tier over the Posix tier.
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

CONFORMANCE_TESTS(CachePrivate, Private)
CONFORMANCE_TESTS(CacheShared, Shared)
CONFORMANCE_TESTS(CacheTiny, Tiny)

}  // namespace
}  // namespace cachestore::test
