#include "host_copy/copy_kernel.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/checksum.h"
#include "host_copy/copy_kernel_impl.h"

// Streaming stores are intrinsics, which the sanitizers don't see: they are
// told, by the calls that the compiler makes for plain accesses.
#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_read_range(void* address, long size);
extern "C" void __tsan_write_range(void* address, long size);
#elif defined(__SANITIZE_ADDRESS__)
extern "C" void __asan_loadN(void* address, long size);
extern "C" void __asan_storeN(void* address, long size);
#endif

namespace cachestore {
namespace {

using copy_kernel::kLine;

class Variants {
 public:
  Variants() {
    for (const auto& variant : {copy_kernel::Avx512Fused(), copy_kernel::Avx512(),
                                copy_kernel::Avx2(), copy_kernel::Sse2()}) {
      if (variant) list_[size_++] = *variant;
    }
    list_[size_++] = {"memcpy", nullptr, nullptr};
  }

  const CopyVariant& streaming() const { return list_[0]; }
  const CopyVariant& plain() const { return list_[size_ - 1]; }
  std::span<const CopyVariant> all() const { return {list_.data(), size_}; }

  const CopyVariant& For(CopyKernel kernel, size_t n) const {
    const bool stream = kernel == CopyKernel::kStreaming ||
                        (kernel == CopyKernel::kAuto && n >= kStreamingThreshold);
    return stream ? streaming() : plain();
  }

 private:
  std::array<CopyVariant, 5> list_{};  // the fastest first
  size_t size_ = 0;
};

// A function's static: usable from other static initialisers, and initialised
// once under threads.
const Variants& Available() {
  static const Variants variants;
  return variants;
}

void NoteAccesses([[maybe_unused]] void* to, [[maybe_unused]] const void* from,
                  [[maybe_unused]] size_t n) {
#if defined(__SANITIZE_THREAD__)
  __tsan_read_range(const_cast<void*>(from), static_cast<long>(n));
  __tsan_write_range(to, static_cast<long>(n));
#elif defined(__SANITIZE_ADDRESS__)
  __asan_loadN(const_cast<void*>(from), static_cast<long>(n));
  __asan_storeN(to, static_cast<long>(n));
#endif
}

// What is before the target's first whole line.
size_t HeadOf(const uint8_t* to, size_t n) {
  return std::min<size_t>(n, -reinterpret_cast<uintptr_t>(to) % kLine);
}

// Plainly; the checksum is that of what arrived.
uint32_t CopyThenChecksum(uint8_t* to, const uint8_t* from, size_t n, uint32_t crc) {
  if (n == 0) return crc;
  std::memcpy(to, from, n);
  return Crc32c(crc, to, n);
}

// Half of the smallest first-level caches in use (32 KiB): what was read or
// written stays for the second look at it. And the streams' own block size.
constexpr size_t kChunk = size_t{16} << 10;

}  // namespace

void CopyBytes(void* to, const void* from, size_t n, const CopyVariant& variant) {
  if (n == 0) return;  // the pointers may be null then, which memcpy doesn't allow
  if (variant.stream == nullptr) {
    std::memcpy(to, from, n);
    return;
  }
  NoteAccesses(to, from, n);
  auto* out = static_cast<uint8_t*>(to);
  const auto* in = static_cast<const uint8_t*>(from);
  const size_t head = HeadOf(out, n);
  std::memcpy(out, in, head);
  const size_t lines = (n - head) / kLine * kLine;
  variant.stream(out + head, in + head, lines, 0);
  std::memcpy(out + head + lines, in + head + lines, n - head - lines);
  copy_kernel::Fence();
}

void CopyBytes(void* to, const void* from, size_t n, CopyKernel kernel) {
  CopyBytes(to, from, n, Available().For(kernel, n));
}

uint32_t CopyBytesChecksummed(void* to, const void* from, size_t n, uint32_t crc,
                              const CopyVariant& variant) {
  auto* out = static_cast<uint8_t*>(to);
  const auto* in = static_cast<const uint8_t*>(from);
  if (variant.stream == nullptr) {
    for (size_t at = 0; at < n; at += kChunk) {
      crc = CopyThenChecksum(out + at, in + at, std::min(kChunk, n - at), crc);
    }
    return crc;
  }
  NoteAccesses(to, from, n);
  const size_t head = HeadOf(out, n);
  const size_t end = head + (n - head) / kLine * kLine;
  crc = CopyThenChecksum(out, in, head, crc);
  if (variant.stream_checksummed != nullptr) {
    crc = variant.stream_checksummed(out + head, in + head, end - head, crc);
  } else {
    for (size_t at = head; at < end; at += kChunk) {
      const size_t chunk = std::min(kChunk, end - at);
      crc = Crc32c(crc, in + at, chunk);
      // While it stores this one it fetches the next: else the memory would
      // rest from stores during a checksum, and from loads during a copy.
      variant.stream(out + at, in + at, chunk, end - at > kChunk ? kChunk : 0);
    }
  }
  crc = CopyThenChecksum(out + end, in + end, n - end, crc);
  copy_kernel::Fence();
  return crc;
}

uint32_t CopyBytesChecksummed(void* to, const void* from, size_t n, uint32_t crc,
                              CopyKernel kernel) {
  return CopyBytesChecksummed(to, from, n, crc, Available().For(kernel, n));
}

std::string CopyKernelName(CopyKernel kernel) {
  const std::string streaming = Available().streaming().name;
  switch (kernel) {
    case CopyKernel::kStreaming:
      return streaming;
    case CopyKernel::kAuto:
      return "auto: " + streaming + " from " + std::to_string(kStreamingThreshold) + " bytes on";
    case CopyKernel::kMemcpy:
      break;
  }
  return Available().plain().name;
}

std::span<const CopyVariant> CopyVariants() { return Available().all(); }

}  // namespace cachestore
