// Fuzz target: a whole block file. The record's check, and where the file has a
// block's size a real load of it, must agree with docs/format.md as it is read
// here: by other code, with another checksum.
//
// A checksum keeps a fuzzer out. So each input is tried three times: as it is;
// with the record's checksum put right; with those of the tensors, too.
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <span>

#include "fuzz/fuzz.h"
#include "posix/record.h"
#include "store.h"

namespace cachestore::fuzz {
namespace {

constexpr std::array<uint64_t, 2> kTensorSizes = {100, 37};
constexpr uint64_t kPayload = 137;
constexpr uint64_t kStride = 4096;
constexpr uint64_t kFileSize = kStride + kRecordSize;
constexpr uint8_t kFingerprintByte = 1;
constexpr char kBlockName[] = "000102030405060708090a0b0c0d0e0f";

BlockId Id() {
  BlockId id;
  for (size_t i = 0; i < id.size(); ++i) id[i] = static_cast<uint8_t>(i);
  return id;
}

RecordFormat Format() {
  Fingerprint fingerprint;
  fingerprint.fill(kFingerprintByte);
  BootId boot;
  boot.fill(0xb0);
  return RecordFormat::Make({{kTensorSizes.begin(), kTensorSizes.end()}, kPayload, kPayload},
                            fingerprint, boot)
      .value();
}

// CRC-32C by its definition, a byte at a time.
constexpr std::array<uint32_t, 256> kTable = [] {
  std::array<uint32_t, 256> table = {};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (0x82f63b78u & (0u - (crc & 1u)));
    table[byte] = crc;
  }
  return table;
}();

uint32_t Checksum(std::span<const uint8_t> bytes) {
  uint32_t crc = 0xffffffffu;
  for (const uint8_t byte : bytes) crc = (crc >> 8) ^ kTable[(crc ^ byte) & 0xff];
  return ~crc;
}

uint64_t Number(std::span<const uint8_t> bytes, size_t at, size_t n) {
  uint64_t number = 0;
  for (size_t i = n; i > 0; --i) number = number << 8 | bytes[at + i - 1];
  return number;
}

void PutNumber(std::span<uint8_t> bytes, size_t at, uint32_t number) {
  for (size_t i = 0; i < 4; ++i) bytes[at + i] = static_cast<uint8_t>(number >> (8 * i));
}

// Where docs/format.md puts the checksums of these tensors.
constexpr size_t kChecksumsAt = 112 + 8 * kTensorSizes.size();

bool IsRecord(std::span<const uint8_t> record) {
  const BlockId id = Id();
  return std::memcmp(record.data(), "CSBLOCK1", 8) == 0 &&
         Number(record, 4092, 4) == Checksum(record.first(4092)) && Number(record, 8, 4) == 2 &&
         Number(record, 12, 4) == 4096 &&
         std::all_of(&record[16], &record[48], [](uint8_t b) { return b == kFingerprintByte; }) &&
         std::equal(id.begin(), id.end(), &record[48]) && Number(record, 80, 8) == kPayload &&
         Number(record, 88, 8) == kStride && Number(record, 96, 4) == 1 &&
         Number(record, 100, 4) == 2 && Number(record, 104, 4) == 1 &&
         Number(record, 108, 4) == 0 && Number(record, 112, 8) == 100 &&
         Number(record, 120, 8) == 37;
}

std::array<uint32_t, 2> TensorChecksums(std::span<const uint8_t> file) {
  return {Checksum(file.first(100)), Checksum(file.subspan(100, kStride - 100))};
}

bool IsBlock(std::span<const uint8_t> file) {
  if (file.size() != kFileSize) return false;
  const std::span<const uint8_t> record = file.subspan(kStride);
  const std::array<uint32_t, 2> checksums = TensorChecksums(file);
  return IsRecord(record) && Number(record, kChecksumsAt, 4) == checksums[0] &&
         Number(record, kChecksumsAt + 4, 4) == checksums[1];
}

void Seal(std::span<uint8_t> record) { PutNumber(record, 4092, Checksum(record.first(4092))); }

// A store that lives as long as the process, in a directory in memory.
class LiveStore {
 public:
  static LiveStore& Get() {
    static LiveStore store;
    return store;
  }

  void ExpectLoad(const Bytes& file) {
    {
      std::ofstream out(path_, std::ios::binary | std::ios::trunc);
      out.write(reinterpret_cast<const char*>(file.data()),
                static_cast<std::streamsize>(file.size()));
      Require(static_cast<bool>(out), "the block file is written");
    }
    std::array<uint8_t, kPayload> page = {};
    const BlockId id = Id();
    const uint32_t shard = 0;
    const std::array<uint64_t, 2> addresses = {reinterpret_cast<uintptr_t>(page.data()),
                                               reinterpret_cast<uintptr_t>(page.data() + 100)};
    cs_batch batch = {};
    batch.n = 1;
    batch.block_ids = id.data();
    batch.shard_indices = &shard;
    batch.m = addresses.size();
    batch.addresses = addresses.data();
    batch.sizes = kTensorSizes.data();
    const Result<cs_task> task = store_->Load(batch);
    Require(task.ok(), "a load is accepted");
    int32_t code = -1;
    const Status waited = store_->Wait(task.value(), std::chrono::seconds(30), {&code, 1});
    Require(waited.ok(), "a load ends");
    const bool is_block = IsBlock(file);
    Require(code == (is_block ? CS_OK : CS_CORRUPT), "a load takes a block, and nothing else");
    Require(!is_block || std::equal(page.begin(), page.end(), file.begin()), "its bytes are right");
    Require((access(path_.c_str(), F_OK) == 0) == is_block, "what isn't a block is removed");
    while (store_->NextEvent().has_value()) continue;
  }

