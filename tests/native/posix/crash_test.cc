// Every system call of an operation fails in turn, with each error that it can
// give; is done and fails all the same; falls short; or is the last one that its
// process makes. Afterwards no visible block is wrong, lookups agree with loads,
// results with lookups, what is counted as used with what is there, and nothing
// is left lying about.
//
// An operation is a line of kOperations. Calls are counted while it runs, the
// threads' behind it included; which call is the n-th may differ from time to
// time, but there is an end to them.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "base/aligned_buffer.h"
#include "cache/processes.h"
#include "fixture.h"
#include "harness.h"
#include "posix/collecting.h"
#include "posix/one_fault.h"

namespace cachestore::test {
namespace {

constexpr size_t kBlocks = 2;
constexpr size_t kMostCalls = 200;  // of an operation

struct Way {
  const char* name;
  uint32_t shards;
  bool direct;
  cs_zero_copy zero_copy;
};
constexpr Way kWays[] = {
    {"zero-copy", 1, false, CS_ZERO_COPY_ALWAYS},
    {"direct, bounced", 1, true, CS_ZERO_COPY_NEVER},
    {"two shards, direct", 2, true, CS_ZERO_COPY_ALWAYS},
    {"two shards, bounced", 2, false, CS_ZERO_COPY_NEVER},
    // The ones above have each pair of these; the rest is for `make soak`.
    {"bounced", 1, false, CS_ZERO_COPY_NEVER},
    {"direct", 1, true, CS_ZERO_COPY_ALWAYS},
    {"two shards", 2, false, CS_ZERO_COPY_ALWAYS},
    {"two shards, direct, bounced", 2, true, CS_ZERO_COPY_NEVER},
};
size_t Ways() { return std::getenv("CACHESTORE_CRASH_ALL") == nullptr ? 4 : std::size(kWays); }

// Thousands of small files: in memory, where that does all that a disk does.
std::string ScratchParent() {
  if (access("/dev/shm", W_OK) != 0) return "";
  const TempDir probe("/dev/shm");
  const FileCloser direct_io = [&] {
    const Result<Fd> opened = Env::Real().OpenWrite(probe.path() + "/probe", /*direct=*/true);
    return opened.ok() ? FileCloser(Env::Real(), opened.value()) : FileCloser();
  }();
  return direct_io ? "/dev/shm" : "";
}

StoreSetup SetupOf(const std::string& root, const Way& way) {
  StoreSetup setup({root});
  setup.shards = way.shards;
  setup.direct = way.direct;
  setup.zero_copy = way.zero_copy;
  if (way.direct) setup.tensor_sizes = {4096, 8192};  // or it would be bounced
  setup.load_workers = 1;
  setup.dump_workers = 1;
  return setup;
}

std::vector<std::string> NamesIn(const StoreSetup& setup, const char* directory) {
  const auto names = Env::Real().List(setup.roots[0] + "/" + setup.identity + "/" + directory);
  return names.ok() ? names.value() : std::vector<std::string>();
}

// A store, and one operation on it.
struct Trial {
  Trial(const StoreSetup& store_setup, const std::string& what)
      : setup(store_setup), pages(setup, 0, kBlocks), context(what) {}

  bool Expect(bool holds, const std::string& text) {
    if (!holds) Fail(__FILE__, __LINE__, context + ": expected that " + text);
    fine = fine && holds;
    return holds;
  }
  // With nothing at work behind: also, nothing that a dead store left.
  bool Open() {
    store = OpenOrFail(setup, env);
    if (!Expect(store != nullptr, "a store opens")) return false;
    Expect(Eventually([&] { return NamesIn(setup, "trash").empty(); }), "trash is removed");
    Expect(Eventually([&] { return NamesIn(setup, "tmp").size() == 1; }), "tmp is reclaimed");
    WaitCleaned(setup, env);
    return fine;
  }
  void Reopen() {
    store->Close();
    env.ResetCounts();
    (void)Open();
  }
  Pages First(size_t blocks) const { return {setup, 0, blocks}; }
  void Dump(size_t blocks) {
    Pages first = First(blocks);
    first.Fill();
    Expect(DumpAll(*store, first) == Repeated(first.size(), CS_OK), "a dump succeeds");
  }
  void Clear() {
    env.ResetCounts();
    Expect(store->Clear().ok(), "a clear succeeds");
    WaitCleaned(setup, env);
  }
  // What is found is whole and right, and the rest isn't found.
  std::vector<uint8_t> LookAndLoad() {
    const std::vector<uint8_t> before = LookupAll(*store, pages);
    pages.Poison();
    const Codes codes = LoadAll(*store, pages);
    // What couldn't be read for once is said to be absent until it can be.
    const std::vector<uint8_t> present = LookupAll(*store, pages);
    for (size_t i = 0; i < pages.size(); ++i) {
      const bool there = present[i / setup.shards] == 1;
      if (before[i / setup.shards] == 1) Expect(there, "what a lookup finds can be loaded");
      Expect(codes[i] == (there ? CS_OK : CS_NOT_FOUND), "loads agree with lookups");
      if (there) Expect(pages.Holds(i), "a load gives the right bytes");
    }
    return present;
  }

