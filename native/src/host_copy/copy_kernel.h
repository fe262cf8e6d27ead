// Copies between host buffers: memcpy, or streaming (non-temporal) stores.
//
// A plain store first reads the line it is about to overwrite. A streaming one
// doesn't, which saves a third of the memory traffic, and leaves the caches to
// others; a target that is read again at once is then read from memory.
//
// Streaming stores are weakly ordered: a release-store doesn't wait for them.
// So every function here ends with a fence where it used any, after which a
// release-store of the calling thread publishes the bytes as it would those of
// plain stores. Nobody else may read the target before that.
//
// The ranges must not overlap; no alignment is asked for. The streaming kernel
// is the fastest that the CPU and the operating system allow, chosen once, at
// the first use; other CPUs than x86-64 have none, and memcpy stands in. All
// functions are thread-safe.
#ifndef CACHESTORE_HOST_COPY_COPY_KERNEL_H_
#define CACHESTORE_HOST_COPY_COPY_KERNEL_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace cachestore {

enum class CopyKernel : uint8_t {
  kAuto,  // streaming from kStreamingThreshold bytes on
  kMemcpy,
  kStreaming,
};

// The least that the streaming kernels copy four pages side by side. Measured
// from and to memory outside the caches, one thread, GB/s, memcpy and AVX-512
// streaming: 4 KiB 4.9 and 4.6; 8 KiB 5.1 and 5.3; 16 KiB 7.1 and 10.0;
// 64 KiB 6.4 and 11.3; 1 MiB 6.2 and 11.0; 4.4 MiB 7.0 and 11.0. Where the
// target goes into write(2) at once, still in the cache after memcpy, the two
// are equal at 16 KiB, and streaming is a tenth faster from 1 MiB on.
inline constexpr size_t kStreamingThreshold = size_t{16} << 10;

void CopyBytes(void* to, const void* from, size_t n, CopyKernel kernel);

// The same, and returns the CRC-32C of some data followed by these n bytes, crc
// being that of the data before, 0 of none (base/checksum.h).
//
// The source is read from memory once. Somebody who writes to it meanwhile may
// make the checksum wrong for the copy (kernels without checksum of their own
// read it from the cache twice): then whoever verifies the copy finds out.
uint32_t CopyBytesChecksummed(void* to, const void* from, size_t n, uint32_t crc,
                              CopyKernel kernel);

// What the kernel comes to on this machine, to be shown: "memcpy", "avx512",
// "auto: avx512 from 16384 bytes on".
std::string CopyKernelName(CopyKernel kernel);

// For tests and benchmarks: one way to copy.
struct CopyVariant {
  const char* name;
  // Both copy n bytes, a multiple of 64, to an address that is one, too, without
  // a fence. Null: memcpy. While copying, `stream` asks for the source from
  // `ahead` bytes on to be brought into the cache.
  void (*stream)(uint8_t* to, const uint8_t* from, size_t n, size_t ahead);
  // With the checksum in one pass, as above. Null: Crc32c, then `stream`.
  uint32_t (*stream_checksummed)(uint8_t* to, const uint8_t* from, size_t n, uint32_t crc);
};

// Those that can run here: streaming, the one in use first; memcpy last.
std::span<const CopyVariant> CopyVariants();

void CopyBytes(void* to, const void* from, size_t n, const CopyVariant& variant);
uint32_t CopyBytesChecksummed(void* to, const void* from, size_t n, uint32_t crc,
                              const CopyVariant& variant);

}  // namespace cachestore

#endif  // CACHESTORE_HOST_COPY_COPY_KERNEL_H_
