// Env::Real(), and the parts of Env made of its own calls.
#include "base/env.h"

#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <thread>

#include "base/rename_new.h"
#include "fault_env.h"
#include "fixture.h"
#include "harness.h"

namespace cachestore::test {
namespace {

Env& env() { return Env::Real(); }

FileCloser Opened(Result<Fd> opened) {
  return EXPECT_OK(opened) ? FileCloser(env(), opened.value()) : FileCloser();
}

const auto kNever = [] { return false; };

}  // namespace

TEST(Env, WritesAndReadsVectors) {
  const TempDir dir;
  const std::string path = dir.path() + "/file";
  FileCloser file = Opened(env().OpenWrite(path, false));
  ASSERT_TRUE(static_cast<bool>(file));
  char a[] = "abc";
  char b[] = "defgh";
  std::vector<iovec> parts = {{a, 3}, {nullptr, 0}, {b, 5}, {nullptr, 0}};
  EXPECT_OK(env().WriteFull(file.get(), parts, 2));
  EXPECT_OK(file.Close());
  EXPECT_TRUE(ReadFile(path) ==
              std::vector<uint8_t>({0, 0, 'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}));

  file = Opened(env().OpenRead(path, false));
  char x[4] = {};
  char y[8] = {};
  std::vector<iovec> into = {{nullptr, 0}, {x, 4}, {y, 8}};
  // More is asked for than there is: what is left before the end comes.
  const Result<uint64_t> read = env().ReadFull(file.get(), into, 3);
  ASSERT_OK(read);
  EXPECT_EQ(read.value(), 7u);
  EXPECT_EQ(std::string(x, 4), "bcde");
  EXPECT_EQ(std::string(y), "fgh");
  std::vector<iovec> beyond = {{x, 4}};
  EXPECT_EQ(env().ReadFull(file.get(), beyond, 100).value(), 0u);
  EXPECT_EQ(env().ReadFull(file.get(), {}, 0).value(), 0u);
}

// One call of the kernel takes IOV_MAX parts; ours takes any number.
TEST(Env, ContinuesBeyondIovMax) {
  const TempDir dir;
  const std::string path = dir.path() + "/file";
  std::vector<uint8_t> bytes(3 * IOV_MAX);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 31);
  std::vector<iovec> parts;
  for (uint8_t& byte : bytes) parts.push_back({&byte, 1});
  FileCloser file = Opened(env().OpenWrite(path, false));
  EXPECT_OK(env().WriteFull(file.get(), parts, 0));
  EXPECT_TRUE(ReadFile(path) == bytes);
  std::vector<uint8_t> back(bytes.size());
  parts.clear();
  for (uint8_t& byte : back) parts.push_back({&byte, 1});
  file = Opened(env().OpenRead(path, false));
  const Result<uint64_t> read = env().ReadFull(file.get(), parts, 0);
  ASSERT_OK(read);
  EXPECT_EQ(read.value(), bytes.size());
  EXPECT_TRUE(back == bytes);
}

// F02: a write that falls short is continued, and the reason it fell short
// for is the result.
TEST(Env, ShortWriteEndsAsTheErrorBehindIt) {
  const TempDir dir;
  FileCloser file = Opened(env().OpenWrite(dir.path() + "/file", false));
  std::vector<uint8_t> bytes(10000, 1);
  std::vector<iovec> parts = {{bytes.data(), 6000}, {bytes.data() + 6000, 4000}};
  struct rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto old_handler = signal(SIGXFSZ, SIG_IGN);
  const struct rlimit low = {7000, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &low), 0);
  const Status written = env().WriteFull(file.get(), parts, 0);
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, old_handler);
  EXPECT_EQ(written.code(), CS_NO_SPACE);
  EXPECT_EQ(env().StatFd(file.get()).value().size, 7000u);
}

// F02: an error result isn't lost in an unsigned number.
TEST(Env, FullDeviceIsNoSpace) {
  FileCloser file = Opened(env().OpenWrite("/dev/full", false));
  char byte = 0;
  iovec part{&byte, 1};
  EXPECT_EQ(env().WriteFull(file.get(), {&part, 1}, 0).code(), CS_NO_SPACE);
}

TEST(Env, ErrorsSayWhatAndWhere) {
  const Status status = env().OpenRead("/does/not/exist", false).status();
  EXPECT_EQ(status.code(), CS_NOT_FOUND);
  EXPECT_EQ(status.text(), "open /does/not/exist: No such file or directory");
  char byte = 0;
  iovec part{&byte, 1};
  EXPECT_EQ(env().ReadFull(-1, {&part, 1}, 0).status().code(), CS_IO);
  part = {&byte, 1};
  EXPECT_EQ(env().WriteFull(-1, {&part, 1}, 0).code(), CS_IO);
  EXPECT_FALSE(env().Close(-1).ok());
  EXPECT_FALSE(env().StatFd(-1).ok());
  EXPECT_EQ(env().Stat("/does/not/exist").status().code(), CS_NOT_FOUND);
  EXPECT_EQ(env().List("/does/not/exist").status().code(), CS_NOT_FOUND);
  EXPECT_EQ(env().FilesystemType("/does/not/exist").status().code(), CS_NOT_FOUND);
}

TEST(Env, DescriptorsAreCloseOnExec) {
  const TempDir dir;
  const std::string path = dir.path() + "/file";
  const FileCloser files[] = {Opened(env().OpenWrite(path, false)),
                              Opened(env().OpenRead(path, false)),
                              Opened(env().OpenLocked(path + ".lock", true))};
  for (const FileCloser& file : files) {
    EXPECT_TRUE((fcntl(file.get(), F_GETFD) & FD_CLOEXEC) != 0);
  }
  struct stat st = {};
  ASSERT_EQ(stat(path.c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 0777u, 0600u);
}

// F14: the lock is proof of life, between descriptors of one process too.
TEST(Env, LockIsOneHoldersUntilItsDescriptorEnds) {
  const TempDir dir;
  const std::string path = dir.path() + "/lock";
  EXPECT_EQ(env().OpenLocked(path, false).status().code(), CS_NOT_FOUND);
  FileCloser first = Opened(env().OpenLocked(path, true));
  const size_t descriptors = DescriptorCount();
  EXPECT_EQ(env().OpenLocked(path, true).status().code(), CS_REFUSED);
  EXPECT_EQ(env().OpenLocked(path, false).status().code(), CS_REFUSED);
  EXPECT_EQ(DescriptorCount(), descriptors);
  // Opening and closing the file elsewhere doesn't let go of it.
  Opened(env().OpenRead(path, false)).Reset();
  EXPECT_EQ(env().OpenLocked(path, false).status().code(), CS_REFUSED);
  first.Reset();
  EXPECT_OK(env().OpenLocked(path, false));
}

TEST(Env, MakesDirectoriesOnce) {
  const TempDir dir;
  const std::string path = dir.path() + "/a/b b/ü/d";
  EXPECT_OK(env().MakeDirectories(path));
  EXPECT_OK(env().MakeDirectories(path));
  EXPECT_OK(env().MakeDirectory(path));
  EXPECT_TRUE(env().Stat(path).value().is_directory);
  WriteFile(path + "/file", {1});
  EXPECT_EQ(env().MakeDirectory(path + "/file").code(), CS_NOT_FOUND);
  EXPECT_FALSE(env().MakeDirectories(path + "/file/x").ok());
  EXPECT_FALSE(env().Stat(path + "/file").value().is_directory);
}

TEST(Env, RemovesATreeButNothingOutsideIt) {
  const TempDir dir;
  const std::string tree = dir.path() + "/tree";
  const std::string outside = dir.path() + "/outside";
  ASSERT_OK(env().MakeDirectories(tree + "/a/b"));
  ASSERT_OK(env().MakeDirectories(outside));
  WriteFile(outside + "/kept", {1});
  WriteFile(tree + "/a/b/file", {1});
  ASSERT_EQ(symlink(outside.c_str(), (tree + "/a/link").c_str()), 0);
  EXPECT_OK(env().RemoveTree(tree, kNever));
  EXPECT_EQ(env().Stat(tree).status().code(), CS_NOT_FOUND);
  EXPECT_OK(env().Stat(outside + "/kept"));
  EXPECT_OK(env().RemoveTree(tree, kNever));  // gone already
}

TEST(Env, StopsRemovingWhenAsked) {
  const TempDir dir;
  for (int i = 0; i < 10; ++i) WriteFile(dir.path() + "/" + std::to_string(i), {1});
  int asked = 0;
  EXPECT_EQ(env().RemoveTree(dir.path(), [&] { return ++asked > 4; }).code(), CS_CLOSED);
  EXPECT_EQ(env().List(dir.path()).value().size(), 6u);
}

// Two removers of one tree, as two stores' cleaners are.
TEST(Env, RemoversMayRace) {
  const TempDir dir;
  const std::string tree = dir.path() + "/tree";
  for (int i = 0; i < 20; ++i) {
    const std::string child = tree + "/" + std::to_string(i);
    ASSERT_OK(env().MakeDirectories(child));
    for (int k = 0; k < 5; ++k) WriteFile(child + "/" + std::to_string(k), {1});
  }
  std::thread other([&] { EXPECT_OK(env().RemoveTree(tree, kNever)); });
  EXPECT_OK(env().RemoveTree(tree, kNever));
  other.join();
  EXPECT_FALSE(env().Stat(tree).ok());
}

TEST(Env, RenameReplaces) {
  const TempDir dir;
  const std::string from = dir.path() + "/from";
  const std::string to = dir.path() + "/to";
  WriteFile(from, {1});
  WriteFile(to, {2});
  EXPECT_OK(env().Rename(from, to));
  EXPECT_TRUE(ReadFile(to) == std::vector<uint8_t>{1});
  EXPECT_EQ(env().Rename(from, to).code(), CS_NOT_FOUND);
  EXPECT_EQ(env().Unlink(from).code(), CS_NOT_FOUND);
  EXPECT_OK(env().Unlink(to));
}

// In each of its ways.
TEST(Env, RenameNewReplacesNothing) {
  for (const auto rename : {&RenameNew, &RenameNewAtOnce, &RenameNewByLink, &RenameNewByLook}) {
    const TempDir dir;
    const std::string from = dir.path() + "/from";
    const std::string below = dir.path() + "/below";
    const std::string to = below + "/to";
    ASSERT_OK(env().MakeDirectory(below));
    WriteFile(from, {1});
    const Result<Fd> opened = env().OpenDirectory(below);
    ASSERT_OK(opened);
    const FileCloser directory(env(), opened.value());
    WriteFile(to, {2});
    EXPECT_EQ(rename(from, directory.get(), "to"), EEXIST);
    EXPECT_TRUE(ReadFile(to) == std::vector<uint8_t>{2});
    EXPECT_OK(env().Unlink(to));
    EXPECT_EQ(symlink("nowhere", to.c_str()), 0);
    EXPECT_EQ(rename(from, directory.get(), "to"), EEXIST);
    EXPECT_OK(env().Unlink(to));
    EXPECT_OK(env().MakeDirectory(to));
    EXPECT_EQ(rename(from, directory.get(), "to"), EEXIST);
    EXPECT_OK(env().RemoveDirectory(to));
    // Wherever the directory is by now.
    EXPECT_OK(env().Rename(below, dir.path() + "/elsewhere"));
    EXPECT_EQ(rename(from, directory.get(), "to"), 0);
    EXPECT_TRUE(ReadFile(dir.path() + "/elsewhere/to") == std::vector<uint8_t>{1});
    EXPECT_EQ(rename(from, directory.get(), "another"), ENOENT);
    WriteFile(from, {1});
    EXPECT_OK(env().Unlink(dir.path() + "/elsewhere/to"));
    EXPECT_OK(env().RemoveDirectory(dir.path() + "/elsewhere"));
    EXPECT_EQ(rename(from, directory.get(), "to"), ENOENT);
    EXPECT_TRUE(ReadFile(from) == std::vector<uint8_t>{1});
  }
}

TEST(Env, RenameNewIsInTheEnvironment) {
  const TempDir dir;
  WriteFile(dir.path() + "/from", {1});
  WriteFile(dir.path() + "/to", {2});
  EXPECT_EQ(symlink(dir.path().c_str(), (dir.path() + "/link").c_str()), 0);
  EXPECT_FALSE(env().OpenDirectory(dir.path() + "/link").ok());
  EXPECT_FALSE(env().OpenDirectory(dir.path() + "/to").ok());
  const Result<Fd> opened = env().OpenDirectory(dir.path());
  ASSERT_OK(opened);
  const FileCloser directory(env(), opened.value());
  EXPECT_EQ(env().RenameNew(dir.path() + "/from", directory.get(), "to").error(), EEXIST);
  EXPECT_OK(env().RenameNew(dir.path() + "/from", directory.get(), "new"));
  EXPECT_TRUE(ReadFile(dir.path() + "/new") == std::vector<uint8_t>{1});
}

TEST(Env, UniqueNamesAreUnique) {
  std::set<std::string> names;
  for (int i = 0; i < 1000; ++i) {
    const std::string name = env().UniqueName();
    EXPECT_EQ(name.size(), 16u);
    EXPECT_EQ(name.find_first_not_of("0123456789abcdef"), std::string::npos);
    names.insert(name);
  }
  EXPECT_EQ(names.size(), 1000u);
}

TEST(Env, CloserClosesOnce) {
  const TempDir dir;
  const size_t before = DescriptorCount();
  {
    FileCloser file = Opened(env().OpenWrite(dir.path() + "/a", false));
    FileCloser moved = std::move(file);
    file = Opened(env().OpenWrite(dir.path() + "/b", false));
    moved = std::move(file);
    EXPECT_EQ(DescriptorCount(), before + 1);
    EXPECT_OK(moved.Close());
    EXPECT_FALSE(static_cast<bool>(moved));
    EXPECT_EQ(DescriptorCount(), before);
  }
  EXPECT_EQ(DescriptorCount(), before);
}

}  // namespace cachestore::test
