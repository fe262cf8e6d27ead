// The shared region as tests look at it: attached as one more process.
#ifndef CACHESTORE_TESTS_CACHE_PROCESSES_REGION_H_
#define CACHESTORE_TESTS_CACHE_PROCESSES_REGION_H_

#include <memory>
#include <string>

#include "cache/region.h"
#include "fixture.h"

namespace cachestore::test {

// A directory for shared regions: in memory, where there is such a place.
std::string SharedMemoryParent();

RegionOptions RegionOptionsOf(const StoreSetup& setup);
std::string RegionPath(const StoreSetup& setup);
// Attaches (or makes it, of setup.buffer_capacity). Null, and a failure, if it
// can't.
std::unique_ptr<Region> AttachOrFail(const StoreSetup& setup);
// The same, once nobody holds a slot any more: none is being loaded, dirty or
// pinned, which must come to be soon, and all fits together.
std::unique_ptr<Region> AttachAtRest(const StoreSetup& setup);

struct RegionCounts {
  uint32_t free = 0, ready = 0, failed = 0, loading = 0, dirty = 0, orphans = 0;
  uint32_t pins = 0;
  uint32_t processes = 0;  // entries in use, alive or not

  uint32_t slots() const { return free + ready + failed + loading; }
};
// By walking the entries, not by the header's counters. Takes the lock.
RegionCounts CountsOf(Region& region);
// What doesn't fit together in lists, chains and counters; "" if nothing.
// Takes the lock.
std::string Inconsistency(Region& region);

// States that a death between two statements of a metadata change leaves.
enum class Damage {
  kNothing,
  kTakenFromFree,     // in no list
  kTakenAndLinked,    // and in its chain, but free by its state
  kLoadingUncounted,  // being loaded, but not counted
  kTakenFromUsed,     // ready and in no list
  kReadyUncounted,    // ready, but counted as being loaded, and in no list
  kTornList,          // the list's end isn't its last entry
  kCutChain,          // ready, listed, and can't be found
  kTwice,             // two slots of one block
  kCount,
};
// With the lock held, by a process that then dies. False: the region is in no
// state for that.
[[nodiscard]] bool Break(Region& region, Damage damage);

}  // namespace cachestore::test

#endif  // CACHESTORE_TESTS_CACHE_PROCESSES_REGION_H_
