#include "cache/region.h"

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/fork.h"
#include "base/shared_memory.h"

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace cachestore {
namespace {

constexpr uint64_t kAttachByte = 0;
constexpr uint64_t kProcessBytes = 16;  // process p's is this + p
constexpr std::chrono::milliseconds kCleanerPatience{50};
constexpr char kNamePrefix[] = "cachestore-region-";

bool LockWithin(Fd fd, uint64_t byte, std::chrono::milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (!TryLockByte(fd, byte)) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

bool SameFile(Fd fd, const std::string& path) {
  const Result<SharedFileInfo> ours = StatSharedFile(fd);
  const Result<FileInfo> there = Env::Real().Stat(path);
  return ours.ok() && there.ok() && ours.value().device == there.value().device &&
         ours.value().inode == there.value().inode;
}

// A region, or one that its maker didn't come to complete.
bool HasOurMagic(Fd fd) {
  std::array<char, sizeof RegionHeader::magic> start{};
  iovec part{start.data(), start.size()};
  const Result<uint64_t> read = Env::Real().ReadFull(fd, {&part, 1}, 0);
  if (!read.ok()) return false;
  return std::all_of(start.begin(), start.end(), [](char c) { return c == 0; }) ||
         std::memcmp(start.data(), kRegionMagic, start.size()) == 0;
}

uint64_t HeaderBytes(uint64_t slots, uint64_t buckets) {
  return AlignUp(AlignUp(sizeof(RegionHeader)) + sizeof(ProcessEntry) * kMaxProcesses +
                 sizeof(SlotEntry) * slots + sizeof(uint32_t) * buckets);
}

uint64_t BucketsFor(uint64_t slots) { return std::bit_ceil(std::max<uint64_t>(2 * slots, 8)); }

Status Wrong(const std::string& path, const char* what) {
  return {CS_INVALID, "the shared region " + path + " " + what +
                          ": another version of this software made it; stop the processes that "
                          "use it, then remove the file"};
}

}  // namespace

std::string Region::FileName(const std::array<uint8_t, 32>& fingerprint) {
  static constexpr char kDigits[] = "0123456789abcdef";
  // Every user has a region of his own.
  std::string name = kNamePrefix + std::to_string(UserId()) + "-";
  for (size_t i = 0; i < 16; ++i) {
    name += kDigits[fingerprint[i] >> 4];
    name += kDigits[fingerprint[i] & 15];
  }
  return name;
}

Result<std::unique_ptr<Region>> Region::Open(const RegionOptions& options, Callbacks callbacks) {
  return options.shared ? OpenShared(options, callbacks)
                        : OpenPrivate(options, std::move(callbacks));
}

Result<std::unique_ptr<Region>> Region::OpenPrivate(const RegionOptions& options,
                                                    Callbacks callbacks) {
  std::unique_ptr<Region> region(new Region(std::move(callbacks)));
  if (Status created = Create(*region, options); !created.ok()) return created;
  if (Status joined = region->JoinProcesses(options.workers); !joined.ok()) return joined;
  return region;
}

Result<std::unique_ptr<Region>> Region::OpenShared(const RegionOptions& options,
                                                   const Callbacks& callbacks) {
  const std::string path = options.directory + "/" + FileName(options.fingerprint);
  for (int tries = 0; tries < 100; ++tries) {
    std::unique_ptr<Region> region(new Region(callbacks));
    region->path_ = path;
    Result<Fd> opened = OpenSharedFile(path, /*create=*/true);
    if (!opened.ok()) return opened.status();
    region->fd_ = opened.value();
    const Result<SharedFileInfo> info = StatSharedFile(region->fd_);
    if (!info.ok()) return info.status();
    if (!info.value().is_ours && SameFile(region->fd_, path)) {
      return Status(CS_IO, "the shared region " + path +
                               " isn't a plain file of this user with mode 0600: not used");
    }
    if (!LockWithin(region->fd_, kAttachByte, kAttachPatience)) {
      return Status(CS_TIMEOUT,
                    "the shared region " + path + " is being opened by another process");
    }
    if (!SameFile(region->fd_, path)) continue;  // it was replaced while we waited
    const Result<SharedFileInfo> now = StatSharedFile(region->fd_);
    if (!now.ok()) return now.status();
    Status done;
    if (IsLockedByOthers(region->fd_, kProcessBytes, kMaxProcesses)) {
      done = Attach(*region, options);
    } else if (now.value().size == 0) {
      done = Create(*region, options);
      if (!done.ok()) (void)RemoveSharedFile(region->fd_, path);
    } else {
      // Left by processes that are all gone.
      if (Attach(*region, options).ok()) callbacks.recover(*region);
      (void)RemoveSharedFile(region->fd_, path);
      continue;
    }
    if (done.ok()) done = region->JoinProcesses(options.workers);
    if (!done.ok()) return done;
    UnlockByte(region->fd_, kAttachByte);
    return region;
  }
  return Status(CS_IO, "the shared region " + path + " is replaced again and again");
}

Status Region::Create(Region& region, const RegionOptions& options) {
  const Result<uint64_t> capacity = options.size_for(region.fd_ >= 0);
  if (!capacity.ok()) return capacity.status();
  uint64_t slots = std::min<uint64_t>(capacity.value() / options.slot_size, kNone - 1);
  while (slots > 0 &&
         HeaderBytes(slots, BucketsFor(slots)) + slots * options.slot_size > capacity.value()) {
    --slots;
  }
  if (slots == 0) {
    return {CS_NO_MEMORY, "a cache buffer of " + std::to_string(capacity.value()) +
                              " bytes holds no page of " + std::to_string(options.slot_size)};
  }
  const uint64_t buckets = BucketsFor(slots);
  const uint64_t header = HeaderBytes(slots, buckets);
  const uint64_t total = header + slots * options.slot_size;
  if (region.fd_ >= 0) {
    if (Status reserved = ReserveSharedFile(region.fd_, total); !reserved.ok()) return reserved;
  }
  if (Status mapped = region.MapWhole(total); !mapped.ok()) return mapped;
  region.created_ = true;
  region.slot_count_ = static_cast<uint32_t>(slots);
  region.Initialise(options, slots);
  return Status::Ok();
}

void Region::Initialise(const RegionOptions& options, uint64_t slots) {
  RegionHeader& h = *new (memory_) RegionHeader{};
  std::memcpy(h.magic, kRegionMagic, sizeof h.magic);
  h.version = kRegionVersion;
  h.header_size = sizeof(RegionHeader);
  h.fingerprint = options.fingerprint;
  h.slot_count = slots;
  h.slot_size = options.slot_size;
  h.payload = options.payload;
  h.bucket_count = BucketsFor(slots);
  h.slots_offset = AlignUp(sizeof(RegionHeader)) + sizeof(ProcessEntry) * kMaxProcesses;
  h.buckets_offset = h.slots_offset + sizeof(SlotEntry) * slots;
  h.data_offset = HeaderBytes(slots, h.bucket_count);
  h.total_size = size_;
  h.latest_clear = options.latest_clear;
  h.free = h.used = {kNone, kNone, 0};
  for (uint32_t p = 0; p < kMaxProcesses; ++p) {
    ProcessEntry& entry = *new (&process(p)) ProcessEntry{};
    for (std::atomic<uint32_t>& cell : entry.pinned) cell.store(kNone);
  }
  for (uint64_t b = 0; b < h.bucket_count; ++b) bucket(b) = kNone;
  for (uint32_t s = 0; s < slots; ++s) {
    SlotEntry& entry = *new (&slot(s)) SlotEntry{};
    entry.hash_next = entry.parent = kNone;
    entry.list_previous = s == 0 ? kNone : s - 1;
    entry.list_next = s + 1 == slots ? kNone : s + 1;
  }
  h.free = {0, static_cast<uint32_t>(slots - 1), static_cast<uint32_t>(slots)};
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&h.mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  h.complete.store(1, std::memory_order_release);
}

// Checks everything before anything in it is used.
Status Region::Attach(Region& region, const RegionOptions& options) {
  const Result<SharedFileInfo> info = StatSharedFile(region.fd_);
  if (!info.ok()) return info.status();
  if (info.value().size < AlignUp(sizeof(RegionHeader))) return Wrong(region.path_, "is too short");
  if (Status mapped = region.MapWhole(info.value().size); !mapped.ok()) return mapped;
  const RegionHeader& h = region.header();
  if (std::memcmp(h.magic, kRegionMagic, sizeof h.magic) != 0 || h.version != kRegionVersion ||
      h.header_size != sizeof(RegionHeader)) {
    return Wrong(region.path_, "has another format");
  }
  if (h.complete.load(std::memory_order_acquire) != 1) {
    return Wrong(region.path_, "was never completed");
  }
  if (h.fingerprint != options.fingerprint || h.payload != options.payload ||
      h.slot_size != options.slot_size) {
    return Wrong(region.path_, "is of another identity or page size");
  }
  if (h.slot_count == 0 || h.slot_count >= kNone || h.bucket_count != BucketsFor(h.slot_count) ||
      h.slots_offset != AlignUp(sizeof(RegionHeader)) + sizeof(ProcessEntry) * kMaxProcesses ||
      h.buckets_offset != h.slots_offset + sizeof(SlotEntry) * h.slot_count ||
      h.data_offset != HeaderBytes(h.slot_count, h.bucket_count) || h.total_size != region.size_ ||
      h.total_size < h.data_offset + h.slot_count * h.slot_size) {
    return Wrong(region.path_, "has sizes that don't fit together");
  }
  region.slot_count_ = static_cast<uint32_t>(h.slot_count);
  return Status::Ok();
}

Status Region::MapWhole(uint64_t size) {
  Result<uint8_t*> mapped = MapMemory(fd_, size, huge_pages_);
  if (!mapped.ok()) return mapped.status();
  memory_ = mapped.value();
  size_ = size;
  forks_ = ForkCount();
  KeepFromChildren(memory_, size_);
  return Status::Ok();
}

// With the attach lock held.
Status Region::JoinProcesses(uint32_t workers) {
  const Lock lock(*this);
  if (!lock.ok())
    return {CS_TIMEOUT, "the shared region " + path_ + " is locked by a stopped process"};
  for (const bool take_dead : {false, true}) {
    for (uint32_t p = 0; p < kMaxProcesses; ++p) {
      if (process(p).in_use != 0 && !take_dead) continue;
      if (fd_ >= 0 && !TryLockByte(fd_, kProcessBytes + p)) continue;
      self_ = p;
      if (take_dead) callbacks_.reclaim(*this, p);
      process(p).in_use = 1;
      process(p).workers = workers;
      return Status::Ok();
    }
  }
  return {CS_REFUSED, "the shared region " + path_ + " has its " + std::to_string(kMaxProcesses) +
                          " processes already"};
}

Region::~Region() { Close(); }

void Region::Close() {
  if (IsInert()) {
    fd_ = -1;
    memory_ = nullptr;
  }
  if (fd_ >= 0 && self_ != kNone) {
    // Nobody may attach between our look and the removal.
    const bool locked = LockWithin(fd_, kAttachByte, std::chrono::seconds(5));
    {
      const Lock lock(*this);
      if (lock.ok()) {
        // What it couldn't store is the others'.
        callbacks_.reclaim(*this, self_);
        process(self_).in_use = 0;
      }
    }
    if (locked && !IsLockedByOthers(fd_, kProcessBytes, kMaxProcesses) && SameFile(fd_, path_)) {
      (void)RemoveSharedFile(fd_, path_);
    }
  }
  self_ = kNone;
  if (memory_ != nullptr) UnmapMemory(std::exchange(memory_, nullptr), size_);
  if (fd_ >= 0) CloseSharedFile(std::exchange(fd_, -1));
}

int Region::RemoveAbandoned(const std::string& directory, const std::string& keep) {
  const Result<std::vector<std::string>> names =
      Env::Real().List(directory + "/.");  // may be a link
  if (!names.ok()) return 0;
  int removed = 0;
  for (const std::string& name : names.value()) {
    if (name.rfind(kNamePrefix, 0) != 0 || name == keep) continue;
    const std::string path = directory + "/" + name;
    const Result<Fd> opened = OpenSharedFile(path, /*create=*/false);
    if (!opened.ok()) continue;
    const Fd fd = opened.value();
    const Result<SharedFileInfo> info = StatSharedFile(fd);
    // The attach lock first: whoever is making it holds that. Another cleaner has
    // it for a moment only, and then the room is there when we need it.
    if (info.ok() && info.value().is_ours && LockWithin(fd, kAttachByte, kCleanerPatience) &&
        !IsLockedByOthers(fd, kProcessBytes, kMaxProcesses) && HasOurMagic(fd) &&
        SameFile(fd, path) && RemoveSharedFile(fd, path).ok()) {
      ++removed;
    }
    CloseSharedFile(fd);
  }
  return removed;
}

ProcessEntry& Region::process(uint32_t number) const {
  return reinterpret_cast<ProcessEntry*>(memory_ + AlignUp(sizeof(RegionHeader)))[number];
}

SlotEntry& Region::slot(uint32_t number) const {
  return reinterpret_cast<SlotEntry*>(memory_ + header().slots_offset)[number];
}

uint32_t& Region::bucket(uint64_t number) const {
  return reinterpret_cast<uint32_t*>(memory_ + header().buckets_offset)[number];
}

uint8_t* Region::bytes(uint32_t slot) const {
  return memory_ + header().data_offset + slot * header().slot_size;
}

bool Region::IsAlive(uint32_t number) const {
  return number == self_ || (fd_ >= 0 && IsLockedByOthers(fd_, kProcessBytes + number, 1));
}

bool Region::IsInert() const { return memory_ != nullptr && forks_ != ForkCount(); }

bool Region::TakeMutex() {
  if (memory_ == nullptr || IsInert()) return false;
  // By the wall clock, since thread sanitizers don't know the call with the
  // monotonic one. A step of the clock makes one wait longer or shorter.
  const std::chrono::nanoseconds patience =
      stuck_.load(std::memory_order_relaxed) ? kStuckPatience : kLockPatience;
  timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  const int64_t nanoseconds = until.tv_nsec + patience.count();
  until.tv_sec += nanoseconds / 1000000000;
  until.tv_nsec = nanoseconds % 1000000000;
  const int result = pthread_mutex_timedlock(&header().mutex, &until);
  stuck_.store(result == ETIMEDOUT, std::memory_order_relaxed);
  if (result == EOWNERDEAD) {
#ifdef __SANITIZE_THREAD__
    // Which doesn't know that this is a lock taken.
    __tsan_mutex_pre_lock(&header().mutex, 0);
    __tsan_mutex_post_lock(&header().mutex, 0, 0);
#endif
    callbacks_.repair(*this);
    pthread_mutex_consistent(&header().mutex);
    return true;
  }
  return result == 0;
}

}  // namespace cachestore
