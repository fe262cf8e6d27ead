// Large shards go in several calls: at every seam the bytes, the checksums and
// the errors must be as in one.
#include <unistd.h>

#include <algorithm>
#include <numeric>

#include "base/aligned_buffer.h"
#include "fixture.h"
#include "harness.h"

namespace cachestore::test {
namespace {

constexpr uint64_t kPiece = 128 * 1024;  // kPieceSize of shard_io.cc

struct How {
  const char* name;
  cs_zero_copy zero_copy;
  bool direct;
  size_t skew;
};
constexpr How kHows[] = {
    {"zero-copy", CS_ZERO_COPY_ALWAYS, false, 0},
    {"bounced", CS_ZERO_COPY_NEVER, false, 0},
    {"direct", CS_ZERO_COPY_ALWAYS, true, 0},
    {"direct, skewed", CS_ZERO_COPY_ALWAYS, true, 64},
    {"direct, bounced", CS_ZERO_COPY_NEVER, true, 0},
};

StoreSetup SetupOf(const TempDir& root, const How& how, std::vector<uint64_t> sizes) {
  StoreSetup setup({root.path()});
  setup.tensor_sizes = std::move(sizes);
  setup.zero_copy = how.zero_copy;
  setup.direct = how.direct;
  return setup;
}

// Three pieces, none of which ends where a tensor does.
std::vector<uint64_t> ThreePieces() { return {kPiece - 50, 200, kPiece + 5000, 37}; }

}  // namespace

TEST(Pieces, SizesAroundTheSeamsComeBack) {
  const std::vector<std::vector<uint64_t>> all_sizes = {
      {kPiece - 1},
      {kPiece},
      {kPiece + 1},
      {kPiece - 4096},
      {kPiece, kPiece},
      {3 * kPiece + 5},
      {1, kPiece - 1, 1},
      {kPiece - 1, 2, kPiece - 1},
      ThreePieces(),
      std::vector<uint64_t>(300, 1000),
      std::vector<uint64_t>(40, 8192),
  };
  for (const How& how : kHows) {
    for (const std::vector<uint64_t>& sizes : all_sizes) {
      for (const uint32_t shards : {1u, 2u}) {
        if (sizes.size() > 100 && shards > 1) continue;
        const TempDir root;
        StoreSetup setup = SetupOf(root, how, sizes);
        setup.shards = shards;
        const auto store = OpenOrFail(setup);
        Pages pages(setup, 0, 2, how.skew);
        pages.Fill();
        EXPECT_TRUE(DumpAll(*store, pages) == Repeated(2 * shards, CS_OK));
        pages.Poison();
        EXPECT_TRUE(LoadAll(*store, pages) == Repeated(2 * shards, CS_OK));
        if (!pages.HoldsAll() || !pages.GuardsIntact()) {
          Fail(__FILE__, __LINE__,
               std::string(how.name) + ", " + std::to_string(sizes[0]) + " bytes first");
        }
        // On disk: the tensors one after the other, then zeros, whatever the way.
        const std::vector<uint8_t> file = ReadFile(BlockPath(setup, IdOf(0)));
        ASSERT_EQ(file.size(), setup.file_size());
        size_t at = 0;
        for (size_t t = 0; t < sizes.size(); ++t) {
          EXPECT_TRUE(std::equal(pages.tensor(0, t), pages.tensor(0, t) + sizes[t],
                                 file.begin() + static_cast<std::ptrdiff_t>(at)));
          at += sizes[t];
        }
        EXPECT_TRUE(std::all_of(file.begin() + static_cast<std::ptrdiff_t>(at),
                                file.begin() + static_cast<std::ptrdiff_t>(AlignUp(at)),
                                [](uint8_t byte) { return byte == 0; }));
      }
    }
  }
}

// A block written one way is read any other way.
TEST(Pieces, EveryWayReadsWhatEveryWayWrote) {
  const TempDir root;
  for (const How& writes : kHows) {
    StoreSetup setup = SetupOf(root, writes, ThreePieces());
    const auto writer = OpenOrFail(setup);
    EXPECT_OK(writer->Clear());
    Pages pages(setup, 0, 2, writes.skew);
    pages.Fill();
    EXPECT_TRUE(DumpAll(*writer, pages) == Repeated(2, CS_OK));
    for (const How& reads : kHows) {
      const auto reader = OpenOrFail(SetupOf(root, reads, ThreePieces()));
      Pages into(setup, 0, 2, reads.skew);
      EXPECT_TRUE(LoadAll(*reader, into) == Repeated(2, CS_OK));
      EXPECT_TRUE(into.HoldsAll());
    }
  }
}

// F04: damage at and around every seam.
TEST(Pieces, FlippedByteAtASeamIsAMiss) {
  for (const How& how : kHows) {
    const TempDir root;
    const StoreSetup setup = SetupOf(root, how, ThreePieces());
    const auto store = OpenOrFail(setup);
    Pages pages(setup, 0, 1, how.skew);
    pages.Fill();
    EXPECT_TRUE(DumpAll(*store, pages) == Repeated(1, CS_OK));
    const std::string path = BlockPath(setup, IdOf(0));
    const std::vector<uint8_t> good = ReadFile(path);
    for (const uint64_t seam :
         {uint64_t{0}, kPiece - 50, kPiece, kPiece + 150, 2 * kPiece, setup.payload() - 37,
          setup.payload(), setup.file_size() - 4096, setup.file_size()}) {
      for (const uint64_t at : {seam - 1, seam}) {
        if (at >= good.size()) continue;
        std::vector<uint8_t> bad = good;
        bad[at] ^= 0x10;
        WriteFile(path, bad);
        EXPECT_TRUE(LoadAll(*store, pages) == Repeated(1, CS_CORRUPT));
        EXPECT_FALSE(IsPresent(*store, IdOf(0)));
      }
    }
    WriteFile(path, good);
    EXPECT_TRUE(LoadAll(*store, pages) == Repeated(1, CS_OK));
  }
}

// Two pieces that changed places: right bytes, wrong order.
TEST(Pieces, SwappedPiecesAreAMiss) {
  const TempDir root;
  const StoreSetup setup = SetupOf(root, kHows[0], {3 * kPiece});
  const auto store = OpenOrFail(setup);
  Pages pages(setup, 0, 1);
  pages.Fill();
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(1, CS_OK));
  std::vector<uint8_t> bytes = ReadFile(BlockPath(setup, IdOf(0)));
  std::swap_ranges(bytes.begin(), bytes.begin() + kPiece, bytes.begin() + kPiece);
  WriteFile(BlockPath(setup, IdOf(0)), bytes);
  EXPECT_TRUE(LoadAll(*store, pages) == Repeated(1, CS_CORRUPT));
}

