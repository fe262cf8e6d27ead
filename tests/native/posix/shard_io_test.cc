// What a block file must be to be served, and what becomes of one that isn't:
// F04 (wrong bytes), F05 (gone, cut, emptied), F22 (somebody else's).
#include "posix/shard_io.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "base/checksum.h"
#include "fixture.h"
#include "harness.h"
#include "posix/stored_block.h"

namespace cachestore::test {
namespace {

// 100 + 37 bytes: 3959 of padding.
struct Stored : StoredBlock {
  explicit Stored(uint32_t shards = 1) : StoredBlock(Of(shards)) {}

  static StoreSetup Of(uint32_t shards) {
    StoreSetup setup;
    setup.shards = shards;
    return setup;
  }

  // Puts these bytes in the file's place; then a load must be a counted miss,
  // the file gone and the lookup negative. Which shards fail: all but those
  // in `fine`.
  void ExpectMiss(const std::vector<uint8_t>& damaged, const char* what,
                  const std::vector<size_t>& fine = {}) {
    WriteFile(path, damaged);
    ExpectMissOfFile(what, fine);
  }

  void ExpectMissOfFile(const char* what, const std::vector<size_t>& fine = {}) {
    const uint64_t before = store->Stats().load_corrupt;
    pages->Poison();
    size_t misses = 0;
    for (size_t i = 0; i < pages->size(); ++i) {
      Result<cs_task> task = store->Load(pages->part(i, 1));
      const Codes codes = WaitFor(*store, task.value(), 1);
      const bool expected_fine = std::find(fine.begin(), fine.end(), i) != fine.end();
      // Once it is set aside, the other shards find nothing.
      const int32_t expected = expected_fine ? CS_OK : misses > 0 ? CS_NOT_FOUND : CS_CORRUPT;
      if (codes[0] != expected) {
        Fail(__FILE__, __LINE__,
             std::string(what) + ": shard " + std::to_string(i) + " gave " +
                 std::to_string(codes[0]));
      }
      if (codes[0] == CS_OK) EXPECT_TRUE(pages->Holds(i));
      misses += expected_fine ? 0 : 1;
    }
    EXPECT_EQ(store->Stats().load_corrupt, before + 1);
    EXPECT_FALSE(IsPresent(*store, IdOf(1)));
    while (store->NextEvent().has_value()) continue;
  }
};

// 64 blocks at a time, each with another byte of its file changed.
void FlipEveryByte(cs_zero_copy zero_copy) {
  constexpr size_t kAtOnce = 64;
  const TempDir root;
  StoreSetup setup({root.path()});
  setup.zero_copy = zero_copy;
  const auto store = OpenOrFail(setup);
  Pages pages(setup, 0, kAtOnce);
  pages.Fill();
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(kAtOnce, CS_OK));
  std::vector<std::string> paths;
  std::vector<std::vector<uint8_t>> files;
  for (const BlockId& id : pages.block_ids()) {
    paths.push_back(BlockPath(setup, id));
    files.push_back(ReadFile(paths.back()));
  }
  const size_t size = setup.file_size();
  ASSERT_EQ(size % kAtOnce, 0u);
  for (size_t first = 0; first < size; first += kAtOnce) {
    for (size_t k = 0; k < kAtOnce; ++k) {
      const size_t at = first + k;
      files[k][at] ^= static_cast<uint8_t>(1 + at % 255);
      WriteFile(paths[k], files[k]);
      files[k][at] ^= static_cast<uint8_t>(1 + at % 255);
    }
    const Codes codes = LoadAll(*store, pages);
    if (codes != Repeated(kAtOnce, CS_CORRUPT)) {
      Fail(__FILE__, __LINE__, "a byte from " + std::to_string(first) + " on");
    }
    EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(kAtOnce, 0));
    while (store->NextEvent().has_value()) continue;
  }
  EXPECT_EQ(store->Stats().load_corrupt, size);
  EXPECT_EQ(store->Stats().load_ok, 0u);
  EXPECT_TRUE(pages.GuardsIntact());
}

}  // namespace

