// Region: what is trusted of a file, sizes, who is in it. region_start_test.cc
// and processes_*_test.cc have those that need processes.
#include "cache/region.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <set>

#include "base/aligned_buffer.h"
#include "base/shared_memory.h"
#include "cache/few_slots.h"
#include "cache/processes_region.h"
#include "fixture.h"
#include "harness.h"

namespace cachestore::test {
namespace {

constexpr uint32_t kSlots = 8;

std::string PathOf(const RegionOptions& options) {
  return options.directory + "/" + Region::FileName(options.fingerprint);
}

// The bytes of a region in which block 1 is dirty.
std::vector<uint8_t> Image(const RegionOptions& options) {
  const auto region = OpenRegion(options);
  if (region == nullptr) return {};
  SlotTable table(*region, 0, kSlots);
  const Claim claim = table.ClaimForDump(IdOf(1));
  EXPECT_TRUE(table.PublishDump(claim.ref, 0, table.epoch()));
  return ReadFile(PathOf(options));
}

void PutFile(const std::string& path, const std::vector<uint8_t>& bytes, mode_t mode = 0600) {
  WriteFile(path, bytes);
  EXPECT_EQ(chmod(path.c_str(), mode), 0);
}

// As another process that has it open.
struct Holder {
  explicit Holder(const std::string& path) : fd(OpenSharedFile(path, /*create=*/false).value()) {
    EXPECT_TRUE(TryLockByte(fd, 16 + 5));
  }
  ~Holder() { CloseSharedFile(fd); }
  const Fd fd;
};

struct Opened {
  explicit Opened(const RegionOptions& options)
      : result(Region::Open(options, {[this](Region& left) {
                                        ++recovered;
                                        dirty = left.header().dirty_count;
                                      },
                                      [this](Region& region, uint32_t process) {
                                        ++reclaimed;
                                        SlotTable::Reclaim(region, process);
                                      },
                                      [this](Region&) { ++repaired; }})) {}
  int recovered = 0;
  int reclaimed = 0;
  int repaired = 0;
  uint32_t dirty = 0;
  Result<std::unique_ptr<Region>> result;
};

void ExpectText(const Status& status, Code code, const std::vector<std::string>& texts) {
  EXPECT_EQ(status.code(), code);
  for (const std::string& text : texts) {
    if (status.text().find(text) == std::string::npos) {
      Fail(__FILE__, __LINE__, "\"" + text + "\" isn't in: " + status.text());
    }
  }
}

// A file in its place that is in use, and isn't what it should be: an error that
// names it, and not a byte of it changed.
void ExpectRefused(const RegionOptions& options, const std::vector<uint8_t>& bytes,
                   const std::string& text) {
  const std::string path = PathOf(options);
  PutFile(path, bytes);
  const Holder holder(path);
  const Opened opened(options);
  ExpectText(opened.result.status(), CS_INVALID, {path, text});
  EXPECT_EQ(opened.recovered + opened.reclaimed + opened.repaired, 0);
  EXPECT_TRUE(ReadFile(path) == bytes);
}

// The same, in use by nobody: made anew, and what was there isn't looked into.
void ExpectReplaced(const RegionOptions& options, const std::vector<uint8_t>& bytes) {
  PutFile(PathOf(options), bytes);
  const Opened opened(options);
  ASSERT_OK(opened.result);
  EXPECT_TRUE(opened.result.value()->created());
  EXPECT_EQ(opened.recovered, 0);
  EXPECT_EQ(Inconsistency(*opened.result.value()), "");
}

struct Field {
  const char* name;
  size_t offset;
  const char* text;  // of the error
};
const Field kFields[] = {
    {"magic", offsetof(RegionHeader, magic), "another format"},
    {"version", offsetof(RegionHeader, version), "another format"},
    {"header_size", offsetof(RegionHeader, header_size), "another format"},
    {"fingerprint", offsetof(RegionHeader, fingerprint) + 31, "another identity"},
    {"slot_count", offsetof(RegionHeader, slot_count), "sizes"},
    {"slot_size", offsetof(RegionHeader, slot_size), "page size"},
    {"payload", offsetof(RegionHeader, payload), "page size"},
    {"bucket_count", offsetof(RegionHeader, bucket_count), "sizes"},
    {"slots_offset", offsetof(RegionHeader, slots_offset), "sizes"},
    {"buckets_offset", offsetof(RegionHeader, buckets_offset), "sizes"},
    {"data_offset", offsetof(RegionHeader, data_offset), "sizes"},
    {"total_size", offsetof(RegionHeader, total_size), "sizes"},
    {"complete", offsetof(RegionHeader, complete), "never completed"},
};

}  // namespace

TEST(Region, EveryFieldOfTheHeaderIsChecked) {
  const TempDir root;
  const RegionOptions options = FewSlots(kSlots, root.path());
  const std::vector<uint8_t> image = Image(options);
  ASSERT_EQ(image.size(), RegionBytes(kSlots, kSlotSize));
  for (const Field& field : kFields) {
    std::vector<uint8_t> bytes = image;
    bytes[field.offset] ^= 1;
    ExpectRefused(options, bytes, field.text);
    ExpectReplaced(options, bytes);
    std::memset(&bytes[field.offset], 0xFF, 4);
    ExpectRefused(options, bytes, field.text);
    if (std::string_view(field.name) == "magic") continue;
    std::memset(&bytes[field.offset], 0, 4);
    bytes[field.offset + 1] = 0x7F;
    ExpectRefused(options, bytes, field.text);
  }
}

TEST(Region, TheFilesSizeIsChecked) {
  const TempDir root;
  const RegionOptions options = FewSlots(kSlots, root.path());
  const std::vector<uint8_t> image = Image(options);
  for (const size_t size : {size_t{1}, size_t{100}, sizeof(RegionHeader)}) {
    std::vector<uint8_t> bytes(image.begin(), image.begin() + static_cast<ptrdiff_t>(size));
    ExpectRefused(options, bytes, "too short");
    ExpectReplaced(options, bytes);
  }
  constexpr auto kData = static_cast<ptrdiff_t>(kSlots * kSlotSize);
  for (const ptrdiff_t change : std::initializer_list<ptrdiff_t>{-1, -4096, -kData, 1, 4096}) {
    std::vector<uint8_t> bytes = image;
    bytes.resize(static_cast<size_t>(static_cast<ptrdiff_t>(image.size()) + change));
    ExpectRefused(options, bytes, "sizes");
    ExpectReplaced(options, bytes);
  }
  ExpectRefused(options, std::vector<uint8_t>(image.size(), 0), "another format");
  ExpectReplaced(options, std::vector<uint8_t>(image.size(), 0));
  // Whoever was to make it died before it came to that.
  ExpectReplaced(options, {});
}

TEST(Region, WhoeverWantsAnotherGeometryIsRefused) {
  const TempDir root;
  const auto held = OpenRegion(FewSlots(kSlots, root.path()));
  ASSERT_TRUE(held != nullptr);
  RegionOptions options = FewSlots(kSlots, root.path());
  options.payload -= 1;
  ExpectText(Opened(options).result.status(), CS_INVALID, {PathOf(options), "page size"});
  options = FewSlots(kSlots, root.path());
  options.slot_size += 4096;
  ExpectText(Opened(options).result.status(), CS_INVALID, {PathOf(options), "page size"});
  // The file's name has half of the fingerprint only.
  options = FewSlots(kSlots, root.path());
  options.fingerprint[31] ^= 1;
  ExpectText(Opened(options).result.status(), CS_INVALID, {PathOf(options), "another identity"});
  // But an attach takes the size that is there.
  const Opened other(FewSlots(2 * kSlots, root.path()));
  ASSERT_OK(other.result);
  EXPECT_EQ(other.result.value()->slot_count(), kSlots);
  EXPECT_FALSE(other.result.value()->created());
}

TEST(Region, WhatNobodyHoldsIsRecoveredAndMadeAnew) {
  const TempDir root;
  const RegionOptions options = FewSlots(kSlots, root.path());
  PutFile(PathOf(options), Image(options));
  const Opened opened(options);
  ASSERT_OK(opened.result);
  EXPECT_EQ(opened.recovered, 1);
  EXPECT_EQ(opened.dirty, 1u);
  EXPECT_TRUE(opened.result.value()->created());
  EXPECT_EQ(opened.result.value()->header().dirty_count, 0u);
  EXPECT_EQ(opened.result.value()->header().free.count, kSlots);
}

// Mode, kind and number of names: region_start_test.cc.
TEST(Region, AnotherUsersFileIsNotTrusted) {
  if (geteuid() != 0) SKIP("only root can give a file to another user");
  const TempDir root;
  const RegionOptions options = FewSlots(kSlots, root.path());
  const std::string path = PathOf(options);
  const std::vector<uint8_t> image = Image(options);
  PutFile(path, image);
  ASSERT_EQ(chown(path.c_str(), 12345, static_cast<gid_t>(-1)), 0);
  const Opened opened(options);
  ExpectText(opened.result.status(), CS_IO, {path, "this user"});
  EXPECT_EQ(opened.recovered, 0);
  EXPECT_TRUE(ReadFile(path) == image);
  EXPECT_EQ(Region::RemoveAbandoned(root.path(), ""), 0);
}

TEST(Region, TooSmallForASlot) {
  const TempDir root;
  for (const bool shared : {false, true}) {
    for (const uint64_t capacity :
         {uint64_t{0}, uint64_t{1}, kSlotSize, RegionBytes(1, kSlotSize) - 1}) {
      RegionOptions options = FewSlots(1, shared ? root.path() : "");
      options.size_for = [=](bool) { return capacity; };
      ExpectText(Opened(options).result.status(), CS_NO_MEMORY,
                 {std::to_string(capacity), std::to_string(kSlotSize)});
      if (shared) EXPECT_FALSE(std::filesystem::exists(PathOf(options)));
    }
    EXPECT_OK(Opened(FewSlots(1, shared ? root.path() : "")).result);
  }
}

TEST(Region, ASizeThatCantBeHadLeavesNothing) {
  const TempDir root;
  RegionOptions options = FewSlots(1, root.path());
  options.size_for = [](bool) { return Status(CS_NO_MEMORY, "as the test wants it"); };
  ExpectText(Opened(options).result.status(), CS_NO_MEMORY, {"as the test wants it"});
  EXPECT_FALSE(std::filesystem::exists(PathOf(options)));
  options.size_for = [](bool) { return uint64_t{1} << 56; };
  EXPECT_FALSE(Opened(options).result.ok());
  EXPECT_FALSE(std::filesystem::exists(PathOf(options)));
}

TEST(Region, PrivateOnesNeedNoDirectory) {
  RegionOptions options = FewSlots(kSlots);
  options.directory = "/nowhere at all";
  const size_t descriptors = DescriptorCount();
  const Opened one(options);
  const Opened two(options);
  ASSERT_OK(one.result);
  ASSERT_OK(two.result);
  EXPECT_EQ(DescriptorCount(), descriptors);
  EXPECT_FALSE(one.result.value()->shared());
  EXPECT_TRUE(one.result.value()->created());
  EXPECT_NE(one.result.value()->bytes(0), two.result.value()->bytes(0));
  EXPECT_FALSE(Opened([&] {
                 options.shared = true;
                 return options;
               }())
                   .result.ok());
}

// Same bytes for all, at any address; aligned slots that don't overlap.
TEST(Region, SlotsAreSharedAndAligned) {
  const TempDir root;
  const auto one = OpenRegion(FewSlots(kSlots, root.path()));
  const auto two = OpenRegion(FewSlots(kSlots, root.path()));
  ASSERT_TRUE(one != nullptr && two != nullptr);
  EXPECT_TRUE(one->created() && !two->created());
  EXPECT_EQ(one->size(), RegionBytes(kSlots, kSlotSize));
  for (uint32_t s = 0; s < kSlots; ++s) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(one->bytes(s)) % 4096, 0u);
    std::memset(one->bytes(s), static_cast<int>(s + 1), kSlotSize);
  }
  for (uint32_t s = 0; s < kSlots; ++s) {
    for (uint64_t i = 0; i < kSlotSize; ++i) ASSERT_EQ(two->bytes(s)[i], s + 1);
  }
  EXPECT_EQ(Inconsistency(*two), "");
  struct stat st;
  ASSERT_EQ(stat(PathOf(FewSlots(kSlots, root.path())).c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 07777, 0600u);
  EXPECT_GE(static_cast<uint64_t>(st.st_blocks) * 512, one->size());  // all of it is reserved
}

