// F02: a full disk. A dump that finds no room says so, leaves nothing visible
// and no temporary file, and works again when there is room.
#include <signal.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>

#include "fixture.h"
#include "harness.h"

namespace cachestore::test {
namespace {

// A filesystem of its own, of so many bytes.
class TinyTmpfs {
 public:
  explicit TinyTmpfs(const std::string& options) {
    mounted_ = mount("cachestore-test", dir_.path().c_str(), "tmpfs", MS_NOSUID | MS_NODEV,
                     options.c_str()) == 0;
    if (!mounted_) reason_ = std::string("mounting a tmpfs: ") + strerror(errno);
  }
  ~TinyTmpfs() {
    if (mounted_) umount2(dir_.path().c_str(), MNT_DETACH);
  }
  const std::string& reason() const { return reason_; }  // "" if it is there
  const std::string& path() const { return dir_.path(); }

 private:
  TempDir dir_;
  bool mounted_ = false;
  std::string reason_;
};

void ExpectNothingLeft(Store& store, const StoreSetup& setup, const Pages& pages,
                       const Codes& codes) {
  const std::vector<uint8_t> present = LookupAll(store, pages);
  for (size_t i = 0; i < pages.size(); ++i) {
    EXPECT_EQ(present[i / setup.shards], codes[i] == CS_OK ? 1 : 0);
  }
  EXPECT_TRUE(FilesBelow(TemporaryRoot(setup)).empty());
}

}  // namespace

// The write fails at once, or after a part was written.
TEST(Space, WriteThatFindsNoRoom) {
  for (const uint64_t type : {uint64_t{0}, FaultEnv::kNfs}) {
    for (const int64_t limit : {-1, 0, 1, 137, 4096, 8191}) {
      const TempDir root;
      const StoreSetup setup({root.path()});
      FaultEnv env;
      env.SetFilesystemType(type);
      const auto store = OpenOrFail(setup, env);
      WaitCleaned(setup, env);
      Pages pages(setup, 0, 3);
      pages.Fill();
      env.Before(Op::kWriteFull, [limit](FaultEnv::Call& call) {
        if (limit >= 0) call.limit = static_cast<uint64_t>(limit);
        return Status(CS_NO_SPACE, "injected");
      });
      const Codes codes = DumpAll(*store, pages);
      EXPECT_TRUE(codes == Repeated(3, CS_NO_SPACE));
      ExpectNothingLeft(*store, setup, pages, codes);
      EXPECT_EQ(store->Stats().dump_no_space, 3u);
      env.NoHooks();
      EXPECT_TRUE(DumpAll(*store, pages) == Repeated(3, CS_OK));
      pages.Poison();
      EXPECT_TRUE(LoadAll(*store, pages) == Repeated(3, CS_OK));
      EXPECT_TRUE(pages.HoldsAll());
    }
  }
}

// Some filesystems tell a full disk at close, or have no room for a name.
TEST(Space, NoRoomFoundOutOutsideTheWrite) {
  for (const Op op : {Op::kOpenWrite, Op::kClose, Op::kRename}) {
    const TempDir root;
    const StoreSetup setup({root.path()});
    FaultEnv env;
    const auto store = OpenOrFail(setup, env);
    WaitCleaned(setup, env);
    Pages pages(setup, 0, 3);
    pages.Fill();
    env.Before(op, Failing(CS_NO_SPACE));
    const Codes codes = DumpAll(*store, pages);
    EXPECT_TRUE(codes == Repeated(3, CS_NO_SPACE));
    env.NoHooks();
    ExpectNothingLeft(*store, setup, pages, codes);
  }
}

// A directory for the fan-out needs room too.
TEST(Space, NoRoomForADirectory) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  FaultEnv env;
  const auto store = OpenOrFail(setup, env);
  WaitCleaned(setup, env);
  Pages pages(setup, 0, 3);
  pages.Fill();
  env.Before(Op::kMakeDirectory, Failing(CS_NO_SPACE));
  const Codes codes = DumpAll(*store, pages);
  EXPECT_TRUE(codes == Repeated(3, CS_NO_SPACE));
  env.NoHooks();
  ExpectNothingLeft(*store, setup, pages, codes);
}

