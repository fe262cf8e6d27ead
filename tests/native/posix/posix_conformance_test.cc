// The conformance suite on every way the Posix tier moves bytes.
#include "base/aligned_buffer.h"
#include "conformance.h"

namespace cachestore::test {
namespace {

std::unique_ptr<Pipeline> Posix() {
  auto pipeline = std::make_unique<Pipeline>();
  pipeline->setup.roots = {pipeline->root.path()};
  pipeline->setup.tensor_sizes = {100, 37, 5000};
  Pipeline* const p = pipeline.get();
  pipeline->damage = [p](const BlockId& id) {
    const std::string path = BlockPath(p->setup, id);
    std::vector<uint8_t> bytes = ReadFile(path);
    bytes.at(120) ^= 1;
    WriteFile(path, bytes);
  };
  return pipeline;
}

std::unique_ptr<Pipeline> ZeroCopy() {
  auto pipeline = Posix();
  pipeline->setup.zero_copy = CS_ZERO_COPY_ALWAYS;
  return pipeline;
}

std::unique_ptr<Pipeline> Bounced() {
  auto pipeline = Posix();
  pipeline->setup.zero_copy = CS_ZERO_COPY_NEVER;
  return pipeline;
}

// As on a network filesystem: bounced, and lookups on workers.
std::unique_ptr<Pipeline> Network() {
  auto pipeline = Posix();
  pipeline->env.SetFilesystemType(FaultEnv::kNfs);
  return pipeline;
}

std::unique_ptr<Pipeline> SeveralRoots() {
  auto pipeline = Posix();
  pipeline->setup.roots.clear();
  for (const char* name : {"/a", "/b b", "/c"}) {
    pipeline->setup.roots.push_back(pipeline->root.path() + name);
  }
  Pipeline* const p = pipeline.get();
  pipeline->damage = [p](const BlockId& id) {
    for (const std::string& root : p->setup.roots) {
      StoreSetup one = p->setup;
      one.roots = {root};
      const std::string path = BlockPath(one, id);
      std::vector<uint8_t> bytes = ReadFile(path);
      if (bytes.empty()) continue;
      bytes.at(120) ^= 1;
      WriteFile(path, bytes);
    }
  };
  return pipeline;
}

// O_DIRECT straight on the caller's aligned memory.
std::unique_ptr<Pipeline> DirectAligned() {
  auto pipeline = Posix();
  pipeline->setup.direct = true;
  pipeline->setup.tensor_sizes = {4096, 8192};
  const std::string path = pipeline->root.path() + "/probe";
  WriteFile(path, {1});
  Result<Fd> opened = Env::Real().OpenRead(path, /*direct=*/true);
  if (opened.ok()) {
    (void)Env::Real().Close(opened.value());
  } else {
    pipeline->skipped = "no O_DIRECT here: " + opened.status().text();
  }
  return pipeline;
}

// O_DIRECT by a buffer of the store's: skewed memory, odd sizes (F10).
std::unique_ptr<Pipeline> DirectSkewed() {
  auto pipeline = DirectAligned();
  pipeline->setup.tensor_sizes = {4097, 37};
  pipeline->skew = 64;
  return pipeline;
}

}  // namespace

CONFORMANCE_TESTS(PosixZeroCopy, ZeroCopy)
CONFORMANCE_TESTS(PosixBounced, Bounced)
CONFORMANCE_TESTS(PosixNetwork, Network)
CONFORMANCE_TESTS(PosixSeveralRoots, SeveralRoots)
CONFORMANCE_TESTS(PosixDirectAligned, DirectAligned)
CONFORMANCE_TESTS(PosixDirectSkewed, DirectSkewed)

}  // namespace cachestore::test
