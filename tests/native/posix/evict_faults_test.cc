// Every system call of collecting and evicting fails in turn, with each error that
// it can give, once or from then on (as if the process had died there).
#include <filesystem>
#include <memory>
#include <string>

#include "fixture.h"
#include "harness.h"
#include "posix/collecting.h"
#include "posix/one_fault.h"

namespace cachestore::test {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kFile = 8192;  // of a block of StoreSetup's tensors
constexpr uint64_t kBlocks = 6;
constexpr uint64_t kLow = 3;

DirectoryOptions OptionsOf(const StoreSetup& setup) {
  DirectoryOptions options;
  options.root = setup.roots[0];
  options.identity_name = setup.identity;
  options.manifest = setup.manifest;
  options.limits = {8 * kFile, 0, 50, 38};  // above 4 blocks, down to 3
  return options;
}

size_t Stored(const StoreSetup& setup) {
  size_t files = 0;
  for (uint64_t i = 0; i < kBlocks; ++i) files += fs::exists(BlockPath(setup, IdOf(i))) ? 1 : 0;
  return files;
}

// From a collector's start until it has nothing to do.
constexpr int kSteps = 8;

// True: there was such a call.
bool Trial(const StoreSetup& setup, size_t at, Mode mode, int error) {
  FaultEnv env;
  bool fired = false;
  {
    Collecting faulty(OptionsOf(setup), env);
    const Fault fault(at, mode, error);
    fault.Arm(env);
    faulty.Step(kSteps);
    fired = fault.fired();
    // The oldest go, and never more than have to.
    if (Stored(setup) < kLow) Fail(__FILE__, __LINE__, "too many are gone");
    env.NoHooks();
  }
  Collecting next(OptionsOf(setup), env);
  EXPECT_TRUE(next.opened);
  next.Step(kSteps);
  EXPECT_TRUE(next.collector.collecting());
  // Between the watermarks, where the one before may have ended.
  EXPECT_TRUE(Stored(setup) >= kLow && Stored(setup) <= kLow + 1);
  EXPECT_EQ(next.directory.space().used(), Stored(setup) * kFile);
  return fired;
}

TEST(EvictFaults, EveryCallFailsWithEachError) {
  const TempDir root;
  StoreSetup setup({root.path()});
  bool fired = true;
  size_t calls = 0;
  for (size_t at = 1; fired; ++at) {
    fired = false;
    for (const Mode mode : {Mode::kInstead, Mode::kFromThenOn}) {
      for (const int error : {EIO, ENOENT, ENOSPC, EACCES, EROFS, ESTALE}) {
        auto store = OpenOrFail(setup);
        ASSERT_TRUE(store != nullptr);
        ASSERT_OK(store->Clear());
        Pages pages(setup, 0, kBlocks);
        pages.Fill();
        ASSERT_TRUE(DumpAll(*store, pages) == Repeated(pages.size(), CS_OK));
        store.reset();
        fired = Trial(setup, at, mode, error) || fired;
        store = OpenOrFail(setup);
        ASSERT_TRUE(store != nullptr);
        const std::vector<uint8_t> present = LookupAll(*store, pages);
        pages.Poison();
        const Codes codes = LoadAll(*store, pages);
        for (size_t i = 0; i < codes.size(); ++i) {
          EXPECT_EQ(codes[i], present[i] == 1 ? CS_OK : CS_NOT_FOUND);
          if (codes[i] == CS_OK) EXPECT_TRUE(pages.Holds(i));
        }
      }
    }
    calls = at;
  }
  EXPECT_GT(calls, 30u);
}

}  // namespace
}  // namespace cachestore::test