// F04, over the whole file: tensors, padding, record.
TEST(ShardIo, EveryFlippedByteIsAMissZeroCopy) { FlipEveryByte(CS_ZERO_COPY_ALWAYS); }
TEST(ShardIo, EveryFlippedByteIsAMissBounced) { FlipEveryByte(CS_ZERO_COPY_NEVER); }

// In a block of several shards a damaged one doesn't spoil those that were
// read before it was found out.
TEST(ShardIo, FlippedByteOfOneShardOfSeveral) {
  Stored stored(3);
  for (size_t shard = 0; shard < 3; ++shard) {
    std::vector<uint8_t> damaged = stored.bytes;
    damaged[4096 * shard + 101] ^= 1;
    std::vector<size_t> fine;
    for (size_t i = 0; i < shard; ++i) fine.push_back(i);
    stored.ExpectMiss(damaged, "shard", fine);
  }
}

// Two shards that changed places have right bytes in the wrong place.
TEST(ShardIo, SwappedShardsAreAMiss) {
  Stored stored(2);
  std::vector<uint8_t> damaged = stored.bytes;
  std::swap_ranges(damaged.begin(), damaged.begin() + 4096, damaged.begin() + 4096);
  stored.ExpectMiss(damaged, "swapped");
}

// F05: cut, emptied, too long.
TEST(ShardIo, EveryOtherLengthIsAMiss) {
  Stored stored;
  const size_t size = stored.bytes.size();
  for (const size_t length :
       {size_t{0}, size_t{1}, size_t{99}, size_t{100}, size_t{136}, size_t{137}, size_t{4095},
        size_t{4096}, size_t{4097}, size - 4096, size - 4, size - 1, size + 1, size + 4096}) {
    std::vector<uint8_t> other = stored.bytes;
    other.resize(length);
    // A lookup, too, takes no file of another size for a block.
    WriteFile(stored.path, other);
    EXPECT_FALSE(IsPresent(*stored.store, IdOf(1)));
    stored.ExpectMiss(other, ("length " + std::to_string(length)).c_str());
  }
}

// A file of holes is as long as it should be.
TEST(ShardIo, FileOfZerosIsAMiss) {
  Stored stored;
  stored.ExpectMiss(std::vector<uint8_t>(stored.bytes.size(), 0), "zeros");
}

TEST(ShardIo, DirectoryInItsPlaceIsAMiss) {
  Stored stored;
  ASSERT_EQ(unlink(stored.path.c_str()), 0);
  ASSERT_EQ(mkdir(stored.path.c_str(), 0700), 0);
  EXPECT_FALSE(IsPresent(*stored.store, IdOf(1)));
  stored.pages->Poison();
  EXPECT_TRUE(LoadAll(*stored.store, *stored.pages) == Repeated(1, CS_CORRUPT));
  EXPECT_FALSE(IsPresent(*stored.store, IdOf(1)));
  // It is no obstacle for ever: a dump takes its place.
  stored.pages->Fill();
  EXPECT_TRUE(DumpAll(*stored.store, *stored.pages) == Repeated(1, CS_OK));
  EXPECT_TRUE(IsPresent(*stored.store, IdOf(1)));
  EXPECT_TRUE(LoadAll(*stored.store, *stored.pages) == Repeated(1, CS_OK));
}

// ... also one that looks as large as a block.
TEST(ShardIo, DirectoryOfABlocksSizeIsAMiss) {
  Stored stored(2);
  ASSERT_EQ(unlink(stored.path.c_str()), 0);
  ASSERT_EQ(mkdir(stored.path.c_str(), 0700), 0);
  // Filesystems differ in what size a directory has; make one that fits.
  struct stat st = {};
  ASSERT_EQ(stat(stored.path.c_str(), &st), 0);
  for (int i = 0; i < 3000 && static_cast<uint64_t>(st.st_size) < stored.setup.file_size(); ++i) {
    WriteFile(stored.path + "/" + std::string(60, 'x') + std::to_string(i), {});
    ASSERT_EQ(stat(stored.path.c_str(), &st), 0);
  }
  if (static_cast<uint64_t>(st.st_size) != stored.setup.file_size()) {
    SKIP("no directory of " + std::to_string(stored.setup.file_size()) + " bytes here, but of " +
         std::to_string(st.st_size));
  }
  EXPECT_FALSE(IsPresent(*stored.store, IdOf(1)));
  EXPECT_TRUE(LoadAll(*stored.store, *stored.pages) == Repeated(2, CS_CORRUPT));
}

