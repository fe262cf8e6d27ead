// The conformance suite on the Cache tier over the Posix tier.
#include <filesystem>

#include "conformance.h"

namespace cachestore::test {
namespace {

std::unique_ptr<Pipeline> Private() {
  auto pipeline = std::make_unique<Pipeline>();
  pipeline->setup.roots = {pipeline->root.path()};
  pipeline->setup.pipeline = "Cache|Posix";
  pipeline->setup.share_buffer = false;
  pipeline->setup.tensor_sizes = {100, 37, 5000};
  pipeline->max_shards = 1;
  pipeline->depth = &StoreSetup::copy_queue_depth;
  pipeline->has_memory = true;
  Pipeline* const p = pipeline.get();
  pipeline->damage = [p](const BlockId& id) {
    const std::string path = BlockPath(p->setup, id);
    std::vector<uint8_t> bytes = ReadFile(path);
    bytes.at(120) ^= 1;
    WriteFile(path, bytes);
  };
  return pipeline;
}

std::unique_ptr<Pipeline> Shared() {
  auto pipeline = Private();
  pipeline->setup.share_buffer = true;
  pipeline->setup.buffer_directory = pipeline->root.path() + "/shm";
  std::filesystem::create_directory(pipeline->setup.buffer_directory);
  return pipeline;
}

// A region smaller than one batch: the rest of it goes past the cache.
std::unique_ptr<Pipeline> Tiny() {
  auto pipeline = Private();
  pipeline->setup.buffer_capacity = 64 << 10;
  pipeline->writes_through = true;
  return pipeline;
}

// I/O of the tier below straight on the slots.
std::unique_ptr<Pipeline> Direct() {
  auto pipeline = Private();
  pipeline->setup.direct = true;
  pipeline->setup.tensor_sizes = {4096, 8192};
  const std::string path = pipeline->root.path() + "/probe";
  WriteFile(path, {1});
  const Result<Fd> opened = Env::Real().OpenRead(path, /*direct=*/true);
  if (opened.ok()) {
    (void)Env::Real().Close(opened.value());
  } else {
    pipeline->skipped = "no O_DIRECT here: " + opened.status().text();
  }
  return pipeline;
}

}  // namespace

CONFORMANCE_TESTS(CachePrivate, Private)
CONFORMANCE_TESTS(CacheShared, Shared)
CONFORMANCE_TESTS(CacheTiny, Tiny)
CONFORMANCE_TESTS(CacheDirect, Direct)

}  // namespace cachestore::test
