// What lies in the shared region, byte for byte (docs/format.md). Plain data
// and offsets: no pointer, since every process maps it elsewhere.
//
//   RegionHeader | ProcessEntry[kMaxProcesses] | SlotEntry[slots] |
//   uint32 buckets[bucket_count] | padding to 4096 | slot bytes
#ifndef CACHESTORE_CACHE_REGION_LAYOUT_H_
#define CACHESTORE_CACHE_REGION_LAYOUT_H_

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "tier/geometry.h"

namespace cachestore {

inline constexpr char kRegionMagic[9] = "CSREGIO1";
inline constexpr uint32_t kRegionVersion = 1;
inline constexpr uint32_t kMaxProcesses = 64;  // bits of SlotEntry::waiters
inline constexpr uint32_t kMaxWorkers = 128;   // copy workers of one process, both directions
inline constexpr uint32_t kNone = UINT32_MAX;

enum class SlotState : uint32_t {
  kFree = 0,
  kLoading = 1,  // being filled by `owner`, and nobody else touches its bytes
  kReady = 2,    // its bytes are the block's
  kFailed = 3,   // the latest filling failed with `code`; the bytes mean nothing
};

struct SlotEntry {
  // Guarded by RegionHeader::mutex, but for `state` and `generation`, which
  // may be read without it to see whether something has changed.
  std::atomic<SlotState> state;
  std::atomic<uint32_t> generation;  // counts the slot's uses
  BlockId block;
  uint32_t owner;      // process: of kLoading its filler, of a dirty one its storer or kNone
  int32_t code;        // of kFailed: a cs_code
  uint32_t dirty;      // 1: ready, and not known to be in the storage
  uint32_t orphan;     // 1: cleared; free it as soon as nobody uses it
  uint32_t checksum;   // of a dirty slot's payload: CRC-32C
  uint64_t waiters;    // processes to wake when it leaves kLoading
  uint64_t tick;       // of its last use
  uint32_t hash_next;  // in its bucket's chain
  uint32_t list_next, list_previous;  // in the free list, or in the order of use
  // The slot of the block that its own follows, if that was known and there:
  // a use of this one is one of that.
  uint32_t parent, parent_generation;
};

struct ProcessEntry {
  std::atomic<uint32_t> wake;  // futex: changes when something it waits for did
  uint32_t in_use;             // guarded by the mutex; alive iff its byte is locked
  uint32_t workers;            // cells of `pinned` in use; guarded by the mutex
  // The slot that each of its copy workers reads from, or kNone: the slot isn't
  // replaced meanwhile. Set with the mutex held, unset without. There is no
  // count of pins that a death could leave wrong.
  std::array<std::atomic<uint32_t>, kMaxWorkers> pinned;
};

struct List {
  uint32_t first, last, count;
};

struct RegionHeader {
  char magic[8];
  uint32_t version;
  uint32_t header_size;
  std::array<uint8_t, 32> fingerprint;
  uint64_t slot_count;
  uint64_t slot_size;  // a multiple of 4096
  uint64_t payload;
  uint64_t bucket_count;
  uint64_t slots_offset;
  uint64_t buckets_offset;
  uint64_t data_offset;
  uint64_t total_size;
  std::atomic<uint32_t> complete;  // 1: all above is written, and the mutex made

  std::atomic<uint64_t> epoch;  // changes with every clear; with the mutex held

  pthread_mutex_t mutex;  // robust, shared; guards all below and the entries
  uint64_t latest_clear;  // Tier::LatestClear of the tier below
  uint64_t tick;
  List free;  // kFree
  List used;  // kReady and clean, or kFailed; oldest use first. Pinned ones too
  uint32_t dirty_count;
  uint32_t loading_count;
  uint32_t ownerless_count;  // dirty slots whose storer died
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::atomic<SlotState>::is_always_lock_free);

}  // namespace cachestore

#endif  // CACHESTORE_CACHE_REGION_LAYOUT_H_
