#include "posix/parent_links.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace cachestore {

ParentLinks::ParentLinks(unsigned bits)
    : set_bits_(std::max(bits, static_cast<unsigned>(std::countr_zero(kWays))) -
                static_cast<unsigned>(std::countr_zero(kWays))),
      links_(kWays << set_bits_),
      count_(size_t{1} << set_bits_) {}

size_t ParentLinks::SetOf(const BlockId& block) const {
  if (set_bits_ == 0) return 0;
  uint64_t halves[2];
  std::memcpy(halves, block.data(), sizeof halves);
  return ((halves[0] ^ std::rotl(halves[1], 32)) * 0x9e3779b97f4a7c15u) >> (64 - set_bits_);
}

bool ParentLinks::MoveToFront(size_t set, const BlockId& block) {
  const auto first = links_.begin() + static_cast<ptrdiff_t>(set * kWays);
  const auto last = first + count_[set];
  const auto found =
      std::find_if(first, last, [&](const Link& link) { return link.block == block; });
  if (found == last) return false;
  std::rotate(first, found, found + 1);
  return true;
}

void ParentLinks::Set(const BlockId& block, const BlockId& parent) {
  const size_t set = SetOf(block);
  const auto first = links_.begin() + static_cast<ptrdiff_t>(set * kWays);
  if (!MoveToFront(set, block)) {
    if (count_[set] < kWays) ++count_[set];
    std::rotate(first, first + count_[set] - 1, first + count_[set]);
  }
  *first = {block, parent};
}

const BlockId* ParentLinks::Find(const BlockId& block) {
  const size_t set = SetOf(block);
  return MoveToFront(set, block) ? &links_[set * kWays].parent : nullptr;
}

}  // namespace cachestore
