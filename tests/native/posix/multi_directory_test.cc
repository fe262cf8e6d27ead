// Several directories, of which one fails: it is taken out of use, the others
// serve on, and it comes back. F06: a failed load isn't tried for ever.
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "fixture.h"
#include "harness.h"
#include "posix/stored_block.h"

namespace cachestore::test {
namespace {

using Hook = FaultEnv::Hook;

void BeforeAll(FaultEnv& env, const Hook& hook) {
  for (size_t i = 0; i + 1 < kOpCount; ++i) env.Before(static_cast<Op>(i), hook);
}

Hook FailingWith(int error) {
  return [error](FaultEnv::Call& call) {
    return Status::FromErrno(error, OpName(call.op), call.path);
  };
}

// Two directories and blocks stored in both.
struct Two {
  explicit Two(uint32_t timeout_ms = 5000, uint64_t type = 0) : setup({a.path(), b.path()}) {
    setup.timeout_ms = timeout_ms;
    if (type != 0) env.SetFilesystemType(type);
    store = OpenOrFail(setup, env);
    WaitCleaned(setup, env);
    pages = std::make_unique<Pages>(setup, 0, 20);
    pages->Fill();
    EXPECT_TRUE(DumpAll(*store, *pages) == Repeated(20, CS_OK));
    for (const BlockId& id : pages->block_ids()) {
      in_a.push_back(access(BlockPath(setup, id).c_str(), F_OK) == 0 ? 1 : 0);
    }
    EXPECT_GT(std::count(in_a.begin(), in_a.end(), 1), 3);
    EXPECT_GT(std::count(in_a.begin(), in_a.end(), 0), 3);
  }

  Codes CodesByPlace(int32_t code_in_a) const {
    Codes codes;
    for (const uint8_t is_in_a : in_a) codes.push_back(is_in_a ? code_in_a : CS_OK);
    return codes;
  }
  std::vector<uint8_t> NotInA() const {
    std::vector<uint8_t> present;
    for (const uint8_t is_in_a : in_a) present.push_back(is_in_a ? 0 : 1);
    return present;
  }
  // Said just after it is so.
  bool HasEvent(const std::string& text) {
    return Eventually([&] {
      while (const auto event = store->NextEvent()) {
        if (event->text.find(text) != std::string::npos) return true;
      }
      return false;
    });
  }
  // Lookups until the first directory is out of use.
  void TakeOut(const Hook& hook) {
    BeforeAll(env, On(a.path(), hook));
    LookupAll(*store, *pages);
    EXPECT_EQ(store->Stats().posix_directories_out, 1u);
  }
  bool ComesBack() {
    return Eventually([&] {
      const cs_stats stats = store->Stats();
      return stats.posix_directories_out == 0 && stats.posix_directories_read_only == 0;
    });
  }

