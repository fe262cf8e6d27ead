// FaultEnv: an Env that makes any system call of the store fail, fall short or
// hang, and counts them. Gate: where a test holds threads, and lets them go.
#ifndef CACHESTORE_TESTS_FAULT_ENV_H_
#define CACHESTORE_TESTS_FAULT_ENV_H_

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/env.h"

namespace cachestore::test {

// No wait of a test is longer; each is expected to end at once.
inline constexpr std::chrono::seconds kWaitBound{10};

// Threads that Pass wait until Open. Thread-safe. Also opened by its end, so
// that a test that fails early doesn't hang.
class Gate {
 public:
  ~Gate() { Open(); }

  // Arrives, and waits for Open (a test failure after kWaitBound).
  void Pass();
  void Open();
  // True once `n` threads have arrived in all; false after kWaitBound.
  [[nodiscard]] bool WaitArrived(size_t n);
  // Whether no more than `n` threads arrive while there is time to: looks for
  // a moment. Only to show that something doesn't happen.
  [[nodiscard]] bool StaysAt(size_t n);
  size_t arrived() const;

 private:
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  size_t arrived_ = 0;
  bool open_ = false;
};

// Asks again and again, until `done` says true (true) or kWaitBound is over.
// For what no gate can stand in: a thread's end, a file's removal.
[[nodiscard]] bool Eventually(const std::function<bool()>& done);

// Threads and open descriptors of this process. A joined thread counts for a moment more.
size_t ThreadCount();
size_t DescriptorCount();

enum class Op : uint8_t {
  kOpenRead,
  kOpenWrite,
  kOpenLocked,
  kOpenDirectory,
  kClose,
  kReadFull,
  kWriteFull,
  kStatFd,
  kStat,
  kRename,  // RenameNew too
  kUnlink,
  kMakeDirectory,
  kRemoveDirectory,
  kList,
  kFilesystemType,
  kSetModified,
  kSpace,
  kSyncDirectory,
  kUniqueName,  // the last one: no system call on files
};
inline constexpr size_t kOpCount = 19;
const char* OpName(Op op);

// Thread-safe. Must outlive every worker that uses it: call WaitIdle before
// it ends if a store has left workers behind.
class FaultEnv : public Env {
 public:
  struct Call {
    Op op;
    std::string path;  // of descriptors: what was opened; of Rename: the target
    uint64_t offset = 0;
    std::string from = {};  // of Rename
    // Set by a hook: ReadFull and WriteFull transfer so many bytes only.
    std::optional<uint64_t> limit = std::nullopt;
  };
  // Runs on the calling thread before the operation, and may block. An error
  // is the operation's outcome; without `limit` nothing is done then.
  using Hook = std::function<Status(Call&)>;

  explicit FaultEnv(Env& real = Env::Real()) : real_(real) {}
  ~FaultEnv() override { (void)WaitIdle(); }

  void Before(Op op, Hook hook);
  // Runs after an operation that succeeded; an error replaces its outcome.
  void After(Op op, Hook hook);
  void NoHooks();
  // What FilesystemType answers. 0x6969 is NFS: no directory to be sure of.
  void SetFilesystemType(uint64_t type) { filesystem_type_ = type; }
  static constexpr uint64_t kNfs = 0x6969;

  size_t calls(Op op) const { return counts_[static_cast<size_t>(op)]; }
  size_t calls() const;  // of all operations
  void ResetCounts();
  // False if calls are still running after kWaitBound.
  bool WaitIdle();

  Result<Fd> OpenRead(const std::string& path, bool direct) override;
  Result<Fd> OpenWrite(const std::string& path, bool direct) override;
  Result<Fd> OpenLocked(const std::string& path, bool create) override;
  Result<Fd> OpenDirectory(const std::string& path) override;
  Status Close(Fd fd) override;
  Result<uint64_t> ReadFull(Fd fd, std::span<iovec> parts, uint64_t offset) override;
  Status WriteFull(Fd fd, std::span<iovec> parts, uint64_t offset) override;
  Result<FileInfo> StatFd(Fd fd) override;
  Result<FileInfo> Stat(const std::string& path) override;
  Status Rename(const std::string& from, const std::string& to) override;
  Status RenameNew(const std::string& from, Fd directory, const std::string& name) override;
  Status Unlink(const std::string& path) override;
  Status MakeDirectory(const std::string& path) override;
  Status RemoveDirectory(const std::string& path) override;
  Result<std::vector<std::string>> List(const std::string& path) override;
  Result<uint64_t> FilesystemType(const std::string& path) override;
  std::string UniqueName() override;
  Status SetModified(const std::string& path, uint64_t modified_ns) override;
  Result<SpaceInfo> Space(const std::string& path) override;
  Status SyncDirectory(const std::string& path) override;
  uint64_t Now() override { return real_.Now(); }  // no system call that could fail

 private:
  struct Hooks {
    Hook before;
    Hook after;
  };
  class Running;

  std::shared_ptr<const Hooks> HooksOf(Op op) const;
  // Hook, operation, hook.
  template <typename Outcome, typename Operation>
  Outcome Do(Call call, Operation operation);
  Result<Fd> Opened(const std::string& path, Result<Fd> opened);
  std::string PathOf(Fd fd) const;

  Env& real_;
  std::array<std::atomic<size_t>, kOpCount> counts_{};
  std::atomic<uint64_t> filesystem_type_{0};

  mutable std::mutex mutex_;  // guards all below
  std::condition_variable idle_;
  size_t running_ = 0;
  std::map<Op, std::shared_ptr<const Hooks>> hooks_;
  std::map<Fd, std::string> paths_;
};

// Hooks.
FaultEnv::Hook Failing(Code code);
FaultEnv::Hook FailingTimes(Code code, size_t times);
FaultEnv::Hook Holding(Gate& gate);
// Only on paths that contain `part`.
FaultEnv::Hook On(std::string part, FaultEnv::Hook hook);
// Only at this offset of a file.
FaultEnv::Hook At(uint64_t offset, FaultEnv::Hook hook);

}  // namespace cachestore::test

#endif  // CACHESTORE_TESTS_FAULT_ENV_H_
