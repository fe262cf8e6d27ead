// Opening the directories of a store, within a bound: until one is open nothing is
// known of its filesystem, which may hang.
#ifndef CACHESTORE_POSIX_OPENING_H_
#define CACHESTORE_POSIX_OPENING_H_

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "base/env.h"
#include "base/event_ring.h"
#include "posix/directory.h"
#include "posix/posix_tier.h"

namespace cachestore {

using Roots = std::vector<std::shared_ptr<Root>>;
using Directories = std::vector<std::shared_ptr<Directory>>;

// Runs `work` on a thread of its own and waits for it. False: it takes longer,
// and is left behind with all it holds.
bool RunWithin(std::chrono::milliseconds patience, const char* name, std::function<void()> work);

Roots MakeRoots(Env& env, EventRing& events, const PosixOptions& options);

// A pool's directory in each root, each on a thread of its own. One of several that
// can't be opened is out of use; if none can, or a setting is refused, the error
// names each.
Result<Directories> OpenDirectories(Env& env, const std::shared_ptr<EventRing>& events,
                                    const PosixOptions& options, const PoolOptions& pool,
                                    const Roots& roots);

}  // namespace cachestore

#endif  // CACHESTORE_POSIX_OPENING_H_