  const TempDir a;
  const TempDir b;
  FaultEnv env;
  StoreSetup setup;
  std::unique_ptr<Store> store;
  std::unique_ptr<Pages> pages;
  std::vector<uint8_t> in_a;  // of each block
};

}  // namespace

TEST(MultiDirectory, OneThatFailsIsTakenOutAndComesBack) {
  Two two;
  EXPECT_EQ(two.store->Stats().posix_directories, 2u);
  std::atomic<size_t> calls{0};
  two.TakeOut([&](FaultEnv::Call& call) {
    if (call.path.find("/blocks/") != std::string::npos) calls.fetch_add(1);
    return Status::FromErrno(EIO, "call", call.path);
  });
  EXPECT_EQ(calls.load(), 3u);
  EXPECT_TRUE(two.HasEvent(two.a.path() + " is out of use"));
  // Nothing goes there, and what lies there is missed.
  EXPECT_TRUE(LookupAll(*two.store, *two.pages) == two.NotInA());
  EXPECT_TRUE(LoadAll(*two.store, *two.pages) == two.CodesByPlace(CS_NOT_FOUND));
  EXPECT_EQ(calls.load(), 3u);
  // What is dumped goes to the other.
  EXPECT_TRUE(DumpAll(*two.store, *two.pages) == Repeated(20, CS_OK));
  EXPECT_TRUE(LookupAll(*two.store, *two.pages) == std::vector<uint8_t>(20, 1));
  two.pages->Poison();
  EXPECT_TRUE(LoadAll(*two.store, *two.pages) == Repeated(20, CS_OK));
  EXPECT_TRUE(two.pages->HoldsAll());
  EXPECT_EQ(calls.load(), 3u);
  two.env.NoHooks();
  EXPECT_TRUE(two.ComesBack());
  EXPECT_TRUE(two.HasEvent(two.a.path() + " is in full use again"));
  EXPECT_TRUE(LoadAll(*two.store, *two.pages) == Repeated(20, CS_OK));
  EXPECT_TRUE(FilesBelow(TemporaryRoot(two.setup)).empty());
}

// What lies in one that can only be read is served; dumps go to the next.
TEST(MultiDirectory, OneThatCanOnlyBeReadServesWhatItHas) {
  Two two;
  const auto read_only = On(two.a.path(), FailingWith(EROFS));
  for (const Op op : {Op::kOpenWrite, Op::kOpenLocked, Op::kWriteFull, Op::kRename, Op::kUnlink,
                      Op::kMakeDirectory, Op::kSetModified}) {
    two.env.Before(op, read_only);
  }
  Pages more(two.setup, 100, 20);
  more.Fill();
  const Codes first = DumpAll(*two.store, more);  // some find out
  EXPECT_GT(std::count(first.begin(), first.end(), CS_IO), 0);
  EXPECT_EQ(two.store->Stats().posix_directories_read_only, 1u);
  EXPECT_TRUE(two.HasEvent(two.a.path() + " is only read from"));
  EXPECT_TRUE(DumpAll(*two.store, more) == Repeated(20, CS_OK));
  EXPECT_TRUE(LookupAll(*two.store, more) == std::vector<uint8_t>(20, 1));
  EXPECT_TRUE(LookupAll(*two.store, *two.pages) == std::vector<uint8_t>(20, 1));
  for (Pages* pages : {two.pages.get(), &more}) {
    pages->Poison();
    EXPECT_TRUE(LoadAll(*two.store, *pages) == Repeated(20, CS_OK));
    EXPECT_TRUE(pages->HoldsAll());
  }
  // Nothing that is there already is stored twice.
  const uint64_t existing = two.store->Stats().dump_existing;
  EXPECT_TRUE(DumpAll(*two.store, *two.pages) == Repeated(20, CS_OK));
  EXPECT_EQ(two.store->Stats().dump_existing, existing + 20);
  two.env.NoHooks();
  EXPECT_TRUE(two.ComesBack());
}

// All that there is is out of use: misses and failures, no I/O, and it comes back.
TEST(MultiDirectory, TheOnlyOneComesBackToo) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  FaultEnv env;
  const auto store = OpenOrFail(setup, env);
  WaitCleaned(setup, env);
  Pages pages(setup, 0, 4);
  pages.Fill();
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(4, CS_OK));
  BeforeAll(env, FailingWith(EIO));
  LookupAll(*store, pages);
  EXPECT_EQ(store->Stats().posix_directories_out, 1u);
  EXPECT_TRUE(LoadAll(*store, pages) == Repeated(4, CS_NOT_FOUND));
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(4, CS_IO));
  env.NoHooks();
  EXPECT_TRUE(Eventually([&] { return store->Stats().posix_directories_out == 0; }));
  EXPECT_TRUE(LoadAll(*store, pages) == Repeated(4, CS_OK));
}