  const StoreSetup setup;
  FaultEnv env;
  std::unique_ptr<Store> store;
  Pages pages;
  std::string context;
  bool fine = true;
  Mode mode = Mode::kInstead;
  // It was told that the mark of the latest clear is gone: as if others had cleared.
  bool cleared = false;
  // What the operation said, for its `check`.
  Codes codes;
  Status status;
};

// A collector that begins now counts what is there, to the byte, whatever happened.
bool UsageIsRight(const StoreSetup& setup) {
  uint64_t there = 0;
  for (const std::string& path : FilesBelow(setup.roots[0] + "/" + setup.identity + "/blocks")) {
    there += AlignUp(Env::Real().Stat(path).value().size);
  }
  DirectoryOptions options;
  options.root = setup.roots[0];
  options.identity_name = setup.identity;
  options.limits.capacity = 1 << 30;
  Collecting collecting(options);
  if (!EXPECT_TRUE(collecting.opened)) return false;
  collecting.Step();  // the files are few: all of a pass
  return collecting.directory.space().used() == there;
}

// Where its `run` starts is the same each time, whatever the trial before left.
struct Operation {
  const char* name;
  void (*prepare)(Trial&);  // nothing fails
  void (*run)(Trial&);      // under faults, to its end
  // Nothing fails any more: what it said is true. Gets the blocks that are there.
  void (*check)(Trial&, const std::vector<uint8_t>& present);
};

void PrepareDump(Trial& trial) {
  trial.Clear();  // so that the fan-out directories are made again
  trial.Dump(1);
}
void RunDump(Trial& trial) {
  trial.pages.Fill();
  trial.codes = DumpAll(*trial.store, trial.pages);
}
void CheckDump(Trial& trial, const std::vector<uint8_t>& present) {
  const uint32_t shards = trial.setup.shards;
  trial.Expect(present[0] == 1, "what was stored before is there");
  for (size_t i = 0; i < trial.codes.size(); ++i) {
    const bool ok = trial.codes[i] == CS_OK;
    trial.Expect(trial.codes[i] == trial.codes[i / shards * shards], "a block has one result");
    if (ok && !trial.cleared) {
      trial.Expect(present[i / shards] == 1, "what a dump has stored is there");
    }
    // A rename that was done and fails all the same leaves a whole block, and so
    // does one after which nothing can be removed.
    if (!ok && i / shards == 1 && trial.mode != Mode::kAfter && trial.mode != Mode::kFromThenOn) {
      trial.Expect(present[1] == 0, "of a failed dump nothing is visible");
    }
  }
}

void PrepareBlocks(Trial& trial) { trial.Dump(kBlocks); }
void RunLoad(Trial& trial) {
  trial.pages.Poison();
  trial.codes = LoadAll(*trial.store, trial.pages);
  for (size_t i = 0; i < trial.codes.size(); ++i) {
    if (trial.codes[i] == CS_OK) trial.Expect(trial.pages.Holds(i), "loaded bytes are right");
  }
  trial.Expect(trial.pages.GuardsIntact(), "a load stays in its page");
}
void CheckLoad(Trial& trial, const std::vector<uint8_t>& present) {
  if (trial.mode == Mode::kEndsEarly) return;  // as if damaged, so it is removed
  trial.Expect(present == std::vector<uint8_t>(kBlocks, 1), "an error removes no block");
}

void RunLookup(Trial& trial) {
  const std::vector<uint8_t> present = LookupAll(*trial.store, trial.pages);
  trial.Expect(present[1] == 0, "a lookup finds nothing that isn't there");
  const Result<size_t> length = trial.store->LookupPrefix(0, trial.pages.block_ids());
  trial.Expect(length.ok() && length.value() <= 1, "nor does one for a prefix");
}
void CheckLookup(Trial& trial, const std::vector<uint8_t>& present) {
  trial.Expect(present == std::vector<uint8_t>{1, 0}, "a lookup changes nothing");
}

void RunClear(Trial& trial) {
  trial.env.ResetCounts();
  trial.status = trial.store->Clear();
  WaitCleaned(trial.setup, trial.env);
}
void CheckClear(Trial& trial, const std::vector<uint8_t>& present) {
  if (trial.status.ok()) {
    trial.Expect(present == std::vector<uint8_t>(kBlocks, 0), "a clear takes all blocks");
  }
}

void RunOpenAndClose(Trial& trial) {
  Result<std::unique_ptr<Store>> opened = trial.setup.Open(trial.env);
  trial.status = opened.status();
  if (opened.ok()) opened.value()->Close();
}
void CheckOpenAndClose(Trial& trial, const std::vector<uint8_t>& present) {
  trial.Expect(present == std::vector<uint8_t>(kBlocks, 1), "an open takes no block");
}

constexpr Operation kOperations[] = {
    {"dump", PrepareDump, RunDump, CheckDump},
    {"load", PrepareBlocks, RunLoad, CheckLoad},
    {"lookup", PrepareDump, RunLookup, CheckLookup},
    {"clear", PrepareBlocks, RunClear, CheckClear},
    {"open and close", PrepareBlocks, RunOpenAndClose, CheckOpenAndClose},
};

std::string Describe(const Operation& operation, const Way& way, size_t at, Mode mode, int error) {
  return std::string(operation.name) + ", " + way.name + ", call " + std::to_string(at) + ", " +
         kModeNames[static_cast<size_t>(mode)] + ", errno " + std::to_string(error);
}

// One fault, and all that must hold after it.
Fault Try(const StoreSetup& setup, const Operation& operation, const Way& way, size_t at, Mode mode,
          int error, bool& fine) {
  const Fault fault(at, mode, error);
  const size_t descriptors = DescriptorCount();
  {
    Trial trial(setup, Describe(operation, way, at, mode, error));
    trial.mode = mode;
    if (trial.Open()) {
      operation.prepare(trial);
      fault.Arm(trial.env);
      operation.run(trial);
      trial.env.NoHooks();
      if (fault.fired()) {
        trial.cleared = fault.path().ends_with("/cleared") &&
                        Injected(error, {fault.op(), ""}).code() == CS_NOT_FOUND;
        trial.context += std::string(" (") + OpName(fault.op()) + " " + fault.path() + ")";
      }
      // After so many errors the directory may be out of use until it is probed.
      if (mode == Mode::kFromThenOn) trial.Reopen();
      operation.check(trial, trial.LookAndLoad());
      trial.store->Close();
      trial.Expect(UsageIsRight(setup), "what is counted as used is there");
      trial.Expect(DescriptorCount() == descriptors, "no descriptor is left open");
    }
    fine = trial.fine;
  }
  return fault;
}

// The errors for one call; of several that the store can't tell apart, one that
// differs from call to call, unless `all`.
std::vector<int> Chosen(Op op, size_t at, bool all) {
  const std::vector<int> errors = ErrorsOf(op);
  if (all) return errors;
  std::vector<std::pair<Code, std::vector<int>>> classes;
  for (const int error : errors) {
    const Code code = Status::FromErrno(error, "", "").code();
    const auto same =
        std::find_if(classes.begin(), classes.end(), [&](auto& c) { return c.first == code; });
    if (same != classes.end()) {
      same->second.push_back(error);
    } else {
      classes.push_back({code, {error}});
    }
  }
  std::vector<int> chosen;
  for (const auto& [code, same] : classes) chosen.push_back(same[at % same.size()]);
  return chosen;
}

// All faults of one operation, call after call.
void FailInTurn(const Operation& operation, const Way& way, bool all) {
  const TempDir root(ScratchParent());
  const StoreSetup setup = SetupOf(root.path(), way);
  bool fine = true;
  for (size_t at = 1; fine; ++at) {
    const Fault first = Try(setup, operation, way, at, Mode::kInstead, EIO, fine);
    if (!first.fired()) break;  // it makes fewer calls
    if (at > kMostCalls) return Fail(__FILE__, __LINE__, "there is no end to its calls");
    const Op op = first.op();
    const auto then = [&](Mode mode, int error) {
      if (fine) (void)Try(setup, operation, way, at, mode, error, fine);
    };
    for (const int error : Chosen(op, at, all)) {
      then(Mode::kInstead, error);
      if (Changes(op)) then(Mode::kAfter, error);
      if (op == Op::kReadFull || op == Op::kWriteFull) then(Mode::kHalf, error);
    }
    if (op == Op::kReadFull) then(Mode::kEndsEarly, EIO);
    for (const int error : {EIO, ENOSPC, EROFS}) then(Mode::kFromThenOn, error);
  }
}

// A process without threads, which forks one that has them for each crash.
ROLE(CrashServer) {
  const StoreSetup setup = SetupOf(arguments[0], kWays[std::stoul(arguments[1])]);
  while (const auto line = HearParent()) {
    size_t operation = 0;
    size_t at = 0;
    int mode = 0;
    if (std::sscanf(line->c_str(), "%zu %zu %d", &operation, &at, &mode) != 3) return 1;
    const pid_t pid = fork();
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      alarm(60);
      Trial trial(setup, "in the child, " + *line);
      if (!trial.Open()) _exit(1);
      kOperations[operation].prepare(trial);
      if (!trial.fine) _exit(1);
      Fault(at, static_cast<Mode>(mode)).Arm(trial.env);
      kOperations[operation].run(trial);
      _exit(kFinished);
    }
    int status = 0;
    if (pid < 0 || waitpid(pid, &status, 0) != pid) return 1;
    TellParent(std::to_string(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status)));
  }
  return 0;
}

