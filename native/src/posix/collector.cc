#include "posix/collector.h"

#include <algorithm>
#include <cerrno>
#include <thread>
#include <utility>

namespace cachestore {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Between steps when all is quiet, and between attempts to collect.
constexpr milliseconds kQuiet{500};
constexpr milliseconds kRetry{1000};
// How long a writer says nothing before it is looked at.
constexpr milliseconds kProbe{5000};
// A pass costs no more than so many entries a second in the long run, unless
// room is wanted.
constexpr uint64_t kEntriesPerSecond = 5000;

uint64_t Minus(uint64_t a, uint64_t b) { return a - std::min(a, b); }

}  // namespace

Collector::Collector(Env& env, EventRing& events, Directory& directory, milliseconds busy)
    : env_(env),
      events_(events),
      directory_(directory),
      space_(directory.space()),
      limits_(space_.limits()),
      path_(directory.root() + "/collector"),
      busy_(busy),
      walk_(env, directory.root()) {}

milliseconds Collector::Step(bool times_are_written) {
  const std::unique_lock stepping(stepping_, std::try_to_lock);
  if (!stepping.owns_lock()) return kQuiet;
  if (!Collecting()) {
    Follow();
    MeasureRoom();
    // What is wanted is the collector's to find; it may be granted soon.
    return std::exchange(wanted_, 0) > 0 ? 2 * busy_ : kQuiet;
  }
  CountChanges();
  Look();
  MeasureRoom();
  // For a burst of dumps that may never come back no more than a part goes.
  if (known_) wanted_ = std::min(wanted_, std::max(used_ / 32, 64 * walk_.largest()));
  // What is oldest is known when every use is noted, so first of all this is asked for.
  if (times_are_written && wants_room()) Evict();
  wants_room_.store(Need() > 0, std::memory_order_relaxed);
  const SpaceChanges ours = writers_[directory_.instance()].changes;
  granted_to_others_ = Grant();
  space_.Know(used_, granted_to_others_, ours);
  const uint64_t told = told_.generation;
  Tell();
  if (walk_.running() || (Need() > 0 && steady_clock::now() >= next_eviction_)) return busy_;
  const auto pause = std::chrono::ceil<milliseconds>(next_look_ - steady_clock::now());
  // While others add, they wait for what they are granted.
  return std::clamp(pause, busy_, told_.generation == told ? kQuiet : 2 * busy_);
}

// Whether this store collects, taking the part up if nobody else has it.
bool Collector::Collecting() {
  if (lockless_ || (lock_ && HoldsLock())) return true;
  if (lock_) {
    Warn("the lock of " + path_ + " was removed: this store no longer collects there");
    StopCollecting();
  }
  if (steady_clock::now() < next_try_) return false;
  next_try_ = steady_clock::now() + kRetry;
  TryToCollect();
  return lockless_ || lock_;
}

void Collector::TryToCollect() {
  if (const Status made = env_.MakeDirectories(path_); !made.ok()) {
    return Warn("nothing is evicted from " + directory_.root() + " by this store: " + made.text());
  }
  Result<Fd> locked = env_.OpenLocked(path_ + "/lock", /*create=*/true);
  if (!locked.ok()) {
    if (locked.status().code() == CS_REFUSED) return;  // somebody collects
    const int error = locked.status().error();
    lockless_ = error == ENOLCK || error == ENOSYS || error == EOPNOTSUPP;
    if (!lockless_)
      return Warn("nothing is evicted from " + directory_.root() +
                  " by this store: " + locked.status().text());
  }
  if (!lockless_) {
    lock_ = FileCloser(env_, locked.value());
    if (!HoldsLock()) return StopCollecting();  // removed meanwhile
  }
  // Until the first pass has ended, what the collector before had written.
  const Result<CollectorState> before = ReadState();
  known_ = false;
  used_ = before.ok() ? before.value().used : limits_.capacity;
  wanted_ = 0;
  making_room_ = false;
  first_count_ = before.ok();
  walk_.Stop();
  told_ = before.ok() ? before.value() : CollectorState{};
  writers_.clear();
  // What the collector before had granted may be used.
  for (const auto& [instance, bytes] : told_.grants) writers_[instance].granted = bytes;
  oldest_.clear();
  next_look_ = steady_clock::now();
  collecting_.store(true, std::memory_order_relaxed);
}

