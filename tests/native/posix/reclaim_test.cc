// F07, F13's kin, F14: a process that dies in the middle of a write. What it
// left is removed by the next store that opens; a live one's isn't.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "fixture.h"
#include "harness.h"

extern char** environ;

namespace cachestore::test {
namespace {

constexpr char kRootVariable[] = "CACHESTORE_TEST_ROOT";

// This program again, running only Reclaim.Child on `root`: it opens a store,
// hangs in the write of a block, says so, and stays.
class Child {
 public:
  explicit Child(const std::string& root) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return;
    setenv(kRootVariable, root.c_str(), 1);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    std::string self = "/proc/self/exe";
    std::string filter = "--filter";
    std::string test = "Reclaim.Child";
    char* const arguments[] = {self.data(), filter.data(), test.data(), nullptr};
    if (posix_spawn(&pid_, self.c_str(), &actions, nullptr, arguments, environ) != 0) pid_ = -1;
    posix_spawn_file_actions_destroy(&actions);
    unsetenv(kRootVariable);
    close(ends[1]);
    output_ = ends[0];
  }
  ~Child() {
    Kill();
    close(output_);
  }

  // True once it hangs in its write.
  bool WaitHanging() {
    std::string text;
    char buffer[256];
    ssize_t n = 0;
    while (text.find("hanging\n") == std::string::npos &&
           (n = read(output_, buffer, sizeof buffer)) > 0) {
      text.append(buffer, static_cast<size_t>(n));
    }
    return text.find("hanging\n") != std::string::npos;
  }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
  int output_ = -1;
};

size_t Instances(const StoreSetup& setup) {
  return Env::Real().List(TemporaryRoot(setup)).value().size();
}

}  // namespace

// Only does something as the child process of the tests below.
TEST(Reclaim, Child) {
  const char* const root = getenv(kRootVariable);
  if (root == nullptr) return;
  const StoreSetup setup({root});
  FaultEnv env;
  const auto store = OpenOrFail(setup, env);
  Gate gate;
  // After the bytes, before the rename.
  env.After(Op::kWriteFull, Holding(gate));
  Pages pages(setup, 0, 2);
  pages.Fill();
  if (!store->Dump(pages.batch()).ok() || !gate.WaitArrived(2)) return;
  // The parent reads this, and then kills us; the bound is for its own death.
  if (write(STDOUT_FILENO, "hanging\n", 8) == 8) sleep(30);
  _exit(1);
}

TEST(Reclaim, KilledProcessesFilesAreRemovedALiveOnesAreNot) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  Child child(root.path());
  ASSERT_TRUE(child.WaitHanging());
  const std::vector<std::string> written = FilesBelow(TemporaryRoot(setup));
  EXPECT_EQ(written.size(), 2u);
  // Alive: stores come and go, its files stay.
  for (int i = 0; i < 3; ++i) {
    FaultEnv env;
    const auto store = OpenOrFail(setup, env);
    WaitCleaned(setup, env);
    EXPECT_OK(store->Clear());
    EXPECT_TRUE(Eventually([&] { return env.calls(Op::kList) >= 4; }));
    store->Close();
    EXPECT_TRUE(FilesBelow(TemporaryRoot(setup)) == written);
  }
  child.Kill();
  FaultEnv env;
  const auto store = OpenOrFail(setup, env);
  WaitCleaned(setup, env);
  EXPECT_TRUE(Eventually([&] { return Instances(setup) == 1; }));
  EXPECT_TRUE(FilesBelow(TemporaryRoot(setup)).empty());
  // It says what it did, and none of it was ever visible.
  const auto event = store->NextEvent();
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->level, CS_EVENT_INFO);
  EXPECT_NE(event->text.find("/tmp/"), std::string::npos);
  Pages pages(setup, 0, 2);
  EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(2, 0));
}

// Crash after crash: what piles up is bounded by what the next open removes.
TEST(Reclaim, CrashesDontPileUp) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  for (int i = 0; i < 3; ++i) {
    Child child(root.path());
    ASSERT_TRUE(child.WaitHanging());
    child.Kill();
  }
  // Each child's opening has removed, or was still removing, its elders'.
  const auto store = OpenOrFail(setup);
  EXPECT_TRUE(Eventually([&] { return Instances(setup) == 1; }));
  EXPECT_TRUE(FilesBelow(TemporaryRoot(setup)).empty());
}

