// Directory: where things lie, who may remove what, and which directory gets a
// block.
#include "posix/directory.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <set>
#include <thread>

#include "fixture.h"
#include "harness.h"
#include "posix/shard_io.h"

namespace cachestore::test {
namespace {

const auto kNever = [] { return false; };

struct Opened {
  explicit Opened(const std::string& root, Env& env = Env::Real(), const char* identity = "id")
      : directory(env, events, {root, identity, "manifest", CS_DIRECT_OFF, CS_ZERO_COPY_AUTO}) {
    status = directory.Open();
  }
  EventRing events;
  Directory directory;
  Status status;
};

std::vector<std::string> Names(const std::string& path) {
  Result<std::vector<std::string>> names = Env::Real().List(path);
  if (!names.ok()) return {};
  std::sort(names.value().begin(), names.value().end());
  return names.value();
}

std::string Store(Opened& opened, const BlockId& id) {
  const std::string temporary = opened.directory.NewTemporaryPath();
  WriteFile(temporary, {1, 2, 3});
  EXPECT_OK(opened.directory.Publish(temporary, id, opened.directory.epoch()));
  EXPECT_EQ(access(opened.directory.BlockPath(id).c_str(), F_OK), 0);
  return opened.directory.BlockPath(id);
}

}  // namespace

// Decision 3: local filesystems only; whatever isn't known may hang.
TEST(Directory, KnowsWhichFilesystemsAreSure) {
  for (const uint64_t type : {0xef53u, 0x58465342u, 0x9123683eu, 0x01021994u}) {
    EXPECT_TRUE(IsSureToEnd(type));
  }
  // NFS, FUSE, CIFS, SMB2, Ceph, Lustre, GPFS, 9p, AFS, none.
  for (const uint64_t type : {0x6969u, 0x65735546u, 0xff534d42u, 0xfe534d42u, 0x00c36400u,
                              0x0bd00bd0u, 0x47504653u, 0x01021997u, 0x5346414fu, 0u}) {
    EXPECT_FALSE(IsSureToEnd(type));
  }
}

TEST(Directory, ZeroCopyGoesByTypeOrBySetting) {
  const TempDir root;
  FaultEnv env;
  const auto zero_copy = [&](uint64_t type, cs_zero_copy setting) {
    env.SetFilesystemType(type);
    EventRing events;
    Directory directory(env, events, {root.path(), "id", "{}", CS_DIRECT_OFF, setting});
    EXPECT_OK(directory.Open());
    return directory.zero_copy();
  };
  EXPECT_TRUE(zero_copy(0xef53, CS_ZERO_COPY_AUTO));
  EXPECT_FALSE(zero_copy(FaultEnv::kNfs, CS_ZERO_COPY_AUTO));
  EXPECT_TRUE(zero_copy(FaultEnv::kNfs, CS_ZERO_COPY_ALWAYS));
  EXPECT_FALSE(zero_copy(0xef53, CS_ZERO_COPY_NEVER));
}

TEST(Directory, LaysOutWhatTheFormatSays) {
  const TempDir root;
  Opened opened(root.path() + "/not/there yet");
  EXPECT_OK(opened.status);
  BlockId id;
  for (uint8_t i = 0; i < 16; ++i) id[i] = static_cast<uint8_t>(0xa0 + i);
  const std::string base = root.path() + "/not/there yet/id";
  EXPECT_EQ(opened.directory.BlockPath(id), base + "/blocks/a0a/a0a1a2a3a4a5a6a7a8a9aaabacadaeaf");
  EXPECT_TRUE(ReadFile(base + "/identity.json") ==
              std::vector<uint8_t>({'m', 'a', 'n', 'i', 'f', 'e', 's', 't'}));
  const std::string path = Store(opened, id);
  EXPECT_TRUE(ReadFile(path) == std::vector<uint8_t>({1, 2, 3}));
  struct stat st = {};
  ASSERT_EQ(stat(base.c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 0777u, 0700u);
  EXPECT_EQ(Names(base + "/tmp").size(), 1u);
  EXPECT_TRUE(Names(base + "/tmp/" + Names(base + "/tmp")[0]) == std::vector<std::string>{"lock"});
  opened.directory.Close();
  EXPECT_TRUE(Names(base + "/tmp").empty());
}

TEST(Directory, TemporaryPathsAreNobodyElses) {
  const TempDir root;
  Opened a(root.path());
  Opened b(root.path());
  std::set<std::string> paths;
  for (int i = 0; i < 100; ++i) {
    paths.insert(a.directory.NewTemporaryPath());
    paths.insert(b.directory.NewTemporaryPath());
  }
  EXPECT_EQ(paths.size(), 200u);
}

// A directory that can't be written to serves what it has.
TEST(Directory, FullOrReadOnlyDirectoryOpensWithAWarning) {
  for (const Op op : {Op::kOpenWrite, Op::kWriteFull, Op::kRename, Op::kOpenLocked}) {
    const TempDir root;
    {
      Opened first(root.path());
    }
    FaultEnv env;
    env.Before(op, Failing(CS_NO_SPACE));
    Opened opened(root.path(), env);
    EXPECT_OK(opened.status);
    if (op == Op::kOpenLocked) continue;  // as on a filesystem without locks
    const auto event = opened.events.Take();
    ASSERT_TRUE(event.has_value());
    EXPECT_EQ(event->level, CS_EVENT_WARNING);
    EXPECT_NE(event->text.find("nothing can be stored"), std::string::npos);
  }
}

TEST(Directory, UnusableDirectoryIsAnError) {
  const TempDir root;
  WriteFile(root.path() + "/file", {1});
  Opened opened(root.path() + "/file");
  EXPECT_FALSE(opened.status.ok());
  EXPECT_NE(opened.status.text().find(root.path() + "/file"), std::string::npos);
  FaultEnv env;
  env.Before(Op::kFilesystemType, Failing(CS_IO));
  Opened unknown(root.path(), env);
  EXPECT_EQ(unknown.status.code(), CS_IO);
}

// F07, F14: the temporary files of a store that is gone are removed, those of
// a live one aren't: by lock, not by age or name.
TEST(Directory, CleanerTakesFromTheDeadOnly) {
  const TempDir root;
  Opened live(root.path());
  const std::string live_file = live.directory.NewTemporaryPath();
  WriteFile(live_file, {1});
  std::string dead_file;
  {
    Opened dead(root.path());
    dead_file = dead.directory.NewTemporaryPath();
    WriteFile(dead_file, {1});
  }  // not closed: as after a crash
  Opened cleaner(root.path());
  cleaner.directory.RemoveTrash(kNever);
  EXPECT_EQ(access(live_file.c_str(), F_OK), 0);
  EXPECT_NE(access(dead_file.c_str(), F_OK), 0);
  EXPECT_EQ(Names(root.path() + "/id/tmp").size(), 2u);
  const auto event = cleaner.events.Take();
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->level, CS_EVENT_INFO);
}

// F07: a removal that was cut short is taken up again, however far it got.
TEST(Directory, HalfRemovedDirectoryIsReclaimed) {
  for (int allowed = 0; allowed < 8; ++allowed) {
    const TempDir root;
    {
      Opened dead(root.path());
      for (int i = 0; i < 5; ++i) WriteFile(dead.directory.NewTemporaryPath(), {1});
    }
    FaultEnv env;
    auto left = std::make_shared<std::atomic<int>>(allowed);
    Opened first(root.path(), env);
    const auto run_out = [left](FaultEnv::Call&) {
      return left->fetch_sub(1) > 0 ? Status::Ok() : Status(CS_IO, "cut short");
    };
    env.Before(Op::kUnlink, run_out);
    env.Before(Op::kRemoveDirectory, run_out);
    first.directory.RemoveTrash(kNever);
    env.NoHooks();
    first.directory.RemoveTrash(kNever);
    EXPECT_EQ(Names(root.path() + "/id/tmp").size(), 1u);
  }
}

// ... and what its maker left before it had a lock.
TEST(Directory, EmptyDirectoryWithoutALockIsReclaimed) {
  const TempDir root;
  Opened opened(root.path());
  ASSERT_OK(Env::Real().MakeDirectories(root.path() + "/id/tmp/0123456789abcdef"));
  opened.directory.RemoveTrash(kNever);
  EXPECT_EQ(Names(root.path() + "/id/tmp").size(), 1u);
}

// ... and what a power cut left of one, when the lock's name was lost.
TEST(Directory, FilesWithoutALockAreReclaimed) {
  const TempDir root;
  Opened opened(root.path());
  ASSERT_OK(Env::Real().MakeDirectories(root.path() + "/id/tmp/0123456789abcdef"));
  WriteFile(root.path() + "/id/tmp/0123456789abcdef/0", {1});
  opened.directory.RemoveTrash(kNever);
  EXPECT_EQ(Names(root.path() + "/id/tmp").size(), 1u);
}

// A cleaner that comes between the steps of making one only delays it.
TEST(Directory, MakingOutlastsACleaner) {
  const TempDir root;
  Opened cleaner(root.path());
  FaultEnv env;
  auto times = std::make_shared<std::atomic<int>>(3);
  // Before the lock file is there: the directory is empty.
  env.Before(Op::kOpenLocked, [&, times](FaultEnv::Call&) {
    if (times->fetch_sub(1) > 0) cleaner.directory.RemoveTrash(kNever);
    return Status::Ok();
  });
  Opened opened(root.path(), env);
  EXPECT_OK(opened.status);
  EXPECT_FALSE(opened.events.Take().has_value());
  WriteFile(opened.directory.NewTemporaryPath(), {1});
  cleaner.directory.RemoveTrash(kNever);
  EXPECT_EQ(FilesBelow(root.path() + "/id/tmp").size(), 1u);
}

// F11: deleted under a running store, made and locked again.
TEST(Directory, TemporaryDirectoryIsMadeAndLockedAgain) {
  const TempDir root;
  Opened opened(root.path());
  std::filesystem::remove_all(root.path() + "/id");
  EXPECT_OK(opened.directory.MakeTemporaryDirectory());
  const std::string file = opened.directory.NewTemporaryPath();
  WriteFile(file, {1});
  Opened other(root.path());
  other.directory.RemoveTrash(kNever);
  EXPECT_EQ(access(file.c_str(), F_OK), 0);
  EXPECT_OK(opened.directory.MakeTemporaryDirectory());  // there and ours: nothing to do
  EXPECT_OK(opened.directory.Publish(file, IdOf(1), 0));
}

// Removed by a cleaner before any of the steps of opening it: it is there afterwards, whole.
TEST(Directory, IsOpenedWhileItIsRemoved) {
  for (const Op op : {Op::kMakeDirectory, Op::kFilesystemType, Op::kStat, Op::kOpenLocked,
                      Op::kOpenWrite, Op::kRename}) {
    for (int at = 0; at < 4; ++at) {
      const TempDir root;
      FaultEnv env;
      std::atomic<int> calls{0};
      env.Before(op, [&](FaultEnv::Call&) {
        if (calls.fetch_add(1) == at) std::filesystem::remove_all(root.path() + "/id");
        return Status::Ok();
      });
      Opened opened(root.path(), env);
      EXPECT_OK(opened.status);
      env.NoHooks();
      EXPECT_FALSE(opened.events.Take().has_value());
      (void)Store(opened, IdOf(1));
      EXPECT_EQ(access((root.path() + "/id/identity.json").c_str(), F_OK), 0);
      Opened other(root.path());
      other.directory.RemoveTrash(kNever);
      EXPECT_FALSE(Names(root.path() + "/id/tmp/" + opened.directory.instance()).empty());
    }
  }
}

TEST(Directory, ClearTakesAllBlocksAndNoOthers) {
  const TempDir root;
  Opened opened(root.path());
  Opened other(root.path(), Env::Real(), "other");
  std::vector<std::string> paths;
  for (uint64_t i = 0; i < 20; ++i) paths.push_back(Store(opened, IdOf(i)));
  const std::string kept = Store(other, IdOf(1));
  EXPECT_OK(opened.directory.Clear());
  for (const std::string& path : paths) EXPECT_NE(access(path.c_str(), F_OK), 0);
  EXPECT_OK(opened.directory.Clear());  // nothing there
  opened.directory.RemoveTrash(kNever);
  EXPECT_TRUE(FilesBelow(root.path() + "/id/trash").empty());
  EXPECT_EQ(access(kept.c_str(), F_OK), 0);
  EXPECT_FALSE(opened.events.Take().has_value());
}

// Whichever comes first, a clear or the probe that brings the directory back: one
// that is in use again has been cleared.
TEST(Directory, IsClearedBeforeItIsBroughtBack) {
  const TempDir root;
  FaultEnv env;
  Opened opened(root.path(), env);
  Directory& directory = opened.directory;
  // The clear comes about when the probe makes its last call, sooner or later.
  std::atomic<bool> probed{false};
  env.After(Op::kUnlink, On("-probe", [&](FaultEnv::Call&) {
              probed = true;
              return Status::Ok();
            }));
  size_t owed = 0;
  // On a busy machine it takes more rounds until one comes before the probe's end.
  for (uint64_t round = 0; round < 200 || (owed == 0 && round < 5000); ++round) {
    probed = false;
    const std::string path = Store(opened, IdOf(round));
    directory.health().StartAs(Health::Use::kOut, {CS_IO, "out"});
    std::thread probing([&] { directory.Probe(); });
    while (!probed) {
    }
    for (std::atomic<uint64_t> i{0}; i < round % 200; ++i) {
    }
    const Status cleared = directory.Clear();
    probing.join();
    owed += cleared.ok() ? 0 : 1;
    if (directory.health().use() == Health::Use::kOut) directory.Probe();
    ASSERT_TRUE(directory.health().use() == Health::Use::kFull);
    ASSERT_NE(access(path.c_str(), F_OK), 0);
    // And is not cleared once more.
    const std::string kept = Store(opened, IdOf(10000 + round));
    directory.Probe();
    ASSERT_EQ(access(kept.c_str(), F_OK), 0);
    directory.RemoveTrash(kNever);
  }
  EXPECT_GT(owed, 0u);
}

// A cleaner at work in trash/ must not make a clear do nothing and say "done",
// nor be disturbed by it.
TEST(Directory, ClearWhileTheCleanerRuns) {
  const TempDir root;
  FaultEnv env;
  Opened opened(root.path(), env);
  Store(opened, IdOf(1));
  ASSERT_OK(opened.directory.Clear());
  // The cleaner has listed trash/; then comes a clear, before each removal.
  env.Before(Op::kRemoveDirectory, [&](FaultEnv::Call&) {
    static thread_local bool inside = false;
    if (inside) return Status::Ok();
    inside = true;
    const std::string path = Store(opened, IdOf(2));
    EXPECT_OK(opened.directory.Clear());
    EXPECT_NE(access(path.c_str(), F_OK), 0);
    inside = false;
    return Status::Ok();
  });
  opened.directory.RemoveTrash(kNever);
  EXPECT_FALSE(opened.events.Take().has_value());
  // The other way round: somebody removes trash/ before a clear's rename.
  env.NoHooks();
  const std::string path = Store(opened, IdOf(3));
  auto times = std::make_shared<std::atomic<int>>(2);
  env.Before(Op::kRename, [&, times](FaultEnv::Call&) {
    if (times->fetch_sub(1) > 0) std::filesystem::remove_all(root.path() + "/id/trash");
    return Status::Ok();
  });
  EXPECT_OK(opened.directory.Clear());
  EXPECT_NE(access(path.c_str(), F_OK), 0);
}

// A clear between any two steps of a publication only delays it.
TEST(Directory, PublishOutlastsClears) {
  const TempDir root;
  FaultEnv env;
  Opened opened(root.path(), env);
  const std::string temporary = opened.directory.NewTemporaryPath();
  WriteFile(temporary, {1});
  auto times = std::make_shared<std::atomic<int>>(4);
  const auto clear = [&, times](FaultEnv::Call&) {
    if (times->fetch_sub(1) > 0) std::filesystem::remove_all(root.path() + "/id/blocks");
    return Status::Ok();
  };
  env.Before(Op::kRename, clear);
  env.Before(Op::kMakeDirectory, clear);
  EXPECT_OK(opened.directory.Publish(temporary, IdOf(1), 0));
  EXPECT_EQ(access(opened.directory.BlockPath(IdOf(1)).c_str(), F_OK), 0);
}

// A vanished file isn't looked for for ever.
TEST(Directory, PublishOfAMissingFileFails) {
  const TempDir root;
  Opened opened(root.path());
  EXPECT_EQ(
      opened.directory.Publish(opened.directory.NewTemporaryPath(), IdOf(1), 0).status().code(),
      CS_NOT_FOUND);
}

namespace {

// The directories' order mustn't matter, so it's their roots that are compared.
std::string Choice(const std::vector<std::unique_ptr<Directory>>& directories, const BlockId& id) {
  const Directory* best = nullptr;
  for (const auto& directory : directories) {
    if (best == nullptr || directory->Score(id) > best->Score(id)) best = directory.get();
  }
  return best->root();
}

}  // namespace

TEST(Directory, BlocksSpreadEvenlyAndMoveOnlyToANewOne) {
  EventRing events;
  const auto make = [&](size_t n) {
    std::vector<std::unique_ptr<Directory>> directories;
    for (size_t i = 0; i < n; ++i) {
      directories.push_back(
          std::make_unique<Directory>(Env::Real(), events,
                                      DirectoryOptions{"/mnt/disk" + std::to_string(i), "id", "",
                                                       CS_DIRECT_OFF, CS_ZERO_COPY_AUTO}));
    }
    return directories;
  };
  constexpr size_t kBlocks = 100000;
  for (size_t n = 2; n <= 8; ++n) {
    const auto before = make(n);
    auto reversed = make(n);
    std::reverse(reversed.begin(), reversed.end());
    const auto after = make(n + 1);
    std::map<std::string, size_t> counts;
    size_t moved = 0;
    for (uint64_t i = 0; i < kBlocks; ++i) {
      const std::string choice = Choice(before, IdOf(i));
      ++counts[choice];
      EXPECT_EQ(Choice(reversed, IdOf(i)), choice);
      const std::string later = Choice(after, IdOf(i));
      if (later != choice) {
        ++moved;
        EXPECT_EQ(later, after.back()->root());
      }
    }
    // Pearson's chi-squared; its mean is n - 1, and 40 is beyond any luck here.
    const double expected = static_cast<double>(kBlocks) / static_cast<double>(n);
    double chi_squared = 0;
    for (const auto& directory : before) {
      const double off = static_cast<double>(counts[directory->root()]) - expected;
      chi_squared += off * off / expected;
    }
    EXPECT_LT(chi_squared, 40);
    const double share = static_cast<double>(moved) * static_cast<double>(n + 1) / kBlocks;
    EXPECT_GT(share, 0.85);
    EXPECT_LT(share, 1.15);
  }
}

// Ids that differ little (a counter) spread as well: F08's fan-out too.
TEST(Directory, SimilarIdsSpreadOverDirectories) {
  EventRing events;
  std::vector<std::unique_ptr<Directory>> directories;
  for (const char* root : {"/a", "/b", "/c", "/d"}) {
    directories.push_back(std::make_unique<Directory>(
        Env::Real(), events, DirectoryOptions{root, "id", "", CS_DIRECT_OFF, CS_ZERO_COPY_AUTO}));
  }
  for (const size_t at : {0, 1, 6}) {
    std::map<std::string, size_t> counts;
    for (unsigned i = 0; i < 4096; ++i) {
      BlockId id{};
      id[at] = static_cast<uint8_t>(i);
      id[at + 1] = static_cast<uint8_t>(i >> 8);
      ++counts[Choice(directories, id)];
    }
    for (const auto& [root, count] : counts) {
      EXPECT_GT(count, 850u);
      EXPECT_LT(count, 1200u);
    }
  }
}

}  // namespace cachestore::test
