#include "posix/posix_tier.h"

#include <algorithm>
#include <array>
#include <utility>

#include "posix/directory_upkeep.h"
#include "posix/opening.h"
#include "posix/record.h"

namespace cachestore {
namespace {

// Lookups that go to workers go in pieces of this many blocks.
constexpr size_t kAsidePiece = 128;
// How long Close waits for workers that should have nothing left to do.
constexpr std::chrono::milliseconds kJoinPatience{2000};

uint64_t Value(const std::atomic<uint64_t>& counter) {
  return counter.load(std::memory_order_relaxed);
}

template <typename Work>
void RunShard(Request& request, size_t shard, Work work) {
  if (const Code code = Thrown(work); code != CS_OK) request.Finish(shard, code);
}

}  // namespace

struct PosixTier::Core {
  Core(Env& system, std::shared_ptr<EventRing> event_ring, uint64_t depth)
      : env(system), events(std::move(event_ring)), load(depth), dump(depth) {}

  Env& env;
  const std::shared_ptr<EventRing> events;
  Roots roots;
  BootId boot{};  // not known: what is stored is always verified
  // Those below `pools` don't change any more.
  std::array<std::unique_ptr<ShardIo>, kMaxPools> ios;
  std::atomic<uint32_t> pools{0};
  std::unique_ptr<DirectoryUpkeep> upkeep;
  Admission load;
  Admission dump;
  struct Lookups {
    std::atomic<uint64_t> blocks{0};
    std::atomic<uint64_t> hits{0};
  };
  std::array<Lookups, 2> lookups;  // by Admission::Pools
  std::atomic<bool> stopping{false};

  ShardIo& io(uint32_t pool) const { return *ios[pool]; }
  ShardIo& io(const Request& request) const { return io(request.batch().pool); }

  Status Add(const PosixOptions& options, const PoolOptions& pool) {
    Result<RecordFormat> format = RecordFormat::Make(pool.geometry, pool.fingerprint, boot);
    if (!format.ok()) return format.status();
    Result<Directories> opened = OpenDirectories(env, events, options, pool, roots);
    if (!opened.ok()) return opened.status();
    const uint32_t number = pools.load(std::memory_order_relaxed);
    ios[number] = std::make_unique<ShardIo>(env, *events, pool.geometry, std::move(format.value()),
                                            options.verify, std::move(opened.value()));
    if (number > 0) upkeep->AddPool(*ios[number]);
    pools.store(number + 1, std::memory_order_release);
    return Status::Ok();
  }

  // The directories of all pools, pool by pool: one for each root.
  size_t DirectoryCount() const { return pools.load(std::memory_order_acquire) * roots.size(); }
  Directory& DirectoryAt(size_t i) const {
    return *ios[i / roots.size()]->directories()[i % roots.size()];
  }
  template <typename Visit>
  void EachDirectory(Visit visit) const {
    const size_t count = DirectoryCount();
    for (size_t i = 0; i < count; ++i) visit(DirectoryAt(i));
  }

  void CountLookups(uint32_t pool, uint64_t blocks, uint64_t hits) {
    Lookups& counts = lookups[static_cast<size_t>(Admission::PoolsOf(pool))];
    counts.blocks.fetch_add(blocks, std::memory_order_relaxed);
    counts.hits.fetch_add(hits, std::memory_order_relaxed);
  }
  void AddStats(cs_stats& stats, Admission::Pools which) const {
    const bool first = which == Admission::Pools::kFirst;
    Admission::Existing existing;
    const uint32_t end = first ? 1 : pools.load(std::memory_order_acquire);
    for (uint32_t pool = first ? 0 : 1; pool < end; ++pool) {
      const uint64_t shards = ios[pool]->existing();
      existing.shards += shards;
      existing.bytes += shards * ios[pool]->geometry().payload();
    }
    const Lookups& counts = lookups[static_cast<size_t>(which)];
    stats.lookup_blocks += Value(counts.blocks);
    stats.lookup_hits += Value(counts.hits);
    load.AddLoadStats(stats, which);
    dump.AddDumpStats(stats, which, existing);
  }