// The last one to leave removes it.
TEST(Region, ProcessesComeAndGo) {
  const TempDir root;
  const RegionOptions options = FewSlots(kSlots, root.path());
  const size_t descriptors = DescriptorCount();
  std::vector<std::unique_ptr<Region>> regions;
  std::set<uint32_t> numbers;
  for (uint32_t p = 0; p < kMaxProcesses; ++p) {
    regions.push_back(OpenRegion(options));
    ASSERT_TRUE(regions.back() != nullptr);
    numbers.insert(regions.back()->self());
  }
  EXPECT_EQ(numbers.size(), kMaxProcesses);
  ExpectText(Opened(options).result.status(), CS_REFUSED, {PathOf(options), "64 processes"});
  for (uint32_t p = 0; p < kMaxProcesses; ++p) EXPECT_TRUE(regions[0]->IsAlive(p));
  const uint32_t left = regions[17]->self();
  regions.erase(regions.begin() + 17);
  EXPECT_FALSE(regions[0]->IsAlive(left));
  regions.push_back(OpenRegion(options));
  ASSERT_TRUE(regions.back() != nullptr);
  EXPECT_EQ(regions.back()->self(), left);
  while (regions.size() > 1) {
    regions.pop_back();
    EXPECT_TRUE(std::filesystem::exists(PathOf(options)));
  }
  regions.clear();
  EXPECT_FALSE(std::filesystem::exists(PathOf(options)));
  EXPECT_EQ(DescriptorCount(), descriptors);
}

}  // namespace cachestore::test
