#include "cache/small_tmpfs.h"

#include <string.h>
#include <sys/mount.h>

#include <cerrno>
#include <fstream>
#include <vector>

#include "cache/processes.h"

namespace cachestore::test {

SmallTmpfs::SmallTmpfs(const std::string& path, const std::string& options) : path_(path) {
  if (mount("cachestore-test", path.c_str(), "tmpfs", MS_NOSUID | MS_NODEV, options.c_str()) != 0) {
    reason_ = std::string("mounting a tmpfs: ") + strerror(errno);
  }
}

SmallTmpfs::~SmallTmpfs() {
  if (reason_.empty()) umount2(path_.c_str(), MNT_DETACH);
}

FakeMemory::FakeMemory(uint64_t kilobytes) {
  const std::string path = directory_.path() + "/meminfo";
  std::ofstream(path) << "MemTotal: " << kilobytes << " kB\nMemAvailable: " << kilobytes << " kB\n";
  if (mount(path.c_str(), "/proc/meminfo", nullptr, MS_BIND, nullptr) != 0) {
    reason_ = std::string("mounting over /proc/meminfo: ") + strerror(errno);
  }
}

FakeMemory::~FakeMemory() {
  if (reason_.empty()) umount2("/proc/meminfo", MNT_DETACH);
}

ROLE(MayMount) {
  const TempDir directory;
  const SmallTmpfs tmpfs(directory.path(), "size=1m");
  const FakeMemory memory(1);
  return tmpfs.reason().empty() && memory.reason().empty() ? 0 : 3;
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
  SKIP("neither unshare -m nor unshare -rm may mount what is needed here");
}

}  // namespace cachestore::test