// A bounded wait for the collector, which looks at least every kQuiet.
void Collector::Begin(milliseconds patience) {
  const auto deadline = steady_clock::now() + std::min(patience, 3 * kQuiet);
  do {
    Step();
    const std::unique_lock stepping(stepping_, std::try_to_lock);
    if (!stepping.owns_lock() || lock_ || granted_) return;
    std::this_thread::sleep_for(busy_ / 5);
  } while (steady_clock::now() < deadline);
}

bool Collector::HoldsLock() {
  const Result<bool> held = env_.Names(path_ + "/lock", lock_.get());
  return !held.ok() || held.value();  // while it can't be looked at, it isn't gone
}

void Collector::Release() {
  const std::unique_lock stepping(stepping_, std::try_to_lock);
  if (stepping.owns_lock()) StopCollecting();
}

void Collector::StopCollecting() {
  lock_.Reset();
  collecting_.store(false, std::memory_order_relaxed);
  compared_ = false;
}

void Collector::Follow() {
  // At first, too: a full disk has no room for what a file has never held.
  const SpaceChanges changes = space_.changes();
  if (changes != written_ && directory_.WriteChanges(changes).ok()) written_ = changes;
  const Result<CollectorState> read = ReadState();
  if (read.ok()) {
    const CollectorState& state = read.value();
    CompareLimits(state.limits);
    // Until the collector has noticed this store, it may add nothing.
    const auto grant = state.grants.find(directory_.instance());
    granted_ = grant != state.grants.end() || state.limits.capacity == 0;
    uint64_t granted = grant == state.grants.end() ? 0 : grant->second;
    if (!granted_) {
      // It may have been deleted, so that the collector can't see this store.
      (void)directory_.MakeTemporaryDirectory();
      written_.reset();
    }
    if (state.limits.capacity == 0) granted = UINT64_MAX / 2;
    space_.KnowGrant(state.used, granted, changes);
  }
}

void Collector::CompareLimits(const SpaceLimits& theirs) {
  if (compared_) return;
  compared_ = true;
  if (theirs == limits_) return;
  const auto text = [](const SpaceLimits& limits) {
    return "capacity " + std::to_string(limits.capacity) + ", free space reserve " +
           std::to_string(limits.free_space_reserve) + " bytes, watermarks " +
           std::to_string(limits.high_watermark_percent) + " and " +
           std::to_string(limits.low_watermark_percent) + " %";
  };
  events_.Add(CS_EVENT_WARNING, "the limits of " + directory_.root() + " differ: this store has " +
                                    text(limits_) + "; the store that collects there has " +
                                    text(theirs) + ", and evicts by those");
}

