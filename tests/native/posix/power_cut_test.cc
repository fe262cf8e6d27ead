// What is promised after a clean close, a killed process and a power cut
// (docs/format.md, Durability): a power cut costs misses, never a wrong byte; a
// killed process costs nothing that was published.
//
// One history of a store is cut after each of its changes, and another store is
// opened on each of the states that such a cut may leave.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string_view>

#include "fixture.h"
#include "harness.h"
#include "posix/power_cut_env.h"

namespace cachestore::test {
namespace {

using Kept = PowerCutEnv::Kept;

constexpr size_t kBlocks = 4;

const char* NameOf(Kept kept) {
  static constexpr const char* kNames[] = {"all", "names", "sizes", "some"};
  return kNames[static_cast<size_t>(kept)];
}

// More of them in `make soak`.
size_t SeedsPerCut() {
  const char* const text = std::getenv("CACHESTORE_POWER_CUT_SEEDS");
  return text == nullptr ? 4 : std::strtoul(text, nullptr, 10);
}

// Thousands of small files: in memory, where there is such a directory.
std::string ScratchParent() { return access("/dev/shm", W_OK) == 0 ? "/dev/shm" : ""; }

// What a store did to an empty directory, one change after the other.
struct History {
  explicit History(uint32_t shards) : env(root.path()), setup({root.path()}) {
    setup.shards = shards;
    // One after the other, so that a seed means the same state each time.
    setup.dump_workers = 1;
    setup.load_workers = 1;
    auto store = OpenOrFail(setup, env);
    WaitCleaned(setup, env);
    Dump(*store, 0, 3);
    Load(*store, 0, 3);
    env.ResetCounts();
    EXPECT_OK(store->Clear());
    WaitCleaned(setup, env);
    stored.assign(kBlocks, 0);
    Note();
    Dump(*store, 1, 3);
    Replace(*store, 2);
    // A second store, and what it is writing goes with it.
    auto second = OpenOrFail(setup, env);
    Dump(*second, 0, 1);
    second->Close();
    store->Close();
    Note();
  }

  void Dump(Store& store, uint64_t first, size_t blocks) {
    Pages pages(setup, first, blocks);
    pages.Fill();
    EXPECT_TRUE(DumpAll(store, pages) == Repeated(pages.size(), CS_OK));
    for (size_t b = 0; b < blocks; ++b) stored[first + b] = 1;
    Note();
  }
  void Note() { known[env.changes()] = stored; }
  void Load(Store& store, uint64_t first, size_t blocks) {
    Pages pages(setup, first, blocks);
    EXPECT_TRUE(LoadAll(store, pages) == Repeated(pages.size(), CS_OK));
  }
  // A damaged block is removed by its load, and stored anew.
  void Replace(Store& store, uint64_t number) {
    const std::string path = BlockPath(setup, IdOf(number));
    std::vector<uint8_t> bytes = ReadFile(path);
    bytes[50] ^= 1;
    WriteFile(path, bytes);
    Pages pages(setup, number, 1);
    EXPECT_TRUE(LoadAll(store, pages) != Repeated(pages.size(), CS_OK));
    Dump(store, number, 1);
  }

  const TempDir root;
  PowerCutEnv env;
  StoreSetup setup;
  std::vector<uint8_t> stored = std::vector<uint8_t>(kBlocks, 0);  // now
  // Which blocks were stored, by the number of changes.
  std::map<size_t, std::vector<uint8_t>> known;
};

// An Env after the host has started again: the kernel has drawn another boot id.
class RebootedEnv final : public FaultEnv {
 public:
  RebootedEnv() { WriteFile(boot_id_, Bytes("11111111-2222-3333-4444-555555555555\n")); }
  Result<Fd> OpenRead(const std::string& path, bool direct) override {
    return FaultEnv::OpenRead(path == "/proc/sys/kernel/random/boot_id" ? boot_id_ : path, direct);
  }

 private:
  static std::vector<uint8_t> Bytes(std::string_view text) { return {text.begin(), text.end()}; }

  const TempDir directory_;
  const std::string boot_id_ = directory_.path() + "/boot_id";
};

Env& EnvAfter(Kept kept) {
  static RebootedEnv rebooted;
  return kept == Kept::kAll ? Env::Real() : rebooted;
}

// A state after a cut, and a store on it.
class Survivor {
 public:
  Survivor(const History& history, size_t cut, Kept kept, uint64_t seed)
      : setup_(history.setup), pages_(history.setup, 0, kBlocks) {
    context_ = "after " + std::to_string(cut) + " changes (" + history.env.Name(cut) +
               "), kept: " + NameOf(kept) + ", seed " + std::to_string(seed) + ", " +
               std::to_string(setup_.shards) + " shards, verify " + std::to_string(seed % 3) + ": ";
    history.env.Restore(cut, kept, seed, root_.path());
    setup_.roots = {root_.path()};
    // What is checked less may be what this boot has written only.
    static constexpr cs_verify kVerify[] = {CS_VERIFY_ALWAYS, CS_VERIFY_SAMPLE, CS_VERIFY_NEVER};
    setup_.verify = kVerify[seed % 3];
    store_ = OpenOrFail(setup_, EnvAfter(kept));
    Expect(store_ != nullptr, "a store opens");
  }

  bool fine() const { return fine_; }
  bool Expect(bool holds, const char* what) {
    if (!holds) Fail(__FILE__, __LINE__, context_ + what);
    fine_ = fine_ && holds;
    return holds;
  }

