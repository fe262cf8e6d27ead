#include "base/shared_memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "base/fork.h"

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

struct flock ByteRange(short type, uint64_t first, uint64_t count) {
  struct flock range = {};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = static_cast<off_t>(first);
  range.l_len = static_cast<off_t>(count);
  return range;
}

// The number in a one-line file; UINT64_MAX if there is none ("max").
uint64_t NumberIn(const std::string& path) {
  std::ifstream file(path);
  uint64_t number = 0;
  return file >> number ? number : UINT64_MAX;
}

}  // namespace

uint32_t UserId() { return geteuid(); }

Result<Fd> OpenSharedFile(const std::string& path, bool create) {
  const int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | (create ? O_CREAT : 0);
  const Fd fd =
      OpenUnforked([&] { return RetryEintr([&] { return open(path.c_str(), flags, 0600); }); });
  if (fd < 0) return Status::FromErrno(errno, "open", path);
  return fd;
}

Result<SharedFileInfo> StatSharedFile(Fd fd) {
  struct stat st;
  if (fstat(fd, &st) != 0) return Status::FromErrno(errno, "stat", "shared memory");
  SharedFileInfo info;
  info.device = static_cast<uint64_t>(st.st_dev);
  info.inode = static_cast<uint64_t>(st.st_ino);
  info.size = static_cast<uint64_t>(st.st_size);
  info.is_ours = S_ISREG(st.st_mode) && st.st_uid == UserId() && (st.st_mode & 07777) == 0600 &&
                 st.st_nlink <= 1;
  return info;
}

void CloseSharedFile(Fd fd) { CloseUnforked(fd); }

Status ReserveSharedFile(Fd fd, uint64_t size) {
  if (RetryEintr([&] { return ftruncate(fd, static_cast<off_t>(size)); }) != 0) {
    return Status::FromErrno(errno, "resize", "shared memory");
  }
  int error;
  do {
    error = posix_fallocate(fd, 0, static_cast<off_t>(size));
  } while (error == EINTR);
  if (error != 0) return Status::FromErrno(error, "reserve", "shared memory");
  return Status::Ok();
}

Status RemoveSharedFile(Fd fd, const std::string& path) {
  (void)RetryEintr([&] { return ftruncate(fd, 0); });
  return Env::Real().Unlink(path);
}

Result<uint64_t> FreeBytes(const std::string& path) {
  struct statvfs st;
  if (RetryEintr([&] { return statvfs(path.c_str(), &st); }) != 0) {
    return Status::FromErrno(errno, "statvfs", path);
  }
  return static_cast<uint64_t>(st.f_bavail) * st.f_frsize;
}

uint64_t MemoryHeadroom() {
  uint64_t headroom = UINT64_MAX;
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    unsigned long long kilobytes = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %llu kB", &kilobytes) == 1) {
      headroom = kilobytes * 1024;
    }
  }
  // cgroup v2: the limit of any ancestor counts. v1 shows its own at a fixed
  // place inside a container.
  std::string path;
  std::ifstream cgroups("/proc/self/cgroup");
  for (std::string line; std::getline(cgroups, line);) {
    if (line.rfind("0::", 0) == 0) path = line.substr(3);
  }
  for (;;) {
    const std::string base = "/sys/fs/cgroup" + (path == "/" ? "" : path);
    const uint64_t limit = NumberIn(base + "/memory.max");
    const uint64_t used = NumberIn(base + "/memory.current");
    if (limit != UINT64_MAX && used != UINT64_MAX) {
      headroom = std::min(headroom, limit - std::min(limit, used));
    }
    if (path.empty() || path == "/") break;
    path.resize(path.find_last_of('/'));
  }
  const std::string v1 = "/sys/fs/cgroup/memory/memory.";
  const uint64_t limit = NumberIn(v1 + "limit_in_bytes");
  const uint64_t used = NumberIn(v1 + "usage_in_bytes");
  if (limit != UINT64_MAX && used != UINT64_MAX) {
    headroom = std::min(headroom, limit - std::min(limit, used));
  }
  return headroom;
}

