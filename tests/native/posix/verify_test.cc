// Whose bytes a load checks, and what it checks whatever the settings say.
#include <algorithm>
#include <cstring>
#include <filesystem>

#include "base/checksum.h"
#include "fixture.h"
#include "harness.h"
#include "posix/boot_id.h"
#include "posix/record.h"
#include "posix/stored_block.h"

namespace cachestore::test {
namespace {

constexpr uint64_t kPiece = 128 * 1024;  // kPieceSize of shard_io.cc

struct How {
  const char* name;
  cs_zero_copy zero_copy;
  bool direct;
};
constexpr How kHows[] = {{"zero-copy", CS_ZERO_COPY_ALWAYS, false},
                         {"bounced", CS_ZERO_COPY_NEVER, false},
                         {"direct", CS_ZERO_COPY_ALWAYS, true}};

void Seal(std::vector<uint8_t>& file) {
  uint8_t* const record = file.data() + file.size() - kRecordSize;
  const uint32_t checksum = Crc32c(0, record, kRecordSize - 4);
  for (size_t i = 0; i < 4; ++i) {
    record[kRecordSize - 4 + i] = static_cast<uint8_t>(checksum >> (8 * i));
  }
}

// The same block as another boot, or another host, would have written it.
std::vector<uint8_t> OfBoot(std::vector<uint8_t> file, const BootId& boot) {
  std::memcpy(file.data() + file.size() - kRecordSize + 64, boot.data(), boot.size());
  Seal(file);
  return file;
}

BootId AnotherBoot() {
  BootId boot = ReadBootId(Env::Real());
  boot[15] ^= 1;
  return boot;
}

struct Stored : StoredBlock {
  explicit Stored(cs_verify verify, const How& how = kHows[0], uint32_t shards = 1,
                  std::vector<uint64_t> sizes = {100, 37})
      : StoredBlock(Of(verify, how, shards, std::move(sizes))) {}

  static StoreSetup Of(cs_verify verify, const How& how, uint32_t shards,
                       std::vector<uint64_t> sizes) {
    StoreSetup setup;
    setup.verify = verify;
    setup.zero_copy = how.zero_copy;
    setup.direct = how.direct;
    setup.shards = shards;
    setup.tensor_sizes = std::move(sizes);
    return setup;
  }

