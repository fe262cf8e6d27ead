#include "base/fork.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>

namespace cachestore {
namespace {

// As many descriptors as Linux gives a process, unless it is told otherwise.
constexpr size_t kMostFds = 1 << 20;
constexpr size_t kBits = 64;
// Forks that come one after the other, for ever, are no case to wait for.
constexpr int kTries = 100000;

std::atomic<uint32_t> forks{0};
std::atomic<uint32_t> forks_begun{0};  // by this process
std::atomic<uint32_t> forks_ended{0};

// A bit for each descriptor of such a file. A child may call nothing but
// async-signal-safe functions: a fixed array, no lock.
std::array<std::atomic<uint64_t>, kMostFds / kBits> unforked;
std::atomic<size_t> words{0};  // that have had bits

uint64_t BitOf(int fd) { return uint64_t{1} << (static_cast<size_t>(fd) % kBits); }
std::atomic<uint64_t>& WordOf(int fd) { return unforked[static_cast<size_t>(fd) / kBits]; }
bool HasBit(int fd) { return fd >= 0 && static_cast<size_t>(fd) < kMostFds; }

void Note(int fd) {
  if (!HasBit(fd)) return;
  const size_t needed = static_cast<size_t>(fd) / kBits + 1;
  size_t known = words.load();
  while (known < needed && !words.compare_exchange_weak(known, needed)) {
  }
  WordOf(fd).fetch_or(BitOf(fd));
}

void Forget(int fd) {
  if (HasBit(fd)) WordOf(fd).fetch_and(~BitOf(fd));
}

void BeforeFork() { forks_begun.fetch_add(1); }

void InParent() { forks_ended.fetch_add(1); }

void InChild() {
  forks.fetch_add(1);
  forks_ended.store(forks_begun.load());
  for (size_t i = 0; i < words.load(); ++i) {
    const uint64_t bits = unforked[i].exchange(0);
    for (size_t bit = 0; bit < kBits; ++bit) {
      if ((bits >> bit & 1) != 0) close(static_cast<int>(i * kBits + bit));
    }
  }
}

void Watch() {
  static const int registered = pthread_atfork(&BeforeFork, &InParent, &InChild);
  (void)registered;
}

}  // namespace

uint32_t ForkCount() {
  Watch();
  return forks.load();
}

int OpenUnforked(const std::function<int()>& open) {
  Watch();
  for (int tries = 0;; ++tries) {
    const uint32_t ended = forks_ended.load();
    const int fd = open();
    if (fd < 0) return fd;
    Note(fd);
    // No fork was under way meanwhile, so that no child has a copy.
    if (forks_begun.load() == ended || tries == kTries) return fd;
    Forget(fd);
    close(fd);
    sched_yield();
  }
}

bool IsUnforked(int fd) { return HasBit(fd) && (WordOf(fd).load() & BitOf(fd)) != 0; }

int CloseUnforked(int fd) {
  struct flock all = {};
  all.l_type = F_UNLCK;
  all.l_whence = SEEK_SET;
  while (fcntl(fd, F_OFD_SETLK, &all) != 0 && errno == EINTR) {
  }
  Forget(fd);
  return close(fd);
}

}  // namespace cachestore
