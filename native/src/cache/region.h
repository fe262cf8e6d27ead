// Region: the memory of the cache's slots, shared by all processes of a user
// that have the same identity on this host, or private to one.
//
// Rules of the region (docs/design.md):
//   - A process is alive as long as the kernel says that its byte of the file
//     is locked: the lock belongs to its open file description and ends with
//     it. Nothing is concluded from names, pids, paths or ages.
//   - The file's first byte is the attach lock: who holds it may create,
//     recover and remove.
//   - The mutex guards metadata only and is never held across a copy, I/O or a
//     wait. It is robust: whoever finds that its owner died repairs. Every
//     attempt is timed: a stopped process costs the others kLockPatience, once.
//   - A forked child has no part in it: the memory isn't mapped there, and the
//     descriptor, which would keep the parent's lock alive, is closed at once.
//
// Thread-safe, but for Open and Close.
#ifndef CACHESTORE_CACHE_REGION_H_
#define CACHESTORE_CACHE_REGION_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "base/env.h"
#include "base/status.h"
#include "cache/region_layout.h"

namespace cachestore {

struct RegionOptions {
  bool shared = true;
  std::string directory = "/dev/shm";  // of the file; any tmpfs
  std::array<uint8_t, 32> fingerprint{};
  uint64_t payload = 0;       // bytes of a slot that mean something
  uint64_t slot_size = 0;     // a multiple of 4096
  uint64_t latest_clear = 0;  // of the tier below, for a region that is made
  uint32_t workers = 0;       // copy workers of this process that will pin slots
  // How many bytes to take; asked when a region is made, with whether it is
  // shared.
  std::function<Result<uint64_t>(bool shared)> size_for;
};

class Region {
 public:
  static constexpr std::chrono::milliseconds kLockPatience{1000};
  // For the attempts that follow one in vain: a request has many pages.
  static constexpr std::chrono::milliseconds kStuckPatience{1};
  static constexpr std::chrono::seconds kAttachPatience{120};

  struct Callbacks {
    // For a region left by processes that are all gone, before it is
    // discarded: the place to save what is only there.
    std::function<void(Region&)> recover;
    // For the entry of a process that died, or that leaves, with the mutex held,
    // before it is used again: gives back what that process held.
    std::function<void(Region&, uint32_t process)> reclaim;
    // With the mutex held, when its owner died holding it.
    std::function<void(Region&)> repair;
  };

  // Attaches to the region that others hold, or makes it. An attach takes the
  // size that is there.
  static Result<std::unique_ptr<Region>> Open(const RegionOptions& options, Callbacks callbacks);
  // Removes, in a directory, every region of this user that nobody holds and
  // that isn't `keep`; returns how many.
  static int RemoveAbandoned(const std::string& directory, const std::string& keep);
  // The file's name for an identity and this user.
  static std::string FileName(const std::array<uint8_t, 32>& fingerprint);

  ~Region();

  RegionHeader& header() const { return *reinterpret_cast<RegionHeader*>(memory_); }
  ProcessEntry& process(uint32_t number) const;
  SlotEntry& slot(uint32_t number) const;
  uint32_t& bucket(uint64_t number) const;
  uint8_t* bytes(uint32_t slot) const;

  uint32_t slot_count() const { return slot_count_; }
  // Our own number among the processes.
  uint32_t self() const { return self_; }
  bool shared() const { return fd_ >= 0; }
  bool created() const { return created_; }
  // What came of asking for huge pages, in words.
  const std::string& huge_pages() const { return huge_pages_; }
  uint64_t size() const { return size_; }
  // Whether process `number` still holds its byte. Ours always does.
  bool IsAlive(uint32_t number) const;
  // In a forked child: the region isn't there.
  bool IsInert() const;

  // Holds the mutex while it lives, if ok().
  class Lock {
   public:
    explicit Lock(Region& region) : region_(region), ok_(region.TakeMutex()) {}
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;
    ~Lock() {
      if (ok_) pthread_mutex_unlock(&region_.header().mutex);
    }
    bool ok() const { return ok_; }

   private:
    Region& region_;
    const bool ok_;
  };

  // Gives up our place; the last one removes the file.
  void Close();

 private:
  explicit Region(Callbacks callbacks) : callbacks_(std::move(callbacks)) {}

  static Result<std::unique_ptr<Region>> OpenPrivate(const RegionOptions& options,
                                                     Callbacks callbacks);
  static Result<std::unique_ptr<Region>> OpenShared(const RegionOptions& options,
                                                    const Callbacks& callbacks);
  static Status Create(Region& region, const RegionOptions& options);
  static Status Attach(Region& region, const RegionOptions& options);
  Status MapWhole(uint64_t size);
  Status JoinProcesses(uint32_t workers);
  void Initialise(const RegionOptions& options, uint64_t slots);
  bool TakeMutex();

  const Callbacks callbacks_;
  Fd fd_ = -1;
  std::string path_;
  uint8_t* memory_ = nullptr;
  uint64_t size_ = 0;
  uint32_t slot_count_ = 0;
  std::atomic<bool> stuck_{false};  // the latest attempt at the mutex was in vain
  uint32_t self_ = kNone;
  bool created_ = false;
  std::string huge_pages_;
  uint32_t forks_ = 0;  // ForkCount at Open
};

}  // namespace cachestore

#endif  // CACHESTORE_CACHE_REGION_H_
