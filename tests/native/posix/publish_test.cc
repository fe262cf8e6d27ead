// How blocks' files come to their names and go, where others do the same at once.
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "fixture.h"
#include "harness.h"
#include "posix/directory.h"

namespace cachestore::test {
namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<uint8_t>;

// A directory of which the test has a say in each call, and the path of a block of it.
struct Opened {
  Opened() { EXPECT_OK(directory.Open()); }
  Result<bool> Publish(const Bytes& bytes, bool is_unreadable = false) {
    const std::string temporary = directory.NewTemporaryPath();
    WriteFile(temporary, bytes);
    return directory.Publish(temporary, IdOf(1), directory.epoch(), is_unreadable);
  }
  // As another store does.
  void Replace(const Bytes& bytes) const {
    WriteFile(path + ".new", bytes);
    fs::rename(path + ".new", path);
  }
  // What comes before the next call of that kind on a block or its directory.
  void AtNext(Op op, std::function<void()> then) {
    env.Before(op, On("/blocks/", [this, then = std::move(then)](FaultEnv::Call&) {
                 env.NoHooks();
                 then();
                 return Status::Ok();
               }));
  }
  void Clear() { EXPECT_OK(directory.Clear()); }
  void RemoveTrash() {
    directory.RemoveTrash([] { return false; });
  }
  FileInfo Info() const {
    const Result<FileInfo> info = Env::Real().Stat(path);
    EXPECT_OK(info);
    return info.ok() ? info.value() : FileInfo{};
  }
  // Nothing but the block's file is left behind.
  void ExpectTidy() const {
    size_t files = 0;
    for (const auto& entry : fs::recursive_directory_iterator(root.path())) {
      if (!entry.is_regular_file()) continue;
      const std::string name = entry.path().filename();
      files += name != "lock" && name != "identity.json" && name != "cleared" ? 1 : 0;
    }
    EXPECT_EQ(files, access(path.c_str(), F_OK) == 0 ? 1u : 0u);
  }

  const TempDir root;
  FaultEnv env;
  EventRing events;
  Directory directory{env, events, {root.path(), "id", "manifest"}};
  const std::string path = directory.BlockPath(IdOf(1));
};

bool IsTrue(const Result<bool>& result) { return result.ok() && result.value(); }
bool IsFalse(const Result<bool>& result) { return result.ok() && !result.value(); }

}  // namespace

// Two stores dump a block at the same time: the first one's stays.
TEST(Publish, WhatIsThereStays) {
  Opened opened;
  EXPECT_TRUE(IsTrue(opened.Publish({1, 1, 1})));
  EXPECT_TRUE(IsFalse(opened.Publish({2, 2, 2})));
  EXPECT_TRUE(ReadFile(opened.path) == (Bytes{1, 1, 1}));
  opened.ExpectTidy();
}

TEST(Publish, WhatCouldNotBeReadIsReplaced) {
  Opened opened;
  EXPECT_TRUE(IsTrue(opened.Publish({1, 1, 1})));
  EXPECT_TRUE(IsTrue(opened.Publish({2, 2, 2}, /*is_unreadable=*/true)));
  EXPECT_TRUE(ReadFile(opened.path) == (Bytes{2, 2, 2}));
  opened.ExpectTidy();
}

TEST(Publish, WhatIsNoBlockMakesWay) {
  for (const char* kind : {"shorter", "longer", "link", "fifo", "directory"}) {
    Opened opened;
    EXPECT_OK(Env::Real().MakeDirectories(opened.path.substr(0, opened.path.rfind('/'))));
    const std::string is = kind;
    if (is == "shorter") WriteFile(opened.path, {1});
    if (is == "longer") WriteFile(opened.path, {1, 1, 1, 1});
    if (is == "link") fs::create_symlink("nowhere", opened.path);
    if (is == "fifo") EXPECT_EQ(mkfifo(opened.path.c_str(), 0600), 0);
    if (is == "directory") fs::create_directories(opened.path);
    EXPECT_TRUE(IsTrue(opened.Publish({2, 2, 2})));
    EXPECT_TRUE(ReadFile(opened.path) == (Bytes{2, 2, 2}));
    opened.ExpectTidy();
  }
}

