#include "host_copy/copy_kernel.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/checksum.h"
#include "harness.h"

namespace cachestore::test {
namespace {

using Bytes = std::vector<uint8_t>;

constexpr size_t kAlignment = 4096;
constexpr size_t kGuard = 256;
constexpr uint8_t kGuardByte = 0xA5;

Bytes RandomBytes(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  Bytes bytes(size);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

// A source and a target, at any skew from a page, the target between guards.
class Buffers {
 public:
  explicit Buffers(size_t largest)
      : source_(RandomBytes(largest + 2 * kAlignment, 1)),
        target_(largest + 2 * kAlignment + 2 * kGuard) {}

  const uint8_t* source(size_t skew) const { return Align(source_.data()) + skew; }
  uint8_t* target(size_t skew) {
    return const_cast<uint8_t*>(Align(target_.data() + kGuard)) + skew;
  }

  // Fills the target and its guards with one byte.
  void Poison(size_t skew, size_t n) {
    std::memset(target(skew) - kGuard, kGuardByte, n + 2 * kGuard);
  }

  // The copy is there, and nothing around it.
  bool Check(const std::string& what, size_t from, size_t to, size_t n) {
    const uint8_t* const copy = target(to);
    if (std::memcmp(copy, source(from), n) == 0 && IsGuard(copy - kGuard) && IsGuard(copy + n)) {
      return true;
    }
    std::string text = what + ": " + std::to_string(n) + " bytes from skew " +
                       std::to_string(from) + " to skew " + std::to_string(to);
    for (size_t i = 0; i < n + 2 * kGuard; ++i) {
      const bool inside = i >= kGuard && i < kGuard + n;
      const uint8_t expected = inside ? source(from)[i - kGuard] : kGuardByte;
      const uint8_t actual = *(copy - kGuard + i);
      if (actual == expected) continue;
      text += ": byte " + std::to_string(static_cast<int64_t>(i) - static_cast<int64_t>(kGuard)) +
              " is " + std::to_string(actual) + ", not " + std::to_string(expected);
      break;
    }
    Fail(__FILE__, __LINE__, text);
    return false;
  }

  bool Try(const CopyVariant& variant, size_t from, size_t to, size_t n) {
    Poison(to, n);
    CopyBytes(target(to), source(from), n, variant);
    return Check(variant.name, from, to, n);
  }

  bool TryChecksummed(const CopyVariant& variant, size_t from, size_t to, size_t n, uint32_t seed) {
    Poison(to, n);
    const uint32_t crc = CopyBytesChecksummed(target(to), source(from), n, seed, variant);
    if (!Check(std::string(variant.name) + " checksummed", from, to, n)) return false;
    if (crc == Crc32c(seed, source(from), n)) return true;
    Fail(__FILE__, __LINE__,
         std::string(variant.name) + ": wrong checksum of " + std::to_string(n) +
             " bytes from skew " + std::to_string(from) + " to skew " + std::to_string(to));
    return false;
  }

 private:
  static const uint8_t* Align(const uint8_t* p) {
    return p + -reinterpret_cast<uintptr_t>(p) % kAlignment;
  }

  static bool IsGuard(const uint8_t* p) {
    static const Bytes guard(kGuard, kGuardByte);
    return std::memcmp(p, guard.data(), kGuard) == 0;
  }

  Bytes source_;
  Bytes target_;
};

// Each size where a kernel changes its step, and those beside it.
std::vector<size_t> SizesAroundSteps() {
  std::vector<size_t> sizes;
  for (const size_t step : {256, 4096, 8192, 16384, 32768, 49152, 65536, 1 << 20}) {
    for (const int beside : {-65, -64, -63, -33, -16, -1, 0, 1, 15, 63, 64, 65, 127}) {
      sizes.push_back(step + static_cast<size_t>(static_cast<ptrdiff_t>(beside)));
    }
  }
  return sizes;
}

constexpr size_t kLargest = (size_t{4} << 20) + 128;

}  // namespace

// Every kernel, all sizes of some vectors, at every skew of either side by turns.
TEST(CopyKernel, SmallCopiesEqualTheirSource) {
  Buffers buffers(256);
  for (const CopyVariant& variant : CopyVariants()) {
    size_t turn = 0;
    for (size_t n = 0; n <= 200; ++n) {
      for (size_t skew = n % 3; skew < 128; skew += 3) {
        const size_t other = turn++ * 37 % 128;
        ASSERT_TRUE(buffers.Try(variant, other, skew, n));
        ASSERT_TRUE(buffers.TryChecksummed(variant, skew, other, n, static_cast<uint32_t>(turn)));
      }
    }
  }
}

TEST(CopyKernel, CopiesAroundEachStepEqualTheirSource) {
  Buffers buffers((size_t{1} << 20) + 256);
  std::mt19937 random(2);
  for (const CopyVariant& variant : CopyVariants()) {
    for (const size_t n : SizesAroundSteps()) {
      for (size_t i = 0; i < 2; ++i) {
        ASSERT_TRUE(buffers.Try(variant, random() % 128, random() % 128, n));
        ASSERT_TRUE(
            buffers.TryChecksummed(variant, random() % 128, i * (random() % 128), n, random()));
      }
    }
  }
}

TEST(CopyKernel, LargeCopiesEqualTheirSource) {
  Buffers buffers(kLargest);
  std::mt19937 random(3);
  for (const CopyVariant& variant : CopyVariants()) {
    for (int i = 0; i < 3; ++i) {
      const size_t n = kLargest - random() % (size_t{3} << 20);
      ASSERT_TRUE(buffers.Try(variant, random() % 128, random() % 128, n));
      ASSERT_TRUE(buffers.TryChecksummed(variant, random() % 128, random() % 128, n, random()));
    }
  }
}

// Either side of the threshold of kAuto, and the other kernels by name.
TEST(CopyKernel, EveryKernelCopies) {
  Buffers buffers(4 * kStreamingThreshold);
  for (const CopyKernel kernel : {CopyKernel::kAuto, CopyKernel::kMemcpy, CopyKernel::kStreaming}) {
    for (const size_t n : {size_t{0}, size_t{1}, kStreamingThreshold - 1, kStreamingThreshold,
                           3 * kStreamingThreshold + 5}) {
      buffers.Poison(7, n);
      CopyBytes(buffers.target(7), buffers.source(3), n, kernel);
      ASSERT_TRUE(buffers.Check(CopyKernelName(kernel), 3, 7, n));
      buffers.Poison(9, n);
      EXPECT_EQ(CopyBytesChecksummed(buffers.target(9), buffers.source(4), n, 5, kernel),
                Crc32c(5, buffers.source(4), n));
      ASSERT_TRUE(buffers.Check(CopyKernelName(kernel), 4, 9, n));
    }
  }
}

TEST(CopyKernel, NothingMayBeNull) {
  for (const CopyVariant& variant : CopyVariants()) {
    CopyBytes(nullptr, nullptr, 0, variant);
    EXPECT_EQ(CopyBytesChecksummed(nullptr, nullptr, 0, 77, variant), 77u);
  }
}

TEST(CopyKernel, NamesAndOrder) {
  const auto variants = CopyVariants();
  EXPECT_EQ(std::string(variants.back().name), "memcpy");
  EXPECT_TRUE(variants.back().stream == nullptr);
  EXPECT_EQ(CopyKernelName(CopyKernel::kMemcpy), "memcpy");
  EXPECT_EQ(CopyKernelName(CopyKernel::kStreaming), variants.front().name);
  EXPECT_EQ(CopyKernelName(CopyKernel::kAuto),
            "auto: " + std::string(variants.front().name) + " from 16384 bytes on");
#if defined(__x86_64__)
  EXPECT_TRUE(variants.front().stream != nullptr);
#endif
}

// A release-store after a copy publishes it. (On hardware a missing fence is
// seen but seldom; under TSan a copy that it isn't told of is no race.)
TEST(CopyKernel, AReleaseStorePublishesTheCopy) {
  constexpr size_t kSize = 64 << 10;
  for (const CopyVariant& variant : CopyVariants()) {
    const Bytes source[2] = {Bytes(kSize, 1), Bytes(kSize, 2)};
    Bytes target(kSize, 2);
    std::atomic<uint32_t> turn{0};  // even: the writer's, odd: the reader's
    std::atomic<bool> right{true};
    constexpr uint32_t kTurns = 200;
    std::thread reader([&] {
      for (uint32_t i = 1; i < kTurns; i += 2) {
        while (turn.load(std::memory_order_acquire) != i) std::this_thread::yield();
        if (target != source[i / 2 % 2]) right = false;
        turn.store(i + 1, std::memory_order_release);
      }
    });
    for (uint32_t i = 0; i < kTurns; i += 2) {
      while (turn.load(std::memory_order_acquire) != i) std::this_thread::yield();
      CopyBytes(target.data(), source[i / 2 % 2].data(), kSize, variant);
      turn.store(i + 1, std::memory_order_release);
    }
    reader.join();
    EXPECT_TRUE(right.load());
  }
}

}  // namespace cachestore::test
