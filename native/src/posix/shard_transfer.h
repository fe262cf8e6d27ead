// What loading and dumping a shard share: the calls that move it.
#ifndef CACHESTORE_POSIX_SHARD_TRANSFER_H_
#define CACHESTORE_POSIX_SHARD_TRANSFER_H_

#include <cstdint>
#include <span>
#include <vector>

#include "base/checksum.h"
#include "posix/shard_io.h"

namespace cachestore {

struct ShardIo::Transfer {
  Directory& directory;
  const BlockId& block;
  uint32_t index;                     // of the shard in its block
  bool direct;                        // O_DIRECT
  std::span<uint8_t* const> tensors;  // the bytes: the caller's or ours
  uint8_t* padding;                   // stride - payload bytes, ours
  uint8_t* record;                    // kRecordSize bytes, ours
};

// What one vectored call moves.
struct ShardIo::Piece {
  struct Range {
    uint8_t* data;
    uint64_t size;
    size_t tensor;  // whose checksum it counts for; kNoTensor: none
  };
  static constexpr size_t kNoTensor = SIZE_MAX;

  std::vector<Range> ranges;
  uint64_t offset = 0;  // in the file
  uint64_t size = 0;

  void Add(uint8_t* data, uint64_t n, size_t tensor) {
    if (n > 0) ranges.push_back({data, n, tensor});
    size += n;
  }
  std::vector<iovec> Vector() const {
    std::vector<iovec> parts;
    for (const Range& range : ranges) {
      // What lies together is one part: a bounced shard is one, as O_DIRECT wants it.
      if (!parts.empty() &&
          static_cast<uint8_t*>(parts.back().iov_base) + parts.back().iov_len == range.data) {
        parts.back().iov_len += range.size;
      } else {
        parts.push_back({range.data, range.size});
      }
    }
    return parts;
  }
  void Checksum(std::span<uint32_t> checksums) const {
    for (const Range& range : ranges) {
      if (range.tensor == kNoTensor) continue;
      checksums[range.tensor] = Crc32c(checksums[range.tensor], range.data, range.size);
    }
  }
};

// Where the tensors of a shard lie in one contiguous piece of memory.
inline std::vector<uint8_t*> Consecutive(const Geometry& geometry, uint8_t* memory) {
  std::vector<uint8_t*> tensors;
  for (const uint64_t size : geometry.tensor_sizes) {
    tensors.push_back(memory);
    memory += size;
  }
  return tensors;
}

}  // namespace cachestore

#endif  // CACHESTORE_POSIX_SHARD_TRANSFER_H_