  // Where that may hang it is done aside, with the first of the lookups of a
  // request. One that can't look now notices when it publishes.
  void NoticeClears(uint32_t pool, Request* aside) {
    for (const auto& directory : io(pool).directories()) {
      if (directory->zero_copy() == (aside != nullptr)) continue;
      if (directory->health().use() == Health::Use::kOut) continue;
      if (aside != nullptr) aside->NotePlace(0, directory.get());
      (void)Thrown([&] { (void)directory->NoticeClear(); });
    }
  }
  // Whether lookups and clears may hang.
  bool GoesAside() const {
    bool may_hang = false;
    EachDirectory([&](Directory& directory) { may_hang = may_hang || !directory.zero_copy(); });
    return may_hang;
  }
  // After Cancel(CS_TIMEOUT): each directory at which a worker was left behind,
  // once a request. One that isn't written to is only looked at by a dump, and one
  // that is was looked at before.
  void NoteHung(Request& request, bool is_dump) {
    EachDirectory([&](Directory& directory) {
      Health& health = directory.health();
      const bool writes = is_dump && health.use() == Health::Use::kFull;
      for (size_t i = 0; i < request.size(); ++i) {
        if (!request.left_behind(i) || request.place(i) != &directory) continue;
        health.NoteHung(writes ? Health::Call::kWrite : Health::Call::kRead);
        break;
      }
    });
  }

  void RunAside(Request& request, size_t index) {
    if (!request.Begin(index, /*touches=*/false)) return;
    Code code = CS_OK;
    if (request.tier_data() == nullptr && index == 0) NoticeClears(request.batch().pool, &request);
    if (request.tier_data() != nullptr) {  // a clear
      const Status cleared = DirectoryAt(index).Clear();
      if (!cleared.ok()) events->Add(CS_EVENT_ERROR, "clear: " + cleared.text());
      upkeep->NoteClear(index % roots.size());
      code = cleared.code();
    } else {
      const bool found = io(request).Exists(request.batch().blocks[index], &request, index);
      code = found ? CS_OK : CS_NOT_FOUND;
    }
    request.Finish(index, code);
  }
};

Result<std::unique_ptr<Tier>> PosixTier::Open(Env& env, std::shared_ptr<EventRing> events,
                                              PosixOptions options) {
  const auto boot = std::make_shared<BootId>();
  if (!RunWithin(options.timeout, "cs-open", [&env, boot] { *boot = ReadBootId(env); })) {
    return Status(CS_TIMEOUT, "opening " + options.roots[0] + ": the system didn't answer within " +
                                  std::to_string(options.timeout.count()) + " ms");
  }
  auto core = std::make_shared<Core>(env, std::move(events), options.queue_depth);
  core->boot = *boot;
  core->roots = MakeRoots(env, *core->events, options);
  if (Status added = core->Add(options, options.first); !added.ok()) return added;
  core->upkeep = std::make_unique<DirectoryUpkeep>(env, *core->events, core->io(0),
                                                   options.use_interval, options.evict_interval);
  if (core->upkeep->evicts()) {
    (void)RunWithin(options.timeout, "cs-open",
                    [core, patience = options.timeout] { core->upkeep->Begin(patience); });
  }
  return std::unique_ptr<Tier>(new PosixTier(std::move(core), std::move(options)));
}

PosixTier::PosixTier(std::shared_ptr<Core> core, PosixOptions options)
    : options_(std::move(options)),
      core_(std::move(core)),
      timeout_(options_.timeout),
      load_pool_("cs-load", options_.load_workers,
                 [core = core_](WorkerPool::Job& job, WorkerPool::Scratch& scratch) {
                   Request& request = *static_cast<Request*>(job.owner.get());
                   RunShard(request, job.index,
                            [&] { core->io(request).Load(request, job.index, scratch); });
                   return request.left_behind(job.index);
                 }),
      dump_pool_(
          "cs-dump", options_.dump_workers,
          [core = core_](WorkerPool::Job& job, WorkerPool::Scratch& scratch) {
            Request& request = *static_cast<Request*>(job.owner.get());
            core->io(request).Dump(request, job.index, scratch);
            return request.left_behind(job.index);
          },
          options_.dump_nice),
      cleaning_pool_(
          "cs-clean", 1,
          [core = core_](WorkerPool::Job& job, WorkerPool::Scratch&) {
            // What is left over is for the next time.
            Directory& directory = core->DirectoryAt(job.index);
            if (directory.health().use() == Health::Use::kOut) return false;
            (void)Thrown([&] { directory.RemoveTrash([&core] { return core->stopping.load(); }); });
            return false;
          }),
      upkeep_(core_->roots.size(),
              [core = core_](size_t root, bool last) { return core->upkeep->Tick(root, last); }) {
  if (core_->GoesAside()) {
    aside_pool_ = std::make_unique<WorkerPool>(
        "cs-lookup", options_.load_workers,
        [core = core_](WorkerPool::Job& job, WorkerPool::Scratch&) {
          Request& request = *static_cast<Request*>(job.owner.get());
          RunShard(request, job.index, [&] { core->RunAside(request, job.index); });
          return request.left_behind(job.index);
        });
  }
  for (size_t i = 0; i < core_->roots.size(); ++i) {
    core_->roots[i]->space.OnWanted(upkeep_.Waker(i));
  }
  CleanUp();
}

PosixTier::~PosixTier() {
  Stop();
  Close();
}

bool PosixTier::LooksAside() const { return aside_pool_ != nullptr && core_->GoesAside(); }

void PosixTier::CleanUp() {
  for (uint32_t i = 0; i < core_->DirectoryCount(); ++i) {
    // Refused only when the store is closing, or the worker is stuck for good.
    (void)cleaning_pool_.Submit({{nullptr, i}});
  }
}

Status PosixTier::OpenPool(PoolOptions options) {
  if (Status added = core_->Add(options_, options); !added.ok()) return added;
  (void)Thrown([&] { CleanUp(); });  // it is open
  return Status::Ok();
}

void PosixTier::Lookup(uint32_t pool, std::span<const BlockId> blocks, std::span<uint8_t> present) {
  uint64_t hits = 0;
  if (!LooksAside()) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      present[i] = core_->io(pool).Exists(blocks[i]) ? 1 : 0;
      hits += present[i];
    }
  } else {
    const auto deadline = Request::Clock::now() + timeout_;
    for (size_t from = 0; from < blocks.size(); from += kAsidePiece) {
      const auto piece = blocks.subspan(from, std::min(kAsidePiece, blocks.size() - from));
      hits += LookupAside(pool, piece, present.subspan(from, piece.size()), deadline);
    }
  }
  core_->CountLookups(pool, blocks.size(), hits);
}

