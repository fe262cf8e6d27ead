// Root: a storage backend directory, with what all pools that a store keeps there
// share of it: how much is in it, what it is good for, and the store's name in it.
//
// Thread-safe.
#ifndef CACHESTORE_POSIX_ROOT_H_
#define CACHESTORE_POSIX_ROOT_H_

#include <atomic>
#include <mutex>
#include <string>
#include <utility>

#include "base/env.h"
#include "base/event_ring.h"
#include "posix/health.h"
#include "posix/space.h"

namespace cachestore {

struct Root {
  // `at`: absolute, no trailing slash.
  Root(Env& env, EventRing& events, std::string at, const SpaceLimits& limits, bool use_direct)
      : path(std::move(at)),
        instance(env.UniqueName()),
        health(events, path),
        space(limits),
        direct(use_direct) {}

  const std::string path;
  // Of this store's directories in tmp/.
  const std::string instance;
  Health health;
  Space space;
  std::atomic<bool> direct;  // files are opened with O_DIRECT

  // Guards what the directories below owe, and with it `health` coming back: see
  // Directory. Never held across I/O.
  std::mutex clear_mutex;
};

}  // namespace cachestore

#endif  // CACHESTORE_POSIX_ROOT_H_