  // What a load of all shards gives with these bytes in the file's place.
  Codes LoadOf(const std::vector<uint8_t>& file) {
    WriteFile(path, file);
    pages->Poison();
    Codes codes = LoadAll(*store, *pages);
    while (store->NextEvent().has_value()) continue;
    return codes;
  }
  uint64_t skipped() { return store->Stats().verify_skipped; }
};

std::vector<uint8_t> Flipped(std::vector<uint8_t> bytes, size_t at) {
  bytes[at] ^= 0x20;
  return bytes;
}

}  // namespace

TEST(BootId, IsThatOfTheKernel) {
  const std::vector<uint8_t> text = ReadFile("/proc/sys/kernel/random/boot_id");
  ASSERT_EQ(text.size(), 37u);
  const BootId boot = ReadBootId(Env::Real());
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string digits;
  for (const uint8_t byte : boot) {
    digits += kDigits[byte >> 4];
    digits += kDigits[byte & 15];
  }
  std::string expected(text.begin(), text.end() - 1);
  expected.erase(std::remove(expected.begin(), expected.end(), '-'), expected.end());
  EXPECT_EQ(digits, expected);
  EXPECT_TRUE(boot != BootId{});
}

// No /proc, or something else there: no boot at all.
TEST(BootId, IsZerosIfItCantBeRead) {
  FaultEnv env;
  for (const Op op : {Op::kOpenRead, Op::kReadFull}) {
    env.Before(op, Failing(CS_IO));
    EXPECT_TRUE(ReadBootId(env) == BootId{});
    env.NoHooks();
  }
  for (const uint64_t limit : {0, 1, 35}) {
    env.Before(Op::kReadFull, [limit](FaultEnv::Call& call) {
      call.limit = limit;
      return Status::Ok();
    });
    EXPECT_TRUE(ReadBootId(env) == BootId{});
  }
  env.NoHooks();
  EXPECT_TRUE(ReadBootId(env) != BootId{});
}

TEST(Verify, AlwaysSkipsNothing) {
  for (const How& how : kHows) {
    Stored stored(CS_VERIFY_ALWAYS, how, 2);
    EXPECT_TRUE(stored.LoadOf(stored.bytes) == Repeated(2, CS_OK));
    EXPECT_TRUE(stored.LoadOf(Flipped(stored.bytes, 4096 + 130))[1] == CS_CORRUPT);
    EXPECT_EQ(stored.skipped(), 0u);
  }
}

// That bytes go by unchecked shows in what is served: a flipped one.
TEST(Verify, NeverTakesWhatThisBootWrote) {
  for (const How& how : kHows) {
    for (const uint32_t shards : {1u, 3u}) {
      Stored stored(CS_VERIFY_NEVER, how, shards, {kPiece - 50, 200, kPiece + 5000, 37});
      EXPECT_TRUE(stored.LoadOf(stored.bytes) == Repeated(shards, CS_OK));
      EXPECT_TRUE(stored.pages->HoldsAll());
      EXPECT_TRUE(stored.pages->GuardsIntact());
      EXPECT_EQ(stored.skipped(), shards);
      EXPECT_TRUE(stored.LoadOf(Flipped(stored.bytes, kPiece)) == Repeated(shards, CS_OK));
      EXPECT_FALSE(stored.pages->Holds(0));
      EXPECT_EQ(stored.skipped(), 2 * shards);
    }
  }
}

// Whatever was written before a power cut, or by another host, is checked in full.
TEST(Verify, WhatAnotherBootWroteIsChecked) {
  for (const cs_verify verify : {CS_VERIFY_NEVER, CS_VERIFY_SAMPLE}) {
    for (const How& how : kHows) {
      for (const BootId& boot : {AnotherBoot(), BootId{}}) {
        Stored stored(verify, how, 1, {kPiece - 50, 200, kPiece + 5000, 37});
        const std::vector<uint8_t> other = OfBoot(stored.bytes, boot);
        EXPECT_TRUE(stored.LoadOf(other) == Repeated(1, CS_OK));
        EXPECT_TRUE(stored.pages->HoldsAll());
        // Around every seam, and the padding.
        const uint64_t payload = stored.setup.payload();
        for (const uint64_t at : {uint64_t{0}, kPiece - 51, kPiece - 50, kPiece - 1, kPiece,
                                  kPiece + 150, 2 * kPiece - 1, 2 * kPiece, payload - 1, payload,
                                  stored.setup.file_size() - kRecordSize - 1}) {
          EXPECT_TRUE(stored.LoadOf(Flipped(other, at)) == Repeated(1, CS_CORRUPT));
          EXPECT_FALSE(IsPresent(*stored.store, IdOf(1)));
        }
        EXPECT_EQ(stored.skipped(), 0u);
        EXPECT_TRUE(stored.LoadOf(other) == Repeated(1, CS_OK));
      }
    }
  }
}

// Each shard of a block of several is judged for itself.
TEST(Verify, EveryShardOfAnotherBootIsChecked) {
  Stored stored(CS_VERIFY_NEVER, kHows[0], 3);
  const std::vector<uint8_t> other = OfBoot(stored.bytes, AnotherBoot());
  for (size_t shard = 0; shard < 3; ++shard) {
    WriteFile(stored.path, Flipped(other, 4096 * shard + 130));
    const Result<cs_task> task = stored.store->Load(stored.pages->part(shard, 1));
    EXPECT_TRUE(WaitFor(*stored.store, task.value(), 1) == Repeated(1, CS_CORRUPT));
  }
  EXPECT_EQ(stored.skipped(), 0u);
}

// Record, length, block and identity cost nothing to check.
TEST(Verify, TheRecordIsCheckedWhateverTheSettings) {
  for (const uint32_t shards : {1u, 2u}) {
    Stored stored(CS_VERIFY_NEVER, kHows[0], shards);
    const auto expect_miss = [&](const std::vector<uint8_t>& file, size_t at) {
      const Codes codes = stored.LoadOf(file);
      // Shards that find the file set aside already are absent.
      const bool misses = std::all_of(codes.begin(), codes.end(), [](int32_t code) {
        return code == CS_CORRUPT || code == CS_NOT_FOUND;
      });
      if (!misses) Fail(__FILE__, __LINE__, "a change at " + std::to_string(at));
      EXPECT_FALSE(IsPresent(*stored.store, IdOf(1)));
    };
    const size_t size = stored.bytes.size();
    for (size_t at = size - kRecordSize; at < size; at += at < size - kRecordSize + 160 ? 1 : 97) {
      expect_miss(Flipped(stored.bytes, at), at);
    }
    for (const size_t length : {size_t{0}, size_t{4096}, size - 1, size + 1, size + 4096}) {
      std::vector<uint8_t> file = stored.bytes;
      file.resize(length);
      expect_miss(file, length);
    }
    // Whole records of something else: version, record size, fingerprint, id, geometry.
    for (const size_t field : {8, 12, 16, 48, 80, 88, 96, 100, 104, 108, 112, 120}) {
      std::vector<uint8_t> file = Flipped(stored.bytes, size - kRecordSize + field);
      Seal(file);
      expect_miss(file, field);
    }
    EXPECT_EQ(stored.skipped(), 0u);
  }
}

// A host whose boot can't be told has none: nobody trusts what it writes unseen,
// itself included.
TEST(Verify, WithoutABootEverythingIsChecked) {
  const TempDir root;
  StoreSetup setup({root.path()});
  setup.verify = CS_VERIFY_NEVER;
  FaultEnv env;
  env.Before(Op::kOpenRead, On("boot_id", Failing(CS_IO)));
  Pages pages(setup, 1, 1);
  pages.Fill();
  for (const bool writer : {true, false}) {
    const auto store = writer ? OpenOrFail(setup, env) : OpenOrFail(setup);
    if (writer) EXPECT_TRUE(DumpAll(*store, pages) == Repeated(1, CS_OK));
    const std::vector<uint8_t> file = ReadFile(BlockPath(setup, IdOf(1)));
    EXPECT_TRUE(std::all_of(file.end() - kRecordSize + 64, file.end() - kRecordSize + 80,
                            [](uint8_t byte) { return byte == 0; }));
    EXPECT_TRUE(LoadAll(*store, pages) == Repeated(1, CS_OK));
    WriteFile(BlockPath(setup, IdOf(1)), Flipped(file, 3));
    EXPECT_TRUE(LoadAll(*store, pages) == Repeated(1, CS_CORRUPT));
    EXPECT_EQ(store->Stats().verify_skipped, 0u);
    WriteFile(BlockPath(setup, IdOf(1)), file);
  }
}

TEST(Verify, SampleChecksOneLoadInSixteen) {
  Stored stored(CS_VERIFY_SAMPLE);
  for (size_t i = 1; i <= 256; ++i) {
    EXPECT_TRUE(LoadAll(*stored.store, *stored.pages) == Repeated(1, CS_OK));
    if (i % 16 == 0) EXPECT_EQ(stored.skipped(), i / 16 * 15);
  }
}

// ... and no block by a rhythm of its own stays out of it.
TEST(Verify, SampleGetsToEveryBlock) {
  for (const size_t blocks : {1, 2, 15, 16, 17, 32}) {
    const TempDir root;
    StoreSetup setup({root.path()});
    setup.verify = CS_VERIFY_SAMPLE;
    const auto store = OpenOrFail(setup);
    Pages pages(setup, 0, blocks);
    pages.Fill();
    EXPECT_TRUE(DumpAll(*store, pages) == Repeated(blocks, CS_OK));
    for (const BlockId& id : pages.block_ids()) {
      WriteFile(BlockPath(setup, id), Flipped(ReadFile(BlockPath(setup, id)), 50));
    }
    // Round after round, until each has been found out.
    size_t left = blocks;
    for (size_t round = 0; left > 0 && round < 17 * 16; ++round) {
      for (size_t i = 0; i < blocks; ++i) {
        const Result<cs_task> task = store->Load(pages.part(i, 1));
        if (WaitFor(*store, task.value(), 1) != Repeated(1, CS_CORRUPT)) continue;
        --left;
        // Good from now on, and loaded like the others.
        pages.Fill();
        EXPECT_TRUE(WaitFor(*store, store->Dump(pages.part(i, 1)).value(), 1) ==
                    Repeated(1, CS_OK));
      }
      while (store->NextEvent().has_value()) continue;
    }
    EXPECT_EQ(left, 0u);
  }
}

// What isn't checked costs no more calls than what is.
TEST(Verify, SkippingTakesNoMoreCalls) {
  for (const How& how : kHows) {
    for (const uint32_t shards : {1u, 2u}) {
      size_t calls[2];
      for (const cs_verify verify : {CS_VERIFY_ALWAYS, CS_VERIFY_NEVER}) {
        Stored stored(verify, how, shards, {3 * kPiece});
        WaitCleaned(stored.setup, stored.env);
        stored.env.ResetCounts();
        EXPECT_TRUE(LoadAll(*stored.store, *stored.pages) == Repeated(shards, CS_OK));
        calls[verify == CS_VERIFY_NEVER] = stored.env.calls();
        EXPECT_EQ(stored.skipped(), verify == CS_VERIFY_NEVER ? shards : 0);
      }
      EXPECT_LE(calls[1], calls[0]);
    }
  }
}

// The settings reach the files through a cache, whose loads count as well.
TEST(Verify, ThroughTheCache) {
  for (const cs_verify verify : {CS_VERIFY_ALWAYS, CS_VERIFY_NEVER}) {
    const TempDir root;
    StoreSetup setup({root.path()});
    setup.pipeline = "Cache|Posix";
    setup.share_buffer = false;
    setup.verify = verify;
    Pages pages(setup, 0, 1);
    pages.Fill();
    {
      const auto store = OpenOrFail(setup);
      EXPECT_TRUE(DumpAll(*store, pages) == Repeated(1, CS_OK));
    }
    const std::string path = BlockPath(setup, IdOf(0));
    WriteFile(path, Flipped(ReadFile(path), 50));
    const auto store = OpenOrFail(setup);
    const bool never = verify == CS_VERIFY_NEVER;
    EXPECT_TRUE(LoadAll(*store, pages) == Repeated(1, never ? CS_OK : CS_CORRUPT));
    EXPECT_EQ(store->Stats().verify_skipped, never ? 1u : 0u);
  }
}

}  // namespace cachestore::test
