// Forked children. None of the parent's threads runs there, a lock may be held
// by one of them for ever, and not all of the memory is mapped: what was made
// before the fork must not be used after it.
//
// Files that are locked. A lock belongs to the open file and lasts as long as
// any descriptor of it, a child's too: others would take a dead process for a
// living one. So every file with such locks is opened and closed here, and a
// handler of fork closes the child's descriptors of them.
//
// Invariant: only the process that opened such a file has a descriptor of it
// while it has locks. What a fork copies between the opening and the note of it
// has none, and is left behind for another opening; what it copies between the
// release of the locks and the closing has none any more. A clone or vfork
// without exec, which runs no handler, isn't provided for.
#ifndef CACHESTORE_BASE_FORK_H_
#define CACHESTORE_BASE_FORK_H_

#include <cstdint>
#include <functional>

namespace cachestore {

// How often this process and those it descends from were forked since the first
// call. Compare with what it was when a thing was made.
uint32_t ForkCount();

// `open`: as open(2), close-on-exec; may be called again.
int OpenUnforked(const std::function<int()>& open);
bool IsUnforked(int fd);
// Gives back all locks of the file. As close(2).
int CloseUnforked(int fd);

}  // namespace cachestore

#endif  // CACHESTORE_BASE_FORK_H_
