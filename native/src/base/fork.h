// Forked children. None of the parent's threads runs there, a lock may be held
// by one of them for ever, and not all of the memory is mapped: what was made
// before the fork must not be used after it.
#ifndef CACHESTORE_BASE_FORK_H_
#define CACHESTORE_BASE_FORK_H_

#include <cstdint>

namespace cachestore {

// How often this process and those it descends from were forked since the first
// call. Compare with what it was when a thing was made.
uint32_t ForkCount();

}  // namespace cachestore

#endif  // CACHESTORE_BASE_FORK_H_
