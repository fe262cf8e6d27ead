#include "base/checksum.h"

#include <array>

#include "base/checksum_impl.h"

namespace cachestore {
namespace {

class Variants {
 public:
  // The fastest first.
  Variants() {
    for (const auto& variant : {crc32c::Avx512(), crc32c::Sse42(), crc32c::Arm64()}) {
      if (variant) list_[size_++] = *variant;
    }
    list_[size_++] = {"portable", crc32c::Portable};
  }

  const Crc32cVariant& best() const { return list_[0]; }
  std::span<const Crc32cVariant> all() const { return {list_.data(), size_}; }

 private:
  std::array<Crc32cVariant, 4> list_{};
  size_t size_ = 0;
};

// A function's static: usable from other static initialisers, and initialised
// once under threads.
const Variants& Available() {
  static const Variants variants;
  return variants;
}

// [k]: x^(8 * 2^k), the factor for 2^k bytes.
constexpr std::array<uint32_t, 64> kByteShifts = [] {
  std::array<uint32_t, 64> shifts{};
  shifts[0] = crc32c::PowerOfX(8);
  for (size_t k = 1; k < shifts.size(); ++k) {
    shifts[k] = crc32c::Multiply(shifts[k - 1], shifts[k - 1]);
  }
  return shifts;
}();

}  // namespace

uint32_t Crc32c(uint32_t crc, const void* data, size_t n) {
  return Available().best().function(crc, data, n);
}

uint32_t Crc32cCombine(uint32_t crc_a, uint32_t crc_b, uint64_t length_b) {
  // Both inversions of crc_a meet those of crc_b and cancel.
  for (size_t k = 0; length_b != 0; ++k, length_b >>= 1) {
    if ((length_b & 1) != 0) crc_a = crc32c::Multiply(crc_a, kByteShifts[k]);
  }
  return crc_a ^ crc_b;
}

const char* Crc32cImplementation() { return Available().best().name; }

std::span<const Crc32cVariant> Crc32cVariants() { return Available().all(); }

}  // namespace cachestore