TEST(MultiDirectory, OneThatCantBeOpenedComesLater) {
  const TempDir a;
  const TempDir b;
  WriteFile(a.path() + "/disk", {1});
  StoreSetup setup({a.path() + "/disk", b.path()});
  const auto store = OpenOrFail(setup);
  ASSERT_TRUE(store != nullptr);
  EXPECT_EQ(store->Stats().posix_directories_out, 1u);
  const auto event = store->NextEvent();
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->level, CS_EVENT_WARNING);
  EXPECT_NE(event->text.find("/disk is out of use"), std::string::npos);
  Pages pages(setup, 0, 10);
  pages.Fill();
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(10, CS_OK));
  EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(10, 1));
  ASSERT_EQ(unlink((a.path() + "/disk").c_str()), 0);
  EXPECT_TRUE(Eventually([&] { return store->Stats().posix_directories_out == 0; }));
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(10, CS_OK));
  EXPECT_GT(FilesBelow(a.path() + "/disk/identity/blocks").size(), 0u);
}

TEST(MultiDirectory, NoneThatCanBeOpenedIsAnErrorThatNamesAll) {
  const TempDir a;
  WriteFile(a.path() + "/one", {1});
  WriteFile(a.path() + "/two", {1});
  const StoreSetup setup({a.path() + "/one", a.path() + "/two"});
  const std::string text = setup.Open().status().text();
  EXPECT_NE(text.find("/one"), std::string::npos);
  EXPECT_NE(text.find("/two"), std::string::npos);
}

// A new identity on a read-only mount: nothing is there, and that is no error.
TEST(MultiDirectory, AReadOnlyOneWithoutThisIdentityIsNoError) {
  const TempDir a;
  const TempDir b;
  FaultEnv env;
  env.Before(Op::kMakeDirectory, On(a.path() + "/", FailingWith(EROFS)));
  const StoreSetup setup({a.path(), b.path()});
  const auto store = OpenOrFail(setup, env);
  ASSERT_TRUE(store != nullptr);
  EXPECT_EQ(store->Stats().posix_directories_read_only, 1u);
  Pages pages(setup, 0, 10);
  pages.Fill();
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(10, CS_OK));
  EXPECT_TRUE(LoadAll(*store, pages) == Repeated(10, CS_OK));
  env.NoHooks();
  EXPECT_TRUE(Eventually([&] { return store->Stats().posix_directories_read_only == 0; }));
  EXPECT_EQ(access((a.path() + "/identity/identity.json").c_str(), F_OK), 0);
}

// F27: one hung mount neither fails the attach nor holds up the other.
TEST(MultiDirectory, OneThatHangsWhileOpeningComesLater) {
  const TempDir a;
  const TempDir b;
  StoreSetup setup({a.path(), b.path()});
  setup.timeout_ms = 200;
  FaultEnv env;
  Gate gate;
  BeforeAll(env, On(a.path(), Holding(gate)));
  const auto store = OpenOrFail(setup, env);
  ASSERT_TRUE(store != nullptr);
  EXPECT_EQ(store->Stats().posix_directories_out, 1u);
  Pages pages(setup, 0, 10);
  pages.Fill();
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(10, CS_OK));
  EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(10, 1));
  gate.Open();
  EXPECT_TRUE(Eventually([&] { return store->Stats().posix_directories_out == 0; }));
}

// F27: what doesn't answer, time after time, isn't asked any more.
TEST(MultiDirectory, OneThatHangsIsTakenOut) {
  Two two(/*timeout_ms=*/300, FaultEnv::kNfs);
  Gate gate;
  two.env.Before(Op::kOpenRead, On(two.a.path(), Holding(gate)));
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(two.store->Stats().posix_directories_out, 0u);
    const Codes codes = LoadAll(*two.store, *two.pages, std::chrono::milliseconds(400));
    EXPECT_GT(std::count(codes.begin(), codes.end(), CS_TIMEOUT), 0);
  }
  EXPECT_EQ(two.store->Stats().posix_directories_out, 1u);
  EXPECT_TRUE(two.HasEvent("doesn't answer in time"));
  EXPECT_TRUE(LoadAll(*two.store, *two.pages) == two.CodesByPlace(CS_NOT_FOUND));
  gate.Open();
  EXPECT_TRUE(two.env.WaitIdle());
  EXPECT_TRUE(two.ComesBack());
}

