#include "base/checksum.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "harness.h"

namespace cachestore {
namespace {

using Bytes = std::vector<unsigned char>;

// Bit by bit, as the definition has it.
uint32_t ReferenceStep(uint32_t crc, unsigned char byte) {
  crc = ~crc ^ byte;
  for (int i = 0; i < 8; ++i) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78U : 0);
  return ~crc;
}

// [n]: the checksum of the first n bytes.
std::vector<uint32_t> ReferenceOfPrefixes(const unsigned char* data, size_t size) {
  std::vector<uint32_t> crcs(size + 1, 0);
  for (size_t i = 0; i < size; ++i) crcs[i + 1] = ReferenceStep(crcs[i], data[i]);
  return crcs;
}

Bytes RandomBytes(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  Bytes bytes(size);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

bool Check(const Crc32cVariant& variant, size_t offset, size_t length, uint32_t actual,
           uint32_t expected) {
  if (actual == expected) return true;
  test::Fail(__FILE__, __LINE__,
             std::string(variant.name) + ": " + std::to_string(length) + " bytes at offset " +
                 std::to_string(offset) + " give " + std::to_string(actual) + ", not " +
                 std::to_string(expected));
  return false;
}

// Memory with an inaccessible page right before and right after it, so that an
// access outside ends the test.
class FencedMemory {
 public:
  explicit FencedMemory(size_t size) : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    size_ = (size + page_ - 1) / page_ * page_;
    void* memory = mmap(nullptr, size_ + 2 * page_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    memory_ = static_cast<unsigned char*>(memory);
    if (mprotect(memory_, page_, PROT_NONE) != 0) std::abort();
    if (mprotect(memory_ + page_ + size_, page_, PROT_NONE) != 0) std::abort();
  }
  ~FencedMemory() { munmap(memory_, size_ + 2 * page_); }
  FencedMemory(const FencedMemory&) = delete;
  FencedMemory& operator=(const FencedMemory&) = delete;

  unsigned char* begin() { return memory_ + page_; }
  unsigned char* end() { return begin() + size_; }
  size_t size() const { return size_; }

 private:
  size_t page_;
  size_t size_;
  unsigned char* memory_;
};

// Stays the first test, so that the choice of the implementation is made here.
TEST(Checksum, FirstUseByManyThreads) {
  constexpr int kThreads = 8;
  std::barrier start(kThreads);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      start.arrive_and_wait();
      EXPECT_EQ(Crc32c(0, "123456789", 9), 0xE3069283U);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Checksum, VariantsAreNamedOnceAndTheFirstIsInUse) {
  const auto variants = Crc32cVariants();
  ASSERT_GE(variants.size(), 1);
  EXPECT_EQ(std::string_view(variants.front().name), Crc32cImplementation());
  EXPECT_EQ(variants.back().name, "portable");
  std::set<std::string> names;
  for (const Crc32cVariant& variant : variants) names.insert(variant.name);
  EXPECT_EQ(names.size(), variants.size());
}

// RFC 3720, B.4, and the usual check string.
TEST(Checksum, PublishedVectors) {
  Bytes increasing(32);
  std::iota(increasing.begin(), increasing.end(), static_cast<unsigned char>(0));
  const Bytes decreasing(increasing.rbegin(), increasing.rend());
  const Bytes read_command = {
      0x01, 0xC0, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
      0x00, 0x00, 0x00, 0x00, 0x14, 0x00, 0x00, 0x00, 0x00, 0x00, 0x04, 0x00,
      0x00, 0x00, 0x00, 0x14, 0x00, 0x00, 0x00, 0x18, 0x28, 0x00, 0x00, 0x00,
      0x00, 0x00, 0x00, 0x00, 0x02, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
  };
  const std::string_view digits = "123456789";
  const struct {
    Bytes data;
    uint32_t crc;
  } vectors[] = {
      {Bytes(), 0},
      {Bytes(32, 0x00), 0x8A9136AA},
      {Bytes(32, 0xFF), 0x62A8AB43},
      {increasing, 0x46DD794E},
      {decreasing, 0x113FDB5C},
      {read_command, 0xD9963A56},
      {Bytes(digits.begin(), digits.end()), 0xE3069283},
  };
  for (const auto& [data, crc] : vectors) {
    EXPECT_EQ(Crc32c(0, data.data(), data.size()), crc);
    EXPECT_EQ(ReferenceOfPrefixes(data.data(), data.size()).back(), crc);
    for (const Crc32cVariant& variant : Crc32cVariants()) {
      ASSERT_TRUE(
          Check(variant, 0, data.size(), variant.function(0, data.data(), data.size()), crc));
    }
  }
}

TEST(Checksum, NoDataKeepsTheChecksum) {
  for (const Crc32cVariant& variant : Crc32cVariants()) {
    EXPECT_EQ(variant.function(0x12345678, nullptr, 0), 0x12345678U);
  }
}

TEST(Checksum, EveryLengthUpTo5000) {
  const Bytes data = RandomBytes(5000, 1);
  const auto expected = ReferenceOfPrefixes(data.data(), data.size());
  for (const Crc32cVariant& variant : Crc32cVariants()) {
    for (size_t n = 0; n <= data.size(); ++n) {
      ASSERT_TRUE(Check(variant, 0, n, variant.function(0, data.data(), n), expected[n]));
    }
  }
}

TEST(Checksum, RandomLengthsAtEveryAlignment) {
  constexpr size_t kLongest = 5000;
  constexpr size_t kAlignments = 64;
  const Bytes data = RandomBytes(kLongest + 2 * kAlignments, 2);
  // The heap aligns to less than a cache line.
  const size_t base = -reinterpret_cast<uintptr_t>(data.data()) % kAlignments;
  std::mt19937 random(3);
  std::uniform_int_distribution<size_t> length(0, kLongest);
  for (size_t alignment = 0; alignment < kAlignments; ++alignment) {
    const unsigned char* from = data.data() + base + alignment;
    const auto expected = ReferenceOfPrefixes(from, kLongest);
    for (const Crc32cVariant& variant : Crc32cVariants()) {
      for (int i = 0; i < 50; ++i) {
        const size_t n = length(random);
        ASSERT_TRUE(Check(variant, alignment, n, variant.function(0, from, n), expected[n]));
      }
    }
  }
}

// The sizes at which an implementation turns to another loop, and what they add
// up to; touching either end of the accessible memory.
TEST(Checksum, LengthsAroundBlockBoundaries) {
  FencedMemory memory(32 << 10);
  const Bytes data = RandomBytes(memory.size(), 4);
  std::memcpy(memory.begin(), data.data(), data.size());
  const auto expected = ReferenceOfPrefixes(memory.begin(), memory.size());

  std::set<size_t> lengths;
  const size_t boundaries[] = {8,
                               16,
                               64,
                               3 * 128,
                               512,
                               2 * 512,
                               4 * 512,
                               3 * 1024,
                               2 * 3 * 1024,
                               3 * 2048,
                               2 * 3 * 2048,
                               4096,
                               8192,
                               16384,
                               3 * 2048 + 384,
                               3 * 1024 + 8,
                               memory.size()};
  for (const size_t boundary : boundaries) {
    for (size_t n = boundary - std::min<size_t>(boundary, 70); n <= boundary + 70; ++n) {
      if (n <= memory.size()) lengths.insert(n);
    }
  }
  for (const Crc32cVariant& variant : Crc32cVariants()) {
    for (const size_t n : lengths) {
      ASSERT_TRUE(Check(variant, 0, n, variant.function(0, memory.begin(), n), expected[n]));
      // What the whole has in common with its last n bytes: they continue the
      // prefix before them.
      const size_t before = memory.size() - n;
      ASSERT_TRUE(Check(variant, before, n, variant.function(expected[before], memory.end() - n, n),
                        expected.back()));
    }
  }
}

TEST(Checksum, ChainsAtEverySplit) {
  const Bytes data = RandomBytes(7000, 5);
  const auto expected = ReferenceOfPrefixes(data.data(), data.size());
  for (const Crc32cVariant& variant : Crc32cVariants()) {
    for (size_t split = 0; split <= data.size(); ++split) {
      const uint32_t first = variant.function(0, data.data(), split);
      const uint32_t both = variant.function(first, data.data() + split, data.size() - split);
      ASSERT_TRUE(Check(variant, split, data.size() - split, both, expected.back()));
    }
  }
}

TEST(Checksum, SeesAChangedBitInEveryByte) {
  Bytes page = RandomBytes(4096 + 100, 6);
  for (const Crc32cVariant& variant : Crc32cVariants()) {
    const uint32_t whole = variant.function(0, page.data(), page.size());
    for (size_t i = 0; i < page.size(); ++i) {
      const auto bit = static_cast<unsigned char>(1 << (i % 8));
      page[i] ^= bit;
      ASSERT_NE(variant.function(0, page.data(), page.size()), whole);
      page[i] ^= bit;
    }
  }
}

TEST(ChecksumCombine, EqualsTheWholeAtEverySplit) {
  const Bytes data = RandomBytes(3000, 7);
  const uint32_t whole = Crc32c(0, data.data(), data.size());
  for (size_t split = 0; split <= data.size(); ++split) {
    const uint32_t a = Crc32c(0, data.data(), split);
    const uint32_t b = Crc32c(0, data.data() + split, data.size() - split);
    ASSERT_EQ(Crc32cCombine(a, b, data.size() - split), whole);
  }
}

TEST(ChecksumCombine, WorksForLongPieces) {
  // The polynomial is x + 1 times a primitive one of degree 31, so moving a
  // checksum by any multiple of 2^31 - 1 bits is no move at all.
  constexpr uint64_t kPeriod = (uint64_t{1} << 31) - 1;
  const uint32_t a = 0x89ABCDEF;
  const uint32_t b = 0x01234567;
  EXPECT_EQ(Crc32cCombine(a, b, kPeriod), a ^ b);
  EXPECT_EQ(Crc32cCombine(a, b, kPeriod << 32), a ^ b);
  EXPECT_EQ(Crc32cCombine(a, b, kPeriod * ((uint64_t{1} << 33) - 1)), a ^ b);
  EXPECT_EQ(Crc32cCombine(a, b, (kPeriod << 32) + 5), Crc32cCombine(a, b, 5));
  EXPECT_NE(Crc32cCombine(a, b, uint64_t{1} << 63), a ^ b);

  // ... and doing it in two steps is doing it in one, modulo 2^64 or not.
  const uint64_t first = 0x7123456789ABCDEF;
  const uint64_t second = 0x8000000000000001;
  const uint32_t c = 0xDEADBEEF;
  EXPECT_EQ(Crc32cCombine(Crc32cCombine(a, b, first), c, second),
            Crc32cCombine(a, Crc32cCombine(b, c, second), first + second));
}

}  // namespace
}  // namespace cachestore