  // Lookups and loads agree, and no byte is wrong. Returns which blocks are there.
  std::vector<uint8_t> LookAndLoad() {
    const std::vector<uint8_t> present = LookupAll(*store_, pages_);
    const uint64_t corrupt_before = store_->Stats().load_corrupt;
    pages_.Poison();
    const Codes codes = LoadAll(*store_, pages_);
    std::vector<uint8_t> whole(kBlocks, 1);
    uint64_t corrupt = 0;
    for (size_t i = 0; i < pages_.size(); ++i) {
      const size_t block = i / setup_.shards;
      corrupt += codes[i] == CS_CORRUPT ? 1 : 0;
      if (codes[i] == CS_OK) {
        Expect(pages_.Holds(i), "a load gives the right bytes");
        Expect(present[block] == 1, "what can be loaded is found by a lookup");
      } else {
        Expect(codes[i] == CS_NOT_FOUND || codes[i] == CS_CORRUPT, "a damaged block is a miss");
        whole[block] = 0;
      }
    }
    Expect(pages_.GuardsIntact(), "a load stays in its page");
    Expect(store_->Stats().load_corrupt == corrupt_before + corrupt, "each damage is counted");
    // F06: the failed load is the end of the lookup's promise.
    Expect(LookupAll(*store_, pages_) == whole, "a lookup says what the load has found");
    return whole;
  }

  void DumpAllOfThem() {
    pages_.Fill();
    Expect(DumpAll(*store_, pages_) == Repeated(pages_.size(), CS_OK), "a dump succeeds");
  }

  // The next dump of a page that was missed heals it.
  void Heal() {
    DumpAllOfThem();
    Expect(LookAndLoad() == std::vector<uint8_t>(kBlocks, 1), "a dump heals what was missed");
  }

  void Clear() {
    Expect(store_->Clear().ok(), "a clear succeeds");
    Expect(LookAndLoad() == std::vector<uint8_t>(kBlocks, 0), "a clear takes all blocks");
  }

  // What the dead store was writing, and what it had cleared, is gone.
  void Close() {
    Expect(Eventually([&] { return Names("trash").empty(); }), "cleared blocks are removed");
    Expect(Eventually([&] { return Names("tmp").size() == 1; }), "temporary files are removed");
    store_->Close();
    Expect(Names("tmp").empty(), "a close leaves nothing");
  }

 private:
  std::vector<std::string> Names(const char* directory) {
    const auto names = Env::Real().List(root_.path() + "/" + setup_.identity + "/" + directory);
    return names.ok() ? names.value() : std::vector<std::string>();
  }

  const TempDir root_{ScratchParent()};
  StoreSetup setup_;
  Pages pages_;
  std::string context_;
  std::unique_ptr<Store> store_;
  bool fine_ = true;
};

bool WorstIsAMiss(const History& history, size_t cut, Kept kept, uint64_t seed) {
  Survivor survivor(history, cut, kept, seed);
  if (!survivor.fine()) return false;
  // A page may be dumped without having been looked for.
  if (seed % 2 == 1) survivor.DumpAllOfThem();
  survivor.LookAndLoad();
  survivor.Heal();
  if (seed / 2 % 2 == 1) survivor.Clear();
  survivor.Close();
  return survivor.fine();
}

void CutAnywhere(uint32_t shards) {
  const History history(shards);
  uint64_t seed = 0;
  for (size_t cut = 0; cut <= history.env.changes(); ++cut) {
    for (const Kept kept : {Kept::kNames, Kept::kSizes}) {
      if (!WorstIsAMiss(history, cut, kept, seed++)) return;
    }
    for (size_t i = 0; i < SeedsPerCut(); ++i) {
      if (!WorstIsAMiss(history, cut, Kept::kSome, seed++)) return;
    }
  }
}

}  // namespace

TEST(PowerCut, WorstIsAMiss) { CutAnywhere(1); }
TEST(PowerCut, WorstIsAMissOfSeveralShards) { CutAnywhere(2); }

// A process that is killed, anywhere, takes nothing along: what was stored then
// is served, and what is found is whole.
TEST(PowerCut, KilledProcessLosesNothing) {
  for (const uint32_t shards : {1u, 2u}) {
    const History history(shards);
    for (size_t cut = 0; cut <= history.env.changes(); ++cut) {
      Survivor survivor(history, cut, Kept::kAll, 0);
      const std::vector<uint8_t> whole = survivor.LookAndLoad();
      if (const auto known = history.known.find(cut); known != history.known.end()) {
        survivor.Expect(whole == known->second, "what was stored is there, what was cleared isn't");
      }
      survivor.Heal();
      survivor.Close();
      if (!survivor.fine()) return;
    }
  }
}

// A closed store leaves its blocks and no temporary file behind.
TEST(PowerCut, CloseLeavesBlocksAndNothingElse) {
  const History history(1);
  EXPECT_EQ(FilesBelow(history.root.path() + "/identity/blocks").size(), kBlocks);
  EXPECT_EQ(Env::Real().List(TemporaryRoot(history.setup)).value().size(), 0u);
  Survivor survivor(history, history.env.changes(), Kept::kAll, 0);
  EXPECT_TRUE(survivor.LookAndLoad() == std::vector<uint8_t>(kBlocks, 1));
  survivor.Close();
}

}  // namespace cachestore::test
