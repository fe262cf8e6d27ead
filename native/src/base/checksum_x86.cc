// CRC-32C on x86-64: the crc32 instruction on three streams at once, and
// carry-less multiplication of 512-bit vectors.
#include "base/checksum_impl.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#define CACHESTORE_TARGET_SSE42 __attribute__((target("sse4.2,crc32,pclmul")))
#define CACHESTORE_TARGET_AVX512 __attribute__((target("sse4.2,crc32,pclmul,avx512f,vpclmulqdq")))

namespace cachestore::crc32c {
namespace {

uint64_t Load64(const unsigned char* from) {
  uint64_t value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

// All of these work on the register, that is the inverted checksum.

CACHESTORE_TARGET_SSE42 inline uint64_t Step64(uint64_t crc, const unsigned char* from) {
  return _mm_crc32_u64(crc, Load64(from));
}

CACHESTORE_TARGET_SSE42 inline uint32_t OneStream(uint32_t crc, const unsigned char* from,
                                                  size_t n) {
  uint64_t wide = crc;
  for (; n >= 8; from += 8, n -= 8) wide = Step64(wide, from);
  crc = static_cast<uint32_t>(wide);
  for (; n > 0; ++from, --n) crc = _mm_crc32_u8(crc, *from);
  return crc;
}

// The factor that moves a register past `bytes` zero bytes when applied by
// ProductOf: a product of two reflected words of 32 bits, read as one of 64,
// stands for x times the true one, and the reduction multiplies by x^32.
constexpr uint32_t StreamShift(uint64_t bytes) { return PowerOfX(8 * bytes - 33); }

CACHESTORE_TARGET_SSE42 inline uint64_t ProductOf(uint64_t crc, uint32_t factor) {
  const __m128i product =
      _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<int64_t>(crc)),
                           _mm_cvtsi64_si128(static_cast<int64_t>(uint64_t{factor})), 0);
  return static_cast<uint64_t>(_mm_cvtsi128_si64(product));
}

// Takes pieces of 3 * kStream bytes while there are any. The instruction takes
// three cycles and one can start in each: three independent streams fill it.
template <size_t kStream>
CACHESTORE_TARGET_SSE42 inline uint32_t ThreeStreams(uint32_t crc, const unsigned char*& from,
                                                     size_t& n) {
  static_assert(kStream % 32 == 0);
  constexpr uint32_t kPastOne = StreamShift(kStream);
  constexpr uint32_t kPastTwo = StreamShift(2 * kStream);
  while (n >= 3 * kStream) {
    uint64_t first = crc;
    uint64_t second = 0;
    uint64_t third = 0;
    const unsigned char* const end = from + kStream;
    for (; from != end; from += 32) {
#pragma GCC unroll 4
      for (size_t i = 0; i < 32; i += 8) {
        first = Step64(first, from + i);
        second = Step64(second, from + kStream + i);
        third = Step64(third, from + 2 * kStream + i);
      }
    }
    const uint64_t moved = ProductOf(first, kPastTwo) ^ ProductOf(second, kPastOne);
    crc = static_cast<uint32_t>(_mm_crc32_u64(0, moved) ^ third);
    from += 2 * kStream;
    n -= 3 * kStream;
  }
  return crc;
}

CACHESTORE_TARGET_SSE42 uint32_t Streams(uint32_t crc, const unsigned char* from, size_t n) {
  crc = ThreeStreams<2048>(crc, from, n);
  crc = ThreeStreams<128>(crc, from, n);
  return OneStream(crc, from, n);
}

CACHESTORE_TARGET_SSE42 uint32_t RunSse42(uint32_t crc, const void* data, size_t n) {
  return ~Streams(~crc, static_cast<const unsigned char*>(data), n);
}

// Folding. A lane of 128 bits with the words `low` (of the higher powers) and
// `high` stands for low * x^64 + high. Moving it `bytes` further into the
// message multiplies it by x^(8 * bytes); low * Factor(8 * bytes + 64) + high *
// Factor(8 * bytes) is congruent to that, fits the lane again, and is added to
// what stands there. The factors are one power short as the product of two
// reflected words of 64 bits, read as one of 128, stands for x times the true
// one.
constexpr long long Factor(uint64_t power) {
  return static_cast<long long>(uint64_t{PowerOfX(power - 1)} << 32);
}

template <uint64_t kBytes>
CACHESTORE_TARGET_AVX512 inline __m512i FoldBy() {
  constexpr long long kLow = Factor(8 * kBytes + 64);
  constexpr long long kHigh = Factor(8 * kBytes);
  return _mm512_set_epi64(kHigh, kLow, kHigh, kLow, kHigh, kLow, kHigh, kLow);
}

CACHESTORE_TARGET_AVX512 inline __m512i Fold(__m512i value, __m512i factors, __m512i onto) {
  const __m512i low = _mm512_clmulepi64_epi128(value, factors, 0x00);
  const __m512i high = _mm512_clmulepi64_epi128(value, factors, 0x11);
  constexpr int kXorOfThree = 0x96;
  return _mm512_ternarylogic_epi64(low, high, onto, kXorOfThree);
}

CACHESTORE_TARGET_AVX512 inline uint32_t Reduce(__m512i value) {
  // Each lane goes to where the last one is, which stays.
  const __m512i factors =
      _mm512_set_epi64(0, 0, Factor(8 * 16), Factor(8 * 16 + 64), Factor(8 * 32),
                       Factor(8 * 32 + 64), Factor(8 * 48), Factor(8 * 48 + 64));
  const __m512i lanes = Fold(value, factors, _mm512_maskz_mov_epi64(0xC0, value));
  uint64_t words[8];
  _mm512_storeu_si512(words, lanes);
  const uint64_t crc = _mm_crc32_u64(0, words[0] ^ words[2] ^ words[4] ^ words[6]);
  return static_cast<uint32_t>(_mm_crc32_u64(crc, words[1] ^ words[3] ^ words[5] ^ words[7]));
}

constexpr size_t kVector = 64;
// Independent vectors in flight: a multiplication takes some eight cycles, and
// a vector needs two of them, one of which can start in each cycle.
constexpr size_t kVectors = 8;
constexpr size_t kStride = kVectors * kVector;

CACHESTORE_TARGET_AVX512 uint32_t RunAvx512(uint32_t crc, const void* data, size_t n) {
  const auto* from = static_cast<const unsigned char*>(data);
  crc = ~crc;
  if (n < kStride) return ~Streams(crc, from, n);

  // Loads that straddle cache lines cost a quarter of the rate; short runs don't repay the
  // way to the next line.
  if (n >= 4 * kStride) {
    const size_t head = -reinterpret_cast<uintptr_t>(from) % kVector;
    crc = OneStream(crc, from, head);
    from += head;
    n -= head;
  }

  __m512i values[kVectors];
#pragma GCC unroll 8
  for (size_t i = 0; i < kVectors; ++i) values[i] = _mm512_loadu_si512(from + i * kVector);
  // What came before is added to the first bytes.
  values[0] = _mm512_xor_si512(
      values[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int32_t>(crc))));
  from += kStride;
  n -= kStride;

