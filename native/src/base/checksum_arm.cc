// CRC-32C by the instructions of 64-bit ARM. Tested under emulation only: the
// results are right there, the speed on a real machine is unmeasured.
#include "base/checksum_impl.h"

#if defined(__aarch64__) && defined(__linux__) && \
    (!defined(__BYTE_ORDER__) || __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__)

#include <arm_acle.h>
#include <sys/auxv.h>

#include <cstring>

#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif

#if defined(__clang__)
#define CACHESTORE_TARGET_CRC __attribute__((target("crc")))
#else
#define CACHESTORE_TARGET_CRC __attribute__((target("+crc")))
#endif

namespace cachestore::crc32c {
namespace {

// Long enough that joining the streams doesn't count.
constexpr size_t kStream = 1024;

// The effect of kStream zero bytes on a register, by its four bytes.
constexpr auto kPastOne = [] {
  std::array<std::array<uint32_t, 256>, 4> tables{};
  const uint32_t factor = PowerOfX(8 * kStream);
  for (uint32_t k = 0; k < 4; ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      tables[k][byte] = Multiply(byte << (8 * k), factor);
    }
  }
  return tables;
}();

uint32_t PastOne(uint32_t crc) {
  return kPastOne[0][crc & 0xFF] ^ kPastOne[1][(crc >> 8) & 0xFF] ^
         kPastOne[2][(crc >> 16) & 0xFF] ^ kPastOne[3][crc >> 24];
}

CACHESTORE_TARGET_CRC inline uint32_t Step64(uint32_t crc, const unsigned char* from) {
  uint64_t word;
  std::memcpy(&word, from, sizeof(word));
  return __crc32cd(crc, word);
}

// The instruction has a latency of two or three cycles and a throughput of one
// a cycle: three independent streams fill it.
CACHESTORE_TARGET_CRC uint32_t RunArm64(uint32_t crc, const void* data, size_t n) {
  const auto* from = static_cast<const unsigned char*>(data);
  crc = ~crc;
  while (n >= 3 * kStream) {
    uint32_t second = 0;
    uint32_t third = 0;
    for (size_t i = 0; i < kStream; i += 8) {
      crc = Step64(crc, from + i);
      second = Step64(second, from + kStream + i);
      third = Step64(third, from + 2 * kStream + i);
    }
    crc = PastOne(PastOne(crc) ^ second) ^ third;
    from += 3 * kStream;
    n -= 3 * kStream;
  }
  for (; n >= 8; from += 8, n -= 8) crc = Step64(crc, from);
  for (; n > 0; ++from, --n) crc = __crc32cb(crc, *from);
  return ~crc;
}

}  // namespace

std::optional<Crc32cVariant> Arm64() {
  if ((getauxval(AT_HWCAP) & HWCAP_CRC32) == 0) return std::nullopt;
  return Crc32cVariant{"arm64", RunArm64};
}

}  // namespace cachestore::crc32c

#else

namespace cachestore::crc32c {

std::optional<Crc32cVariant> Arm64() { return std::nullopt; }

}  // namespace cachestore::crc32c

#endif
