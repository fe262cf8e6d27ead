// CollectorState: what the collector of a storage root tells the other stores,
// and people: <root>/collector/state, a few lines of text (docs/format.md).
#ifndef CACHESTORE_POSIX_COLLECTOR_STATE_H_
#define CACHESTORE_POSIX_COLLECTOR_STATE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "posix/space.h"

namespace cachestore {

struct CollectorState {
  static constexpr size_t kMaxSize = 65536;  // of the text

  SpaceLimits limits;
  uint64_t used = 0;        // bytes
  uint64_t files = 0;       // block files, by the last whole look
  uint64_t generation = 0;  // another one each time it is written
  // For each open store but the collector's, by the name of its directory in tmp/:
  // how many bytes it may have added in all.
  std::map<std::string, uint64_t> grants;

  // Grants that don't fit the text are left out.
  std::string Format() const;
  // None: it isn't such a text.
  static std::optional<CollectorState> Parse(std::string_view text);
};

// The first bytes of a store's lock file: what it has added and removed, and what it
// had no room for.
inline constexpr size_t kSpaceChangesSize = 40;
void EncodeSpaceChanges(const SpaceChanges& changes, std::span<uint8_t, kSpaceChangesSize> bytes);
std::optional<SpaceChanges> DecodeSpaceChanges(std::string_view bytes);

}  // namespace cachestore

#endif  // CACHESTORE_POSIX_COLLECTOR_STATE_H_