// F22, decision 7: a whole file of another identity, or of another block.
TEST(ShardIo, AnotherIdentitysFileIsAMiss) {
  Stored stored;
  StoreSetup other = stored.setup;
  other.identity = "other";
  other.fingerprint = 2;
  {
    const auto store = OpenOrFail(other);
    EXPECT_TRUE(DumpAll(*store, *stored.pages) == Repeated(1, CS_OK));
  }
  stored.ExpectMiss(ReadFile(BlockPath(other, IdOf(1))), "another identity");
}

TEST(ShardIo, AnotherBlocksFileIsAMiss) {
  Stored stored;
  Pages second(stored.setup, 2, 1);
  second.Fill();
  EXPECT_TRUE(DumpAll(*stored.store, second) == Repeated(1, CS_OK));
  stored.ExpectMiss(ReadFile(BlockPath(stored.setup, IdOf(2))), "another block");
  EXPECT_TRUE(IsPresent(*stored.store, IdOf(2)));
}

// As many bytes, cut into other tensors.
TEST(ShardIo, OtherTensorSizesAreAMiss) {
  Stored stored;
  StoreSetup other = stored.setup;
  other.tensor_sizes = {37, 100};
  const auto store = OpenOrFail(other);
  Pages pages(other, 1, 1);
  EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(1, 1));
  EXPECT_TRUE(LoadAll(*store, pages) == Repeated(1, CS_CORRUPT));
  EXPECT_EQ(store->Stats().load_corrupt, 1u);
}

// A whole block of version 1, which had no boot id in its record, and one of a
// version to come.
TEST(ShardIo, AnotherVersionIsAMiss) {
  for (const uint8_t version : {1, 3}) {
    Stored stored;
    std::vector<uint8_t> other = stored.bytes;
    uint8_t* const record = other.data() + other.size() - 4096;
    record[8] = version;
    if (version == 1) {
      std::copy(record + 80, record + 4092, record + 64);
      std::fill(record + 4076, record + 4092, uint8_t{0});
    }
    const uint32_t checksum = Crc32c(0, record, 4092);
    for (size_t i = 0; i < 4; ++i) record[4092 + i] = static_cast<uint8_t>(checksum >> (8 * i));
    stored.ExpectMiss(other, "version");
    stored.pages->Fill();
    EXPECT_TRUE(DumpAll(*stored.store, *stored.pages) == Repeated(1, CS_OK));
    EXPECT_EQ(ReadFile(stored.path) == stored.bytes, true);
  }
}

// F06: the miss is no verdict for ever.
TEST(ShardIo, DumpAfterAMissMakesItTrueAgain) {
  Stored stored;
  std::vector<uint8_t> damaged = stored.bytes;
  damaged[5] ^= 1;
  stored.ExpectMiss(damaged, "damaged");
  stored.pages->Fill();
  EXPECT_TRUE(DumpAll(*stored.store, *stored.pages) == Repeated(1, CS_OK));
  EXPECT_EQ(stored.store->Stats().dump_ok, 2u);
  EXPECT_TRUE(ReadFile(stored.path) == stored.bytes);
}

// F05: gone between the lookup and the load.
TEST(ShardIo, UnlinkedAfterLookupIsAMiss) {
  Stored stored;
  EXPECT_TRUE(IsPresent(*stored.store, IdOf(1)));
  ASSERT_EQ(unlink(stored.path.c_str()), 0);
  stored.pages->Poison();
  EXPECT_TRUE(LoadAll(*stored.store, *stored.pages) == Repeated(1, CS_NOT_FOUND));
  EXPECT_TRUE(stored.pages->IsPoisoned());
  EXPECT_EQ(stored.store->Stats().load_absent, 1u);
}

