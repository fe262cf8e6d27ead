// A tmpfs of a small size, and a small memory, in a mount namespace of the test's own (unshare -m).
#ifndef CACHESTORE_TESTS_CACHE_SMALL_TMPFS_H_
#define CACHESTORE_TESTS_CACHE_SMALL_TMPFS_H_

#include <cstdint>
#include <string>

#include "harness.h"

namespace cachestore::test {

// Mounts it, in a process that RunIsolated started.
class SmallTmpfs {
 public:
  SmallTmpfs(const std::string& path, const std::string& options);
  ~SmallTmpfs();
  SmallTmpfs(const SmallTmpfs&) = delete;
  SmallTmpfs& operator=(const SmallTmpfs&) = delete;

  const std::string& reason() const { return reason_; }  // "" if it is there

 private:
  const std::string path_;
  std::string reason_;
};

// Makes the kernel say that so little memory is available, likewise.
class FakeMemory {
 public:
  explicit FakeMemory(uint64_t kilobytes);
  ~FakeMemory();
  FakeMemory(const FakeMemory&) = delete;
  FakeMemory& operator=(const FakeMemory&) = delete;

  const std::string& reason() const { return reason_; }  // "" if it does

 private:
  const TempDir directory_;
  std::string reason_;
};

// Runs a role, which is a test of its own, in a mount namespace: the whole of
// it if that is permitted, else the test is skipped.
void RunIsolated(const std::string& role);

}  // namespace cachestore::test

#endif  // CACHESTORE_TESTS_CACHE_SMALL_TMPFS_H_