// What couldn't be read is still there, and before it is looked at there is a clear, and
// the block is stored anew.
TEST(Publish, WhatComesAfterAClearIsNotTakenForWhatCouldNotBeRead) {
  Opened opened;
  EXPECT_TRUE(IsTrue(opened.Publish({1, 1, 1})));
  opened.AtNext(Op::kStat, [&] {
    opened.Clear();
    EXPECT_TRUE(IsTrue(opened.Publish({3, 3, 3})));
  });
  EXPECT_TRUE(IsFalse(opened.Publish({2, 2, 2}, /*is_unreadable=*/true)));
  EXPECT_TRUE(ReadFile(opened.path) == (Bytes{3, 3, 3}));
}

// A clear between the look for one and the rename: the file goes where the others are.
TEST(Publish, WhatAClearOvertakesIsCleared) {
  Opened opened;
  opened.AtNext(Op::kRename, [&] { opened.Clear(); });
  EXPECT_TRUE(IsTrue(opened.Publish({1, 1, 1})));
  EXPECT_FALSE(Env::Real().Stat(opened.path).ok());
  EXPECT_TRUE(IsTrue(opened.Publish({2, 2, 2})));
  opened.RemoveTrash();
  opened.ExpectTidy();
  EXPECT_TRUE(ReadFile(opened.path) == (Bytes{2, 2, 2}));
}

// The same where they are gone from there, too.
TEST(Publish, WhatAClearOvertakesIsClearedThoughItsDirectoryIsGone) {
  Opened opened;
  opened.AtNext(Op::kRename, [&] {
    opened.Clear();
    opened.RemoveTrash();
  });
  EXPECT_TRUE(IsFalse(opened.Publish({1, 1, 1})));
  opened.ExpectTidy();
}

// Just before the directory is opened: that one comes after the clear.
TEST(Publish, WhatIsClearedBeforeItHasADirectoryIsNotThere) {
  Opened opened;
  opened.AtNext(Op::kOpenDirectory, [&] { opened.Clear(); });
  EXPECT_TRUE(IsFalse(opened.Publish({1, 1, 1})));
  EXPECT_FALSE(Env::Real().Stat(opened.path).ok());
  opened.ExpectTidy();
}

// A file that comes to a directory that is being removed.
TEST(Publish, WhatComesLateIsRemovedWithTheRest) {
  Opened opened;
  EXPECT_TRUE(IsTrue(opened.Publish({1, 1, 1})));
  std::string late;
  opened.env.Before(Op::kRemoveDirectory, [&](FaultEnv::Call& call) {
    if (late.empty()) WriteFile(late = call.path + "/late", {1});
    return Status::Ok();
  });
  opened.Clear();
  opened.RemoveTrash();
  EXPECT_FALSE(late.empty());
  EXPECT_FALSE(opened.events.Take().has_value());
  opened.ExpectTidy();
}

// What is damaged is removed as long as it is that.
TEST(Publish, RemovingSparesAnotherFile) {
  Opened opened;
  EXPECT_TRUE(IsTrue(opened.Publish({1, 1, 1})));
  const FileInfo info = opened.Info();
  opened.Replace({2, 2, 2});
  EXPECT_TRUE(IsFalse(opened.directory.RemoveSame(opened.path, info)));
  EXPECT_TRUE(ReadFile(opened.path) == (Bytes{2, 2, 2}));
  EXPECT_TRUE(IsTrue(opened.directory.RemoveSame(opened.path, opened.Info())));
  EXPECT_TRUE(IsFalse(opened.directory.RemoveSame(opened.path, info)));
}

}  // namespace cachestore::test
