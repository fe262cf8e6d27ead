// Files whose locks are this process's alone, whoever forks when.
#include "base/fork.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/shared_memory.h"
#include "fault_env.h"
#include "harness.h"

namespace cachestore::test {
namespace {

// A child that does nothing, until the end.
class Child {
 public:
  Child() : pid_(fork()) {
    if (pid_ == 0) {
      for (;;) pause();
    }
    EXPECT_GT(pid_, 0);
  }
  ~Child() {
    if (pid_ <= 0) return;
    (void)kill(pid_, SIGKILL);
    (void)waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  // Of files that it has open.
  size_t locks() const {
    size_t count = 0;
    const std::string directory = "/proc/" + std::to_string(pid_) + "/fdinfo/";
    const Result<std::vector<std::string>> fds = Env::Real().List(directory);
    if (!EXPECT_OK(fds)) return 0;
    for (const std::string& fd : fds.value()) {
      const Result<std::string> info = Env::Real().ReadText(directory + fd, 4096);
      count += info.ok() && info.value().find("lock:") != std::string::npos ? 1 : 0;
    }
    return count;
  }

 private:
  const pid_t pid_;
};

}  // namespace

TEST(Fork, AChildHasNoLockedFile) {
  const TempDir directory;
  const std::string path = directory.path() + "/lock";
  const Result<Fd> locked = Env::Real().OpenLocked(path, /*create=*/true);
  ASSERT_OK(locked);
  EXPECT_TRUE(IsUnforked(locked.value()));
  const Child child;
  EXPECT_TRUE(Eventually([&] { return child.locks() == 0; }));
  EXPECT_EQ(Env::Real().OpenLocked(path, /*create=*/true).status().code(), CS_REFUSED);
  EXPECT_OK(Env::Real().Close(locked.value()));
  EXPECT_FALSE(IsUnforked(locked.value()));
  const Result<Fd> again = Env::Real().OpenLocked(path, /*create=*/true);
  ASSERT_OK(again);
  EXPECT_OK(Env::Real().Close(again.value()));
}

// Nor one that was open, but not known yet when it was forked, and was locked then.
TEST(Fork, AChildHasNoFileThatIsBeingOpened) {
  const TempDir directory;
  const std::string path = directory.path() + "/lock";
  std::unique_ptr<Child> child;
  const int fd = OpenUnforked([&] {
    const int opened = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (child == nullptr) child = std::make_unique<Child>();
    return opened;
  });
  ASSERT_GT(fd, 0);
  EXPECT_TRUE(TryLockByte(fd, 0));
  EXPECT_EQ(child->locks(), 0u);
  EXPECT_EQ(CloseUnforked(fd), 0);
}

// What another file gets of a number that was a lock's is left alone.
TEST(Fork, AChildKeepsOtherFiles) {
  const TempDir directory;
  const Result<Fd> locked = Env::Real().OpenLocked(directory.path() + "/lock", /*create=*/true);
  ASSERT_OK(locked);
  EXPECT_OK(Env::Real().Close(locked.value()));
  const Result<Fd> other = Env::Real().OpenWrite(directory.path() + "/other", /*direct=*/false);
  ASSERT_OK(other);
  EXPECT_EQ(other.value(), locked.value());
  const FileCloser file(Env::Real(), other.value());
  const pid_t child = fork();
  if (child == 0) _exit(write(other.value(), "x", 1) == 1 ? 0 : 1);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace cachestore::test
