// A region of a few slots of 4096 bytes, as unit tests look at it.
#ifndef CACHESTORE_TESTS_CACHE_FEW_SLOTS_H_
#define CACHESTORE_TESTS_CACHE_FEW_SLOTS_H_

#include <memory>
#include <string>
#include <utility>

#include "cache/cached_mock.h"
#include "cache/region.h"
#include "cache/slot_table.h"
#include "harness.h"

namespace cachestore::test {

inline constexpr uint64_t kSlotSize = 4096;
inline constexpr uint64_t kPayload = 4000;
inline constexpr uint32_t kWorkers = 4;

inline RegionOptions FewSlots(uint32_t slots, const std::string& directory = "") {
  RegionOptions options;
  options.shared = !directory.empty();
  options.directory = directory;
  options.fingerprint.fill(7);
  options.payload = kPayload;
  options.slot_size = kSlotSize;
  options.workers = kWorkers;
  options.size_for = [slots](bool) { return RegionBytes(slots, kSlotSize); };
  return options;
}

inline Region::Callbacks TableCallbacks() {
  return {[](Region&) {}, &SlotTable::Reclaim, &SlotTable::Repair};
}

// Opens or fails the test and gives null.
inline std::unique_ptr<Region> OpenRegion(const RegionOptions& options) {
  Result<std::unique_ptr<Region>> opened = Region::Open(options, TableCallbacks());
  return EXPECT_OK(opened) ? std::move(opened.value()) : nullptr;
}

// A private region and its table.
struct FewSlotsTable {
  explicit FewSlotsTable(uint32_t slots, uint32_t reserve = 0, uint32_t max_dirty = 1u << 20)
      : region(OpenRegion(FewSlots(slots))), table(*region, reserve, max_dirty) {}

  const std::unique_ptr<Region> region;
  SlotTable table;
};

}  // namespace cachestore::test

#endif  // CACHESTORE_TESTS_CACHE_FEW_SLOTS_H_