// ... which is the one where the work was, though its blocks are looked for in
// another one before.
TEST(MultiDirectory, TheOneThatHangsIsBlamed) {
  enum class Work { kLoad, kLookup, kLookForClears, kDump };
  for (const Work work : {Work::kLoad, Work::kLookup, Work::kLookForClears, Work::kDump}) {
    Two two(/*timeout_ms=*/200, FaultEnv::kNfs);
    for (const Op op : {Op::kOpenWrite, Op::kRename}) {
      two.env.Before(op, On(two.a.path(), FailingWith(EROFS)));
    }
    Pages more(two.setup, 100, 20);
    more.Fill();
    (void)DumpAll(*two.store, more);
    ASSERT_EQ(two.store->Stats().posix_directories_read_only, 1u);
    // A block that the first one wants and the second one has, but for a dump.
    const auto wanted = std::find(two.in_a.begin(), two.in_a.end(), 1) - two.in_a.begin();
    const BlockId id = two.pages->block_ids()[static_cast<size_t>(wanted)];
    Pages page(two.setup, static_cast<uint64_t>(wanted), 1);
    page.Fill();
    ASSERT_EQ(unlink(BlockPath(two.setup, id).c_str()), 0);
    if (work != Work::kDump) EXPECT_TRUE(DumpAll(*two.store, page) == Repeated(1, CS_OK));

    Gate gate;
    const std::string at = two.b.path() + "/identity/";
    const auto hanging = [&](const char* where) { return On(at + where, Holding(gate)); };
    if (work == Work::kLoad) two.env.Before(Op::kOpenRead, hanging("blocks"));
    if (work == Work::kLookup) two.env.Before(Op::kStat, hanging("blocks"));
    if (work == Work::kLookForClears) two.env.Before(Op::kStat, hanging("cleared"));
    if (work == Work::kDump) two.env.Before(Op::kWriteFull, hanging("tmp"));
    const std::chrono::milliseconds limit(250);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(two.store->Stats().posix_directories_out, 0u);
      if (work == Work::kLoad) {
        EXPECT_TRUE(LoadAll(*two.store, page, limit) == Repeated(1, CS_TIMEOUT));
      } else if (work == Work::kDump) {
        EXPECT_TRUE(DumpAll(*two.store, page, limit) == Repeated(1, CS_TIMEOUT));
      } else {
        EXPECT_FALSE(IsPresent(*two.store, id));
      }
    }
    // Where writes hang what lies there is still served.
    const bool reads = work == Work::kDump;
    EXPECT_TRUE(two.HasEvent(two.b.path() + (reads ? " is only read from" : " is out of use")));
    EXPECT_EQ(two.store->Stats().posix_directories_out, reads ? 0u : 1u);
    EXPECT_EQ(two.store->Stats().posix_directories_read_only, reads ? 2u : 1u);
    gate.Open();
    EXPECT_TRUE(two.env.WaitIdle());
  }
}

// Two names of one directory.
TEST(MultiDirectory, OneGivenTwiceIsRefused) {
  const TempDir a;
  std::filesystem::create_directory(a.path() + "/disk");
  std::filesystem::create_symlink(a.path() + "/disk", a.path() + "/link");
  const StoreSetup setup({a.path() + "/disk", a.path() + "/link"});
  const Status status = setup.Open().status();
  EXPECT_EQ(status.code(), CS_INVALID);
  EXPECT_NE(status.text().find(a.path() + "/disk and " + a.path() + "/link"), std::string::npos);
  EXPECT_TRUE(FilesBelow(a.path() + "/disk/identity/tmp").empty());
}

// A clear that a directory missed comes before anything is served from it again.
TEST(MultiDirectory, OneOutOfUseIsClearedBeforeItComesBack) {
  Two two;
  two.TakeOut(FailingWith(EIO));
  EXPECT_EQ(two.store->Clear().code(), CS_IO);
  two.env.NoHooks();
  EXPECT_TRUE(two.ComesBack());
  EXPECT_TRUE(LookupAll(*two.store, *two.pages) == std::vector<uint8_t>(20, 0));
  EXPECT_TRUE(Eventually([&] { return FilesBelow(two.a.path() + "/identity/trash").empty(); }));
}