// Several stores of one process, of which one is closed: each has a directory
// of its own.
TEST(Reclaim, StoresOfOneProcessKeepApart) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  FaultEnv env;
  const auto first = OpenOrFail(setup, env);
  WaitCleaned(setup, env);
  Gate gate;
  env.After(Op::kWriteFull, Holding(gate));
  Pages pages(setup, 0, 2);
  pages.Fill();
  Result<cs_task> task = first->Dump(pages.batch());
  ASSERT_OK(task);
  ASSERT_TRUE(gate.WaitArrived(2));
  {
    FaultEnv other_env;
    const auto second = OpenOrFail(setup, other_env);
    WaitCleaned(setup, other_env);
    Pages others(setup, 100, 2);
    EXPECT_TRUE(DumpAll(*second, others) == Repeated(2, CS_OK));
  }
  EXPECT_EQ(FilesBelow(TemporaryRoot(setup)).size(), 2u);
  gate.Open();
  EXPECT_TRUE(WaitFor(*first, task.value(), 2) == Repeated(2, CS_OK));
  EXPECT_EQ(Instances(setup), 1u);
  first->Close();
  EXPECT_EQ(Instances(setup), 0u);
}

// A clear while dumps and loads of this identity run: it takes what is there,
// spares the other identity, and everything goes on.
TEST(Reclaim, ClearBetweenTheStepsOfDumpsAndLoads) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  StoreSetup other_setup = setup;
  other_setup.identity = "other";
  other_setup.fingerprint = 2;
  FaultEnv env;
  const auto store = OpenOrFail(setup, env);
  WaitCleaned(setup, env);
  const auto other = OpenOrFail(other_setup);
  Pages pages(setup, 0, 2);
  pages.Fill();
  EXPECT_TRUE(DumpAll(*other, pages) == Repeated(2, CS_OK));

  for (const Op op : {Op::kOpenWrite, Op::kWriteFull, Op::kRename}) {
    Gate gate;
    env.Before(op, [&](FaultEnv::Call& call) {
      const auto is_of = [&](const char* name) {
        return call.path.find(name) != std::string::npos;
      };
      if (!is_of("/trash/") && !is_of("cleared")) gate.Pass();  // not the clear's own
      return Status::Ok();
    });
    Result<cs_task> task = store->Dump(pages.batch());
    ASSERT_OK(task);
    ASSERT_TRUE(gate.WaitArrived(2));
    EXPECT_OK(store->Clear());
    EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(2, 0));
    gate.Open();
    EXPECT_TRUE(WaitFor(*store, task.value(), 2) == Repeated(2, CS_OK));
    env.NoHooks();
    // Accepted before the clear: not there after it.
    EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(2, 0));
  }
  for (const Op op : {Op::kOpenRead, Op::kStatFd, Op::kReadFull}) {
    pages.Fill();
    EXPECT_TRUE(DumpAll(*store, pages) == Repeated(2, CS_OK));
    pages.Poison();
    Gate gate;
    env.Before(op, Holding(gate));
    Result<cs_task> task = store->Load(pages.batch());
    ASSERT_OK(task);
    ASSERT_TRUE(gate.WaitArrived(2));
    EXPECT_OK(store->Clear());
    EXPECT_TRUE(Eventually([&] { return FilesBelow(root.path() + "/identity/trash").empty(); }));
    gate.Open();
    const Codes codes = WaitFor(*store, task.value(), 2);
    // What was looked at before the clear is read to its end; what is looked at after it is
    // older than its mark, unless both were made in one tick of the clock.
    if (op != Op::kStatFd) {
      EXPECT_TRUE(codes == Repeated(2, op == Op::kReadFull ? CS_OK : CS_NOT_FOUND));
    }
    for (size_t page = 0; page < 2; ++page) {
      EXPECT_TRUE(codes[page] == CS_OK ? pages.Holds(page)
                                       : codes[page] == CS_NOT_FOUND && pages.IsPoisoned(page));
    }
    env.NoHooks();
  }
  EXPECT_TRUE(LookupAll(*other, pages) == std::vector<uint8_t>(2, 1));
  EXPECT_TRUE(LoadAll(*other, pages) == Repeated(2, CS_OK));
  EXPECT_EQ(store->Stats().load_corrupt, 0u);
}

}  // namespace cachestore::test
