// Table-driven CRC-32C: sixteen bytes a step, each by a table of its own, so that
// the look-ups don't wait for one another.
#include <bit>
#include <cstring>

#include "base/checksum_impl.h"

namespace cachestore::crc32c {
namespace {

constexpr size_t kSlices = 16;
constexpr auto kTables = MakeByteTables<kSlices>();

uint64_t LoadLittleEndian(const unsigned char* from) {
  if constexpr (std::endian::native == std::endian::little) {
    uint64_t value;
    std::memcpy(&value, from, sizeof(value));
    return value;
  } else {
    uint64_t value = 0;
    for (size_t i = 0; i < sizeof(value); ++i) value |= uint64_t{from[i]} << (8 * i);
    return value;
  }
}

}  // namespace

uint32_t Portable(uint32_t crc, const void* data, size_t n) {
  const auto* from = static_cast<const unsigned char*>(data);
  crc = ~crc;
  for (; n >= kSlices; from += kSlices, n -= kSlices) {
    const uint64_t first = LoadLittleEndian(from);
    const uint64_t second = LoadLittleEndian(from + 8);
    // Twelve look-ups don't depend on the bytes before; only the other four are
    // in the chain from step to step.
    uint32_t rest = 0;
#pragma GCC unroll 8
    for (size_t i = 0; i < 8; ++i) rest ^= kTables[7 - i][(second >> (8 * i)) & 0xFF];
#pragma GCC unroll 4
    for (size_t i = 4; i < 8; ++i) rest ^= kTables[15 - i][(first >> (8 * i)) & 0xFF];
    const uint32_t head = static_cast<uint32_t>(first) ^ crc;
    crc = rest ^ (kTables[15][head & 0xFF] ^ kTables[14][(head >> 8) & 0xFF]) ^
          (kTables[13][(head >> 16) & 0xFF] ^ kTables[12][head >> 24]);
  }
  for (; n > 0; ++from, --n) crc = (crc >> 8) ^ kTables[0][(crc ^ *from) & 0xFF];
  return ~crc;
}

}  // namespace cachestore::crc32c
