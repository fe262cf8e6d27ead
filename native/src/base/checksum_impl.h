// What the implementations of CRC-32C share: arithmetic modulo its polynomial,
// from which every table and constant is derived at compile time.
//
// Polynomials over GF(2) are kept reflected, as CRC-32C wants them: in a word
// of w bits, bit i is the coefficient of x^(w-1-i). A message is a polynomial
// whose highest coefficient is bit 0 of its first byte; so a little-endian load
// puts a piece of it into a register in this very order. With all inversions
// aside, the checksum of message M is M * x^32 mod P.
#ifndef CACHESTORE_BASE_CHECKSUM_IMPL_H_
#define CACHESTORE_BASE_CHECKSUM_IMPL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/checksum.h"

namespace cachestore::crc32c {

// x^32 mod P; P is the Castagnoli polynomial 0x11EDC6F41, unreflected.
inline constexpr uint32_t kPolynomial = 0x82F63B78;
inline constexpr uint32_t kOne = 0x80000000;

constexpr uint32_t MultiplyByX(uint32_t a) { return (a >> 1) ^ ((a & 1) != 0 ? kPolynomial : 0); }

constexpr uint32_t Multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = MultiplyByX(b);
  }
  return product;
}

// x^n mod P.
constexpr uint32_t PowerOfX(uint64_t n) {
  uint32_t power = kOne;
  uint32_t square = MultiplyByX(kOne);
  for (; n != 0; n >>= 1) {
    if ((n & 1) != 0) power = Multiply(power, square);
    square = Multiply(square, square);
  }
  return power;
}

// table[k][b]: the effect on the CRC register of byte b followed by k zero
// bytes.
template <size_t kSlices>
constexpr std::array<std::array<uint32_t, 256>, kSlices> MakeByteTables() {
  std::array<std::array<uint32_t, 256>, kSlices> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int i = 0; i < 8; ++i) crc = MultiplyByX(crc);
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < kSlices; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t crc = tables[k - 1][byte];
      tables[k][byte] = (crc >> 8) ^ tables[0][crc & 0xFF];
    }
  }
  return tables;
}

// Always there.
uint32_t Portable(uint32_t crc, const void* data, size_t n);

// Null where the CPU or the operating system lacks what it needs, or it was
// compiled for another architecture.
std::optional<Crc32cVariant> Avx512();
std::optional<Crc32cVariant> Sse42();
std::optional<Crc32cVariant> Arm64();

}  // namespace cachestore::crc32c

#endif  // CACHESTORE_BASE_CHECKSUM_IMPL_H_
