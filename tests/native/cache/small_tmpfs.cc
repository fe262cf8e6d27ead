#include "cache/small_tmpfs.h"

#include <string.h>
#include <sys/mount.h>

#include <cerrno>
#include <vector>

#include "cache/processes.h"
#include "harness.h"

namespace cachestore::test {

SmallTmpfs::SmallTmpfs(const std::string& path, const std::string& options) : path_(path) {
  if (mount("cachestore-test", path.c_str(), "tmpfs", MS_NOSUID | MS_NODEV, options.c_str()) != 0) {
    reason_ = std::string("mounting a tmpfs: ") + strerror(errno);
  }
}

SmallTmpfs::~SmallTmpfs() {
  if (reason_.empty()) umount2(path_.c_str(), MNT_DETACH);
}

ROLE(MayMount) {
  const TempDir directory;
  return SmallTmpfs(directory.path(), "size=1m").reason().empty() ? 0 : 3;
}

void RunIsolated(const std::string& role) {
  // As root; else with a user namespace, where those are permitted.
  for (const char* option : {"-m", "-rm"}) {
    const std::vector<std::string> unshare = {"unshare", option};
    if (Process("MayMount", {}, unshare).Finish() != 0) continue;
    Process process(role, {}, unshare);
    EXPECT_EQ(process.WaitEnded(std::chrono::seconds(50)), 0);
    return;
  }
  SKIP("neither unshare -m nor unshare -rm may mount a tmpfs here");
}

}  // namespace cachestore::test