// ... as often as it was told to: what another process stored after the first of
// two clears goes with the second.
TEST(MultiDirectory, EveryClearThatIsOwedIsMade) {
  Two two;
  StoreSetup alone = two.setup;
  alone.roots = {two.a.path()};
  const auto other = OpenOrFail(alone);
  Pages between(alone, 0, 20);
  between.Fill();
  two.TakeOut(FailingWith(EIO));
  EXPECT_EQ(two.store->Clear().code(), CS_IO);
  std::atomic<int> moves{0};
  two.env.NoHooks();
  two.env.After(Op::kRename, On(two.a.path() + "/identity/trash/", [&](FaultEnv::Call&) {
                  if (moves.fetch_add(1) > 0) return Status::Ok();
                  EXPECT_TRUE(DumpAll(*other, between) == Repeated(20, CS_OK));
                  EXPECT_EQ(two.store->Clear().code(), CS_IO);
                  return Status::Ok();
                }));
  EXPECT_TRUE(two.ComesBack());
  EXPECT_EQ(moves.load(), 2);
  EXPECT_TRUE(LookupAll(*two.store, *two.pages) == std::vector<uint8_t>(20, 0));
  EXPECT_TRUE(LookupAll(*other, between) == std::vector<uint8_t>(20, 0));
}

// F06: absent until it is stored anew, and no load is issued meanwhile that a
// lookup could ask for.
TEST(MultiDirectory, AFailedLoadMakesTheBlockAbsent) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  FaultEnv env;
  const auto store = OpenOrFail(setup, env);
  WaitCleaned(setup, env);
  Pages pages(setup, 0, 2);
  pages.Fill();
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(2, CS_OK));
  env.Before(Op::kReadFull, On(BlockPath(setup, IdOf(0)), FailingWith(EIO)));
  EXPECT_TRUE(LoadAll(*store, pages) == (Codes{CS_IO, CS_OK}));
  env.NoHooks();
  env.ResetCounts();
  EXPECT_TRUE(LookupAll(*store, pages) == (std::vector<uint8_t>{0, 1}));
  EXPECT_EQ(env.calls(Op::kStat), 1u);
  const auto inode = [&] { return Env::Real().Stat(BlockPath(setup, IdOf(0))).value().inode; };
  const uint64_t old = inode();
  const uint64_t existing = store->Stats().dump_existing;
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(2, CS_OK));
  EXPECT_EQ(store->Stats().dump_existing, existing + 1);
  EXPECT_NE(inode(), old);
  EXPECT_TRUE(LookupAll(*store, pages) == (std::vector<uint8_t>{1, 1}));
  pages.Poison();
  EXPECT_TRUE(LoadAll(*store, pages) == Repeated(2, CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
}

// ... and so is a damaged one that can't be removed.
TEST(MultiDirectory, ADamagedBlockThatStaysIsAbsent) {
  StoredBlock stored;
  stored.bytes[5] ^= 1;
  WriteFile(stored.path, stored.bytes);
  stored.env.Before(Op::kUnlink, On("/blocks/", FailingWith(EROFS)));
  EXPECT_TRUE(LoadAll(*stored.store, *stored.pages) == Repeated(1, CS_CORRUPT));
  EXPECT_TRUE(LookupAll(*stored.store, *stored.pages) == std::vector<uint8_t>{0});
  stored.env.NoHooks();
  stored.pages->Fill();
  EXPECT_TRUE(DumpAll(*stored.store, *stored.pages) == Repeated(1, CS_OK));
  stored.pages->Poison();
  EXPECT_TRUE(LoadAll(*stored.store, *stored.pages) == Repeated(1, CS_OK));
  EXPECT_TRUE(stored.pages->HoldsAll());
}

}  // namespace cachestore::test