// What each open store says it has added and removed.
void Collector::CountChanges() {
  std::map<std::string, Writer> seen;
  const std::string& root = directory_.root();
  const Result<std::vector<std::string>> identities = env_.List(root + "/.");
  if (!identities.ok()) return;
  const auto writer_of = [&](const std::string& instance) -> Writer& {
    const auto [at, is_new] = seen.try_emplace(instance);
    if (const auto known = writers_.find(instance); is_new && known != writers_.end()) {
      at->second = known->second;
    }
    return at->second;
  };
  const auto count = [&](const std::string& instance, const SpaceChanges& now) {
    Writer& writer = writer_of(instance);
    // What it had added before is in what the collector before had known.
    if (first_count_) writer.changes = now;
    CountChangesOf(writer, now);
  };
  count(directory_.instance(), space_.changes());
  for (const std::string& identity : identities.value()) {
    if (identity.starts_with('.') || identity == "collector") continue;
    if (NoticeClears(identity)) look_.store(true, std::memory_order_relaxed);
    const std::string tmp = root + "/" + identity + "/tmp";
    const Result<std::vector<std::string>> names = env_.List(tmp);
    if (!names.ok()) {
      // Whoever writes there can't be told apart, so nobody is forgotten.
      if (names.status().code() != CS_NOT_FOUND && names.status().error() != EACCES) return;
      continue;
    }
    for (const std::string& name : names.value()) {
      if (name == directory_.instance()) continue;
      const std::string lock = tmp + "/" + name + "/lock";
      const Result<std::string> said = env_.ReadText(lock, kSpaceChangesSize);
      if (said.status().code() == CS_NOT_FOUND) continue;
      Writer& writer = writer_of(name);
      if (!said.ok()) continue;
      const auto changes = DecodeSpaceChanges(said.value());
      // One that hasn't said anything yet is a writer all the same.
      if (changes.has_value()) {
        if (!first_count_) wanted_ += Minus(changes->lacked, writer.changes.lacked);
        count(name, *changes);
      }
      ProbeWriter(writer, lock);
    }
  }
  // One that has gone may have added all that it was granted.
  for (const auto& [instance, writer] : writers_) {
    const auto now = seen.find(instance);
    const bool left = now == seen.end() ? !writer.gone : now->second.gone && !writer.gone;
    if (!left || instance == directory_.instance()) continue;
    const uint64_t unsaid = Minus(writer.granted, writer.changes.added);
    used_ += unsaid;
    added_in_pass_ += unsaid;
    look_.store(true, std::memory_order_relaxed);
  }
  writers_ = std::move(seen);
  first_count_ = false;
}

bool Collector::NoticeClears(const std::string& identity) {
  const Result<FileInfo> mark = env_.Stat(directory_.root() + "/" + identity + "/cleared");
  const uint64_t latest = mark.ok() ? mark.value().modified_ns ^ mark.value().inode : 0;
  uint64_t& known = clears_[identity];
  return std::exchange(known, latest) != latest;
}

void Collector::CountChangesOf(Writer& writer, const SpaceChanges& now) {
  const uint64_t added = Minus(now.added, writer.changes.added);
  const uint64_t removed = Minus(now.removed, writer.changes.removed);
  writer.changes = now;
  if (added == 0 && removed == 0) return;
  writer.next_probe = steady_clock::now() + kProbe;
  used_ = Minus(used_ + added, removed);
  added_in_pass_ += added;
  changed_ = true;
}

// One that says nothing for long may be gone, and will never use its grant.
void Collector::ProbeWriter(Writer& writer, const std::string& lock) {
  const auto now = steady_clock::now();
  if (now < writer.next_probe) return;
  const bool is_new = writer.next_probe == steady_clock::time_point{};
  writer.next_probe = now + kProbe;
  if (is_new) return;
  const Result<Fd> taken = env_.OpenLocked(lock, /*create=*/false);
  // A lock is free for a moment when it is made, and a store has one for each pool.
  if (taken.status().code() == CS_REFUSED) writer.gone = false;
  if (!taken.ok()) return;
  (void)env_.Close(taken.value());
  writer.gone = true;
}

// Lets each writer add a share of half of what is free; the other half is for
// this store and those that open meanwhile. Returns what the others may add in all.
uint64_t Collector::Grant() {
  if (limits_.capacity == 0) return 0;
  const auto left = [](const Writer& writer) {
    return writer.gone ? 0 : Minus(writer.granted, writer.changes.added);
  };
  uint64_t granted = 0;
  for (const auto& [instance, writer] : writers_) {
    if (instance != directory_.instance()) granted += left(writer);
  }
  // Idle writers keep theirs: all of them together fit above the high watermark.
  const uint64_t share =
      std::min(Minus(limits_.capacity, used_) / (2 * writers_.size()),
               Minus(limits_.capacity, limits_.high()) / writers_.size() + 4 * walk_.largest());
  for (auto& [instance, writer] : writers_) {
    if (instance == directory_.instance() || writer.gone || left(writer) > share / 2) continue;
    const uint64_t more = std::min(share - left(writer), Minus(limits_.capacity, used_ + granted));
    writer.granted = writer.changes.added + left(writer) + more;
    granted += more;
  }
  return granted;
}

