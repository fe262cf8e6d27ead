// F12, F21: little shared memory. What doesn't fit is said at the start, with
// the sizes; what was given is there for good, whatever others take later.
#include <fcntl.h>
#include <unistd.h>

#include <memory>
#include <vector>

#include "base/shared_memory.h"
#include "cache/processes_store.h"
#include "cache/small_tmpfs.h"

namespace cachestore::test {
namespace {

bool Has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Takes all that is left of a filesystem, in a file of its own.
void FillUp(const std::string& directory, uint64_t but = 0) {
  const int fd = open((directory + "/others").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_GE(fd, 0);
  const Result<uint64_t> free = FreeBytes(directory);
  EXPECT_OK(free);
  if (free.ok() && free.value() > but) {
    EXPECT_EQ(posix_fallocate(fd, 0, static_cast<off_t>(free.value() - but)), 0);
  }
  close(fd);
}

// A place on a tmpfs of 64 MiB, or so.
struct SmallPlace : Place {
  explicit SmallPlace(const std::string& size = "64m") : tmpfs(shared.path(), "size=" + size) {
    EXPECT_EQ(tmpfs.reason(), "");
  }
  SmallTmpfs tmpfs;
};

// Every slot is written and read.
void ExpectAllSlotsWork(Place& place, StoreProcess& process) {
  const uint64_t slots = process.Stats().cache_slots;
  EXPECT_GT(slots, 100u);
  place.Fill(0, slots);
  EXPECT_EQ(process.Load(0, slots).right, slots);
  EXPECT_EQ(place.watch.reads(), slots);
  EXPECT_EQ(process.Load(0, slots).right, slots);
  EXPECT_EQ(place.watch.reads(), slots);
  EXPECT_EQ(process.Stats().cache_direct, 0u);
}

ROLE(TooLarge) {
  SmallPlace place;
  place.setup.buffer_capacity = 1 << 30;
  StoreProcess process(place.setup, place.watch, /*open=*/false);
  const std::string error = process.Open();
  for (const char* part : {"cache_buffer_capacity_gb", "1024 MiB", "64 MiB", "--shm-size="}) {
    EXPECT_TRUE(Has(error, part));
  }
  EXPECT_TRUE(place.IsClean());
  return 0;
}

ROLE(Automatic) {
  SmallPlace place;
  place.setup.buffer_capacity = 0;
  place.setup.tensor_sizes = {100000, 300};
  const StoreProcesses processes = place.Start(2);
  EXPECT_TRUE(Has(processes[0]->Events(), "cache buffer: shared"));
  EXPECT_GE(processes[0]->Stats().cache_slots, 128u);
  EXPECT_EQ(processes[0]->Dump(0, 4), 4u);
  EXPECT_EQ(processes[1]->Load(0, 4).right, 4u);
  EXPECT_EQ(processes[1]->Stats().cache_hit, 4u);
  return 0;
}

// Nothing is left for an automatic size: a buffer of the process's own, and a
// warning.
ROLE(AutomaticButFull) {
  SmallPlace place;
  const FakeMemory memory(256 << 10);  // of which a private buffer takes a part
  EXPECT_EQ(memory.reason(), "");
  place.setup.buffer_capacity = 0;
  FillUp(place.shared.path());
  StoreProcess process(place.setup, place.watch);
  const std::string events = process.Events();
  EXPECT_TRUE(Has(events, "no shared cache buffer"));
  EXPECT_TRUE(Has(events, "cache buffer: private"));
  EXPECT_EQ(process.Dump(0, 10), 10u);
  EXPECT_EQ(process.Load(0, 10).right, 10u);
  EXPECT_EQ(FilesBelow(place.shared.path()).size(), 1u);  // the others'
  return 0;
}

// A tmpfs promises more than there is: what the kernel or the container can't
// give is no room either.
ROLE(LittleMemory) {
  SmallPlace place;
  const FakeMemory memory(16 << 10);
  EXPECT_EQ(memory.reason(), "");
  place.setup.buffer_capacity = 32 << 20;
  StoreProcess process(place.setup, place.watch, /*open=*/false);
  const std::string error = process.Open();
  for (const char* part : {"cache_buffer_capacity_gb", "32 MiB", "16 MiB"}) {
    EXPECT_TRUE(Has(error, part));
  }
  EXPECT_TRUE(place.IsClean());
  return 0;
}

// Others take the room between the look and the reservation.
ROLE(FilledInBetween) {
  SmallPlace place;
  RegionOptions options = RegionOptionsOf(place.setup);
  options.size_for = [&](bool) -> Result<uint64_t> {
    FillUp(place.shared.path(), 8 << 20);
    return uint64_t{32} << 20;
  };
  const auto opened = Region::Open(options, {});
  EXPECT_FALSE(opened.ok());
  EXPECT_EQ(opened.status().code(), CS_NO_SPACE);
  EXPECT_EQ(FilesBelow(place.shared.path()).size(), 1u);
  EXPECT_OK(FreeBytes(place.shared.path()));
  EXPECT_EQ(FreeBytes(place.shared.path()).value(), uint64_t{8} << 20);
  return 0;
}

// Afterwards no write into a slot can fail: SIGBUS would end the process.
ROLE(FilledLater) {
  SmallPlace place("16m");
  place.setup.tensor_sizes = {60000, 300};
  place.setup.buffer_capacity = 10 << 20;
  const StoreProcesses processes = place.Start(2);
  FillUp(place.shared.path());
  EXPECT_EQ(FreeBytes(place.shared.path()).value(), 0u);
  ExpectAllSlotsWork(place, *processes[0]);
  EXPECT_EQ(processes[1]->Load(0, 4).right, 4u);
  return 0;
}

}  // namespace

TEST(Space, TooLargeIsAnErrorWithSizes) { RunIsolated("TooLarge"); }
TEST(Space, AutomaticFits) { RunIsolated("Automatic"); }
TEST(Space, AutomaticGoesPrivateWhenFull) { RunIsolated("AutomaticButFull"); }
TEST(Space, MoreThanThereIsMemory) { RunIsolated("LittleMemory"); }
TEST(Space, RoomTakenBeforeItIsReserved) { RunIsolated("FilledInBetween"); }
TEST(Space, AllIsReservedAtTheStart) { RunIsolated("FilledLater"); }

// F21: a buffer of the process's own needs no directory at all.
TEST(Space, PrivateNeedsNoDirectory) {
  Place place;
  place.setup.share_buffer = false;
  place.setup.buffer_directory = "/nowhere/at/all";
  const StoreProcesses processes = place.Start(2);
  EXPECT_EQ(processes[0]->Dump(0, 10), 10u);
  EXPECT_EQ(processes[0]->Load(0, 10).right, 10u);
  EXPECT_EQ(processes[0]->Stats().cache_hit, 10u);
  processes[0]->Close();
  EXPECT_EQ(processes[1]->Load(0, 10).right, 10u);
  EXPECT_EQ(processes[1]->Stats().cache_hit, 0u);  // not shared
}

// A shared one of a size that was asked for does.
TEST(Space, SharedNeedsItsDirectory) {
  Place place;
  place.setup.buffer_directory = "/nowhere/at/all";
  StoreProcess process(place.setup, place.watch, /*open=*/false);
  EXPECT_TRUE(Has(process.Open(), "/nowhere/at/all"));
}

}  // namespace cachestore::test
