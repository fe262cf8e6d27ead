#include "cache/cache_tier.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/aligned_buffer.h"
#include "base/shared_memory.h"
#include "cache/direct_requests.h"
#include "host_copy/affinity.h"
#include "host_copy/system.h"

namespace cachestore {
namespace {

// Of the memory that is free, what a buffer without a given size takes: a shared
// one, and a private one, of which every process of a host may have its own.
constexpr uint64_t kSharedDivisor = 2;
constexpr uint64_t kPrivateDivisor = 16;
// A shared buffer without a given size has room for this many pages, one request
// of SGLang's, or is none.
constexpr uint64_t kLeastPages = 128;
// Each is bounded by Region::kLockPatience.
constexpr int kClearTries = 3;
// Slots that dumps leave for loads, of all.
constexpr uint32_t kReserveDivisor = 8;

std::string Size(uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

std::string GiveMore(uint64_t wanted) {
  return "give more shared memory (docker: --shm-size=" + std::to_string((wanted >> 20) + 64) +
         "m, or --ipc=host)";
}

Status DoesNotFit(const CacheOptions& options, bool shared, uint64_t available) {
  const std::string text = "cache_buffer_capacity_gb wants " + Size(options.capacity) +
                           (shared ? " in " + options.directory : " of memory") + ", and " +
                           Size(available) + " are available: lower it";
  return {CS_NO_MEMORY, shared ? text + ", or " + GiveMore(options.capacity) : text};
}

// What may be taken: of the filesystem for shared memory, and of the memory
// that this container has left, since tmpfs promises more than there is.
uint64_t Available(const CacheOptions& options, bool shared) {
  uint64_t available = MemoryHeadroom();
  if (shared) {
    const Result<uint64_t> free = FreeBytes(options.directory);
    available = std::min(available, free.ok() ? free.value() : 0);
  }
  return available;
}

}  // namespace

Result<std::unique_ptr<Tier>> CacheTier::Open(CacheOptions options, std::unique_ptr<Tier> below,
                                              std::shared_ptr<EventRing> events) {
  if (options.geometry.shards() != 1) {
    return Status(CS_INVALID,
                  "block_size must be shard_size: the Cache tier keeps a block of one "
                  "shard in a slot");
  }
  Result<std::unique_ptr<Region>> region = OpenRegion(options, *below, *events);
  if (!region.ok()) {
    below->Stop();
    below->Close();
    return region.status();
  }
  const CpuTopology topology = ReadTopology(Env::Real(), kNodeDirectory, AllowedCpus());
  Result<std::vector<int>> cpus =
      CpusFor(options.cpu_affinity, topology, NodeOfAddress(region.value()->bytes(0)));
  if (!cpus.ok()) {
    below->Stop();
    below->Close();
    return cpus.status();
  }
  return std::unique_ptr<Tier>(new CacheTier(std::move(options), std::move(region.value()),
                                             std::move(below), std::move(events), cpus.value()));
}

Result<std::unique_ptr<Region>> CacheTier::OpenRegion(const CacheOptions& options, Tier& below,
                                                      EventRing& events) {
  RegionOptions wanted;
  wanted.shared = options.shared;
  wanted.directory = options.directory;
  wanted.fingerprint = options.fingerprint;
  wanted.payload = options.geometry.payload();
  wanted.slot_size = AlignUp(options.geometry.shard_size);
  wanted.latest_clear = below.LatestClear();
  wanted.workers = static_cast<uint32_t>(options.workers);
  const Region::Callbacks callbacks{[&](Region& left) { Rescue(options, left, below, events); },
                                    &SlotTable::Reclaim, &SlotTable::Repair};
  if (options.shared) {
    const int removed =
        Region::RemoveAbandoned(options.directory, Region::FileName(options.fingerprint));
    if (removed > 0) {
      events.Add(CS_EVENT_INFO, "removed " + std::to_string(removed) +
                                    " shared regions that no process holds any more");
    }
  }
  // Looked at when a region is made, not before: the one that is there may be
  // ours to join, or a dead one's to be removed first.
  wanted.size_for = [&options](bool shared) -> Result<uint64_t> {
    const uint64_t available = Available(options, shared);
    if (options.capacity > available) return DoesNotFit(options, shared, available);
    if (options.capacity > 0) return options.capacity;
    if (!shared) return available / kPrivateDivisor;
    const uint64_t least = kLeastPages * AlignUp(options.geometry.shard_size);
    if (available / kSharedDivisor >= least) return available / kSharedDivisor;
    return Status(CS_NO_MEMORY, Size(available) + " are available in " + options.directory +
                                    ", and half of that holds less than " +
                                    std::to_string(kLeastPages) + " pages, " + Size(least) + ": " +
                                    GiveMore(kSharedDivisor * least));
  };
  Result<std::unique_ptr<Region>> region = Region::Open(wanted, callbacks);
  if (!region.ok() && options.shared && options.capacity == 0) {
    events.Add(CS_EVENT_WARNING,
               "no shared cache buffer (" + region.status().text() + "): a private one");
    wanted.shared = false;
    region = Region::Open(wanted, callbacks);
  }
  if (region.ok()) {
    const Region& opened = *region.value();
    events.Add(CS_EVENT_INFO,
               std::string("cache buffer: ") + (opened.shared() ? "shared" : "private") +
                   (opened.created() ? ", made, " : ", joined, ") + Size(opened.size()) + ", " +
                   std::to_string(opened.slot_count()) + " slots, " + opened.huge_pages());
  }
  return region;
}

// Stores what only a region that nobody holds any more has: ordinary stops are
// kills.
void CacheTier::Rescue(const CacheOptions& options, Region& region, Tier& below,
                       EventRing& events) {
  // Cleared since by somebody who doesn't have the region: then nothing is kept.
  if (region.header().latest_clear != below.LatestClear()) return;
  const std::vector<uint32_t> dirty = SlotTable::IntactDirty(region);
  size_t stored = 0;
  size_t piece = 128;  // of one request; less if the tier below has no room for it
  const auto deadline = Request::Clock::now() + options.timeout;
  for (size_t from = 0; from < dirty.size();) {
    const size_t to = std::min(from + piece, dirty.size());
    Batch batch;
    for (size_t i = from; i < to; ++i) AddSlot(batch, region, dirty[i], options.geometry);
    const auto request = std::make_shared<Request>(std::move(batch));
    const Status started = below.Dump(request);
    if (started.code() == CS_REFUSED && piece > 1) {
      piece /= 2;
      continue;
    }
    if (!started.ok()) break;
    if (!request->WaitUntil(deadline)) {
      below.Cancel(request, CS_TIMEOUT);
      request->Wait();
    }
    stored += static_cast<size_t>(
        std::count(request->results().begin(), request->results().end(), CS_OK));
    from = to;
  }
  if (!dirty.empty()) {
    events.Add(CS_EVENT_INFO, "stored " + std::to_string(stored) + " of " +
                                  std::to_string(dirty.size()) +
                                  " blocks that processes now gone had only in memory");
  }
}

CacheTier::CacheTier(CacheOptions options, std::unique_ptr<Region> region,
                     std::unique_ptr<Tier> below, std::shared_ptr<EventRing> events,
                     const std::vector<int>& cpus)
    : options_(std::move(options)),
      events_(std::move(events)),
      below_(std::move(below)),
      region_(std::move(region)),
      slots_(*region_, region_->slot_count() / kReserveDivisor,
             std::max<uint32_t>(static_cast<uint32_t>(uint64_t{region_->slot_count()} *
                                                      options_.dirty_percent / 100),
                                1)),
      core_(*region_, slots_, *below_, options_.geometry, *events_, options_.peer_timeout,
            options_.timeout),
      load_executor_({"cs-h2h-load", options_.workers, cpus, CopyKernel::kAuto}),
      dump_executor_({"cs-h2h-dump", options_.workers, cpus, CopyKernel::kAuto}),
      loads_(core_, load_executor_, options_.queue_depth),
      dumps_(core_, dump_executor_, options_.queue_depth) {
  core_.FollowClears();  // made while nobody looked
  core_.ReclaimSoon();   // what processes left that died before we came
}

CacheTier::~CacheTier() {
  Stop();
  Close();
}

void CacheTier::Lookup(uint32_t pool, std::span<const BlockId> blocks, std::span<uint8_t> present) {
  if (pool != 0) return below_->Lookup(pool, blocks, present);
  std::fill(present.begin(), present.end(), uint8_t{0});
  core_.FollowClears();
  (void)slots_.Lookup(blocks, present);
  std::vector<BlockId> rest;
  std::vector<size_t> where;
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (present[i] != 0) continue;
    rest.push_back(blocks[i]);
    where.push_back(i);
  }
  std::vector<uint8_t> below(rest.size());
  if (!rest.empty()) below_->Lookup(pool, rest, below);
  for (size_t i = 0; i < rest.size(); ++i) present[where[i]] = below[i];
  lookups_.fetch_add(blocks.size(), std::memory_order_relaxed);
  lookup_hits_.fetch_add(
      static_cast<uint64_t>(std::count(present.begin(), present.end(), uint8_t{1})),
      std::memory_order_relaxed);
}

size_t CacheTier::LookupPrefix(uint32_t pool, std::span<const BlockId> blocks) {
  if (pool != 0) return below_->LookupPrefix(pool, blocks);
  std::vector<uint8_t> cached(blocks.size(), 0);
  core_.FollowClears();
  (void)slots_.Lookup(blocks, cached);
  size_t length = 0;
  while (length < blocks.size()) {
    if (cached[length] != 0) {
      ++length;
      continue;
    }
    // A run that the cache doesn't have: as far as the tier below has it.
    size_t end = length;
    while (end < blocks.size() && cached[end] == 0) ++end;
    const size_t found = below_->LookupPrefix(pool, blocks.subspan(length, end - length));
    length += found;
    if (length < end) break;
  }
  lookups_.fetch_add(std::min(length + 1, blocks.size()), std::memory_order_relaxed);
  lookup_hits_.fetch_add(length, std::memory_order_relaxed);
  return length;
}

void CacheTier::Cancel(const std::shared_ptr<Request>& request, Code code) {
  if (IsBelows(*request)) return below_->Cancel(request, code);
  (void)request->Cancel(code);
  CallOf(*request).direct.Cancel(*below_, code);
}

Status CacheTier::Clear() {
  const auto clear_slots = [this] {
    for (int tries = 0; tries < kClearTries; ++tries) {
      if (slots_.Clear(below_->LatestClear())) return true;
    }
    return false;
  };
  const Status locked = {CS_TIMEOUT, "the cache buffer is locked by a stopped process"};
  // First, so that no dirty slot goes below later; last, for what was loaded from
  // there in between.
  if (!clear_slots()) return locked;
  const Status below = below_->Clear();
  return clear_slots() ? below : locked;
}

void CacheTier::AddStats(cs_stats& stats) const {
  cs_stats below = {};
  below_->AddStats(below);
  const auto value = [](const std::atomic<uint64_t>& counter) {
    return counter.load(std::memory_order_relaxed);
  };
  const CacheCounters& counters = core_.counters();
  const SlotCounts slots = slots_.Counts();
  const uint64_t existing = value(counters.dump_existing);
  below_->AddSideStats(stats);
  stats.lookup_blocks += value(lookups_);
  stats.lookup_hits += value(lookup_hits_);
  loads_.admission().AddLoadStats(stats, Admission::Pools::kFirst);
  dumps_.admission().AddDumpStats(stats, Admission::Pools::kFirst,
                                  {existing, existing * options_.geometry.payload()});
  stats.stuck_workers += below.stuck_workers;
  stats.cache_hit += value(counters.hit);
  stats.cache_waited += value(counters.waited);
  stats.cache_loaded += value(counters.loaded);
  stats.cache_direct += value(counters.direct);
  stats.cache_dumped += value(counters.dump_cached);
  stats.cache_dumped_direct += value(counters.dump_direct);
  stats.cache_stored += value(counters.stored);
  stats.cache_store_failed += value(counters.store_failed);
  stats.cache_given_up += value(counters.given_up);
  stats.cache_slots += region_->slot_count();
  stats.cache_slots_free += slots.free;
  stats.cache_slots_dirty += slots.dirty;
  stats.cache_slots_loading += slots.loading;
  stats.cache_load_queued += load_executor_.queued();
  stats.cache_load_running += load_executor_.running();
  stats.cache_dump_queued += dump_executor_.queued();
  stats.cache_dump_running += dump_executor_.running();
  stats.storage_loads += below.load_ok;
  stats.storage_dumps += below.dump_ok;
  stats.verify_skipped += below.verify_skipped;
  stats.evicted_blocks += below.evicted_blocks;
  stats.evicted_bytes += below.evicted_bytes;
  stats.posix_used_bytes += below.posix_used_bytes;
  stats.posix_capacity_bytes += below.posix_capacity_bytes;
  stats.posix_directories += below.posix_directories;
  stats.posix_directories_out += below.posix_directories_out;
  stats.posix_directories_read_only += below.posix_directories_read_only;
  stats.posix_directories_full += below.posix_directories_full;
  stats.posix_collecting += below.posix_collecting;
  stats.posix_uses_pending += below.posix_uses_pending;
  stats.posix_uses_dropped += below.posix_uses_dropped;
}

// Nothing of ours blocks: what is queued runs, and what it asks of the tier
// below ends as that tier says. That tier stops in Close: dirty slots go there.
void CacheTier::Stop() {
  loads_.Stop();
  dumps_.Stop();
}

void CacheTier::Drain() {
  if (drained_.exchange(true)) return;
  (void)load_executor_.Stop(/*drain=*/true);
  (void)dump_executor_.Stop(/*drain=*/true);
  core_.Reclaim();  // we may be the last who can store what a dead process left
  core_.FinishStoring();
  if (!core_.WaitStored(Request::Clock::now() + options_.timeout)) {
    events_->Add(CS_EVENT_WARNING, "closed with " + std::to_string(core_.storing()) +
                                       " blocks that could not be stored in time");
  }
}

void CacheTier::Close() {
  Drain();
  if (closed_.exchange(true)) return;
  core_.Close();
  below_->Stop();
  below_->Close();
  region_->Close();
}

}  // namespace cachestore