// F05: cut while it is open, before the read.
TEST(ShardIo, TruncatedWhileBeingReadIsAMiss) {
  for (const uint32_t shards : {1u, 2u}) {
    for (const off_t length : {0, 50, 4096, 8191}) {
      Stored stored(shards);
      Gate gate;
      stored.env.Before(Op::kReadFull, Holding(gate));
      Result<cs_task> task = stored.store->Load(stored.pages->part(0, 1));
      ASSERT_OK(task);
      ASSERT_TRUE(gate.WaitArrived(1));
      ASSERT_EQ(truncate(stored.path.c_str(), length), 0);
      gate.Open();
      EXPECT_TRUE(WaitFor(*stored.store, task.value(), 1) == Repeated(1, CS_CORRUPT));
      EXPECT_FALSE(IsPresent(*stored.store, IdOf(1)));
    }
  }
}

// F05: what was unlinked is read to its end; it was whole.
TEST(ShardIo, UnlinkedWhileBeingReadIsServed) {
  Stored stored;
  Gate gate;
  stored.env.Before(Op::kReadFull, Holding(gate));
  stored.pages->Poison();
  Result<cs_task> task = stored.store->Load(stored.pages->batch());
  ASSERT_TRUE(gate.WaitArrived(1));
  ASSERT_EQ(unlink(stored.path.c_str()), 0);
  gate.Open();
  EXPECT_TRUE(WaitFor(*stored.store, task.value(), 1) == Repeated(1, CS_OK));
  EXPECT_TRUE(stored.pages->HoldsAll());
}

// Setting a damaged file aside must not hit the good one that has just been
// published under the same name.
TEST(ShardIo, SettingAsideSparesASuccessor) {
  Stored stored;
  std::vector<uint8_t> damaged = stored.bytes;
  damaged[5] ^= 1;
  WriteFile(stored.path, damaged);
  Gate gate;
  stored.env.After(Op::kReadFull, Holding(gate));
  Result<cs_task> task = stored.store->Load(stored.pages->batch());
  ASSERT_TRUE(gate.WaitArrived(1));
  WriteFile(stored.path + ".new", stored.bytes);
  std::filesystem::rename(stored.path + ".new", stored.path);
  gate.Open();
  EXPECT_TRUE(WaitFor(*stored.store, task.value(), 1) == Repeated(1, CS_CORRUPT));
  EXPECT_TRUE(IsPresent(*stored.store, IdOf(1)));
  EXPECT_TRUE(LoadAll(*stored.store, *stored.pages) == Repeated(1, CS_OK));
}

// Reading fails: an error, counted as such, and not a word about damage.
TEST(ShardIo, ReadErrorIsNoMiss) {
  Stored stored;
  for (const Op op : {Op::kOpenRead, Op::kStatFd, Op::kReadFull}) {
    stored.env.NoHooks();
    stored.env.Before(op, Failing(CS_IO));
    stored.pages->Poison();
    EXPECT_TRUE(LoadAll(*stored.store, *stored.pages) == Repeated(1, CS_IO));
  }
  EXPECT_EQ(stored.store->Stats().load_failed, 3u);
  EXPECT_EQ(stored.store->Stats().load_corrupt, 0u);
  stored.env.NoHooks();
  EXPECT_TRUE(LoadAll(*stored.store, *stored.pages) == Repeated(1, CS_OK));
}

// A short read in the middle of a whole file isn't passed off as success.
TEST(ShardIo, ShortReadIsAMiss) {
  for (const uint64_t limit : {0, 1, 137, 4096, 8191}) {
    Stored stored;
    stored.env.Before(Op::kReadFull, [limit](FaultEnv::Call& call) {
      call.limit = limit;
      return Status::Ok();
    });
    EXPECT_TRUE(LoadAll(*stored.store, *stored.pages) == Repeated(1, CS_CORRUPT));
  }
}

// What isn't a regular file is a miss, and never waited for: opening a FIFO
// would wait for a writer.
TEST(ShardIo, AFifoInABlocksPlaceIsAMiss) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  const auto store = OpenOrFail(setup);
  Pages pages(setup, 0, 1);
  pages.Fill();
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(1, CS_OK));
  const std::string path = BlockPath(setup, IdOf(0));
  ASSERT_EQ(unlink(path.c_str()), 0);
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(1, 0));
  EXPECT_TRUE(LoadAll(*store, pages) == Repeated(1, CS_CORRUPT));
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(1, CS_OK));
  EXPECT_TRUE(LoadAll(*store, pages) == Repeated(1, CS_OK));
}

}  // namespace cachestore::test
