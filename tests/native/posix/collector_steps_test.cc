// What a collector evicts, seen step by step.
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "fixture.h"
#include "harness.h"
#include "posix/collecting.h"

namespace cachestore::test {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kFile = 8192;  // of a block of StoreSetup's tensors

}  // namespace

// The parts of a block, of one family's identities, go together or stay together: as
// long as one was used lately, all were.
TEST(CollectorSteps, EvictsTheOthersOfABlockWithIt) {
  const TempDir root;
  const auto path = [&](const std::string& identity, uint64_t block) {
    StoreSetup setup({root.path()});
    setup.identity = identity;
    return BlockPath(setup, IdOf(block));
  };
  const auto put = [&](const std::string& identity, uint64_t block, uint64_t second) {
    fs::create_directories(fs::path(path(identity, block)).parent_path());
    WriteFile(path(identity, block), std::vector<uint8_t>(kFile));
    EXPECT_OK(Env::Real().SetModified(path(identity, block), second * 1'000'000'000));
  };
  // By time alone: rank 1's block 0, then one file of block 2.
  put("f.kv-1", 0, 1);
  put("f.kv-0", 0, 5);
  put("f.kv-0", 1, 6);
  put("f.kv-0", 2, 3);
  put("f.indexer", 2, 4);
  put("other.kv", 2, 2);
  put("f", 2, 9);  // no family
  DirectoryOptions options;
  options.root = root.path();
  options.identity_name = "mine";
  options.limits.capacity = 7 * kFile + 100;
  options.limits.high_watermark_percent = 90;
  options.limits.low_watermark_percent = 80;
  Collecting collecting(options);
  ASSERT_TRUE(collecting.opened);
  EXPECT_TRUE(Eventually([&] {
    collecting.Step();
    return collecting.evicted() > 0;
  }));
  // other.kv's is the oldest; one more was to go, and two did.
  EXPECT_EQ(collecting.evicted(), 3u);
  EXPECT_EQ(collecting.collector.evicted_bytes(), 3 * kFile);
  EXPECT_FALSE(fs::exists(path("other.kv", 2)));
  EXPECT_FALSE(fs::exists(path("f.kv-0", 2)));
  EXPECT_FALSE(fs::exists(path("f.indexer", 2)));
  for (const auto& [identity, block] :
       {std::pair("f.kv-1", 0), {"f.kv-0", 0}, {"f.kv-0", 1}, {"f", 2}}) {
    EXPECT_TRUE(fs::exists(path(identity, static_cast<uint64_t>(block))));
  }
  const Result<FileInfo> lifted = Env::Real().Stat(path("f.kv-1", 0));
  ASSERT_OK(lifted);
  EXPECT_EQ(lifted.value().modified_ns, 5'000'000'000u);
  collecting.Step();
  EXPECT_EQ(collecting.directory.space().used(), 4 * kFile);
}

// A burst of dumps for which there is no room costs no more than a part.
TEST(CollectorSteps, MakesRoomForABurstPieceByPiece) {
  TempDir root;
  const StoreSetup setup({root.path()});
  Pages pages(setup, 0, 200);
  pages.Fill();
  {
    auto store = OpenOrFail(setup);
    ASSERT_TRUE(store != nullptr);
    EXPECT_TRUE(DumpAll(*store, pages) == Repeated(200, CS_OK));
  }
  DirectoryOptions options;
  options.root = root.path();
  options.identity_name = setup.identity;
  options.limits.capacity = 10000 * kFile;
  Collecting collecting(options);
  Collecting other(options);
  ASSERT_TRUE(collecting.opened && other.opened);
  collecting.Step(3);
  ASSERT_TRUE(collecting.collector.collecting());
  other.Step();
  collecting.Step();
  EXPECT_EQ(collecting.evicted(), 0u);
  for (int i = 0; i < 1000; ++i) other.directory.space().NoteFull(kFile);
  other.Step();
  collecting.Step();  // looks for the oldest
  collecting.Step();
  EXPECT_EQ(collecting.evicted(), 64u);
  for (int i = 0; i < 5; ++i) {
    other.Step();
    collecting.Step();
  }
  EXPECT_EQ(collecting.evicted(), 64u);
  other.directory.space().NoteFull(kFile);
  other.Step();
  collecting.Step();
  collecting.Step();
  EXPECT_EQ(collecting.evicted(), 65u);
}

}  // namespace cachestore::test
