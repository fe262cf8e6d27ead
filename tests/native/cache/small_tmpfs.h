// A tmpfs of a small size, in a mount namespace of the test's own (unshare -m).
#ifndef CACHESTORE_TESTS_CACHE_SMALL_TMPFS_H_
#define CACHESTORE_TESTS_CACHE_SMALL_TMPFS_H_

#include <string>

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

// Runs a role, which is a test of its own, in a mount namespace: the whole of
// it if that is permitted, else the test is skipped.
void RunIsolated(const std::string& role);

}  // namespace cachestore::test

#endif  // CACHESTORE_TESTS_CACHE_SMALL_TMPFS_H_