namespace {

// Allocates all of it, after the advice about huge pages.
Status Populate(uint8_t* memory, uint64_t size) {
#ifdef MADV_POPULATE_WRITE
  if (RetryEintr([&] { return madvise(memory, size, MADV_POPULATE_WRITE); }) == 0) {
    return Status::Ok();
  }
  if (errno != EINVAL) return Status::FromErrno(errno, "reserve", "memory");
#endif
  // Linux before 5.14.
  for (uint64_t at = 0; at < size; at += 4096) {
    *static_cast<volatile uint8_t*>(memory + at) = 0;
  }
  return Status::Ok();
}

constexpr uint64_t kHugePage = uint64_t{2} << 20;

// The number that the kernel gives under `name` for the mapping that an address
// is in, in bytes.
uint64_t BytesOf(const uint8_t* address, const std::string& name) {
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  std::ifstream maps("/proc/self/smaps");
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long from = 0;
    unsigned long to = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &from, &to) == 2) {
      inside = from <= wanted && wanted < to;
    } else if (inside && line.rfind(name, 0) == 0) {
      return std::strtoull(line.c_str() + name.size(), nullptr, 10) * 1024;
    }
  }
  return 0;
}

// Of a file: what the file system was mounted for. Tried on a part of it.
std::string HugePagesOfFile(uint8_t* memory, uint64_t size) {
#ifdef MADV_POPULATE_READ
  const uint64_t skip = -reinterpret_cast<uintptr_t>(memory) % kHugePage;
  if (size >= skip + kHugePage &&
      RetryEintr([&] { return madvise(memory + skip, kHugePage, MADV_POPULATE_READ); }) == 0) {
    return BytesOf(memory, "ShmemPmdMapped:") > 0
               ? "in huge pages"
               : "no huge pages (a tmpfs mounted with huge=advise would have them)";
  }
#endif
  return "huge pages not known";
}

}  // namespace

Result<uint8_t*> MapMemory(Fd fd, uint64_t size, std::string& huge) {
  const int flags = fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (mapped == MAP_FAILED) return Status::FromErrno(errno, "map", "memory");
  uint8_t* const memory = static_cast<uint8_t*>(mapped);
  const bool advised = madvise(memory, size, MADV_HUGEPAGE) == 0;
  if (fd >= 0) {  // its pages are those that the file was made with
    huge = HugePagesOfFile(memory, size);
    return memory;
  }
  if (Status populated = Populate(memory, size); !populated.ok()) {
    munmap(memory, size);
    return populated;
  }
  huge = advised ? std::to_string(BytesOf(memory, "AnonHugePages:") >> 20) + " MiB in huge pages"
                 : "no huge pages: the kernel has none";
  return memory;
}

void UnmapMemory(uint8_t* memory, uint64_t size) { munmap(memory, size); }

void KeepFromChildren(uint8_t* memory, uint64_t size) {
  (void)madvise(memory, size, MADV_DONTFORK);
}

bool TryLockByte(Fd fd, uint64_t byte) {
  struct flock range = ByteRange(F_WRLCK, byte, 1);
  return RetryEintr([&] { return fcntl(fd, F_OFD_SETLK, &range); }) == 0;
}

void UnlockByte(Fd fd, uint64_t byte) {
  struct flock range = ByteRange(F_UNLCK, byte, 1);
  (void)RetryEintr([&] { return fcntl(fd, F_OFD_SETLK, &range); });
}

bool IsLockedByOthers(Fd fd, uint64_t first, uint64_t count) {
  struct flock range = ByteRange(F_WRLCK, first, count);
  // What can't be told counts as alive: nothing is taken from the living.
  if (RetryEintr([&] { return fcntl(fd, F_OFD_GETLK, &range); }) != 0) return true;
  return range.l_type != F_UNLCK;
}

void FutexWait(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::milliseconds at_most) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  const timespec time = {static_cast<time_t>(at_most.count() / 1000),
                         static_cast<long>(at_most.count() % 1000) * 1000000};
  (void)syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
}

void FutexWake(std::atomic<uint32_t>& word) {
  (void)syscall(SYS_futex, &word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
}

}  // namespace cachestore
