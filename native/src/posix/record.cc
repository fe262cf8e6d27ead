#include "posix/record.h"

#include <cstring>
#include <string>

#include "base/aligned_buffer.h"
#include "base/checksum.h"

namespace cachestore {
namespace {

constexpr char kMagic[] = "CSBLOCK1";  // 8 bytes and an unused 0
constexpr uint32_t kVersion = 2;
constexpr uint32_t kChecksumKindCrc32c = 1;

// Offsets; all numbers are little-endian.
constexpr uint64_t kVersionAt = 8;
constexpr uint64_t kRecordSizeAt = 12;
constexpr uint64_t kFingerprintAt = 16;
constexpr uint64_t kBlockIdAt = 48;
constexpr uint64_t kBootIdAt = 64;
constexpr uint64_t kGeometryAt = 80;
constexpr uint64_t kTensorSizesAt = 112;
constexpr uint64_t kRecordChecksumAt = kRecordSize - 4;

template <typename Number>
void Put(std::vector<uint8_t>& out, Number number) {
  for (size_t i = 0; i < sizeof number; ++i) out.push_back(static_cast<uint8_t>(number >> (8 * i)));
}

void Put32(uint8_t* at, uint32_t number) {
  for (int i = 0; i < 4; ++i) at[i] = static_cast<uint8_t>(number >> (8 * i));
}

uint32_t Get32(const uint8_t* at) {
  uint32_t number = 0;
  for (int i = 0; i < 4; ++i) number |= static_cast<uint32_t>(at[i]) << (8 * i);
  return number;
}

}  // namespace

Result<RecordFormat> RecordFormat::Make(const Geometry& geometry, const Fingerprint& fingerprint,
                                        const BootId& boot) {
  RecordFormat format;
  format.boot_ = boot;
  const uint64_t tensors = geometry.tensor_sizes.size();
  format.checksum_count_ = geometry.shards() * tensors;
  const uint64_t needed = kTensorSizesAt + 8 * tensors + 4 * format.checksum_count_;
  if (needed > kRecordChecksumAt) {
    return Status(CS_INVALID, "tensor_count " + std::to_string(tensors) + " with " +
                                  std::to_string(geometry.shards()) +
                                  " shards a block: a block's record has no room for so many");
  }
  std::vector<uint8_t>& head = format.head_;
  head.assign(kMagic, kMagic + kVersionAt);
  Put(head, kVersion);
  Put(head, static_cast<uint32_t>(kRecordSize));
  head.insert(head.end(), fingerprint.begin(), fingerprint.end());
  head.resize(kBootIdAt);  // the block id's place
  head.insert(head.end(), boot.begin(), boot.end());
  Put(head, geometry.payload() * geometry.shards());
  Put(head, AlignUp(geometry.shard_size));
  Put(head, static_cast<uint32_t>(geometry.shards()));
  Put(head, static_cast<uint32_t>(tensors));
  Put(head, kChecksumKindCrc32c);
  Put(head, uint32_t{0});
  for (const uint64_t size : geometry.tensor_sizes) Put(head, size);
  return format;
}

void RecordFormat::Encode(const BlockId& block, std::span<const uint32_t> checksums,
                          uint8_t* record) const {
  std::memcpy(record, head_.data(), head_.size());
  std::memcpy(record + kBlockIdAt, block.data(), block.size());
  uint64_t at = head_.size();
  for (const uint32_t checksum : checksums) {
    Put32(record + at, checksum);
    at += 4;
  }
  std::memset(record + at, 0, kRecordChecksumAt - at);
  Put32(record + kRecordChecksumAt, Crc32c(0, record, kRecordChecksumAt));
}

Status RecordFormat::Check(const BlockId& block, const uint8_t* record) const {
  if (std::memcmp(record, kMagic, kVersionAt) != 0) return {CS_CORRUPT, "no block record"};
  if (Get32(record + kRecordChecksumAt) != Crc32c(0, record, kRecordChecksumAt)) {
    return {CS_CORRUPT, "damaged record"};
  }
  if (const uint32_t version = Get32(record + kVersionAt); version != kVersion) {
    return {CS_CORRUPT,
            "format version " + std::to_string(version) + ", not " + std::to_string(kVersion)};
  }
  if (Get32(record + kRecordSizeAt) != kRecordSize) return {CS_CORRUPT, "other sizes"};
  if (std::memcmp(record + kFingerprintAt, head_.data() + kFingerprintAt, 32) != 0) {
    return {CS_CORRUPT, "another identity"};
  }
  if (std::memcmp(record + kBlockIdAt, block.data(), block.size()) != 0) {
    return {CS_CORRUPT, "another block"};
  }
  if (std::memcmp(record + kGeometryAt, head_.data() + kGeometryAt, head_.size() - kGeometryAt) !=
      0) {
    return {CS_CORRUPT, "other sizes"};
  }
  return Status::Ok();
}

bool RecordFormat::WrittenInThisBoot(const uint8_t* record) const {
  return boot_ != BootId{} && std::memcmp(record + kBootIdAt, boot_.data(), boot_.size()) == 0;
}

uint32_t RecordFormat::checksum(const uint8_t* record, uint64_t index) const {
  return Get32(record + head_.size() + 4 * index);
}

}  // namespace cachestore