void Collector::Look() {
  if (!walk_.running()) {
    const bool asked = look_.exchange(false, std::memory_order_relaxed);
    // What is missing to make room are the oldest files.
    const bool wants_oldest =
        oldest_.empty() && Need() > 0 && steady_clock::now() >= next_eviction_;
    if (!asked && !wants_oldest && steady_clock::now() < next_look_) return;
    whole_ = wants_oldest || !known_;
    showing_.Clear();
    walk_.Start(whole_, whole_ ? &showing_ : nullptr);
    added_in_pass_ = space_.publishing();
    changed_ = false;
  }
  if (walk_.Step(kEntriesPerStep)) EndPass();
}

void Collector::EndPass() {
  if (!walk_.status().ok()) {
    Warn("looking at " + directory_.root() + ": " + walk_.status().text());
  } else {
    last_warning_.clear();
  }
  if (!walk_.has_listed()) {
    next_look_ = steady_clock::now() + kRetry;
    return;
  }
  // Else what this store has added since the last step would be counted again.
  if (!first_count_) CountChangesOf(writers_[directory_.instance()], space_.changes());
  // What couldn't be looked at counts as it last did, and can't be evicted.
  // What was added meanwhile may have been seen, or not.
  used_ = std::clamp(used_, walk_.bytes(), walk_.bytes() + added_in_pass_);
  known_ = true;
  if (whole_) oldest_ = showing_.Take();
  const milliseconds pause(1000 * walk_.entries() / kEntriesPerSecond);
  next_look_ = steady_clock::now() + std::max(pause, changed_ ? busy_ : kRetry);
}

void Collector::MeasureRoom() {
  if (limits_.free_space_reserve > 0) {
    const Result<SpaceInfo> info = env_.Space(directory_.root());
    free_ = info.ok() ? info.value().available : UINT64_MAX;
    if (info.ok()) space_.KnowFree(info.value());
  }
  wanted_ += space_.TakeWanted();
  const bool too_much = limits_.capacity > 0 && used_ > std::min(limits_.high(), AlmostFull());
  const bool too_little_free = free_ < limits_.free_space_reserve + limits_.free_space_reserve / 16;
  if (too_much || too_little_free) making_room_ = true;
}

// With more than that, a writer may find no room for its next block.
uint64_t Collector::AlmostFull() const {
  const uint64_t writers = writers_.size();
  const uint64_t blocks = writers > 1 ? 4 * writers : 1;
  const uint64_t taken = granted_to_others_ + walk_.largest() * blocks;
  return std::max(limits_.capacity / 4, Minus(limits_.capacity, taken));
}

// How many bytes are to go.
uint64_t Collector::Need() const {
  if (!known_) return 0;
  uint64_t need = wanted_;
  if (making_room_) {
    if (limits_.capacity > 0) {
      need = std::max(need, Minus(used_, std::min(limits_.low(), AlmostFull())));
    }
    const uint64_t wanted_free = limits_.free_space_reserve + limits_.free_space_reserve / 8;
    need = std::max(need, Minus(wanted_free, free_));
  }
  return std::min(need, used_);
}

void Collector::Evict() {
  if (steady_clock::now() < next_eviction_) return;
  const uint64_t before = evicted_blocks();
  for (size_t calls = 0; Need() > 0 && !oldest_.empty() && calls < kEvictionsPerStep;) {
    const OldFile file = oldest_.back();
    oldest_.pop_back();
    calls += EvictBlock(file);
    if (steady_clock::now() < next_eviction_) break;  // it failed
  }
  if (Need() == 0 || used_ == 0) {
    making_room_ = false;
    wanted_ = 0;
  }
  if (evicted_blocks() > before) space_.NoteRoom();
}