size_t PosixTier::LookupPrefix(uint32_t pool, std::span<const BlockId> blocks) {
  if (pool == 0) core_->upkeep->uses().Chain(blocks);
  size_t length = 0;
  if (!LooksAside()) {
    while (length < blocks.size() && core_->io(pool).Exists(blocks[length])) ++length;
  } else {
    const auto deadline = Request::Clock::now() + timeout_;
    std::vector<uint8_t> present(kAsidePiece);
    bool gap = false;
    while (!gap && length < blocks.size()) {
      const auto piece = blocks.subspan(length, std::min(kAsidePiece, blocks.size() - length));
      LookupAside(pool, piece, std::span(present).first(piece.size()), deadline);
      const auto end = present.begin() + static_cast<std::ptrdiff_t>(piece.size());
      const auto hits = static_cast<size_t>(std::find(present.begin(), end, 0) - present.begin());
      gap = hits < piece.size();
      length += hits;
    }
  }
  core_->CountLookups(pool, std::min(length + 1, blocks.size()), length);
  return length;
}

uint64_t PosixTier::LookupAside(uint32_t pool, std::span<const BlockId> blocks,
                                std::span<uint8_t> present, Request::Clock::time_point deadline) {
  if (Request::Clock::now() >= deadline) {
    std::fill(present.begin(), present.end(), uint8_t{0});
    return 0;
  }
  Batch batch;
  batch.pool = pool;
  batch.blocks.assign(blocks.begin(), blocks.end());
  const auto request = std::make_shared<Request>(std::move(batch));
  RunAside(request, deadline);
  uint64_t hits = 0;
  for (size_t i = 0; i < blocks.size(); ++i) {
    present[i] = request->results()[i] == CS_OK ? 1 : 0;
    hits += present[i];
  }
  return hits;
}