// The process ends in each call of an operation; the next one finds all in order.
void CrashInTurn(size_t index, size_t way) {
  const Operation& operation = kOperations[index];
  const TempDir root(ScratchParent());
  const StoreSetup setup = SetupOf(root.path(), kWays[way]);
  Process server("CrashServer", {root.path(), std::to_string(way)});
  size_t crashes = 0;
  for (const Mode mode : {Mode::kDies, Mode::kDiesHalfWritten}) {
    for (size_t at = 1;; ++at) {
      const std::string context = Describe(operation, kWays[way], at, mode, 0);
      const std::string ended = server.Ask(std::to_string(index) + " " + std::to_string(at) + " " +
                                           std::to_string(static_cast<int>(mode)));
      if (ended == std::to_string(kFinished)) break;
      if (ended != std::to_string(kDied)) {
        return Fail(__FILE__, __LINE__, context + ": the process ended with " + ended);
      }
      if (at > kMostCalls) return Fail(__FILE__, __LINE__, "there is no end to its calls");
      ++crashes;
      const size_t descriptors = DescriptorCount();
      Trial trial(setup, context);
      if (!trial.Open()) return;
      const std::vector<uint8_t> present = trial.LookAndLoad();
      const bool keeps = operation.run != RunClear;
      trial.Expect(!keeps || present[0] == 1, "what was stored before is there");
      trial.store->Close();
      trial.Expect(UsageIsRight(setup), "what is counted as used is there");
      trial.Expect(NamesIn(setup, "tmp").empty(), "a close leaves nothing");
      trial.Expect(DescriptorCount() == descriptors, "no descriptor is left open");
      if (!trial.fine) return;
    }
  }
  EXPECT_GT(crashes, 0u);
}

}  // namespace

// F02, F03, F09: each error once where they differ by the text only.
TEST(Crash, EveryCallFailsWithEachError) {
  for (const Operation& operation : kOperations) FailInTurn(operation, kWays[0], /*all=*/true);
}

TEST(Crash, EveryCallOfADumpFails) {
  for (size_t way = 1; way < Ways(); ++way) FailInTurn(kOperations[0], kWays[way], /*all=*/false);
}

TEST(Crash, EveryCallOfALoadFails) {
  for (size_t way = 1; way < Ways(); ++way) FailInTurn(kOperations[1], kWays[way], /*all=*/false);
}

// F07.
TEST(Crash, ProcessDiesInEveryCall) {
  for (size_t i = 0; i < std::size(kOperations); ++i) CrashInTurn(i, 0);
}

TEST(Crash, ProcessDiesInEveryCallOfADump) {
  for (size_t way = 1; way < Ways(); ++way) CrashInTurn(0, way);
}

}  // namespace cachestore::test
