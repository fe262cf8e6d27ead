// F13, F14: regions that come and go. Whatever point of its start a process is
// killed at, the next one starts, also where there is room for one region only;
// what is in use is never removed, what isn't ours is left alone.
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>
#include <vector>

#include "cache/processes_store.h"
#include "cache/small_tmpfs.h"

namespace cachestore::test {
namespace {

// Where this process kills itself; nowhere, mostly.
const char* die_at = "";
// Or stops to be told to go on.
const char* pause_at = "";

void Point(const char* name) {
  if (std::string(die_at) == name) raise(SIGKILL);
  if (std::string(pause_at) == name) {
    TellParent("here");
    (void)HearParent();
  }
}

}  // namespace
}  // namespace cachestore::test

// The library's calls of these come here first.
extern "C" {

int posix_fallocate(int fd, off_t offset, off_t length) {
  cachestore::test::Point("reserve");
  const int error = syscall(SYS_fallocate, fd, 0, offset, length) == 0 ? 0 : errno;
  cachestore::test::Point("reserved");
  return error;
}

int pthread_mutexattr_setrobust(pthread_mutexattr_t* attributes, int robust) noexcept {
  using Function = int (*)(pthread_mutexattr_t*, int);
  static const auto next =
      reinterpret_cast<Function>(dlsym(RTLD_NEXT, "pthread_mutexattr_setrobust"));
  cachestore::test::Point("initialise");
  return next(attributes, robust);
}

int unlink(const char* path) noexcept {
  const bool region = std::string(path).find("cachestore-region-") != std::string::npos;
  if (region) cachestore::test::Point("remove");
  const int result = static_cast<int>(syscall(SYS_unlink, path));
  if (region) cachestore::test::Point("removed");
  return result;
}

}  // extern "C"

namespace cachestore::test {
namespace {

namespace fs = std::filesystem;

// "die" or "pause" at a point, while a store is opened and closed.
ROLE(Starting) {
  (arguments.at(0) == "die" ? die_at : pause_at) = arguments.at(1).c_str();
  const auto store = OpenOrFail(SetupOf(arguments, 2));
  if (store == nullptr) return 1;
  Point("open");
  store->Close();
  return 0;
}

std::unique_ptr<Process> StartingAt(const StoreSetup& setup, const char* what, const char* point) {
  std::vector<std::string> words = WordsOf(setup);
  words.insert(words.begin(), {what, point});
  return std::make_unique<Process>("Starting", words);
}

// Where, as long as it has the region mapped, a process that this runs in has it
// mapped; "(deleted)" is in it if the file is gone.
std::string MappedRegion() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("cachestore-region-") != std::string::npos) return line;
  }
  return "";
}

// Opens and closes a store, many times; the region is in its place whenever it
// is open.
ROLE(Coming) {
  const StoreSetup setup = SetupOf(arguments, 1);
  const int rounds = std::stoi(arguments.at(0));
  for (int i = 0; i < rounds; ++i) {
    const auto store = OpenOrFail(setup);
    if (store == nullptr) return 1;
    const std::string mapped = MappedRegion();
    EXPECT_NE(mapped, "");
    EXPECT_EQ(mapped.find("(deleted)"), std::string::npos);
    Pages pages(setup, static_cast<uint64_t>(i), 1);
    pages.Fill();
    EXPECT_TRUE(DumpAll(*store, pages) == Repeated(1, CS_OK));
    store->Close();
  }
  return 0;
}

constexpr const char* kPoints[] = {"reserve", "reserved", "initialise",
                                   "open",    "remove",   "removed"};

// In a mount namespace, with a tmpfs that has room for one region and a half.
ROLE(KilledStarts) {
  Place place;
  const SmallTmpfs tmpfs(place.shared.path(), "size=12m");
  EXPECT_EQ(tmpfs.reason(), "");
  place.setup.buffer_capacity = 8 << 20;
  for (const char* point : kPoints) {
    for (int round = 0; round < 5; ++round) {
      std::vector<std::unique_ptr<Process>> all;
      for (int p = 0; p < 3; ++p) all.push_back(StartingAt(place.setup, "die", point));
      // One may find that another was faster, and not come to the point.
      for (const auto& process : all) {
        const std::optional<int> status = process->WaitEnded();
        EXPECT_TRUE(status.has_value());
        EXPECT_TRUE(status == -SIGKILL || status == 0);
      }
    }
    const StoreProcesses processes = place.Start(3);
    EXPECT_EQ(processes[0]->Dump(0, 4), 4u);
    EXPECT_EQ(processes[1]->Load(0, 4).right, 4u);
    for (const auto& process : processes) process->Close();
    EXPECT_TRUE(place.IsClean());
  }
  return 0;
}