void PosixTier::RunAside(const std::shared_ptr<Request>& request,
                         Request::Clock::time_point deadline) {
  if (Submit(*aside_pool_, request).ok() && request->WaitUntil(deadline)) return;
  aside_pool_->Remove(request.get());
  const size_t left_behind = request->Cancel(CS_TIMEOUT);
  aside_pool_->NoteStuck(left_behind);
  if (left_behind > 0 && request->tier_data() == nullptr &&
      Request::Clock::now() - request->created() >= timeout_ / 2) {
    core_->NoteHung(*request, /*is_dump=*/false);
  }
  request->Wait();  // nothing here touches the caller's memory: it has ended
}

Status PosixTier::Submit(WorkerPool& pool, const std::shared_ptr<Request>& request) {
  std::vector<WorkerPool::Job> jobs;
  jobs.reserve(request->size());
  for (uint32_t i = 0; i < request->size(); ++i) jobs.push_back({request, i});
  if (pool.Submit(std::move(jobs))) return Status::Ok();
  return core_->stopping.load() ? Status(CS_CLOSED, "the store is closing")
                                : Status(CS_REFUSED, "every worker hangs in the filesystem");
}

// Takes room for the whole request, to be given back shard by shard.
Status PosixTier::Admit(Admission& direction, const std::shared_ptr<Request>& request,
                        std::shared_ptr<void> tier_data) {
  // A worker left behind can end a shard when the tier is gone, and the core
  // with the admission then lives by this.
  // A use of a block is said by the first pool.
  const Batch& batch = request->batch();
  const auto keep_alive = [core = core_, following = batch.pool == 0
                                                         ? core_->upkeep->uses().Follow(batch)
                                                         : nullptr](size_t shard, Code code) {
    if (following != nullptr) core->upkeep->uses().Ended(*following, shard, code);
  };
  const uint64_t payload = core_->io(*request).geometry().payload();
  return direction.Admit(*request, payload, std::move(tier_data), keep_alive);
}

Status PosixTier::Load(const std::shared_ptr<Request>& request) {
  Status admitted = Admit(core_->load, request, nullptr);
  if (!admitted.ok()) return admitted;
  return core_->load.Submit(*request, [&] { return Submit(load_pool_, request); });
}

Status PosixTier::Dump(const std::shared_ptr<Request>& request) {
  const Batch& batch = request->batch();
  Result<std::shared_ptr<BlockWrites>> plan = core_->io(*request).PlanDump(batch);
  if (!plan.ok()) return plan.status();
  const std::shared_ptr<BlockWrites> writes = plan.value();
  if (Status admitted = Admit(core_->dump, request, writes); !admitted.ok()) return admitted;
  // Else the first dump after another's clear would be taken for one from before.
  if (!batch.epoch.has_value()) core_->NoticeClears(batch.pool, /*aside=*/nullptr);
  for (const auto& block : writes->blocks) {
    if (block->directory != nullptr) block->epoch = block->directory->epoch();
  }
  // After the directories' epochs: a later clear is seen there.
  if (batch.epoch.has_value() && *batch.epoch != Epoch()) {
    for (const auto& block : writes->blocks) block->epoch = BlockWrite::kCleared;
  }
  return core_->dump.Submit(*request, [&] { return Submit(dump_pool_, request); });
}

void PosixTier::NoteUse(std::span<const BlockId> blocks, const BlockId* parent) {
  core_->upkeep->uses().Use(blocks, parent);
}

void PosixTier::Cancel(const std::shared_ptr<Request>& request, Code code) {
  const bool is_dump = request->tier_data() != nullptr;
  WorkerPool& pool = is_dump ? dump_pool_ : load_pool_;
  const size_t left_behind = request->Cancel(code);
  // The jobs of a block of several shards still run, to no effect but for the
  // last one, which removes what was written.
  if (!is_dump || core_->io(*request).geometry().shards() == 1) pool.Remove(request.get());
  if (left_behind == 0) return;
  pool.NoteStuck(left_behind);
  // A caller who waits for less has learnt nothing about the directory.
  if (code == CS_TIMEOUT && Request::Clock::now() - request->created() >= timeout_) {
    core_->NoteHung(*request, is_dump);
  }
}