 private:
  LiveStore() {
    root_ = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    root_ += "/cachestore-fuzz-XXXXXX";
    Require(mkdtemp(root_.data()) != nullptr, "a directory is made");
    const char* const root = root_.c_str();
    cs_config config = {};
    config.struct_size = sizeof config;
    config.pipeline = "Posix";
    config.storage_backends = &root;
    config.storage_backend_count = 1;
    config.identity_name = "identity";
    config.identity_manifest = "{}";
    std::memset(config.identity_fingerprint, kFingerprintByte, sizeof config.identity_fingerprint);
    config.tensor_sizes = kTensorSizes.data();
    config.tensor_count = kTensorSizes.size();
    config.shard_size = kPayload;
    config.block_size = kPayload;
    config.posix_load_worker_number = 1;
    config.posix_dump_worker_number = 1;
    config.posix_queue_depth = 16;
    config.timeout_ms = 5000;
    config.posix_high_watermark_percent = 97;
    config.posix_low_watermark_percent = 95;
    Result<std::unique_ptr<Store>> opened = Store::Open(config, Env::Real());
    if (!opened.ok()) std::fprintf(stderr, "%s\n", opened.status().text().c_str());
    Require(opened.ok(), "a store opens");
    store_ = std::move(opened.value());
    const std::string directory = root_ + "/identity/blocks/" + std::string(kBlockName, 3);
    Require(Env::Real().MakeDirectories(directory).ok(), "a fan-out directory is made");
    path_ = directory + "/" + kBlockName;
  }
  ~LiveStore() {
    store_->Close();
    (void)Env::Real().RemoveTree(root_, [] { return false; });
  }

  std::string root_;
  std::string path_;
  std::unique_ptr<Store> store_;
};

void TryFile(const Bytes& file) {
  if (file.size() < kRecordSize) return;
  static const RecordFormat format = Format();
  // Of its own size, so that a read behind it is seen.
  const Bytes record(file.end() - kRecordSize, file.end());
  const bool passes = format.Check(Id(), record.data()).ok();
  Require(passes == IsRecord(record), "a record's check says what the format says");
  if (passes) {
    for (size_t i = 0; i < 2; ++i) {
      Require(format.checksum(record.data(), i) == Number(record, kChecksumsAt + 4 * i, 4),
              "a checksum is where the format says");
    }
    (void)format.WrittenInThisBoot(record.data());
  }
  // What can't be a block anyway isn't worth a file, but for some.
  if (passes || Checksum(record) % 16 == 0) LiveStore::Get().ExpectLoad(file);
}

Bytes WholeBlock() {
  Bytes file(kFileSize, 0);
  for (size_t i = 0; i < kPayload; ++i) file[i] = static_cast<uint8_t>(3 * i + 1);
  Format().Encode(Id(), TensorChecksums(file), file.data() + kStride);
  return file;
}

}  // namespace

std::map<std::string, Bytes> Seeds() {
  std::map<std::string, Bytes> seeds;
  const Bytes whole = WholeBlock();
  const auto changed = [&](const char* name, auto change) {
    Bytes bytes = whole;
    change(bytes);
    seeds[name] = std::move(bytes);
  };
  const auto sealed = [&](const char* name, size_t at, uint8_t byte) {
    changed(name, [&](Bytes& bytes) {
      bytes[kStride + at] = byte;
      Seal(std::span(bytes).subspan(kStride));
    });
  };
  seeds["whole"] = whole;
  sealed("version-1", 8, 1);
  sealed("another-record-size", 12, 1);
  sealed("another-identity", 16, 2);
  sealed("another-block", 48, 0xff);
  sealed("another-boot", 64, 0);
  sealed("two-shards", 96, 2);
  sealed("three-tensors", 100, 3);
  sealed("other-sizes", 112, 101);
  changed("record-alone",
          [](Bytes& bytes) { bytes.erase(bytes.begin(), bytes.begin() + kStride); });
  changed("cut-short", [](Bytes& bytes) { bytes.resize(bytes.size() - 1); });
  changed("payload-damaged", [](Bytes& bytes) { bytes[50] ^= 1; });
  changed("padding-damaged", [](Bytes& bytes) { bytes[4000] ^= 1; });
  changed("zeros", [](Bytes& bytes) { std::fill(bytes.begin(), bytes.end(), uint8_t{0}); });
  return seeds;
}

}  // namespace cachestore::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cachestore::fuzz;
  Bytes file(data, data + size);
  TryFile(file);
  if (size < cachestore::kRecordSize) return 0;
  const std::span<uint8_t> record = std::span(file).last(cachestore::kRecordSize);
  Seal(record);
  TryFile(file);
  if (size != kFileSize) return 0;
  const std::array<uint32_t, 2> checksums = TensorChecksums(file);
  for (size_t i = 0; i < 2; ++i) PutNumber(record, kChecksumsAt + 4 * i, checksums[i]);
  Seal(record);
  TryFile(file);
  return 0;
}