// EFBIG, by a limit of the process; SIGXFSZ mustn't end it (c_api.h, rule 3).
TEST(Space, FileSizeLimit) {
  for (const uint32_t shards : {1u, 3u}) {
    const TempDir root;
    StoreSetup setup({root.path()});
    setup.tensor_sizes = {5000, 3000};
    setup.shards = shards;
    FaultEnv env;
    const auto store = OpenOrFail(setup, env);
    WaitCleaned(setup, env);
    Pages pages(setup, 0, 4);
    pages.Fill();
    struct rlimit before = {};
    ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
    // In the middle of a page: a short write, then EFBIG.
    const struct rlimit low = {setup.file_size() - 4096 - 5000, before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &low), 0);
    const Codes codes = DumpAll(*store, pages);
    setrlimit(RLIMIT_FSIZE, &before);
    EXPECT_TRUE(codes == Repeated(pages.size(), CS_NO_SPACE));
    ExpectNothingLeft(*store, setup, pages, codes);
    EXPECT_TRUE(DumpAll(*store, pages) == Repeated(pages.size(), CS_OK));
  }
}

// A real filesystem that fills up, three times over.
TEST(Space, TinyFilesystem) {
  const TinyTmpfs disk("size=256k");
  if (!disk.reason().empty()) SKIP(disk.reason());
  StoreSetup setup({disk.path()});
  setup.shards = 2;
  FaultEnv env;
  const auto store = OpenOrFail(setup, env);
  ASSERT_TRUE(store != nullptr);
  for (int round = 0; round < 3; ++round) {
    Pages pages(setup, 100 * static_cast<uint64_t>(round), 40);  // 12 KiB each
    pages.Fill();
    const Codes codes = DumpAll(*store, pages);
    size_t stored = 0;
    for (const int32_t code : codes) {
      EXPECT_TRUE(code == CS_OK || code == CS_NO_SPACE);
      stored += code == CS_OK ? 1 : 0;
    }
    EXPECT_GT(stored, 10u);
    EXPECT_LT(stored, 80u);
    ExpectNothingLeft(*store, setup, pages, codes);
    pages.Poison();
    const Codes loaded = LoadAll(*store, pages);
    for (size_t i = 0; i < codes.size(); ++i) {
      EXPECT_EQ(loaded[i], codes[i] == CS_OK ? CS_OK : CS_NOT_FOUND);
      EXPECT_TRUE(codes[i] != CS_OK || pages.Holds(i));
    }
    // Room again: a clear frees it in the background.
    EXPECT_OK(store->Clear());
    EXPECT_TRUE(Eventually([&] { return FilesBelow(disk.path() + "/identity/trash").empty(); }));
  }
}

// A full disk serves what it has, also to a store opened then.
TEST(Space, FullFilesystemStillServes) {
  const TinyTmpfs disk("size=128k");
  if (!disk.reason().empty()) SKIP(disk.reason());
  const StoreSetup setup({disk.path()});
  Pages pages(setup, 0, 8);  // 64 KiB
  pages.Fill();
  {
    const auto store = OpenOrFail(setup);
    ASSERT_TRUE(store != nullptr);
    EXPECT_TRUE(DumpAll(*store, pages) == Repeated(8, CS_OK));
  }
  WriteFile(disk.path() + "/rest", std::vector<uint8_t>(65536, 1));  // cut where it is full
  const auto store = OpenOrFail(setup);
  ASSERT_TRUE(store != nullptr);
  pages.Poison();
  EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(8, 1));
  EXPECT_TRUE(LoadAll(*store, pages) == Repeated(8, CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
  Pages more(setup, 100, 2);
  EXPECT_TRUE(DumpAll(*store, more) == Repeated(2, CS_NO_SPACE));
  ASSERT_EQ(unlink((disk.path() + "/rest").c_str()), 0);
  EXPECT_TRUE(DumpAll(*store, more) == Repeated(2, CS_OK));
}

// No inodes left: the same.
TEST(Space, NoInodesLeft) {
  const TinyTmpfs disk("size=4m,nr_inodes=64");
  if (!disk.reason().empty()) SKIP(disk.reason());
  const StoreSetup setup({disk.path()});
  const auto store = OpenOrFail(setup);
  ASSERT_TRUE(store != nullptr);
  Pages pages(setup, 0, 60);  // each a directory and a file
  pages.Fill();
  const Codes codes = DumpAll(*store, pages);
  for (const int32_t code : codes) EXPECT_TRUE(code == CS_OK || code == CS_NO_SPACE);
  EXPECT_TRUE(codes != Repeated(60, CS_OK));
  ExpectNothingLeft(*store, setup, pages, codes);
}

}  // namespace cachestore::test
