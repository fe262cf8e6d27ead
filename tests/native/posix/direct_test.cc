// F10: O_DIRECT with addresses and sizes that it doesn't take, and filesystems
// that refuse it, at whatever call they do so.
#include <unistd.h>

#include <mutex>
#include <set>

#include "base/aligned_buffer.h"
#include "fixture.h"
#include "harness.h"

namespace cachestore::test {
namespace {

// Knows which descriptors are direct, and refuses them as filesystems do.
class DirectEnv : public FaultEnv {
 public:
  // Without `real` the flag isn't passed on: for any filesystem.
  explicit DirectEnv(bool real = false) : real_(real) {}

  std::atomic<bool> refuse_open{false};
  std::atomic<bool> refuse_read{false};
  std::atomic<bool> refuse_write{false};
  std::atomic<uint64_t> alignment{kAlignment};  // of addresses, sizes and offsets
  std::atomic<size_t> direct_opens{0};
  std::atomic<size_t> block_opens{0};  // of block files and those to be
  std::atomic<size_t> direct_reads{0};
  std::atomic<size_t> cut_reads{0};
  std::atomic<size_t> direct_writes{0};

  Result<Fd> OpenRead(const std::string& path, bool direct) override {
    return Note(path, direct, [&] { return FaultEnv::OpenRead(path, direct && real_); });
  }
  Result<Fd> OpenWrite(const std::string& path, bool direct) override {
    return Note(path, direct, [&] { return FaultEnv::OpenWrite(path, direct && real_); });
  }
  Status Close(Fd fd) override {
    {
      const std::lock_guard lock(mutex_);
      direct_.erase(fd);
    }
    return FaultEnv::Close(fd);
  }
  Result<uint64_t> ReadFull(Fd fd, std::span<iovec> parts, uint64_t offset) override {
    if (IsDirect(fd)) {
      if (refuse_read || !Fits(parts, offset)) return Refused("read");
      ++direct_reads;
      // Where a file ends elsewhere the rest is asked for from there, which some
      // filesystems refuse for its offset before they look at the end.
      const Result<uint64_t> read = FaultEnv::ReadFull(fd, parts, offset);
      if (!read.ok() || (offset + read.value()) % alignment == 0) return read;
      ++cut_reads;
      return Refused("read");
    }
    return FaultEnv::ReadFull(fd, parts, offset);
  }
  Status WriteFull(Fd fd, std::span<iovec> parts, uint64_t offset) override {
    if (IsDirect(fd)) {
      if (refuse_write || !Fits(parts, offset)) return Refused("write");
      ++direct_writes;
    }
    return FaultEnv::WriteFull(fd, parts, offset);
  }

 private:
  static Status Refused(const char* call) {
    return Status::FromErrno(EINVAL, call, "a direct descriptor");
  }

  template <typename Open>
  Result<Fd> Note(const std::string& path, bool direct, Open open) {
    if (path.find("/blocks/") != std::string::npos || path.find("/tmp/") != std::string::npos) {
      ++block_opens;
    }
    if (direct) {
      ++direct_opens;
      if (refuse_open) return Refused("open");
    }
    Result<Fd> opened = open();
    if (direct && opened.ok()) {
      const std::lock_guard lock(mutex_);
      direct_.insert(opened.value());
    }
    return opened;
  }

  bool IsDirect(Fd fd) {
    const std::lock_guard lock(mutex_);
    return direct_.contains(fd);
  }

  bool Fits(std::span<const iovec> parts, uint64_t offset) const {
    uint64_t all = offset;
    for (const iovec& part : parts) {
      all |= part.iov_len | (reinterpret_cast<uintptr_t>(part.iov_base) % kAlignment);
    }
    return all % alignment == 0;
  }

