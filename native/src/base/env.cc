#include "base/env.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <memory>

#include "base/fork.h"
#include "base/rename_new.h"

namespace cachestore {
namespace {

template <typename Call>
auto RetryEintr(Call call) {
  decltype(call()) result;
  do {
    result = call();
  } while (result < 0 && errno == EINTR);
  return result;
}

// Drops the first `bytes` of `parts`; returns what is left of them.
std::span<iovec> Advance(std::span<iovec> parts, uint64_t bytes) {
  while (!parts.empty() && bytes >= parts.front().iov_len) {
    bytes -= parts.front().iov_len;
    parts = parts.subspan(1);
  }
  if (bytes > 0) {
    parts.front().iov_base = static_cast<char*>(parts.front().iov_base) + bytes;
    parts.front().iov_len -= bytes;
  }
  return parts;
}

int VectorLength(std::span<iovec> parts) {
  return static_cast<int>(std::min<size_t>(parts.size(), IOV_MAX));
}

std::string FdName(Fd fd) { return "descriptor " + std::to_string(fd); }

class RealEnv final : public Env {
 public:
  Result<Fd> OpenRead(const std::string& path, bool direct) override {
    return Open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | (direct ? O_DIRECT : 0), "open");
  }

  Result<Fd> OpenWrite(const std::string& path, bool direct) override {
    return Open(path, O_WRONLY | O_CREAT | (direct ? O_DIRECT : 0), "create");
  }

  Result<Fd> OpenLocked(const std::string& path, bool create) override {
    Result<Fd> opened = Fd{-1};
    (void)OpenUnforked([&] {
      opened = Open(path, O_RDWR | (create ? O_CREAT : 0), "open");
      return opened.ok() ? opened.value() : -1;
    });
    if (!opened.ok()) return opened;
    struct flock whole = {};
    whole.l_type = F_WRLCK;
    whole.l_whence = SEEK_SET;
    const Fd fd = opened.value();
    if (RetryEintr([&] { return fcntl(fd, F_OFD_SETLK, &whole); }) == 0) return fd;
    const int error = errno;
    CloseUnforked(fd);
    if (error == EAGAIN || error == EACCES) return Status(CS_REFUSED, "locked: " + path);
    return Status::FromErrno(error, "lock", path);
  }

  Result<Fd> OpenDirectory(const std::string& path) override {
    return Open(path, O_RDONLY | O_DIRECTORY, "open");
  }

  // Linux releases the descriptor also when close() says EINTR: no retry.
  Status Close(Fd fd) override {
    const int closed = IsUnforked(fd) ? CloseUnforked(fd) : close(fd);
    if (closed == 0 || errno == EINTR) return Status::Ok();
    return Status::FromErrno(errno, "close", FdName(fd));
  }

  Result<uint64_t> ReadFull(Fd fd, std::span<iovec> parts, uint64_t offset) override {
    uint64_t done = 0;
    while (!(parts = Advance(parts, 0)).empty()) {
      const ssize_t n = RetryEintr([&] {
        return preadv(fd, parts.data(), VectorLength(parts), static_cast<off_t>(offset + done));
      });
      if (n < 0) return Status::FromErrno(errno, "read", FdName(fd));
      if (n == 0) break;
      done += static_cast<uint64_t>(n);
      parts = Advance(parts, static_cast<uint64_t>(n));
    }
    return done;
  }

  Status WriteFull(Fd fd, std::span<iovec> parts, uint64_t offset) override {
    while (!(parts = Advance(parts, 0)).empty()) {
      const ssize_t n = RetryEintr([&] {
        return pwritev(fd, parts.data(), VectorLength(parts), static_cast<off_t>(offset));
      });
      if (n < 0) return Status::FromErrno(errno, "write", FdName(fd));
      // A write that takes nothing and gives no reason would go on for ever.
      if (n == 0) return Status::FromErrno(ENOSPC, "write", FdName(fd));
      offset += static_cast<uint64_t>(n);
      parts = Advance(parts, static_cast<uint64_t>(n));
    }
    return Status::Ok();
  }

  Result<FileInfo> StatFd(Fd fd) override {
    struct stat st;
    if (fstat(fd, &st) != 0) return Status::FromErrno(errno, "stat", FdName(fd));
    return Info(st);
  }

