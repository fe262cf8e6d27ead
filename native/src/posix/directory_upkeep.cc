#include "posix/directory_upkeep.h"

#include <algorithm>
#include <utility>

namespace cachestore {
namespace {

using std::chrono::milliseconds;

// Between two ticks with nothing to do.
constexpr milliseconds kIdleTick{1000};

}  // namespace

DirectoryUpkeep::DirectoryUpkeep(Env& env, EventRing& events, const ShardIo& io,
                                 milliseconds use_interval) {
  UseLogOptions options;
  options.interval = use_interval;
  for (const auto& directory : io.directories()) {
    Tended& tended = directories_.emplace_back();
    tended.directory = directory.get();
    const bool limited = directory->space().limits().any();
    if (limited) tended.collector = std::make_unique<Collector>(env, events, *directory);
    options.roots.push_back(limited);
  }
  const auto root_of = [this, &io](const BlockId& block) {
    const Places places = io.PlacesOf(block);
    const Directory* const home =
        places.size() == 0 ? &io.DirectoryOf(block) : &places[places.size() - 1];
    const auto at = std::find_if(directories_.begin(), directories_.end(),
                                 [&](const Tended& tended) { return tended.directory == home; });
    return static_cast<size_t>(at - directories_.begin());
  };
  const auto path_of = [this](size_t root, const BlockId& block) {
    return directories_[root].directory->BlockPath(block);
  };
  uses_ = std::make_unique<UseLog>(env, std::move(options), root_of, path_of);
}

bool DirectoryUpkeep::evicts() const {
  return std::any_of(directories_.begin(), directories_.end(),
                     [](const Tended& tended) { return tended.collector != nullptr; });
}

void DirectoryUpkeep::Begin(milliseconds patience) {
  for (const Tended& tended : directories_) {
    const bool out = tended.directory->health().use() == Health::Use::kOut;
    if (tended.collector != nullptr && !out) tended.collector->Begin(patience);
  }
}

milliseconds DirectoryUpkeep::Tick(size_t index, bool last) {
  Tended& tended = directories_[index];
  Directory& directory = *tended.directory;
  Collector* const collector = tended.collector.get();
  if (!last) ProbeIfDue(directory);
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
  if (since < Collector::kBusy) {
    return std::clamp(pause, milliseconds(1),
                      std::chrono::ceil<milliseconds>(Collector::kBusy - since));
  }
  tended.stepped = Clock::now();
  return std::min(pause, collector->Step(/*times_are_written=*/pause.count() > 0));
}

void DirectoryUpkeep::ProbeIfDue(Directory& directory) {
  if (!directory.health().ProbeIsDue(Health::Clock::now())) return;
  const bool was_out = directory.health().use() == Health::Use::kOut;
  directory.Probe();
  // It may never have been cleaned, and may just have been cleared.
  if (was_out && directory.health().use() == Health::Use::kFull) {
    directory.RemoveTrash([this] { return stopping_.load(); });
  }
}

void DirectoryUpkeep::NoteClear(size_t directory) {
  Collector* const collector = directories_[directory].collector.get();
  if (collector != nullptr) collector->NoteClear();
}

void DirectoryUpkeep::AddStats(cs_stats& stats) const {
  stats.posix_uses_pending += uses_->pending();
  stats.posix_uses_dropped += uses_->dropped();
  for (const Tended& tended : directories_) {
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