Status PosixTier::Clear() {
  const size_t count = core_->DirectoryCount();
  Batch batch;
  batch.blocks.resize(count);
  const auto request = std::make_shared<Request>(std::move(batch));
  request->Prepare({}, core_);
  if (LooksAside()) {
    RunAside(request, Request::Clock::now() + timeout_);
  } else {
    for (size_t i = 0; i < count; ++i) core_->RunAside(*request, i);
  }
  core_->upkeep->uses().Forget();
  CleanUp();
  for (const Code code : request->results()) {
    if (code != CS_OK) return {code, "clear failed in a directory; the log names it"};
  }
  return Status::Ok();
}

uint64_t PosixTier::Epoch() const {
  core_->NoticeClears(/*pool=*/0, /*aside=*/nullptr);
  uint64_t sum = 0;  // each only grows
  for (const auto& directory : core_->io(0).directories()) sum += directory->epoch();
  return sum;
}

uint64_t PosixTier::LatestClear() const {
  core_->NoticeClears(/*pool=*/0, /*aside=*/nullptr);
  uint64_t sum = 0;  // of hashes; in whatever order a process has the directories
  for (const auto& directory : core_->io(0).directories()) sum += directory->latest_clear();
  return sum;
}

void PosixTier::AddStats(cs_stats& stats) const {
  core_->AddStats(stats, Admission::Pools::kFirst);
  core_->AddStats(stats, Admission::Pools::kSides);
  const uint32_t pools = core_->pools.load(std::memory_order_acquire);
  for (uint32_t pool = 0; pool < pools; ++pool) {
    stats.verify_skipped += core_->io(pool).verify_skipped();
  }
  core_->upkeep->AddStats(stats);
  stats.stuck_workers +=
      load_pool_.stuck() + dump_pool_.stuck() + (aside_pool_ == nullptr ? 0 : aside_pool_->stuck());
}

void PosixTier::AddSideStats(cs_stats& stats) const {
  core_->AddStats(stats, Admission::Pools::kSides);
}

void PosixTier::Stop() {
  core_->stopping.store(true);
  core_->upkeep->Stop();
  for (WorkerPool* pool : {&load_pool_, &dump_pool_, aside_pool_.get(), &cleaning_pool_}) {
    if (pool == nullptr) continue;
    for (const WorkerPool::Job& job : pool->Close()) {
      if (job.owner == nullptr) continue;  // cleaning
      Request& request = *static_cast<Request*>(job.owner.get());
      if (pool == &dump_pool_) {
        core_->io(request).DropDump(request, job.index, CS_CLOSED);
      } else {
        request.EndQueued(job.index, CS_CLOSED);
      }
    }
  }
}

void PosixTier::Close() {
  upkeep_.Stop();  // not before every request has ended: their uses count
  const auto deadline = Request::Clock::now() + kJoinPatience;
  bool all = true;
  for (WorkerPool* pool : {&load_pool_, &dump_pool_, aside_pool_.get(), &cleaning_pool_}) {
    if (pool == nullptr) continue;
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - Request::Clock::now());
    all = pool->Join(std::max(left, std::chrono::milliseconds(0))) && all;
  }
  {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - Request::Clock::now());
    all = upkeep_.Join(std::max(left, std::chrono::milliseconds(0))) && all;
  }
  // With a worker left behind, its directory may hang us too: what it was
  // writing is removed by whoever opens the store next.
  if (!all) return;
  const auto close = [core = core_] {
    // One that hangs keeps no other from it.
    for (const bool out : {false, true}) {
      core->EachDirectory([&](Directory& directory) {
        if ((directory.health().use() == Health::Use::kOut) == out) directory.Close();
      });
    }
  };
  if (aside_pool_ == nullptr) {
    (void)Thrown(close);
  } else {
    (void)RunWithin(kJoinPatience, "cs-close", close);
  }
}

}  // namespace cachestore