  Result<FileInfo> Stat(const std::string& path) override {
    struct stat st;
    if (lstat(path.c_str(), &st) != 0) return Status::FromErrno(errno, "stat", path);
    return Info(st);
  }

  Status SetModified(const std::string& path, uint64_t modified_ns) override {
    timespec times[2] = {};
    times[0].tv_nsec = UTIME_OMIT;
    times[1].tv_sec = static_cast<time_t>(modified_ns / 1000000000u);
    times[1].tv_nsec = static_cast<long>(modified_ns % 1000000000u);
    if (utimensat(AT_FDCWD, path.c_str(), times, AT_SYMLINK_NOFOLLOW) == 0) return Status::Ok();
    return Status::FromErrno(errno, "set times of", path);
  }

  Status Rename(const std::string& from, const std::string& to) override {
    if (rename(from.c_str(), to.c_str()) == 0) return Status::Ok();
    return Status::FromErrno(errno, "rename to", to);
  }

  Status RenameNew(const std::string& from, Fd directory, const std::string& name) override {
    const int error = cachestore::RenameNew(from, directory, name);
    return error == 0 ? Status::Ok() : Status::FromErrno(error, "rename to", name);
  }

  Status Unlink(const std::string& path) override {
    if (unlink(path.c_str()) == 0) return Status::Ok();
    return Status::FromErrno(errno, "remove", path);
  }

  Status MakeDirectory(const std::string& path) override {
    if (mkdir(path.c_str(), 0700) == 0) return Status::Ok();
    if (errno == EEXIST) {
      // A storage backend may be a link to a directory.
      struct stat st;
      if (stat(path.c_str(), &st) == 0 && S_ISDIR(st.st_mode)) return Status::Ok();
      errno = ENOTDIR;
    }
    return Status::FromErrno(errno, "make directory", path);
  }

  Status RemoveDirectory(const std::string& path) override {
    if (rmdir(path.c_str()) == 0) return Status::Ok();
    return Status::FromErrno(errno, "remove directory", path);
  }

  Result<std::vector<std::string>> List(const std::string& path) override {
    Result<Fd> opened = OpenDirectory(path);
    if (!opened.ok()) return opened.status();
    const std::unique_ptr<DIR, int (*)(DIR*)> directory(fdopendir(opened.value()), &closedir);
    if (directory == nullptr) {
      const int error = errno;
      close(opened.value());
      return Status::FromErrno(error, "list", path);
    }
    std::vector<std::string> names;
    for (;;) {
      errno = 0;
      const dirent* entry = readdir(directory.get());
      if (entry == nullptr) break;
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
    }
    if (errno != 0) return Status::FromErrno(errno, "list", path);
    return names;
  }

  Status SyncDirectory(const std::string& path) override {
    const Result<Fd> opened = OpenDirectory(path);
    if (!opened.ok()) return opened.status();
    const Fd fd = opened.value();
    const int error = RetryEintr([&] { return fsync(fd); }) == 0 ? 0 : errno;
    close(fd);
    return error == 0 ? Status::Ok() : Status::FromErrno(error, "sync", path);
  }

  Result<uint64_t> FilesystemType(const std::string& path) override {
    struct statfs st;
    if (RetryEintr([&] { return statfs(path.c_str(), &st); }) != 0) {
      return Status::FromErrno(errno, "statfs", path);
    }
    // Some architectures sign-extend the 32-bit magic numbers.
    return static_cast<uint64_t>(st.f_type) & 0xffffffffu;
  }

  Result<SpaceInfo> Space(const std::string& path) override {
    struct statvfs st;
    if (RetryEintr([&] { return statvfs(path.c_str(), &st); }) != 0) {
      return Status::FromErrno(errno, "statvfs", path);
    }
    const uint64_t unit = st.f_frsize;
    return SpaceInfo{st.f_blocks * unit, st.f_bavail * unit};
  }

  uint64_t Now() override {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
  }

