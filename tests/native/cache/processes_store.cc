#include "cache/processes_store.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <sstream>
#include <thread>
#include <unordered_map>

#include "base/aligned_buffer.h"
#include "cache/held_page.h"

namespace cachestore::test {
namespace {

// While `held` says so; bounded.
void WaitWhile(const std::atomic<uint32_t>& held) {
  const auto end = std::chrono::steady_clock::now() + kAnswerBound;
  while (held.load() != 0 && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

std::vector<std::string> WordsOf(const StoreSetup& setup) {
  std::ostringstream text;
  text << setup.roots[0] << ' ' << setup.identity << ' ' << +setup.fingerprint << ' '
       << setup.share_buffer << ' ' << setup.buffer_directory << ' ' << setup.buffer_capacity << ' '
       << setup.copy_workers << ' ' << setup.load_workers << ' ' << setup.dump_workers << ' '
       << setup.queue_depth << ' ' << setup.timeout_ms << ' ' << setup.peer_timeout_ms << ' '
       << setup.tensor_sizes.size();
  for (const uint64_t size : setup.tensor_sizes) text << ' ' << size;
  std::vector<std::string> words;
  std::istringstream in(text.str());
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

StoreSetup SetupOf(const std::vector<std::string>& words, size_t from) {
  std::string text;
  for (size_t i = from; i < words.size(); ++i) text += words[i] + ' ';
  std::istringstream in(text);
  StoreSetup setup({""});
  setup.pipeline = "Cache|Posix";
  unsigned fingerprint = 0;
  size_t tensors = 0;
  in >> setup.roots[0] >> setup.identity >> fingerprint >> setup.share_buffer >>
      setup.buffer_directory >> setup.buffer_capacity >> setup.copy_workers >> setup.load_workers >>
      setup.dump_workers >> setup.queue_depth >> setup.timeout_ms >> setup.peer_timeout_ms >>
      tensors;
  setup.fingerprint = static_cast<uint8_t>(fingerprint);
  setup.tensor_sizes.resize(tensors);
  for (uint64_t& size : setup.tensor_sizes) in >> size;
  return setup;
}

StorageWatch::StorageWatch()
    : directory_(std::make_unique<TempDir>(SharedMemoryParent())),
      path_(directory_->path() + "/watch") {
  Map();
}

StorageWatch::StorageWatch(const std::string& path) : path_(path) { Map(); }

void StorageWatch::Map() {
  const int fd = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  void* memory = MAP_FAILED;
  if (fd >= 0 && ftruncate(fd, sizeof(Shared)) == 0) {
    memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (fd >= 0) close(fd);
  if (memory == MAP_FAILED) {
    std::perror("StorageWatch");
    abort();
  }
  shared_ = static_cast<Shared*>(memory);  // of zeros
}

StorageWatch::~StorageWatch() { munmap(shared_, sizeof(Shared)); }

uint64_t StorageWatch::reads() const {
  uint64_t sum = 0;
  for (const auto& count : shared_->reads) sum += count;
  return sum;
}

void StorageWatch::Reset() {
  for (auto& count : shared_->reads) count = 0;
  shared_->writes = 0;
  shared_->reads_inside = shared_->writes_inside = 0;
}

bool StorageWatch::WaitReadsInside(uint32_t n) const {
  return Eventually([&] { return shared_->reads_inside >= n; });
}

bool StorageWatch::WaitWritesInside(uint32_t n) const {
  return Eventually([&] { return shared_->writes_inside >= n; });
}

void StorageWatch::Install(FaultEnv& env, const StoreSetup& setup) {
  auto blocks = std::make_shared<std::unordered_map<std::string, size_t>>();
  for (size_t n = 0; n < kBlocks; ++n) blocks->emplace(BlockPath(setup, IdOf(n)), n);
  env.Before(Op::kReadFull, [this, blocks](FaultEnv::Call& call) {
    const auto found = blocks->find(call.path);
    if (found == blocks->end() || call.offset != 0) return Status::Ok();
    ++shared_->reads[found->second];
    if (shared_->reads_held != 0) {
      ++shared_->reads_inside;
      WaitWhile(shared_->reads_held);
    }
    return Status::Ok();
  });
  env.Before(Op::kWriteFull, [this](FaultEnv::Call& call) {
    if (call.path.find("/tmp/") == std::string::npos || call.offset != 0) return Status::Ok();
    ++shared_->writes;
    if (shared_->writes_held != 0) {
      ++shared_->writes_inside;
      WaitWhile(shared_->writes_held);
    }
    if (shared_->failing == static_cast<uint32_t>(getpid())) return Status(CS_IO, "injected");
    return Status::Ok();
  });
}

Place::Place() {
  setup.pipeline = "Cache|Posix";
  setup.buffer_directory = shared.path();
  setup.tensor_sizes = {5000, 300};
  setup.peer_timeout_ms = 1000;
}

void Place::Fill(size_t first, size_t n) {
  StoreSetup plain = setup;
  plain.pipeline = "Posix";
  plain.queue_depth = 4096;
  const auto store = OpenOrFail(plain);
  if (store == nullptr) return;
  Pages pages(plain, first, n);
  pages.Fill();
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(n, CS_OK));
  store->Close();
}

size_t Place::Stored(size_t first, size_t n) const {
  StoreSetup plain = setup;
  plain.pipeline = "Posix";
  plain.queue_depth = 4096;
  const auto store = OpenOrFail(plain);
  if (store == nullptr) return 0;
  Pages pages(plain, first, n);
  pages.Poison();
  const Codes codes = LoadAll(*store, pages);
  size_t stored = 0;
  for (size_t i = 0; i < n; ++i) stored += codes[i] == CS_OK && pages.Holds(i) ? 1 : 0;
  store->Close();
  return stored;
}

void Place::SetSlots(size_t slots) {
  // Its metadata is less than this for every slot.
  constexpr uint64_t kSlotEntry = 256;
  constexpr uint64_t kHeader = 64 << 10;
  setup.buffer_capacity = kHeader + slots * (AlignUp(setup.payload()) + kSlotEntry);
}

StoreProcesses Place::Start(size_t n) const {
  StoreProcesses processes;
  for (size_t i = 0; i < n; ++i) processes.push_back(std::make_unique<StoreProcess>(setup, watch));
  return processes;
}

bool Place::IsClean() const { return FilesBelow(shared.path()).empty(); }

StoreProcess::StoreProcess(const StoreSetup& setup, const StorageWatch& watch, bool open,
                           const std::vector<std::string>& prefix)
    : process_(
          "Store",
          [&] {
            std::vector<std::string> words = WordsOf(setup);
            words.insert(words.begin(), watch.path());
            return words;
          }(),
          prefix) {
  if (open) EXPECT_EQ(Open(), "");
}

std::string StoreProcess::Open() {
  const std::string answer = process_.Ask("open");
  if (answer == "open") return "";
  return answer.empty() ? "no answer" : answer;
}

void StoreProcess::StartLoad(size_t first, size_t n) {
  EXPECT_EQ(process_.Ask("load " + std::to_string(first) + " " + std::to_string(n)), "started");
}

Loaded StoreProcess::EndLoad() {
  Loaded loaded;
  std::istringstream in(process_.Ask("wait"));
  in >> loaded.right >> loaded.wrong >> loaded.failed;
  return loaded;
}

Loaded StoreProcess::Load(size_t first, size_t n) {
  StartLoad(first, n);
  return EndLoad();
}

void StoreProcess::StartDump(size_t first, size_t n) {
  EXPECT_EQ(process_.Ask("dump " + std::to_string(first) + " " + std::to_string(n)), "started");
}

size_t StoreProcess::EndDump() { return EndLoad().right; }

size_t StoreProcess::Dump(size_t first, size_t n) {
  StartDump(first, n);
  return EndDump();
}

size_t StoreProcess::Lookup(size_t first, size_t n) {
  return std::stoul("0" +
                    process_.Ask("lookup " + std::to_string(first) + " " + std::to_string(n)));
}

cs_stats StoreProcess::Stats() {
  cs_stats stats = {};
  std::istringstream in(process_.Ask("stats"));
  in >> stats.load_outstanding >> stats.dump_outstanding >> stats.cache_hit >> stats.cache_waited >>
      stats.cache_loaded >> stats.cache_direct >> stats.cache_dumped >> stats.cache_dumped_direct >>
      stats.cache_stored >> stats.cache_given_up >> stats.cache_slots >> stats.cache_slots_free >>
      stats.cache_slots_dirty >> stats.cache_slots_loading;
  EXPECT_FALSE(in.fail());
  return stats;
}

bool StoreProcess::TakeLock(Damage damage) {
  return process_.Ask("lock " + std::to_string(static_cast<int>(damage))) == "locked";
}

std::string StoreProcess::HoldCopy(bool load, size_t block) {
  const std::string answer =
      process_.Ask(std::string(load ? "heldload " : "helddump ") + std::to_string(block));
  if (answer == "held") return "";
  return answer.empty() ? "no answer" : answer;
}

namespace {

// The role's side of StoreProcess.
class StoreRole {
 public:
  StoreRole(StoreSetup setup, const std::string& watch) : setup_(std::move(setup)), watch_(watch) {
    watch_.Install(env_, setup_);
  }

  std::string Do(const std::string& line) {
    std::istringstream in(line);
    std::string command;
    in >> command;
    if (command == "open") return Open();
    if (command == "lock") return Lock(in);
    if (command == "unlock") return Unlock();
    if (command == "letgo") return held_ != nullptr && held_->LetGo() ? "gone" : "no";
    if (store_ == nullptr) return "no store";
    if (command == "load" || command == "dump") return Start(command == "load", in);
    if (command == "wait") return Wait();
    if (command == "lookup") return Lookup(in);
    if (command == "stats") return Stats();
    if (command == "events") return Events();
    if (command == "clear") return store_->Clear().ok() ? "cleared" : "no";
    if (command == "heldload" || command == "helddump") return Hold(command == "heldload", in);
    if (command == "close") return Close();
    return "no such command";
  }

 private:
  std::string Open() {
    Result<std::unique_ptr<Store>> opened = setup_.Open(env_);
    if (!opened.ok()) return opened.status().text();
    store_ = std::move(opened.value());
    return "open";
  }

  std::string Close() {
    store_->Close();
    store_.reset();
    return "closed";
  }

  std::string Start(bool load, std::istringstream& in) {
    size_t first = 0;
    size_t n = 0;
    in >> first >> n;
    pages_ = std::make_unique<Pages>(setup_, first, n);
    load ? pages_->Poison() : pages_->Fill();
    load_ = load;
    task_ = load ? store_->Load(pages_->batch()) : store_->Dump(pages_->batch());
    return "started";
  }

  std::string Wait() {
    size_t right = 0;
    size_t wrong = 0;
    const size_t n = pages_->size();
    const Codes codes =
        task_.ok() ? WaitFor(*store_, task_.value(), n) : Repeated(n, task_.status().code());
    if (held_ != nullptr) {
      std::memcpy(pages_->tensor(0, 0), held_->begin(), setup_.tensor_sizes[0]);
      held_.reset();
    }
    for (size_t i = 0; i < n; ++i) {
      if (codes[i] != CS_OK) continue;
      ++(!load_ || pages_->Holds(i) ? right : wrong);
    }
    if (!pages_->GuardsIntact()) ++wrong;
    return std::to_string(right) + " " + std::to_string(wrong) + " " +
           std::to_string(n - std::min(n, right + wrong));
  }

  std::string Lookup(std::istringstream& in) {
    size_t first = 0;
    size_t n = 0;
    in >> first >> n;
    size_t present = 0;
    for (const uint8_t there : LookupAll(*store_, Pages(setup_, first, n))) present += there;
    return std::to_string(present);
  }

  std::string Stats() {
    const cs_stats s = store_->Stats();
    std::ostringstream out;
    out << s.load_outstanding << ' ' << s.dump_outstanding << ' ' << s.cache_hit << ' '
        << s.cache_waited << ' ' << s.cache_loaded << ' ' << s.cache_direct << ' ' << s.cache_dumped
        << ' ' << s.cache_dumped_direct << ' ' << s.cache_stored << ' ' << s.cache_given_up << ' '
        << s.cache_slots << ' ' << s.cache_slots_free << ' ' << s.cache_slots_dirty << ' '
        << s.cache_slots_loading;
    return out.str();
  }

  std::string Events() {
    std::string all;
    while (const auto event = store_->NextEvent()) all += event->text + "; ";
    return all.empty() ? "none" : all;
  }

  std::string Lock(std::istringstream& in) {
    int damage = 0;
    in >> damage;
    region_ = AttachOrFail(setup_);
    if (region_ == nullptr) return "no region";
    lock_ = std::make_unique<Region::Lock>(*region_);
    if (!lock_->ok()) return "not to be had";
    return Break(*region_, static_cast<Damage>(damage)) ? "locked" : "not in that state";
  }

  std::string Unlock() {
    lock_.reset();
    region_.reset();
    return "unlocked";
  }

  // The block's first tensor lies on a page that only LetGo gives.
  std::string Hold(bool load, std::istringstream& in) {
    size_t block = 0;
    in >> block;
    pages_ = std::make_unique<Pages>(setup_, block, 1);
    load ? pages_->Poison() : pages_->Fill();
    held_ = std::make_unique<HeldPage>(pages_->tensor(0, 0), setup_.tensor_sizes[0]);
    if (!held_->reason().empty()) return held_->reason();
    cs_batch batch = pages_->batch();
    addresses_.assign(batch.addresses, batch.addresses + batch.m);
    addresses_[0] = reinterpret_cast<uintptr_t>(held_->begin());
    batch.addresses = addresses_.data();
    load_ = load;
    task_ = load ? store_->Load(batch) : store_->Dump(batch);
    if (!task_.ok()) return task_.status().text();
    return held_->WaitTouched() ? "held" : "nobody touches the page";
  }

  const StoreSetup setup_;
  StorageWatch watch_;
  FaultEnv env_;
  std::unique_ptr<HeldPage> held_;
  std::unique_ptr<Pages> pages_;
  std::vector<uint64_t> addresses_;
  bool load_ = false;
  Result<cs_task> task_ = cs_task{0};
  std::unique_ptr<Region> region_;
  std::unique_ptr<Region::Lock> lock_;
  std::unique_ptr<Store> store_;
};

}  // namespace

ROLE(Store) {
  StoreRole role(SetupOf(arguments, 1), arguments.at(0));
  while (const auto line = HearParent()) TellParent(role.Do(*line));
  return 0;
}

}  // namespace cachestore::test