// Removes a file and the others of its block, unless one was used meanwhile. Returns
// how many were looked at.
size_t Collector::EvictBlock(const OldFile& file) {
  const Result<FileInfo> info = env_.Stat(walk_.PathOf(file));
  // Used since, or gone.
  const bool is_old =
      info.ok() && info.value().modified_ns == file.used_ns && info.value().is_regular;
  if (!is_old) return 1;
  std::vector<OldFile> there;
  size_t calls = 1;
  for (OldFile& part : walk_.PartsBeside(file)) {
    ++calls;
    const Result<FileInfo> found = env_.Stat(walk_.PathOf(part));
    if (!found.ok() || !found.value().is_regular) continue;
    part.used_ns = found.value().modified_ns;
    part.size_4k = In4K(found.value().size);
    if (part.used_ns > file.used_ns) {
      // Another rank has noted a use that this one hasn't: then all of it stays.
      (void)env_.SetModified(walk_.PathOf(file), part.used_ns);
      return calls + 1;
    }
    there.push_back(part);
  }
  Status removed = Remove(file);
  for (size_t i = 0; removed.ok() && i < there.size(); ++i) removed = Remove(there[i]);
  if (!removed.ok()) {
    Warn("evicting from " + directory_.root() + ": " + removed.text());
    next_eviction_ = steady_clock::now() + kRetry;
  }
  return calls + there.size() + 1;
}

Status Collector::Remove(const OldFile& file) {
  Status removed = env_.Unlink(walk_.PathOf(file));
  if (removed.code() == CS_NOT_FOUND) return Status::Ok();
  if (!removed.ok()) return removed;
  const uint64_t bytes = uint64_t{file.size_4k} * 4096;
  walk_.NoteEvicted(file);
  changed_ = true;
  used_ = Minus(used_, bytes);
  wanted_ = Minus(wanted_, bytes);
  if (free_ != UINT64_MAX) free_ += bytes;
  evicted_blocks_.fetch_add(1, std::memory_order_relaxed);
  evicted_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  return removed;
}

void Collector::Tell() {
  CollectorState state;
  state.limits = limits_;
  state.used = used_;
  state.files = walk_.files();
  for (const auto& [instance, writer] : writers_) {
    if (instance != directory_.instance() && !writer.gone) {
      state.grants[instance] = writer.granted;
    }
  }
  state.generation = told_.generation;
  const bool same = state.limits == told_.limits && state.used == told_.used &&
                    state.grants == told_.grants && state.files == told_.files;
  if (same && told_.generation > 0) return;
  ++state.generation;
  // Only the holder of the lock writes, so one name is enough; a collector before may
  // have left a longer file there.
  (void)env_.Unlink(path_ + "/state.new");
  const Status written = env_.ReplaceFile(path_ + "/state.new", path_ + "/state", state.Format());
  if (!written.ok() && written.code() != CS_NO_SPACE) {
    Warn("telling other stores what is used: " + written.text());
  }
  if (written.ok()) told_ = state;
}

Result<CollectorState> Collector::ReadState() {
  const Result<std::string> text = env_.ReadText(path_ + "/state", CollectorState::kMaxSize);
  if (!text.ok()) return text.status();
  const std::optional<CollectorState> state = CollectorState::Parse(text.value());
  if (!state.has_value()) return Status(CS_CORRUPT, path_ + "/state isn't a collector's");
  return *state;
}

void Collector::Warn(std::string text) {
  if (text == last_warning_) return;
  events_.Add(CS_EVENT_WARNING, text);
  last_warning_ = std::move(text);
}

void Collector::Close() {
  const std::unique_lock stepping(stepping_, std::try_to_lock);
  if (!stepping.owns_lock()) return;
  if (lock_ && HoldsLock()) {
    CountChanges();
    Tell();
  }
  StopCollecting();
}

}  // namespace cachestore
