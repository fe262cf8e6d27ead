// Env: every system call of the store, behind one interface, so that a test
// can wrap it and make any of them fail, fall short, or hang.
//
// Handled here once, for every caller: EINTR is retried, short transfers are
// continued until the whole vector is done or the file ends, every descriptor
// is close-on-exec.
//
// Thread-safe. Env::Real() lives for ever, so a worker stuck in a hung
// filesystem can outlive its store.
#ifndef CACHESTORE_BASE_ENV_H_
#define CACHESTORE_BASE_ENV_H_

#include <sys/uio.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"

namespace cachestore {

// A descriptor as a plain number; -1 is none. FileCloser below owns one.
using Fd = int;

struct FileInfo {
  uint64_t size = 0;
  uint64_t device = 0;
  uint64_t inode = 0;
  bool is_directory = false;
  bool is_regular = false;
  uint64_t modified_ns = 0;  // since 1970

  bool IsSameFile(const FileInfo& other) const {
    return device == other.device && inode == other.inode;
  }
};

// Of a filesystem, in bytes.
struct SpaceInfo {
  uint64_t total = 0;
  uint64_t available = 0;  // to this user
};

class Env {
 public:
  virtual ~Env() = default;
  static Env& Real();

  // A symbolic link is never followed where it stands at the end of a path.

  // Never waits for a peer, whatever stands there (a FIFO, a device).
  virtual Result<Fd> OpenRead(const std::string& path, bool direct) = 0;
  // Creates the file if need be, mode 0600. The names written are unique, so
  // that O_EXCL would only keep several shards of one block apart.
  virtual Result<Fd> OpenWrite(const std::string& path, bool direct) = 0;
  // Opens or creates a lock file and takes its whole-file exclusive lock
  // without waiting; CS_REFUSED if somebody else holds it. The lock belongs to
  // the open file description and ends with it; a forked child has no part in it.
  virtual Result<Fd> OpenLocked(const std::string& path, bool create) = 0;
  // For RenameNew.
  virtual Result<Fd> OpenDirectory(const std::string& path) = 0;
  // The error matters only to who has written: some filesystems report a full
  // disk no sooner.
  virtual Status Close(Fd fd) = 0;

  // Fills all of `parts` from `offset` on; the result is how many bytes there
  // were before the end of the file. `parts` is used up.
  virtual Result<uint64_t> ReadFull(Fd fd, std::span<iovec> parts, uint64_t offset) = 0;
  // Writes all of `parts`, or fails. `parts` is used up.
  virtual Status WriteFull(Fd fd, std::span<iovec> parts, uint64_t offset) = 0;

  virtual Result<FileInfo> StatFd(Fd fd) = 0;
  virtual Result<FileInfo> Stat(const std::string& path) = 0;
  // Sets when a file was modified, in ns since 1970.
  virtual Status SetModified(const std::string& path, uint64_t modified_ns) = 0;
  // What is called `to` is replaced.
  virtual Status Rename(const std::string& from, const std::string& to) = 0;
  // To `name` in a directory, wherever that one is by now: EEXIST if anything has the name
  // there (base/rename_new.h).
  virtual Status RenameNew(const std::string& from, Fd directory, const std::string& name) = 0;
  virtual Status Unlink(const std::string& path) = 0;
  // Success also if the directory is there already. Mode 0700.
  virtual Status MakeDirectory(const std::string& path) = 0;
  virtual Status RemoveDirectory(const std::string& path) = 0;
  // Names in a directory, without "." and "..", in no order.
  virtual Result<std::vector<std::string>> List(const std::string& path) = 0;
  // Waits until the names in a directory are on stable storage.
  virtual Status SyncDirectory(const std::string& path) = 0;
  // The filesystem's type number, as statfs(2) gives it.
  virtual Result<uint64_t> FilesystemType(const std::string& path) = 0;
  virtual Result<SpaceInfo> Space(const std::string& path) = 0;
  // ns since 1970.
  virtual uint64_t Now() = 0;
  // Sixteen hex digits that no other process or call has.
  virtual std::string UniqueName() = 0;

  // What a small file holds: its first `limit` bytes at most.
  Result<std::string> ReadText(const std::string& path, size_t limit);
  // Makes a file of this, under a name that nobody else uses.
  Status WriteText(const std::string& path, std::string text);
  // Makes a file of this at `temporary`, as above, does `prepare` with it, and moves it to
  // `path`.
  Status ReplaceFile(const std::string& temporary, const std::string& path, std::string text,
                     const std::function<Status()>& prepare = &Status::Ok);
  // Whether `path` names the file that is open.
  Result<bool> Names(const std::string& path, Fd fd);
  // MakeDirectory for a path and all that lead to it.
  Status MakeDirectories(const std::string& path);
  // Removes a directory and all below it. Something that vanishes meanwhile is
  // no error, and what comes is removed too: `tries`. `stop` is asked between entries.
  Status RemoveTree(const std::string& path, const std::function<bool()>& stop, int tries = 8);
};

// Owns one descriptor.
class FileCloser {
 public:
  FileCloser() = default;
  FileCloser(Env& env, Fd fd) : env_(&env), fd_(fd) {}
  FileCloser(FileCloser&& other) noexcept { *this = std::move(other); }
  FileCloser& operator=(FileCloser&& other) noexcept {
    Reset();
    env_ = other.env_;
    fd_ = std::exchange(other.fd_, -1);
    return *this;
  }
  ~FileCloser() { Reset(); }

  Fd get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void Reset() {
    if (fd_ >= 0) (void)env_->Close(std::exchange(fd_, -1));
  }
  Status Close() { return env_->Close(std::exchange(fd_, -1)); }

 private:
  Env* env_ = nullptr;
  Fd fd_ = -1;
};

}  // namespace cachestore

#endif  // CACHESTORE_BASE_ENV_H_
