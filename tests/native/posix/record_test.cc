// The record at the end of a block file: docs/format.md in bytes.
#include "posix/record.h"

#include <cstring>

#include "base/checksum.h"
#include "fixture.h"
#include "harness.h"

namespace cachestore::test {
namespace {

Geometry TwoShards() { return {{100, 37}, 137, 274}; }

Fingerprint Of(uint8_t byte) {
  Fingerprint fingerprint;
  fingerprint.fill(byte);
  return fingerprint;
}

BootId Boot(uint8_t byte) {
  BootId boot;
  boot.fill(byte);
  return boot;
}

RecordFormat Format(const Geometry& geometry = TwoShards(), uint8_t fingerprint = 1,
                    uint8_t boot = 7) {
  Result<RecordFormat> format = RecordFormat::Make(geometry, Of(fingerprint), Boot(boot));
  EXPECT_OK(format);
  return format.value();
}

std::vector<uint8_t> Encoded(const RecordFormat& format, const BlockId& id) {
  std::vector<uint8_t> record(kRecordSize, 0xee);
  const uint32_t checksums[] = {0x11121314, 0x21222324, 0x31323334, 0x41424344};
  format.Encode(id, checksums, record.data());
  return record;
}

uint64_t Number(const std::vector<uint8_t>& record, size_t at, size_t bytes) {
  uint64_t number = 0;
  for (size_t i = 0; i < bytes; ++i) number |= uint64_t{record[at + i]} << (8 * i);
  return number;
}

void Seal(std::vector<uint8_t>& record) {
  const uint32_t checksum = Crc32c(0, record.data(), kRecordSize - 4);
  for (size_t i = 0; i < 4; ++i) {
    record[kRecordSize - 4 + i] = static_cast<uint8_t>(checksum >> (8 * i));
  }
}

}  // namespace

TEST(Record, PassesItsOwnCheck) {
  const RecordFormat format = Format();
  const std::vector<uint8_t> record = Encoded(format, IdOf(1));
  EXPECT_OK(format.Check(IdOf(1), record.data()));
  EXPECT_EQ(format.checksum(record.data(), 0), 0x11121314u);
  EXPECT_EQ(format.checksum(record.data(), 3), 0x41424344u);
}

// What is on disk stays readable: every field has its place.
TEST(Record, FieldsAreWhereTheFormatSays) {
  const std::vector<uint8_t> record = Encoded(Format(), IdOf(1));
  EXPECT_EQ(std::memcmp(record.data(), "CSBLOCK1", 8), 0);
  EXPECT_EQ(Number(record, 8, 4), 2u);      // version
  EXPECT_EQ(Number(record, 12, 4), 4096u);  // record size
  for (size_t i = 16; i < 48; ++i) EXPECT_EQ(record[i], 1);
  EXPECT_EQ(std::memcmp(record.data() + 48, IdOf(1).data(), 16), 0);
  for (size_t i = 64; i < 80; ++i) EXPECT_EQ(record[i], 7);  // the writer's boot
  EXPECT_EQ(Number(record, 80, 8), 274u);                    // payload of the block
  EXPECT_EQ(Number(record, 88, 8), 4096u);                   // from shard to shard
  EXPECT_EQ(Number(record, 96, 4), 2u);                      // shards
  EXPECT_EQ(Number(record, 100, 4), 2u);                     // tensors
  EXPECT_EQ(Number(record, 104, 4), 1u);                     // CRC-32C
  EXPECT_EQ(Number(record, 108, 4), 0u);
  EXPECT_EQ(Number(record, 112, 8), 100u);
  EXPECT_EQ(Number(record, 120, 8), 37u);
  EXPECT_EQ(Number(record, 128, 4), 0x11121314u);
  EXPECT_EQ(Number(record, 140, 4), 0x41424344u);
  for (size_t i = 144; i < 4092; ++i) EXPECT_EQ(record[i], 0);
  EXPECT_EQ(Number(record, 4092, 4), Crc32c(0, record.data(), 4092));
}

// F04: no byte of it may change.
TEST(Record, EveryFlippedByteIsCorrupt) {
  const RecordFormat format = Format();
  std::vector<uint8_t> record = Encoded(format, IdOf(1));
  for (size_t i = 0; i < record.size(); ++i) {
    for (const uint8_t flip : {uint8_t{1}, uint8_t{0x80}, uint8_t{0xff}}) {
      record[i] ^= flip;
      EXPECT_EQ(format.Check(IdOf(1), record.data()).code(), CS_CORRUPT);
      record[i] ^= flip;
    }
  }
  EXPECT_OK(format.Check(IdOf(1), record.data()));
}

TEST(Record, EmptyBytesAreCorrupt) {
  const std::vector<uint8_t> zeros(kRecordSize, 0);
  EXPECT_EQ(Format().Check(IdOf(1), zeros.data()).code(), CS_CORRUPT);
}

// A record of an earlier or a later version is no damage to be read past,
// however whole.
TEST(Record, AnotherVersionIsRefusedBehindARightChecksum) {
  const RecordFormat format = Format();
  for (const uint8_t version : {0, 1, 3, 255}) {
    std::vector<uint8_t> record = Encoded(format, IdOf(1));
    record[8] = version;
    Seal(record);
    const Status status = format.Check(IdOf(1), record.data());
    EXPECT_EQ(status.code(), CS_CORRUPT);
    EXPECT_EQ(status.text(), "format version " + std::to_string(version) + ", not 2");
  }
}

// Whoever wrote it, it is a record; and zeros are no boot, not even one's own.
TEST(Record, SaysWhetherThisBootHasWrittenIt) {
  const std::vector<uint8_t> ours = Encoded(Format(), IdOf(1));
  const std::vector<uint8_t> others = Encoded(Format(TwoShards(), 1, 8), IdOf(1));
  const std::vector<uint8_t> nobodys = Encoded(Format(TwoShards(), 1, 0), IdOf(1));
  for (const auto& record : {ours, others, nobodys}) {
    EXPECT_OK(Format().Check(IdOf(1), record.data()));
    EXPECT_OK(Format(TwoShards(), 1, 0).Check(IdOf(1), record.data()));
    EXPECT_FALSE(Format(TwoShards(), 1, 0).WrittenInThisBoot(record.data()));
  }
  EXPECT_TRUE(Format().WrittenInThisBoot(ours.data()));
  EXPECT_FALSE(Format().WrittenInThisBoot(others.data()));
  EXPECT_FALSE(Format().WrittenInThisBoot(nobodys.data()));
  // Every byte of it counts.
  for (size_t i = 64; i < 80; ++i) {
    std::vector<uint8_t> record = ours;
    record[i] ^= 1;
    EXPECT_FALSE(Format().WrittenInThisBoot(record.data()));
  }
}

// F22, decision 7: whole records that are about something else.
TEST(Record, OtherIdentitiesBlocksAndSizesAreRefused) {
  const RecordFormat format = Format();
  const auto reason = [&](const RecordFormat& written, const BlockId& id) {
    const Status status = format.Check(IdOf(1), Encoded(written, id).data());
    EXPECT_EQ(status.code(), CS_CORRUPT);
    return status.text();
  };
  EXPECT_EQ(reason(Format(TwoShards(), 2), IdOf(1)), "another identity");
  EXPECT_EQ(reason(format, IdOf(2)), "another block");
  EXPECT_EQ(reason(Format({{37, 100}, 137, 274}), IdOf(1)), "other sizes");
  EXPECT_EQ(reason(Format({{100, 36}, 136, 272}), IdOf(1)), "other sizes");
  EXPECT_EQ(reason(Format({{137}, 137, 274}), IdOf(1)), "other sizes");
  EXPECT_EQ(reason(Format({{100, 37}, 137, 137}), IdOf(1)), "other sizes");
}

// c_api.h promises 320 tensors over all shards of a block.
TEST(Record, HoldsWhatItPromisesAndRefusesMore) {
  EXPECT_OK(RecordFormat::Make({std::vector<uint64_t>(320, 1), 320, 320}, Of(1), Boot(7)));
  EXPECT_OK(RecordFormat::Make({{1}, 1, 320}, Of(1), Boot(7)));
  EXPECT_OK(RecordFormat::Make({std::vector<uint64_t>(160, 1), 160, 320}, Of(1), Boot(7)));
  const Result<RecordFormat> most =
      RecordFormat::Make({std::vector<uint64_t>(331, 1), 331, 331}, Of(1), Boot(7));
  ASSERT_OK(most);
  std::vector<uint8_t> record(kRecordSize);
  const std::vector<uint32_t> checksums(331, 5);
  most.value().Encode(IdOf(1), checksums, record.data());
  EXPECT_OK(most.value().Check(IdOf(1), record.data()));
  EXPECT_EQ(most.value().checksum(record.data(), 330), 5u);
  const Result<RecordFormat> too_many =
      RecordFormat::Make({std::vector<uint64_t>(332, 1), 332, 332}, Of(1), Boot(7));
  EXPECT_EQ(too_many.status().code(), CS_INVALID);
  EXPECT_NE(too_many.status().text().find("tensor_count 332"), std::string::npos);
  EXPECT_EQ(RecordFormat::Make({{1}, 1, 1000}, Of(1), Boot(7)).status().code(), CS_INVALID);
}

}  // namespace cachestore::test
