#include "posix/directory_upkeep.h"

#include <algorithm>
#include <utility>

namespace cachestore {
namespace {

using std::chrono::milliseconds;

// Between two ticks with nothing to do.
constexpr milliseconds kIdleTick{1000};
// Where writing times takes longer than uses come in, as on a slow mount, the order of
// eviction is less exact rather than nothing evicted.
constexpr milliseconds kTimesPatience{2000};

}  // namespace

DirectoryUpkeep::DirectoryUpkeep(Env& env, EventRing& events, const ShardIo& first,
                                 milliseconds use_interval, milliseconds evict_interval)
    : env_(env) {
  AddPool(first);
  UseLogOptions options;
  options.interval = use_interval;
  for (const auto& directory : first.directories()) {
    Tended& tended = roots_.emplace_back();
    tended.directory = directory.get();
    const bool limited = directory->space().limits().any();
    if (limited) {
      tended.collector = std::make_unique<Collector>(env, events, *directory, evict_interval);
    }
    options.roots.push_back(limited);
  }
  const auto root_of = [this, &first](const BlockId& block) {
    const Places places = first.PlacesOf(block);
    const Directory* const home =
        places.size() == 0 ? &first.DirectoryOf(block) : &places[places.size() - 1];
    const auto at = std::find_if(roots_.begin(), roots_.end(),
                                 [&](const Tended& tended) { return tended.directory == home; });
    return static_cast<size_t>(at - roots_.begin());
  };
  uses_ = std::make_unique<UseLog>(env, std::move(options), root_of,
                                   [this](size_t root, const BlockId& block, uint64_t time) {
                                     return Touch(root, block, time);
                                   });
}

void DirectoryUpkeep::AddPool(const ShardIo& io) {
  const size_t pool = pools_.load(std::memory_order_relaxed);
  ios_[pool] = &io;
  pools_.store(pool + 1, std::memory_order_release);
}

std::vector<Directory*> DirectoryUpkeep::DirectoriesIn(size_t root) const {
  std::vector<Directory*> found;
  const size_t pools = pools_.load(std::memory_order_acquire);
  for (size_t pool = 0; pool < pools; ++pool) {
    found.push_back(ios_[pool]->directories()[root].get());
  }
  return found;
}

// A use of a block is one of all that the pools have of it. Not found: none has any.
Status DirectoryUpkeep::Touch(size_t root, const BlockId& block, uint64_t time) {
  Status result{CS_NOT_FOUND, ""};
  const size_t pools = pools_.load(std::memory_order_acquire);
  for (size_t pool = 0; pool < pools; ++pool) {
    Status set = env_.SetModified(ios_[pool]->directories()[root]->BlockPath(block), time);
    const bool says_more =
        result.ok() ? !set.ok() && set.code() != CS_NOT_FOUND : result.code() == CS_NOT_FOUND;
    if (says_more) result = std::move(set);
  }
  return result;
}

bool DirectoryUpkeep::evicts() const {
  return std::any_of(roots_.begin(), roots_.end(),
                     [](const Tended& tended) { return tended.collector != nullptr; });
}

void DirectoryUpkeep::Begin(milliseconds patience) {
  for (const Tended& tended : roots_) {
    const bool out = tended.directory->health().use() == Health::Use::kOut;
    if (tended.collector != nullptr && !out) tended.collector->Begin(patience);
  }
}

milliseconds DirectoryUpkeep::Tick(size_t index, bool last) {
  Tended& tended = roots_[index];
  Directory& directory = *tended.directory;
  Collector* const collector = tended.collector.get();
  if (!last) ProbeIfDue(index);
  if (directory.health().use() == Health::Use::kOut) {
    if (collector != nullptr) collector->Release();
    return kIdleTick;
  }
  // Times first: what is evicted is the oldest.
  const bool now = collector != nullptr && collector->wants_room();
  const milliseconds pause = std::min(uses_->Flush(index, last, now), kIdleTick);
  if (collector == nullptr) return pause;
  if (last) {
    collector->Close();
    return pause;
  }
  // However often it is woken.
  const auto since = Clock::now() - tended.stepped;
  if (since < collector->busy()) {
    return std::clamp(pause, milliseconds(1),
                      std::chrono::ceil<milliseconds>(collector->busy() - since));
  }
  tended.stepped = Clock::now();
  const bool written = pause.count() > 0;
  if (written || !now || tended.wanted_since == Clock::time_point{}) {
    tended.wanted_since = tended.stepped;
  }
  const bool waited = tended.stepped - tended.wanted_since > kTimesPatience;
  return std::min(pause, collector->Step(/*times_are_written=*/written || waited));
}

void DirectoryUpkeep::ProbeIfDue(size_t root) {
  Health& health = roots_[root].directory->health();
  if (!health.ProbeIsDue(Health::Clock::now())) return;
  const bool was_out = health.use() == Health::Use::kOut;
  std::vector<Directory*> directories = DirectoriesIn(root);
  Directory::Probe(directories);
  // One that came meanwhile may owe a clear.
  while (DirectoriesIn(root).size() > directories.size()) {
    directories = DirectoriesIn(root);
    Directory::Probe(directories);
  }
  // They may never have been cleaned, and may just have been cleared.
  if (!was_out || health.use() != Health::Use::kFull) return;
  for (Directory* const directory : directories) {
    directory->RemoveTrash([this] { return stopping_.load(); });
  }
}

void DirectoryUpkeep::NoteClear(size_t root) {
  Collector* const collector = roots_[root].collector.get();
  if (collector != nullptr) collector->NoteClear();
}

void DirectoryUpkeep::AddStats(cs_stats& stats) const {
  stats.posix_uses_pending += uses_->pending();
  stats.posix_uses_dropped += uses_->dropped();
  for (const Tended& tended : roots_) {
    const Health& health = tended.directory->health();
    const Space& space = tended.directory->space();
    stats.posix_directories += 1;
    stats.posix_directories_out += health.use() == Health::Use::kOut ? 1 : 0;
    stats.posix_directories_read_only += health.use() == Health::Use::kReadOnly ? 1 : 0;
    stats.posix_directories_full += health.full() || space.full() ? 1 : 0;
    if (tended.collector == nullptr) continue;
    stats.evicted_blocks += tended.collector->evicted_blocks();
    stats.evicted_bytes += tended.collector->evicted_bytes();
    stats.posix_used_bytes += space.used();
    stats.posix_capacity_bytes += space.limits().capacity;
    stats.posix_collecting += tended.collector->collecting() ? 1 : 0;
  }
}

}  // namespace cachestore
