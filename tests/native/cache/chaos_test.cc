// Six processes share a region and do what comes: load, dump, look up, now and
// then clear, also from outside the region; they are killed and started again,
// stopped and continued, closed and opened. Every page that a load returns is
// compared with what its block id says. No wrong byte, no wait without a bound, and
// in the end no slot, region, descriptor or thread that isn't accounted for.
//
// For CACHESTORE_CHAOS_SECONDS seconds, or five. What is drawn depends on
// CACHESTORE_CHAOS_SEED, which a failure prints; when it happens doesn't.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <random>
#include <sstream>
#include <vector>

#include "cache/processes_store.h"

namespace cachestore::test {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kProcesses = 6;
constexpr size_t kSlots = 48;
constexpr size_t kBlocks = 160;  // more than there are slots
constexpr size_t kMost = 24;     // pages of a request
// No operation takes longer: timeout_ms and peer_timeout_ms, lock waits, and a
// machine with something else to do.
constexpr std::chrono::seconds kBound{20};

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::stoull(text) : otherwise;
}

// One process: an operation whenever the test says so, told with its number of
// right pages. Its descriptors and threads stay what they were.
class ChaosProcess {
 public:
  ChaosProcess(const StoreSetup& setup, uint64_t seed) : setup_(setup), random_(seed) {}

  std::string Do(const std::string& command) {
    if (command == "open") return Open();
    if (command == "close") return Close();
    std::ostringstream did;
    const size_t first = Draw(kBlocks - kMost);
    const size_t n = 1 + Draw(kMost - 1);
    const uint64_t kind = Draw(1000);
    if (kind < 450) {
      did << "load " << Load(first, n);
    } else if (kind < 800) {
      did << "dump " << Dump(first, n);
    } else if (kind < 995) {
      std::vector<uint8_t> present(n);
      const std::vector<BlockId> ids = Pages(setup_, first, n).block_ids();
      (void)store_->Lookup(0, ids, present);
      (void)store_->LookupPrefix(0, ids);
      did << "lookup 0";
    } else if (kind < 998) {
      (void)store_->Clear();
      did << "clear 0";
    } else {
      ClearFromElsewhere();
      did << "clear 0";
    }
    return wrong_ == 0 ? did.str() : "wrong " + std::to_string(wrong_) + " after " + did.str();
  }

 private:
  size_t Draw(size_t below) { return random_() % below; }

  std::string Open() {
    Result<std::unique_ptr<Store>> opened = setup_.Open();
    if (!opened.ok()) return "failed " + opened.status().text();
    store_ = std::move(opened.value());
    return "open";
  }

  // By a store without the region, as another host or the command line.
  void ClearFromElsewhere() {
    StoreSetup files = setup_;
    files.pipeline = "Posix";
    const Result<std::unique_ptr<Store>> opened = files.Open();
    if (opened.ok()) (void)opened.value()->Clear();
  }

  std::string Close() {
    store_->Close();
    store_.reset();
    // From the first time on: a sanitizer's own may come with it.
    if (threads_ == 0) threads_ = ThreadCount();
    if (descriptors_ == 0) descriptors_ = DescriptorCount();
    if (!Eventually([&] { return ThreadCount() <= threads_; }) ||
        DescriptorCount() > descriptors_) {
      return "leaked: " + std::to_string(ThreadCount()) + " threads, " +
             std::to_string(DescriptorCount()) + " descriptors; " + std::to_string(threads_) +
             " and " + std::to_string(descriptors_) + " at first";
    }
    return "closed";
  }

  void Check(const Pages& pages, const Codes& codes, bool loaded) {
    for (size_t i = 0; i < pages.size(); ++i) {
      if (loaded && codes[i] == CS_OK && !pages.Holds(i)) ++wrong_;
      if (codes[i] == CS_INVALID || codes[i] == CS_INTERNAL || codes[i] == CS_CORRUPT) ++wrong_;
    }
    if (!pages.GuardsIntact()) ++wrong_;
  }

  size_t Load(size_t first, size_t n) {
    Pages pages(setup_, first, n);
    pages.Poison();
    const Codes codes = LoadAll(*store_, pages, Patience());
    Check(pages, codes, /*loaded=*/true);
    return static_cast<size_t>(std::count(codes.begin(), codes.end(), CS_OK));
  }

  size_t Dump(size_t first, size_t n) {
    Pages pages(setup_, first, n);
    pages.Fill();
    const Codes codes = DumpAll(*store_, pages, Patience());
    // The caller's memory is the caller's again: what is done with it now is
    // stored nowhere.
    pages.Poison();
    Check(pages, codes, /*loaded=*/false);
    return static_cast<size_t>(std::count(codes.begin(), codes.end(), CS_OK));
  }

  // Some give up soon.
  std::chrono::milliseconds Patience() {
    return std::chrono::milliseconds(Draw(4) == 0 ? Draw(5) : 5000);
  }

  const StoreSetup setup_;
  std::mt19937_64 random_;
  std::unique_ptr<Store> store_;
  size_t wrong_ = 0;
  size_t threads_ = 0;
  size_t descriptors_ = 0;
};

ROLE(Chaos) {
  ChaosProcess process(SetupOf(arguments, 1), std::stoull(arguments.at(0)));
  while (const auto command = HearParent()) TellParent(process.Do(*command));
  return 0;
}

// The test's view of one process.
struct Actor {
  std::unique_ptr<Process> process;
  bool open = false;
  bool stopped = false;
  Clock::time_point asked;      // when the operation that it is in was asked for
  Clock::time_point continues;  // of a stopped one
};