  std::string UniqueName() override {
    uint64_t number = 0;
    if (getrandom(&number, sizeof number, 0) != static_cast<ssize_t>(sizeof number)) {
      // Only before the kernel's generator is seeded: time, pid and a counter.
      static std::atomic<uint64_t> calls{0};
      const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
      number = (static_cast<uint64_t>(now) << 20) ^ (static_cast<uint64_t>(getpid()) << 44) ^
               calls.fetch_add(1);
    }
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(number));
    return text;
  }

 private:
  static Result<Fd> Open(const std::string& path, int flags, const char* what) {
    const Fd fd =
        RetryEintr([&] { return open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, 0600); });
    if (fd < 0) return Status::FromErrno(errno, what, path);
    return fd;
  }

  static FileInfo Info(const struct stat& st) {
    return {static_cast<uint64_t>(st.st_size),
            static_cast<uint64_t>(st.st_dev),
            static_cast<uint64_t>(st.st_ino),
            S_ISDIR(st.st_mode),
            S_ISREG(st.st_mode),
            static_cast<uint64_t>(st.st_mtim.tv_sec) * 1000000000u +
                static_cast<uint64_t>(st.st_mtim.tv_nsec)};
  }
};

}  // namespace

Env& Env::Real() {
  static RealEnv* const env = new RealEnv;  // never destroyed: see the header
  return *env;
}

Result<std::string> Env::ReadText(const std::string& path, size_t limit) {
  const Result<Fd> opened = OpenRead(path, /*direct=*/false);
  if (!opened.ok()) return opened.status();
  const FileCloser file(*this, opened.value());
  std::string text(limit, '\0');
  iovec part{text.data(), text.size()};
  const Result<uint64_t> read = ReadFull(file.get(), {&part, 1}, 0);
  if (!read.ok()) return read.status();
  text.resize(static_cast<size_t>(read.value()));
  return text;
}

Status Env::WriteText(const std::string& path, std::string text) {
  const Result<Fd> opened = OpenWrite(path, /*direct=*/false);
  if (!opened.ok()) return opened.status();
  FileCloser file(*this, opened.value());
  iovec part{text.data(), text.size()};
  const Status written = text.empty() ? Status::Ok() : WriteFull(file.get(), {&part, 1}, 0);
  return written.ok() ? file.Close() : written;
}

Status Env::ReplaceFile(const std::string& temporary, const std::string& path, std::string text,
                        const std::function<Status()>& prepare) {
  Status written = WriteText(temporary, std::move(text));
  if (written.code() == CS_NOT_FOUND) return written;  // there is no directory for it
  if (written.ok()) written = prepare();
  if (written.ok()) written = Rename(temporary, path);
  if (!written.ok()) (void)Unlink(temporary);
  return written;
}

Result<bool> Env::Names(const std::string& path, Fd fd) {
  const Result<FileInfo> open = StatFd(fd);
  if (!open.ok()) return open.status();
  const Result<FileInfo> there = Stat(path);
  if (there.status().code() == CS_NOT_FOUND) return false;
  if (!there.ok()) return there.status();
  return there.value().IsSameFile(open.value());
}

Status Env::MakeDirectories(const std::string& path) {
  Status made = MakeDirectory(path);
  if (made.code() != CS_NOT_FOUND) return made;
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos || slash == 0) return made;
  if (Status parent = MakeDirectories(path.substr(0, slash)); !parent.ok()) return parent;
  return MakeDirectory(path);
}

Status Env::RemoveTree(const std::string& path, const std::function<bool()>& stop, int tries) {
  // Not what a link points to.
  if (const Status removed = Unlink(path); removed.ok()) return removed;
  Result<std::vector<std::string>> names = List(path);
  if (!names.ok()) {
    return names.status().code() == CS_NOT_FOUND ? Status::Ok() : names.status();
  }
  for (const std::string& name : names.value()) {
    if (stop()) return {CS_CLOSED, "stopped while removing " + path};
    const std::string child = path + "/" + name;
    if (Status below = RemoveTree(child, stop); !below.ok()) return below;
  }
  const Status removed = RemoveDirectory(path);
  // Whoever had it open may have given it a file meanwhile.
  if (removed.error() == ENOTEMPTY && tries > 1) return RemoveTree(path, stop, tries - 1);
  return removed.code() == CS_NOT_FOUND ? Status::Ok() : removed;
}

}  // namespace cachestore