// As above, and all at once after a crash: none of them may find the room still
// taken.
ROLE(StartsTogether) {
  Place place;
  const SmallTmpfs tmpfs(place.shared.path(), "size=12m");
  EXPECT_EQ(tmpfs.reason(), "");
  place.setup.buffer_capacity = 8 << 20;
  for (int round = 0; round < 5; ++round) {
    {
      const StoreProcesses crashed = place.Start(2);
      for (const auto& process : crashed) process->Kill();
    }
    EXPECT_FALSE(place.IsClean());
    StoreSetup setup = place.setup;
    if (round % 2 == 1) setup.fingerprint = 7;  // those that come are of another identity
    StoreProcesses processes;
    for (int p = 0; p < 8; ++p) {
      processes.push_back(std::make_unique<StoreProcess>(setup, place.watch, /*open=*/false));
    }
    for (const auto& process : processes) process->process().Say("open");
    for (const auto& process : processes) EXPECT_EQ(process->process().Hear(), "open");
    for (const auto& process : processes) process->Close();
    EXPECT_TRUE(place.IsClean());
  }
  return 0;
}

}  // namespace

TEST(Start, KilledAtEveryPointWithRoomForOne) { RunIsolated("KilledStarts"); }

TEST(Start, AllAtOnceAfterACrashWithRoomForOne) { RunIsolated("StartsTogether"); }

// At no point in particular.
TEST(Start, KilledAtAnyTime) {
  Place place;
  place.setup.buffer_capacity = 64 << 20;
  for (int round = 0; round < 25; ++round) {
    StoreProcesses processes;
    for (int p = 0; p < 2; ++p) {
      processes.push_back(std::make_unique<StoreProcess>(place.setup, place.watch, false));
      processes.back()->process().Say("open");
    }
    (void)processes[0]->process().Hear(std::chrono::milliseconds(2 * round));
    for (const auto& process : processes) process->Kill();
  }
  StoreProcess last(place.setup, place.watch);
  EXPECT_EQ(last.Dump(0, 4), 4u);
  last.Close();
  EXPECT_TRUE(place.IsClean());
}

// Those of other identities are removed as well, by whoever starts.
TEST(Start, AbandonedRegionsAreRemoved) {
  Place place;
  StoreProcesses abandoning;
  for (uint8_t fingerprint = 1; fingerprint <= 3; ++fingerprint) {
    StoreSetup setup = place.setup;
    setup.fingerprint = fingerprint;
    abandoning.push_back(std::make_unique<StoreProcess>(setup, place.watch));
  }
  for (const auto& process : abandoning) process->Kill();
  EXPECT_EQ(FilesBelow(place.shared.path()).size(), 3u);
  place.setup.fingerprint = 9;
  StoreProcess process(place.setup, place.watch);
  EXPECT_EQ(FilesBelow(place.shared.path()), std::vector<std::string>{RegionPath(place.setup)});
  EXPECT_NE(process.Events().find("removed 3 shared regions"), std::string::npos);
}

// Neither one that is in use, nor one of a stopped process, nor one that is
// just being made.
TEST(Start, LiveRegionsAreNotRemoved) {
  Place place;
  StoreProcess live(place.setup, place.watch);
  EXPECT_EQ(live.Dump(0, 5), 5u);
  StoreSetup second = place.setup;
  second.fingerprint = 2;
  StoreProcess stopped(second, place.watch);
  stopped.Stop();
  std::vector<StoreSetup> being_made;
  std::vector<std::unique_ptr<Process>> making;
  for (const char* point : {"reserve", "reserved", "initialise"}) {
    being_made.push_back(place.setup);
    being_made.back().fingerprint = static_cast<uint8_t>(10 + making.size());
    making.push_back(StartingAt(being_made.back(), "pause", point));
    EXPECT_EQ(making.back()->Hear(), "here");
  }
  StoreSetup other = place.setup;
  other.fingerprint = 3;
  for (int i = 0; i < 2; ++i) {
    StoreProcess cleaner(other, place.watch);
    cleaner.Close();
  }
  EXPECT_EQ(FilesBelow(place.shared.path()).size(), 5u);
  for (const auto& process : making) {
    process->Say("go on");
    EXPECT_EQ(process->WaitEnded(), 0);
  }
  StoreProcess joined(place.setup, place.watch);
  EXPECT_EQ(joined.Load(0, 5).right, 5u);
  EXPECT_EQ(joined.Stats().cache_hit, 5u);
}

