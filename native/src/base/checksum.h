// CRC-32C (Castagnoli), the checksum of blocks and records.
//
// The fastest implementation that the CPU and the operating system allow is
// chosen once, at the first use. All functions are thread-safe.
#ifndef CACHESTORE_BASE_CHECKSUM_H_
#define CACHESTORE_BASE_CHECKSUM_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace cachestore {

// The checksum of some data followed by these n bytes, crc being that of the
// data before, 0 of none: Crc32c(Crc32c(0, a), b) == Crc32c(0, ab).
uint32_t Crc32c(uint32_t crc, const void* data, size_t n);

// The checksum of a followed by b, from theirs and the length of b in bytes.
// Its time grows with the number of bits in length_b, not with length_b.
uint32_t Crc32cCombine(uint32_t crc_a, uint32_t crc_b, uint64_t length_b);

struct Crc32cVariant {
  const char* name;
  uint32_t (*function)(uint32_t crc, const void* data, size_t n);
};

// The name of the implementation Crc32c uses.
const char* Crc32cImplementation();

// Those that can run here, the one in use first, for tests and benchmarks.
std::span<const Crc32cVariant> Crc32cVariants();

}  // namespace cachestore

#endif  // CACHESTORE_BASE_CHECKSUM_H_