  const __m512i by_stride = FoldBy<kStride>();
  for (; n >= kStride; from += kStride, n -= kStride) {
#pragma GCC unroll 8
    for (size_t i = 0; i < kVectors; ++i) {
      values[i] = Fold(values[i], by_stride, _mm512_loadu_si512(from + i * kVector));
    }
  }

  static_assert(kVectors == 8);
#pragma GCC unroll 8
  for (size_t i = 0; i < 4; ++i) values[i] = Fold(values[i], FoldBy<4 * kVector>(), values[i + 4]);
#pragma GCC unroll 8
  for (size_t i = 0; i < 2; ++i) values[i] = Fold(values[i], FoldBy<2 * kVector>(), values[i + 2]);
  const __m512i by_vector = FoldBy<kVector>();
  __m512i value = Fold(values[0], by_vector, values[1]);
  for (; n >= kVector; from += kVector, n -= kVector) {
    value = Fold(value, by_vector, _mm512_loadu_si512(from));
  }
  return ~OneStream(Reduce(value), from, n);
}

bool CanRunSse42() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
}

// The AVX-512 bits are set only if the operating system saves the registers.
bool CanRunAvx512() {
  return CanRunSse42() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
}

}  // namespace

std::optional<Crc32cVariant> Sse42() {
  if (!CanRunSse42()) return std::nullopt;
  return Crc32cVariant{"sse4.2", RunSse42};
}

std::optional<Crc32cVariant> Avx512() {
  if (!CanRunAvx512()) return std::nullopt;
  return Crc32cVariant{"avx512", RunAvx512};
}

}  // namespace cachestore::crc32c

#else

namespace cachestore::crc32c {

std::optional<Crc32cVariant> Sse42() { return std::nullopt; }
std::optional<Crc32cVariant> Avx512() { return std::nullopt; }

}  // namespace cachestore::crc32c

#endif
