// ParentLinks: which block comes before which in a prefix, of those seen
// lately. Bounded: a new link takes the place of the one not asked for longest,
// of the few that share its place in the table.
//
// Not thread-safe.
#ifndef CACHESTORE_POSIX_PARENT_LINKS_H_
#define CACHESTORE_POSIX_PARENT_LINKS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tier/geometry.h"

namespace cachestore {

class ParentLinks {
 public:
  // 2^(bits) links, 32 bytes each. At least kWays.
  explicit ParentLinks(unsigned bits);

  void Set(const BlockId& block, const BlockId& parent);
  // Null: not known. Valid until the next call.
  const BlockId* Find(const BlockId& block);

  static constexpr size_t kWays = 8;

 private:
  struct Link {
    BlockId block;
    BlockId parent;
  };

  size_t SetOf(const BlockId& block) const;
  // Moves the link to the front of its set; false if it isn't there.
  bool MoveToFront(size_t set, const BlockId& block);

  const unsigned set_bits_;
  std::vector<Link> links_;     // sets of kWays, each with the latest first
  std::vector<uint8_t> count_;  // of a set
};

}  // namespace cachestore

#endif  // CACHESTORE_POSIX_PARENT_LINKS_H_
