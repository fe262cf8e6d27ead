// What others may do to a directory under a running store: links planted at every
// level, files and whole directories deleted or replaced. Clear and reclaiming
// remove nothing outside, and nothing that isn't theirs.
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "fixture.h"
#include "harness.h"
#include "posix/directory.h"

namespace cachestore::test {
namespace {

namespace fs = std::filesystem;
const auto kNever = [] { return false; };

struct Opened {
  explicit Opened(const std::string& root, Env& env = Env::Real())
      : directory(env, events, {root, "id", "manifest"}) {
    status = directory.Open();
  }
  std::string Store(const BlockId& id) {
    const std::string temporary = directory.NewTemporaryPath();
    WriteFile(temporary, {1, 2, 3});
    EXPECT_OK(directory.Publish(temporary, id, directory.epoch()));
    return directory.BlockPath(id);
  }
  EventRing events;
  Directory directory;
  Status status;
};

// A directory elsewhere, with what a careless removal would take.
struct Outside {
  Outside() {
    fs::create_directories(path() + "/abc");
    for (const char* name : {"/file", "/lock", "/abc/file"}) WriteFile(path() + name, {1});
  }
  const std::string& path() const { return dir.path(); }
  void ExpectWhole() const {
    for (const char* name : {"/file", "/lock", "/abc/file"}) {
      EXPECT_EQ(access((path() + name).c_str(), F_OK), 0);
    }
  }
  const TempDir dir;
};

}  // namespace

TEST(Planted, ClearAndReclaimingFollowNoLink) {
  const char* const kPlaces[] = {"blocks",     "blocks/abc",    "blocks/def/file", "trash",
                                 "trash/x",    "trash/y/z",     "tmp/x",           "tmp/y/file",
                                 "tmp/z/lock", "identity.json", "cleared"};
  for (const char* place : kPlaces) {
    const TempDir root;
    const Outside outside;
    Opened opened(root.path());
    ASSERT_OK(opened.status);
    const std::string link = root.path() + "/id/" + place;
    fs::create_directories(fs::path(link).parent_path());
    fs::remove_all(link);
    fs::create_symlink(outside.path(), link);
    if (std::string(place) == "tmp/y/file") WriteFile(root.path() + "/id/tmp/y/lock", {});
    for (int i = 0; i < 2; ++i) {
      (void)opened.directory.Clear();
      opened.directory.RemoveTrash(kNever);
    }
    outside.ExpectWhole();
    // And it works again.
    opened.Store(IdOf(1));
    EXPECT_OK(opened.directory.Clear());
    EXPECT_NE(access(opened.directory.BlockPath(IdOf(1)).c_str(), F_OK), 0);
    outside.ExpectWhole();
  }
}

// The identity's own directory is no link: not at the start, and not later.
TEST(Planted, AnIdentityThatIsALinkIsRefused) {
  const TempDir root;
  const Outside outside;
  fs::create_directories(outside.path() + "/blocks/abc");
  WriteFile(outside.path() + "/blocks/abc/file", {1});
  fs::create_symlink(outside.path(), root.path() + "/id");
  Opened refused(root.path());
  EXPECT_EQ(refused.status.code(), CS_INVALID);
  fs::remove(root.path() + "/id");
  Opened opened(root.path());
  ASSERT_OK(opened.status);
  fs::rename(root.path() + "/id", root.path() + "/old");
  fs::create_symlink(outside.path(), root.path() + "/id");
  EXPECT_EQ(opened.directory.Clear().code(), CS_INVALID);
  EXPECT_EQ(access((outside.path() + "/blocks/abc/file").c_str(), F_OK), 0);
}

// A block that a clear has taken, and that somebody else has stored after it.
TEST(Planted, PublishingRemovesNobodyElsesBlock) {
  const TempDir root;
  FaultEnv env;
  Opened opened(root.path(), env);
  Opened other(root.path());
  const std::string temporary = opened.directory.NewTemporaryPath();
  WriteFile(temporary, {1});
  env.After(Op::kRename, On("/blocks/", [&](FaultEnv::Call&) {
              EXPECT_OK(other.directory.Clear());
              other.Store(IdOf(1));
              return Status::Ok();
            }));
  EXPECT_OK(opened.directory.Publish(temporary, IdOf(1), opened.directory.epoch()));
  EXPECT_TRUE(ReadFile(opened.directory.BlockPath(IdOf(1))) == (std::vector<uint8_t>{1, 2, 3}));
}

// Only "no locks here" means that; another error isn't passed over.
TEST(Planted, ErrorsOfLocksAreTold) {
  for (const auto& [error, fine] : {std::pair{ENOLCK, true},
                                    {EOPNOTSUPP, true},
                                    {EIO, false},
                                    {EACCES, false},
                                    {ENOSPC, false}}) {
    const TempDir root;
    FaultEnv env;
    Opened opened(root.path(), env);
    fs::remove_all(root.path() + "/id");
    env.Before(Op::kOpenLocked, [error = error](FaultEnv::Call& call) {
      return Status::FromErrno(error, "lock", call.path);
    });
    EXPECT_EQ(opened.directory.MakeTemporaryDirectory().ok(), fine);
  }
}

// F11: the manifest comes back with the first dump.
TEST(Planted, TheManifestComesBack) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  const auto store = OpenOrFail(setup);
  Pages pages(setup, 0, 1);
  pages.Fill();
  fs::remove_all(root.path() + "/identity");
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(1, CS_OK));
  EXPECT_TRUE(ReadFile(root.path() + "/identity/identity.json") ==
              (std::vector<uint8_t>{'{', '}'}));
}

// Deleted between the shards of a block: it isn't published with a hole in it.
TEST(Planted, ABlockWhoseShardsAreDeletedIsNotPublished) {
  const TempDir root;
  StoreSetup setup({root.path()});
  setup.shards = 3;
  setup.dump_workers = 1;
  FaultEnv env;
  const auto store = OpenOrFail(setup, env);
  WaitCleaned(setup, env);
  Pages pages(setup, 0, 1);
  pages.Fill();
  std::atomic<int> writes{0};
  env.After(Op::kWriteFull, [&](FaultEnv::Call&) {
    if (writes.fetch_add(1) == 0) fs::remove_all(root.path() + "/identity/tmp");
    return Status::Ok();
  });
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(3, CS_IO));
  EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>{0});
  env.NoHooks();
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(3, CS_OK));
  EXPECT_TRUE(LoadAll(*store, pages) == Repeated(3, CS_OK));
}

// So that a power cut doesn't bring it back, behind whoever asked for it.
TEST(Planted, AClearIsSyncedBehindIt) {
  const TempDir root;
  FaultEnv env;
  Opened opened(root.path(), env);
  opened.Store(IdOf(1));
  opened.directory.RemoveTrash(kNever);
  EXPECT_EQ(env.calls(Op::kSyncDirectory), 0u);
  EXPECT_OK(opened.directory.Clear());
  EXPECT_EQ(env.calls(Op::kSyncDirectory), 0u);
  opened.directory.RemoveTrash(kNever);
  opened.directory.RemoveTrash(kNever);
  EXPECT_EQ(env.calls(Op::kSyncDirectory), 1u);
}

}  // namespace cachestore::test