  const bool real_;
  std::mutex mutex_;  // guards all below
  std::set<Fd> direct_;
};

// Empty, or why the directory's filesystem can't do it.
std::string Refusal(const std::string& directory) {
  const std::string path = directory + "/try";
  const Result<Fd> opened = Env::Real().OpenWrite(path, /*direct=*/true);
  if (!opened.ok()) return "no O_DIRECT here: " + opened.status().text();
  const FileCloser file(Env::Real(), opened.value());
  AlignedBuffer buffer;
  iovec part{buffer.Get(kAlignment), kAlignment};
  const Status written = Env::Real().WriteFull(file.get(), {&part, 1}, 0);
  EXPECT_EQ(unlink(path.c_str()), 0);
  return written.ok() ? "" : "no O_DIRECT here: " + written.text();
}

StoreSetup DirectSetup(const TempDir& root, std::vector<uint64_t> sizes = {4096, 8192}) {
  StoreSetup setup({root.path()});
  setup.direct = true;
  setup.tensor_sizes = std::move(sizes);
  return setup;
}

std::vector<std::string> Warnings(Store& store) {
  std::vector<std::string> warnings;
  while (const auto event = store.NextEvent()) {
    if (event->level != CS_EVENT_INFO) warnings.push_back(event->text);
  }
  return warnings;
}

// One warning, that names the directory.
void ExpectOneWarning(Store& store, const StoreSetup& setup) {
  const std::vector<std::string> warnings = Warnings(store);
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find(setup.roots[0]), std::string::npos);
  EXPECT_NE(warnings[0].find("O_DIRECT"), std::string::npos);
}

void ExpectRoundTrip(Store& store, Pages& pages) {
  pages.Fill();
  EXPECT_TRUE(DumpAll(store, pages) == Repeated(pages.size(), CS_OK));
  pages.Poison();
  EXPECT_TRUE(LoadAll(store, pages) == Repeated(pages.size(), CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
  EXPECT_TRUE(pages.GuardsIntact());
}

using Refuse = std::atomic<bool> DirectEnv::*;
constexpr Refuse kRefusals[] = {&DirectEnv::refuse_open, &DirectEnv::refuse_read,
                                &DirectEnv::refuse_write};

}  // namespace

// On the disk itself; and nothing gives O_DIRECT up for them.
TEST(Direct, SizesAndSkewsOfAllKindsComeBack) {
  const std::vector<std::vector<uint64_t>> all_sizes = {
      {116992}, {4097}, {4096}, {4096, 4097, 8192}, {100, 37}, {131072, 131072, 1}};
  for (const auto& sizes : all_sizes) {
    for (const size_t skew : {0, 64, 2048}) {
      for (const uint32_t shards : {1u, 2u}) {
        const TempDir root;
        if (const std::string why = Refusal(root.path()); !why.empty()) SKIP(why);
        StoreSetup setup = DirectSetup(root, sizes);
        setup.shards = shards;
        setup.direct_required = true;
        DirectEnv env(/*real=*/true);
        const auto store = OpenOrFail(setup, env);
        env.direct_reads = env.direct_writes = 0;
        Pages pages(setup, 0, 3, skew);
        ExpectRoundTrip(*store, pages);
        EXPECT_GE(env.direct_writes.load(), 3u * shards);
        EXPECT_GE(env.direct_reads.load(), 3u * shards);
        EXPECT_EQ(env.direct_opens.load(), env.block_opens.load() - 1);  // but for identity.json
        EXPECT_TRUE(Warnings(*store).empty());
      }
    }
  }
}

// One tensor of a shard fits, the other doesn't.
TEST(Direct, MixedTensorsComeBack) {
  for (const size_t skewed : {size_t{0}, size_t{1}}) {
    const TempDir root;
    if (const std::string why = Refusal(root.path()); !why.empty()) SKIP(why);
    const StoreSetup setup = DirectSetup(root);
    DirectEnv env(/*real=*/true);
    const auto store = OpenOrFail(setup, env);
    Pages straight(setup, 0, 2);
    Pages skew(setup, 0, 2, 64);
    const auto tensor = [&](size_t shard, size_t t) {
      return (t == skewed ? skew : straight).tensor(shard, t);
    };
    cs_batch batch = straight.batch();
    std::vector<uint64_t> addresses;
    for (size_t i = 0; i < 4; ++i) {
      addresses.push_back(reinterpret_cast<uintptr_t>(tensor(i / 2, i % 2)));
    }
    batch.addresses = addresses.data();
    straight.Fill();
    skew.Fill();
    Result<cs_task> task = store->Dump(batch);
    ASSERT_OK(task);
    EXPECT_TRUE(WaitFor(*store, task.value(), 2) == Repeated(2, CS_OK));
    straight.Poison();
    skew.Poison();
    task = store->Load(batch);
    ASSERT_OK(task);
    EXPECT_TRUE(WaitFor(*store, task.value(), 2) == Repeated(2, CS_OK));
    Pages expected(setup, 0, 2);
    expected.Fill();
    for (size_t i = 0; i < 4; ++i) {
      const uint8_t* const want = expected.tensor(i / 2, i % 2);
      EXPECT_TRUE(std::equal(want, want + setup.tensor_sizes[i % 2], tensor(i / 2, i % 2)));
    }
    EXPECT_TRUE(straight.GuardsIntact() && skew.GuardsIntact());
    EXPECT_TRUE(Warnings(*store).empty());
    EXPECT_GT(env.direct_reads.load(), 2u);  // one was the trial at opening
  }
}

// Aligned pages aren't copied: the file's bytes go to and from them.
TEST(Direct, AlignedPagesGoStraight) {
  const TempDir root;
  const StoreSetup setup = DirectSetup(root);
  DirectEnv env;
  const auto store = OpenOrFail(setup, env);
  Pages pages(setup, 0, 1);
  ExpectRoundTrip(*store, pages);
  pages.Poison();
  Gate gate;
  env.After(Op::kReadFull, Holding(gate));
  const Result<cs_task> task = store->Load(pages.batch());
  ASSERT_TRUE(gate.WaitArrived(1));
  EXPECT_TRUE(pages.HoldsAll());  // before the worker could have copied anything
  gate.Open();
  EXPECT_TRUE(WaitFor(*store, task.value(), 1) == Repeated(1, CS_OK));
}

TEST(Direct, RefusedWhenOpenedIsSaidOnceAndDoneWithout) {
  for (const Refuse refuse : kRefusals) {
    const TempDir root;
    const StoreSetup setup = DirectSetup(root);
    DirectEnv env;
    env.*refuse = true;
    const auto store = OpenOrFail(setup, env);
    ExpectOneWarning(*store, setup);
    env.direct_opens = 0;
    Pages pages(setup, 0, 8);
    ExpectRoundTrip(*store, pages);
    EXPECT_EQ(env.direct_opens.load(), 0u);
    EXPECT_TRUE(Warnings(*store).empty());
  }
}

// As a filesystem with blocks of 64 KiB does.
TEST(Direct, CoarserAlignmentIsDoneWithout) {
  const TempDir root;
  const StoreSetup setup = DirectSetup(root);
  DirectEnv env;
  env.alignment = 65536;
  const auto store = OpenOrFail(setup, env);
  ExpectOneWarning(*store, setup);
  Pages pages(setup, 0, 8);
  ExpectRoundTrip(*store, pages);
}

// The filesystem changes its mind: the transfer at hand succeeds all the same.
TEST(Direct, RefusedLaterIsSaidOnceAndDoneWithout) {
  for (const Refuse refuse : kRefusals) {
    for (const uint32_t shards : {1u, 3u}) {
      for (const bool dump : {true, false}) {
        if (dump ? refuse == &DirectEnv::refuse_read : refuse == &DirectEnv::refuse_write) continue;
        const TempDir root;
        StoreSetup setup = DirectSetup(root);
        setup.shards = shards;
        DirectEnv env;
        const auto store = OpenOrFail(setup, env);
        Pages pages(setup, 0, 8);
        pages.Fill();
        if (dump) env.*refuse = true;
        EXPECT_TRUE(DumpAll(*store, pages) == Repeated(8 * shards, CS_OK));
        env.*refuse = true;
        pages.Poison();
        EXPECT_TRUE(LoadAll(*store, pages) == Repeated(8 * shards, CS_OK));
        EXPECT_TRUE(pages.HoldsAll());
        ExpectOneWarning(*store, setup);
        env.direct_opens = 0;
        Pages more(setup, 100, 8);
        ExpectRoundTrip(*store, more);
        EXPECT_EQ(env.direct_opens.load(), 0u);
        EXPECT_TRUE(FilesBelow(TemporaryRoot(setup)).empty());
      }
    }
  }
}

// Nothing could be written when it was opened, and so nothing tried.
TEST(Direct, RefusedAfterAnOpeningThatCouldntTry) {
  const TempDir root;
  const StoreSetup setup = DirectSetup(root);
  Pages pages(setup, 0, 2);
  {
    const auto store = OpenOrFail(setup);
    ExpectRoundTrip(*store, pages);
  }
  DirectEnv env;
  env.Before(Op::kOpenWrite, Failing(CS_NO_SPACE));
  env.refuse_read = true;
  const auto store = OpenOrFail(setup, env);
  (void)Warnings(*store);
  pages.Poison();
  EXPECT_TRUE(LoadAll(*store, pages) == Repeated(2, CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
  ExpectOneWarning(*store, setup);
}

TEST(Direct, RequiredAndRefusedFailsTheOpening) {
  for (const Refuse refuse : kRefusals) {
    const TempDir root;
    const TempDir other;
    StoreSetup setup = DirectSetup(root);
    setup.roots = {other.path(), root.path()};
    setup.direct_required = true;
    DirectEnv env;
    env.SetFilesystemType(0x65735546);  // FUSE
    env.*refuse = true;
    const Result<std::unique_ptr<Store>> opened = setup.Open(env);
    EXPECT_EQ(opened.status().code(), CS_INVALID);
    const std::string text = opened.status().text();
    for (const std::string& part : {std::string("io_direct"), other.path(), std::string("O_DIRECT"),
                                    std::string("0x65735546")}) {
      if (text.find(part) == std::string::npos)
        Fail(__FILE__, __LINE__, part + " isn't in " + text);
    }
    EXPECT_TRUE(FilesBelow(other.path() + "/identity/tmp").empty());
    env.*refuse = false;
    EXPECT_OK(setup.Open(env));
  }
}

// ... and later it is an error: no transfer goes another way.
TEST(Direct, RequiredIsNeverDoneWithout) {
  for (const uint32_t shards : {1u, 2u}) {
    const TempDir root;
    StoreSetup setup = DirectSetup(root);
    setup.shards = shards;
    setup.direct_required = true;
    DirectEnv env;
    const auto store = OpenOrFail(setup, env);
    Pages pages(setup, 0, 2);
    ExpectRoundTrip(*store, pages);
    for (const Refuse refuse : kRefusals) {
      env.*refuse = true;
      env.direct_opens = env.block_opens = 0;
      Pages more(setup, 10, 2);
      const int32_t load = refuse == &DirectEnv::refuse_write ? CS_OK : CS_IO;
      const int32_t dump = refuse == &DirectEnv::refuse_read ? CS_OK : CS_IO;
      EXPECT_TRUE(DumpAll(*store, more) == Repeated(2 * shards, dump));
      EXPECT_TRUE(LoadAll(*store, pages) == Repeated(2 * shards, load));
      EXPECT_EQ(env.direct_opens.load(), env.block_opens.load());
      EXPECT_EQ(IsPresent(*store, IdOf(10)), dump == CS_OK);
      env.*refuse = false;
      EXPECT_OK(store->Clear());
      ExpectRoundTrip(*store, pages);
    }
  }
}

// F05: a file that is cut under the reader ends a direct read as a refusal
// would. It is a miss, and no reason to give O_DIRECT up.
TEST(Direct, FileThatIsCutIsNoRefusal) {
  for (const off_t length : {0, 5000, 4096, 12288, 16000}) {
    const TempDir root;
    const StoreSetup setup = DirectSetup(root);
    DirectEnv env;
    const auto store = OpenOrFail(setup, env);
    Pages pages(setup, 0, 2);
    ExpectRoundTrip(*store, pages);
    const std::string path = BlockPath(setup, IdOf(0));
    env.Before(Op::kReadFull, On(path, [&](FaultEnv::Call&) {
                 EXPECT_EQ(truncate(path.c_str(), length), 0);
                 return Status::Ok();
               }));
    const Codes codes = LoadAll(*store, pages);
    EXPECT_EQ(codes[0], CS_CORRUPT);
    EXPECT_EQ(codes[1], CS_OK);
    EXPECT_FALSE(IsPresent(*store, IdOf(0)));
    EXPECT_EQ(env.cut_reads.load(), length % 4096 == 0 ? 0u : 1u);
    env.NoHooks();
    env.direct_opens = env.block_opens = 0;
    Pages more(setup, 10, 2);
    ExpectRoundTrip(*store, more);
    EXPECT_EQ(env.direct_opens.load(), env.block_opens.load());
    for (const std::string& warning : Warnings(*store)) {
      EXPECT_EQ(warning.find("support"), std::string::npos);
    }
  }
}

}  // namespace cachestore::test
