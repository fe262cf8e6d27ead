// Record: what a stored block says about itself; the last 4096 bytes of its
// file. docs/format.md describes every byte.
#ifndef CACHESTORE_POSIX_RECORD_H_
#define CACHESTORE_POSIX_RECORD_H_

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "posix/boot_id.h"
#include "tier/geometry.h"

namespace cachestore {

inline constexpr uint64_t kRecordSize = 4096;

// Writes and checks the records of one identity. Immutable, so thread-safe.
class RecordFormat {
 public:
  // CS_INVALID if the geometry has more tensors than a record can hold.
  // `boot`: goes into what is written.
  static Result<RecordFormat> Make(const Geometry& geometry, const Fingerprint& fingerprint,
                                   const BootId& boot);

  // `checksums`: one a tensor, shard after shard; that of a shard's last
  // tensor goes on over the shard's padding.
  void Encode(const BlockId& block, std::span<const uint32_t> checksums, uint8_t* record) const;

  // CS_CORRUPT with the reason unless this is a whole record of this format,
  // identity, block and geometry.
  Status Check(const BlockId& block, const uint8_t* record) const;

  // Of a record that passed Check: whether this boot of this host has written
  // it. False if that isn't known.
  bool WrittenInThisBoot(const uint8_t* record) const;
  // Of a record that passed Check. `index` counts tensors, shard after shard.
  uint32_t checksum(const uint8_t* record, uint64_t index) const;

 private:
  // Everything before the checksums, but for the block id.
  std::vector<uint8_t> head_;
  BootId boot_{};
  uint64_t checksum_count_ = 0;
};

}  // namespace cachestore

#endif  // CACHESTORE_POSIX_RECORD_H_
