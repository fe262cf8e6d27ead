// The raw limit: a batch of whole files, written or read by a few threads with
// one vectored call each. See raw.py for what is counted.

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <thread>
#include <vector>

namespace {

// 0, or the errno of what failed; EIO for a transfer that was cut short.
int Transfer(const char* path, int flags, const iovec* parts, int count, size_t bytes) {
  const int file = open(path, flags | O_CLOEXEC, 0600);
  if (file < 0) return errno;
  const bool is_write = (flags & O_ACCMODE) == O_WRONLY;
  const ssize_t done = is_write ? pwritev(file, parts, count, 0) : preadv(file, parts, count, 0);
  const int error = done < 0 ? errno : static_cast<size_t>(done) == bytes ? 0 : EIO;
  close(file);
  return error;
}

}  // namespace

// File i is paths[i], of the `count` ranges from parts[i * count] on, `bytes`
// in all. The calling thread is one of the `threads`. 0, or an errno.
extern "C" int cs_raw_transfer(size_t files, const char* const* paths, int flags,
                               const iovec* parts, int count, size_t bytes, int threads) {
  std::atomic<size_t> next{0};
  std::atomic<int> error{0};
  const auto work = [&] {
    for (size_t i; (i = next.fetch_add(1)) < files;) {
      const int failed = Transfer(paths[i], flags, parts + i * count, count, bytes);
      if (failed != 0) error = failed;
    }
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
  return error;
}

// How many of the first files are there.
extern "C" size_t cs_raw_lookup(size_t files, const char* const* paths) {
  size_t found = 0;
  while (found < files && access(paths[found], F_OK) == 0) ++found;
  return found;
}
