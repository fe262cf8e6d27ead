// One stored block, and its file.
#ifndef CACHESTORE_TESTS_POSIX_STORED_BLOCK_H_
#define CACHESTORE_TESTS_POSIX_STORED_BLOCK_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fault_env.h"
#include "fixture.h"
#include "harness.h"

namespace cachestore::test {

struct StoredBlock {
  explicit StoredBlock(StoreSetup wanted = StoreSetup()) : setup(std::move(wanted)) {
    setup.roots = {root.path()};
    store = OpenOrFail(setup, env);
    pages = std::make_unique<Pages>(setup, 1, 1);
    pages->Fill();
    EXPECT_TRUE(DumpAll(*store, *pages) == Repeated(setup.shards, CS_OK));
    path = BlockPath(setup, IdOf(1));
    bytes = ReadFile(path);
    EXPECT_EQ(bytes.size(), setup.file_size());
  }

  const TempDir root;
  FaultEnv env;
  StoreSetup setup;
  std::unique_ptr<Store> store;
  std::unique_ptr<Pages> pages;
  std::string path;
  std::vector<uint8_t> bytes;
};

}  // namespace cachestore::test

#endif  // CACHESTORE_TESTS_POSIX_STORED_BLOCK_H_