// Processes come and go at the same time: who leaves never takes the region of
// one that comes.
TEST(Start, LateShutdownDoesNotRemoveASiblings) {
  Place place;
  place.setup.buffer_capacity = 1 << 20;
  std::vector<std::string> words = WordsOf(place.setup);
  words.insert(words.begin(), "25");
  std::vector<std::unique_ptr<Process>> processes;
  for (int p = 0; p < 4; ++p) processes.push_back(std::make_unique<Process>("Coming", words));
  for (const auto& process : processes) EXPECT_EQ(process->WaitEnded(), 0);
  EXPECT_TRUE(place.IsClean());
}

// By name, mode, kind, number of names or magic.
TEST(Start, WhatIsNotOursIsLeftAlone) {
  Place place;
  const std::string shared = place.shared.path();
  const std::string name = shared + "/cachestore-region-";
  std::vector<uint8_t> ours(8192, 0);
  {
    StoreProcess process(place.setup, place.watch);
    process.Kill();
    ours = ReadFile(RegionPath(place.setup));
    fs::remove(RegionPath(place.setup));
  }
  const auto make = [](const std::string& path, const std::vector<uint8_t>& bytes, mode_t mode) {
    WriteFile(path, bytes);
    EXPECT_EQ(chmod(path.c_str(), mode), 0);
  };
  std::vector<uint8_t> foreign(8192, 'x');
  make(shared + "/another-name", ours, 0600);
  make(name + "readable", ours, 0644);
  make(name + "foreign", foreign, 0600);
  make(name + "short", {'x', 'y'}, 0600);
  make(name + "twice", ours, 0600);
  fs::create_hard_link(name + "twice", shared + "/the-same");
  make(shared + "/target", ours, 0600);
  fs::create_symlink(shared + "/target", name + "link");
  fs::create_directory(name + "directory");
  const auto names = [&] {
    std::vector<std::string> all;
    for (const auto& entry : fs::directory_iterator(shared)) all.push_back(entry.path());
    std::sort(all.begin(), all.end());
    return all;
  };
  const std::vector<std::string> before = names();
  EXPECT_EQ(before.size(), 9u);
  StoreProcess process(place.setup, place.watch);
  EXPECT_EQ(process.Dump(0, 5), 5u);
  process.Close();
  EXPECT_TRUE(names() == before);
}

// A file in the region's own place that isn't one to trust is an error, and is
// neither followed nor changed.
TEST(Start, UntrustedFileInItsPlace) {
  for (const char* kind : {"readable", "link", "directory", "twice"}) {
    Place place;
    const std::string path = RegionPath(place.setup);
    const std::string target = place.shared.path() + "/target";
    WriteFile(target, {1, 2, 3});
    if (kind == std::string("readable")) {
      WriteFile(path, {});
      EXPECT_EQ(chmod(path.c_str(), 0644), 0);
    } else if (kind == std::string("link")) {
      fs::create_symlink(target, path);
    } else if (kind == std::string("directory")) {
      fs::create_directory(path);
    } else {
      WriteFile(path, {});
      EXPECT_EQ(chmod(path.c_str(), 0600), 0);
      fs::create_hard_link(path, place.shared.path() + "/the-same");
    }
    StoreProcess process(place.setup, place.watch, /*open=*/false);
    EXPECT_NE(process.Open(), "");
    EXPECT_TRUE(fs::exists(fs::symlink_status(path)));
    EXPECT_TRUE(ReadFile(target) == (std::vector<uint8_t>{1, 2, 3}));
  }
}

// What another version made, and still uses, is refused.
TEST(Start, AnotherVersionInUseIsRefused) {
  Place place;
  const auto region = AttachOrFail(place.setup);
  if (region == nullptr) return;
  const auto expect_refused = [&] {
    StoreProcess process(place.setup, place.watch, /*open=*/false);
    EXPECT_NE(process.Open().find("another version"), std::string::npos);
  };
  ++region->header().version;
  expect_refused();
  --region->header().version;
  ++region->header().total_size;
  expect_refused();
  --region->header().total_size;
  region->header().magic[0] = 'X';
  expect_refused();
  region->header().magic[0] = kRegionMagic[0];
  const StoreProcess process(place.setup, place.watch);
}

}  // namespace cachestore::test