class Chaos {
 public:
  explicit Chaos(uint64_t seed) : random_(seed), actors_(kProcesses) {
    place_.SetSlots(kSlots);
    place_.setup.peer_timeout_ms = 300;
    place_.setup.timeout_ms = 3000;
    place_.Fill(0, kBlocks / 2);
  }

  void Run(std::chrono::seconds time) {
    for (Actor& actor : actors_) Start(actor);
    const auto end = Clock::now() + time;
    while (Clock::now() < end && !failed_) {
      for (Actor& actor : actors_) Step(actor);
    }
    for (Actor& actor : actors_) Settle(actor);
    if (!failed_) ExpectNothingLost();
    for (Actor& actor : actors_) actor.process.reset();
    EXPECT_TRUE(failed_ || place_.IsClean());
    EXPECT_GT(loaded_, 0u);
    EXPECT_GT(dumped_, 0u);
    std::printf("%zu pages loaded, %zu dumped, %zu kills, %zu stops, %zu clears\n", loaded_,
                dumped_, kills_, stops_, clears_);
  }

 private:
  size_t Draw(size_t below) { return random_() % below; }

  void Failed(const std::string& what) {
    failed_ = true;
    Fail(__FILE__, __LINE__, what);
  }

  void Ask(Actor& actor, const std::string& command) {
    actor.process->Say(command);
    actor.asked = Clock::now();
  }

  void Start(Actor& actor) {
    std::vector<std::string> words = WordsOf(place_.setup);
    words.insert(words.begin(), std::to_string(random_()));
    actor.process = std::make_unique<Process>("Chaos", words);
    actor.open = actor.stopped = false;
    Ask(actor, "open");
  }

  void Restart(Actor& actor) {
    ++kills_;
    actor.process->Kill();
    Start(actor);
  }

  // What it has done, and what it is to do next; and what befalls it meanwhile.
  void Step(Actor& actor) {
    if (actor.stopped) {
      if (Clock::now() < actor.continues) return;
      if (Draw(8) == 0) return Restart(actor);
      actor.process->Continue();
      actor.stopped = false;
      actor.asked = Clock::now();
    }
    const std::string answer = actor.process->Hear(std::chrono::milliseconds(1));
    if (!answer.empty()) {
      Note(actor, answer);
      Ask(actor, !actor.open ? "open" : Draw(60) == 0 ? "close" : "go on");
    } else if (Clock::now() - actor.asked > kBound) {
      return Failed("an operation has no end");
    }
    const size_t fate = Draw(2000);
    if (fate < 8) {
      Restart(actor);
    } else if (fate < 14) {
      ++stops_;
      actor.process->Stop();
      actor.stopped = true;
      actor.continues = Clock::now() + std::chrono::milliseconds(Draw(Draw(8) == 0 ? 1800 : 300));
    }
  }

  void Note(Actor& actor, const std::string& answer) {
    std::istringstream in(answer);
    std::string what;
    size_t pages = 0;
    in >> what >> pages;
    if (what == "open") {
      actor.open = true;
    } else if (what == "closed") {
      actor.open = false;
    } else if (what == "load") {
      loaded_ += pages;
    } else if (what == "dump") {
      dumped_ += pages;
    } else if (what == "clear") {
      ++clears_;
    } else if (what == "failed" && answer.find("locked by a stopped process") != answer.npos) {
      // It comes again.
    } else if (what != "lookup") {
      Failed(answer);
    }
  }

  void Settle(Actor& actor) {
    if (actor.stopped) actor.process->Continue();
    actor.stopped = false;
    const std::string answer = actor.process->Hear();
    if (answer.empty()) return Failed("an operation has no end");
    Note(actor, answer);
    if (!actor.open && !failed_) {
      Note(actor, actor.process->Ask("open"));
      if (!actor.open) Failed("it doesn't open");
    }
  }

  // With all six there and nothing to do.
  void ExpectNothingLost() {
    const auto region = AttachOrFail(place_.setup);
    if (region == nullptr) return;
    // Whoever died last is reclaimed by whoever wants something.
    const StoreProcess last(place_.setup, place_.watch);
    EXPECT_TRUE(Eventually([&] {
      const RegionCounts counts = CountsOf(*region);
      return counts.loading == 0 && counts.dirty == 0 && counts.pins == 0 &&
             counts.processes == kProcesses + 2;
    }));
    const RegionCounts counts = CountsOf(*region);
    EXPECT_EQ(counts.loading + counts.dirty + counts.pins, 0u);
    EXPECT_EQ(counts.processes, kProcesses + 2);
    EXPECT_EQ(counts.slots(), region->slot_count());
    EXPECT_EQ(Inconsistency(*region), "");
    EXPECT_EQ(FilesBelow(place_.shared.path()).size(), 1u);
    for (Actor& actor : actors_) EXPECT_EQ(actor.process->Ask("close"), "closed");
  }

  Place place_;
  std::mt19937_64 random_;
  std::vector<Actor> actors_;
  bool failed_ = false;
  size_t loaded_ = 0, dumped_ = 0, kills_ = 0, stops_ = 0, clears_ = 0;
};

}  // namespace

TEST(Chaos, EverythingAtOnce) {
  const uint64_t seed = FromEnvironment("CACHESTORE_CHAOS_SEED", std::random_device()());
  const auto time = std::chrono::seconds(FromEnvironment("CACHESTORE_CHAOS_SECONDS", 5));
  std::printf("CACHESTORE_CHAOS_SEED=%llu\n", static_cast<unsigned long long>(seed));
  Chaos chaos(seed);
  chaos.Run(time);
}

}  // namespace cachestore::test