// F02: the disk is full at a later piece.
TEST(Pieces, WriteThatFailsLaterLeavesNothing) {
  for (const How& how : {kHows[0], kHows[1]}) {
    for (size_t nth = 0; nth < 3; ++nth) {
      const TempDir root;
      const StoreSetup setup = SetupOf(root, how, ThreePieces());
      FaultEnv env;
      const auto store = OpenOrFail(setup, env);
      Pages pages(setup, 0, 1);
      pages.Fill();
      std::atomic<size_t> calls{0};
      env.Before(Op::kWriteFull, [&](FaultEnv::Call& call) {
        if (calls++ != nth) return Status::Ok();
        call.limit = 5000;
        return Status(CS_NO_SPACE, "injected");
      });
      EXPECT_TRUE(DumpAll(*store, pages) == Repeated(1, CS_NO_SPACE));
      EXPECT_EQ(calls.load(), nth + 1);  // no further one is tried
      env.NoHooks();
      EXPECT_FALSE(IsPresent(*store, IdOf(0)));
      EXPECT_TRUE(FilesBelow(TemporaryRoot(setup)).empty());
      EXPECT_TRUE(DumpAll(*store, pages) == Repeated(1, CS_OK));
    }
  }
}

// F05: the file is cut, or the disk fails, after the first piece was read.
TEST(Pieces, ReadThatFailsLaterIsAMissOrAnError) {
  for (const How& how : {kHows[0], kHows[1]}) {
    for (const bool cut : {true, false}) {
      const TempDir root;
      const StoreSetup setup = SetupOf(root, how, ThreePieces());
      FaultEnv env;
      const auto store = OpenOrFail(setup, env);
      Pages pages(setup, 0, 1);
      pages.Fill();
      EXPECT_TRUE(DumpAll(*store, pages) == Repeated(1, CS_OK));
      const std::string path = BlockPath(setup, IdOf(0));
      std::atomic<size_t> calls{0};
      env.Before(Op::kReadFull, [&](FaultEnv::Call&) {
        if (calls++ != 1) return Status::Ok();
        if (!cut) return Status(CS_IO, "injected");
        EXPECT_EQ(truncate(path.c_str(), kPiece + 10), 0);
        return Status::Ok();
      });
      pages.Poison();
      EXPECT_TRUE(LoadAll(*store, pages) == Repeated(1, cut ? CS_CORRUPT : CS_IO));
      EXPECT_EQ(calls.load(), 2u);
      EXPECT_TRUE(!IsPresent(*store, IdOf(0)));  // until it is stored anew
      if (how.zero_copy == CS_ZERO_COPY_NEVER) EXPECT_TRUE(pages.IsPoisoned());
    }
  }
}

// Decision 3, at every seam of a load that hangs: nothing is written later.
TEST(Pieces, LoadGivenUpAtASeamWritesNothing) {
  for (uint64_t seam : {uint64_t{0}, kPiece, 2 * kPiece}) {
    const TempDir root;
    const StoreSetup setup = SetupOf(root, kHows[1], ThreePieces());
    FaultEnv env;
    const auto store = OpenOrFail(setup, env);
    Pages pages(setup, 0, 1);
    pages.Fill();
    EXPECT_TRUE(DumpAll(*store, pages) == Repeated(1, CS_OK));
    pages.Poison();
    Gate gate;
    env.After(Op::kReadFull, At(seam, Holding(gate)));
    Result<cs_task> task = store->Load(pages.batch());
    ASSERT_TRUE(gate.WaitArrived(1));
    EXPECT_TRUE(WaitFor(*store, task.value(), 1, std::chrono::milliseconds(1)) ==
                Repeated(1, CS_TIMEOUT));
    pages.Poison();
    gate.Open();
    EXPECT_TRUE(Eventually([&] { return store->Stats().stuck_workers == 0; }));
    EXPECT_TRUE(pages.IsPoisoned());
  }
}

}  // namespace cachestore::test
