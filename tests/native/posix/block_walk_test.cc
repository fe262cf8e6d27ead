// Passes over a simulated storage root of any number of files: what they cost,
// what they remember, and that the oldest are found.
#include "posix/block_walk.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "harness.h"
#include "posix/block_path.h"

namespace cachestore::test {
namespace {

// One identity, `files` blocks, spread over all its directories; the block of
// number n was used at Time(n). Answers from arithmetic alone.
class SimulatedRoot : public Env {
 public:
  explicit SimulatedRoot(uint64_t files) : files_(files) {}

  static BlockId IdOf(uint64_t n) {
    BlockId id{};
    id[0] = static_cast<uint8_t>(n >> 4);
    id[1] = static_cast<uint8_t>(n << 4);
    for (size_t i = 0; i < 8; ++i) id[2 + i] = static_cast<uint8_t>(n >> (8 * i));
    return id;
  }
  static uint64_t NumberOf(const BlockId& id) {
    uint64_t n = 0;
    for (size_t i = 0; i < 8; ++i) n |= uint64_t{id[2 + i]} << (8 * i);
    return n;
  }
  // A permutation of 1..2^32: no order that the walk could profit from.
  static uint64_t Time(uint64_t n) { return (n * 2654435761u) % (uint64_t{1} << 32) + 1; }

  Result<std::vector<std::string>> List(const std::string& path) override {
    ++calls;
    if (path == "/root/.") return std::vector<std::string>{"identity"};
    std::vector<std::string> names;
    if (path == "/root/identity/blocks") {
      for (uint16_t i = 0; i < 4096; ++i) names.push_back(FanOutName(i));
      return names;
    }
    const auto number = FanOutOfName(path.substr(path.find_last_of('/') + 1));
    if (!number.has_value()) return Status(CS_NOT_FOUND, path);
    for (uint64_t n = *number; n < files_; n += 4096) names.push_back(HexOf(IdOf(n)));
    return names;
  }
  Result<FileInfo> Stat(const std::string& path) override {
    ++calls;
    FileInfo info;
    const auto block = BlockOfHex(path.substr(path.find_last_of('/') + 1));
    if (!block.has_value()) {
      info.is_directory = true;
      info.modified_ns = 1;
      return info;
    }
    info.is_regular = true;
    info.size = 8192;
    info.modified_ns = Time(NumberOf(*block));
    return info;
  }
  uint64_t Now() override { return uint64_t{1} << 60; }

  // Not called by a walk.
  Result<Fd> OpenRead(const std::string&, bool) override { return None(); }
  Result<Fd> OpenWrite(const std::string&, bool) override { return None(); }
  Result<Fd> OpenLocked(const std::string&, bool) override { return None(); }
  Result<Fd> OpenDirectory(const std::string&) override { return None(); }
  Status Close(Fd) override { return None(); }
  Result<uint64_t> ReadFull(Fd, std::span<iovec>, uint64_t) override { return None(); }
  Status WriteFull(Fd, std::span<iovec>, uint64_t) override { return None(); }
  Result<FileInfo> StatFd(Fd) override { return None(); }
  Status SetModified(const std::string&, uint64_t) override { return None(); }
  Status Rename(const std::string&, const std::string&) override { return None(); }
  Status RenameNew(const std::string&, Fd, const std::string&) override { return None(); }
  Status Unlink(const std::string&) override { return None(); }
  Status MakeDirectory(const std::string&) override { return None(); }
  Status RemoveDirectory(const std::string&) override { return None(); }
  Status SyncDirectory(const std::string&) override { return None(); }
  Result<uint64_t> FilesystemType(const std::string&) override { return None(); }
  Result<SpaceInfo> Space(const std::string&) override { return None(); }
  std::string UniqueName() override { return "0"; }

  uint64_t calls = 0;

 private:
  static Status None() { return {CS_INTERNAL, "a walk doesn't do this"}; }
  const uint64_t files_;
};

// Ten million in `make soak`, without a sanitizer's slowness for so many.
uint64_t Files() {
  const char* const set = std::getenv("CACHESTORE_WALK_FILES");
  return set == nullptr ? 100000 : std::strtoull(set, nullptr, 10);
}

size_t ResidentKiB() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word != "VmRSS:") continue;
    size_t kib = 0;
    status >> kib;
    return kib;
  }
  return 0;
}

TEST(BlockWalk, CostsAndRemembersABoundedPiece) {
  constexpr size_t kStep = 5000;
  constexpr size_t kOldest = 65536;
  const uint64_t files = Files();
  SimulatedRoot env(files);
  BlockWalk walk(env, "/root");
  Oldest oldest(kOldest);
  const size_t before = ResidentKiB();
  walk.Start(/*whole=*/true, &oldest);
  uint64_t most_calls = 0;
  size_t steps = 0;
  for (bool ended = false; !ended; ++steps) {
    const uint64_t calls = env.calls;
    ended = walk.Step(kStep);
    most_calls = std::max(most_calls, env.calls - calls);
  }
  const size_t grown = ResidentKiB() - std::min(before, ResidentKiB());
  std::printf("%llu files: %zu steps, at most %llu calls each, %zu KiB more memory\n",
              static_cast<unsigned long long>(files), steps,
              static_cast<unsigned long long>(most_calls), grown);
  EXPECT_OK(walk.status());
  EXPECT_EQ(walk.files(), files);
  EXPECT_EQ(walk.bytes(), files * 8192);
  EXPECT_TRUE(most_calls <= kStep + 2);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_TRUE(grown < 16 * 1024);
#endif

  // The oldest, in order, and all of them.
  std::vector<OldFile> found = oldest.Take();
  EXPECT_EQ(found.size(), std::min<uint64_t>(files, kOldest));
  std::vector<uint64_t> times;
  for (uint64_t n = 0; n < files; ++n) times.push_back(SimulatedRoot::Time(n));
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(found.size() - 1),
                   times.end());
  EXPECT_EQ(found.front().used_ns, times[found.size() - 1]);
  EXPECT_TRUE(std::is_sorted(found.rbegin(), found.rend()));

  // Nothing has changed: directories are looked at, files aren't.
  walk.Start(/*whole=*/false, nullptr);
  const uint64_t calls = env.calls;
  while (!walk.Step(kStep)) {
  }
  EXPECT_TRUE(env.calls - calls < 4096 + 10);
  EXPECT_EQ(walk.files(), files);

  // What is evicted is no longer there.
  walk.NoteEvicted(found.back());
  EXPECT_EQ(walk.files(), files - 1);
}

}  // namespace
}  // namespace cachestore::test
