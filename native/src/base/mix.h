// Mix: a number for a number, such that what differs in a bit differs in about half of
// all bits then.
#ifndef CACHESTORE_BASE_MIX_H_
#define CACHESTORE_BASE_MIX_H_

#include <cstdint>

namespace cachestore {

// Bijective (the finaliser of splitmix64).
inline uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace cachestore

#endif  // CACHESTORE_BASE_MIX_H_
