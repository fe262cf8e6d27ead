#include "posix/posix_tier.h"

#include <algorithm>
#include <utility>

#include "posix/directory_upkeep.h"
#include "posix/opening.h"

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
  Core(std::shared_ptr<EventRing> event_ring, uint64_t depth)
      : events(std::move(event_ring)), load(depth), dump(depth) {}

  const std::shared_ptr<EventRing> events;
  std::unique_ptr<ShardIo> io;
  std::unique_ptr<DirectoryUpkeep> upkeep;
  Admission load;
  Admission dump;
  std::atomic<uint64_t> lookups{0};
  std::atomic<uint64_t> lookup_hits{0};
  std::atomic<bool> stopping{false};

  // Where that may hang it is done aside, with the first of the lookups of a
  // request. One that can't look now notices when it publishes.
  void NoticeClears(Request* aside) {
    for (const auto& directory : io->directories()) {
      if (directory->zero_copy() == (aside != nullptr)) continue;
      if (directory->health().use() == Health::Use::kOut) continue;
      if (aside != nullptr) aside->NotePlace(0, directory.get());
      (void)Thrown([&] { (void)directory->NoticeClear(); });
    }
  }
  // Whether lookups and clears may hang.
  bool GoesAside() const {
    const auto directories = io->directories();
    return std::any_of(directories.begin(), directories.end(),
                       [](const auto& directory) { return !directory->zero_copy(); });
  }
  // After Cancel(CS_TIMEOUT): each directory at which a worker was left behind,
  // once a request. One that isn't written to is only looked at by a dump, and one
  // that is was looked at before.
  void NoteHung(Request& request, bool is_dump) {
    for (const auto& directory : io->directories()) {
      Health& health = directory->health();
      const bool writes = is_dump && health.use() == Health::Use::kFull;
      for (size_t i = 0; i < request.size(); ++i) {
        if (!request.left_behind(i) || request.place(i) != directory.get()) continue;
        health.NoteHung(writes ? Health::Call::kWrite : Health::Call::kRead);
        break;
      }
    }
  }

  void RunAside(Request& request, size_t index) {
    if (!request.Begin(index, /*touches=*/false)) return;
    Code code = CS_OK;
    if (request.tier_data() == nullptr && index == 0) NoticeClears(&request);
    if (request.tier_data() != nullptr) {  // a clear
      const Status cleared = io->directories()[index]->Clear();
      if (!cleared.ok()) events->Add(CS_EVENT_ERROR, "clear: " + cleared.text());
      upkeep->NoteClear(index);
      code = cleared.code();
    } else {
      code = io->Exists(request.batch().blocks[index], &request, index) ? CS_OK : CS_NOT_FOUND;
    }
    request.Finish(index, code);
  }
};

Result<std::unique_ptr<Tier>> PosixTier::Open(Env& env, std::shared_ptr<EventRing> events,
                                              PosixOptions options) {
  // Not known: what is stored is always verified.
  const auto boot = std::make_shared<BootId>();
  if (!RunWithin(options.timeout, "cs-open", [&env, boot] { *boot = ReadBootId(env); })) {
    return Status(CS_TIMEOUT, "opening " + options.roots[0] + ": the system didn't answer within " +
                                  std::to_string(options.timeout.count()) + " ms");
  }
  Result<RecordFormat> format = RecordFormat::Make(options.geometry, options.fingerprint, *boot);
  if (!format.ok()) return format.status();
  auto core = std::make_shared<Core>(std::move(events), options.queue_depth);
  Result<Directories> directories = OpenDirectories(env, core->events, options);
  if (!directories.ok()) return directories.status();
  core->io =
      std::make_unique<ShardIo>(env, *core->events, options.geometry, std::move(format.value()),
                                options.verify, std::move(directories.value()));
  core->upkeep =
      std::make_unique<DirectoryUpkeep>(env, *core->events, *core->io, options.use_interval);
  if (core->upkeep->evicts()) {
    (void)RunWithin(options.timeout, "cs-open",
                    [core, patience = options.timeout] { core->upkeep->Begin(patience); });
  }
  return std::unique_ptr<Tier>(new PosixTier(std::move(core), options));
}

PosixTier::PosixTier(std::shared_ptr<Core> core, const PosixOptions& options)
    : core_(std::move(core)),
      timeout_(options.timeout),
      load_pool_("cs-load", options.load_workers,
                 [core = core_](WorkerPool::Job& job, WorkerPool::Scratch& scratch) {
                   Request& request = *static_cast<Request*>(job.owner.get());
                   RunShard(request, job.index,
                            [&] { core->io->Load(request, job.index, scratch); });
                   return request.left_behind(job.index);
                 }),
      dump_pool_(
          "cs-dump", options.dump_workers,
          [core = core_](WorkerPool::Job& job, WorkerPool::Scratch& scratch) {
            Request& request = *static_cast<Request*>(job.owner.get());
            core->io->Dump(request, job.index, scratch);
            return request.left_behind(job.index);
          },
          options.dump_nice),
      cleaning_pool_(
          "cs-clean", 1,
          [core = core_](WorkerPool::Job& job, WorkerPool::Scratch&) {
            // What is left over is for the next time.
            Directory& directory = *core->io->directories()[job.index];
            if (directory.health().use() == Health::Use::kOut) return false;
            (void)Thrown([&] { directory.RemoveTrash([&core] { return core->stopping.load(); }); });
            return false;
          }),
      upkeep_(core_->io->directories().size(),
              [core = core_](size_t root, bool last) { return core->upkeep->Tick(root, last); }) {
  if (core_->GoesAside()) {
    aside_pool_ = std::make_unique<WorkerPool>(
        "cs-lookup", options.load_workers,
        [core = core_](WorkerPool::Job& job, WorkerPool::Scratch&) {
          Request& request = *static_cast<Request*>(job.owner.get());
          RunShard(request, job.index, [&] { core->RunAside(request, job.index); });
          return request.left_behind(job.index);
        });
  }
  for (size_t i = 0; i < core_->io->directories().size(); ++i) {
    core_->io->directories()[i]->space().OnWanted(upkeep_.Waker(i));
  }
  CleanUp();
}

PosixTier::~PosixTier() {
  Stop();
  Close();
}

bool PosixTier::LooksAside() const { return aside_pool_ != nullptr && core_->GoesAside(); }

void PosixTier::CleanUp() {
  for (uint32_t i = 0; i < core_->io->directories().size(); ++i) {
    // Refused only when the store is closing, or the worker is stuck for good.
    (void)cleaning_pool_.Submit({{nullptr, i}});
  }
}

void PosixTier::Lookup(std::span<const BlockId> blocks, std::span<uint8_t> present) {
  uint64_t hits = 0;
  if (!LooksAside()) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      present[i] = core_->io->Exists(blocks[i]) ? 1 : 0;
      hits += present[i];
    }
  } else {
    const auto deadline = Request::Clock::now() + timeout_;
    for (size_t from = 0; from < blocks.size(); from += kAsidePiece) {
      const auto piece = blocks.subspan(from, std::min(kAsidePiece, blocks.size() - from));
      hits += LookupAside(piece, present.subspan(from, piece.size()), deadline);
    }
  }
  core_->lookups.fetch_add(blocks.size(), std::memory_order_relaxed);
  core_->lookup_hits.fetch_add(hits, std::memory_order_relaxed);
}

size_t PosixTier::LookupPrefix(std::span<const BlockId> blocks) {
  core_->upkeep->uses().Chain(blocks);
  size_t length = 0;
  if (!LooksAside()) {
    while (length < blocks.size() && core_->io->Exists(blocks[length])) ++length;
  } else {
    const auto deadline = Request::Clock::now() + timeout_;
    std::vector<uint8_t> present(kAsidePiece);
    bool gap = false;
    while (!gap && length < blocks.size()) {
      const auto piece = blocks.subspan(length, std::min(kAsidePiece, blocks.size() - length));
      LookupAside(piece, std::span(present).first(piece.size()), deadline);
      const auto end = present.begin() + static_cast<std::ptrdiff_t>(piece.size());
      const auto hits = static_cast<size_t>(std::find(present.begin(), end, 0) - present.begin());
      gap = hits < piece.size();
      length += hits;
    }
  }
  core_->lookups.fetch_add(std::min(length + 1, blocks.size()), std::memory_order_relaxed);
  core_->lookup_hits.fetch_add(length, std::memory_order_relaxed);
  return length;
}

uint64_t PosixTier::LookupAside(std::span<const BlockId> blocks, std::span<uint8_t> present,
                                Request::Clock::time_point deadline) {
  if (Request::Clock::now() >= deadline) {
    std::fill(present.begin(), present.end(), uint8_t{0});
    return 0;
  }
  Batch batch;
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
  const auto keep_alive = [core = core_, following = core_->upkeep->uses().Follow(
                                             request->batch())](size_t shard, Code code) {
    if (following != nullptr) core->upkeep->uses().Ended(*following, shard, code);
  };
  return direction.Admit(*request, std::move(tier_data), keep_alive);
}

Status PosixTier::Load(const std::shared_ptr<Request>& request) {
  Status admitted = Admit(core_->load, request, nullptr);
  if (!admitted.ok()) return admitted;
  return core_->load.Submit(*request, [&] { return Submit(load_pool_, request); });
}

Status PosixTier::Dump(const std::shared_ptr<Request>& request) {
  const Batch& batch = request->batch();
  Result<std::shared_ptr<BlockWrites>> plan = core_->io->PlanDump(batch);
  if (!plan.ok()) return plan.status();
  const std::shared_ptr<BlockWrites> writes = plan.value();
  if (Status admitted = Admit(core_->dump, request, writes); !admitted.ok()) return admitted;
  // Else the first dump after another's clear would be taken for one from before.
  if (!batch.epoch.has_value()) core_->NoticeClears(/*aside=*/nullptr);
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
  if (!is_dump || core_->io->geometry().shards() == 1) pool.Remove(request.get());
  if (left_behind == 0) return;
  pool.NoteStuck(left_behind);
  // A caller who waits for less has learnt nothing about the directory.
  if (code == CS_TIMEOUT && Request::Clock::now() - request->created() >= timeout_) {
    core_->NoteHung(*request, is_dump);
  }
}

Status PosixTier::Clear() {
  const auto directories = core_->io->directories();
  Batch batch;
  batch.blocks.resize(directories.size());
  const auto request = std::make_shared<Request>(std::move(batch));
  request->Prepare({}, core_);
  if (LooksAside()) {
    RunAside(request, Request::Clock::now() + timeout_);
  } else {
    for (size_t i = 0; i < directories.size(); ++i) core_->RunAside(*request, i);
  }
  core_->upkeep->uses().Forget();
  CleanUp();
  for (const Code code : request->results()) {
    if (code != CS_OK) return {code, "clear failed in a directory; the log names it"};
  }
  return Status::Ok();
}

uint64_t PosixTier::Epoch() const {
  core_->NoticeClears(/*aside=*/nullptr);
  uint64_t sum = 0;  // each only grows
  for (const auto& directory : core_->io->directories()) sum += directory->epoch();
  return sum;
}

uint64_t PosixTier::LatestClear() const {
  core_->NoticeClears(/*aside=*/nullptr);
  uint64_t mixed = 0;
  for (const auto& directory : core_->io->directories()) {
    mixed = mixed * 31 + directory->latest_clear();
  }
  return mixed;
}

void PosixTier::AddStats(cs_stats& stats) const {
  const uint64_t payload = core_->io->geometry().payload();
  stats.lookup_blocks += Value(core_->lookups);
  stats.lookup_hits += Value(core_->lookup_hits);
  core_->load.AddLoadStats(stats, payload);
  core_->dump.AddDumpStats(stats, core_->io->existing(), payload);
  stats.verify_skipped += core_->io->verify_skipped();
  core_->upkeep->AddStats(stats);
  stats.stuck_workers +=
      load_pool_.stuck() + dump_pool_.stuck() + (aside_pool_ == nullptr ? 0 : aside_pool_->stuck());
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
        core_->io->DropDump(request, job.index, CS_CLOSED);
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
      for (const auto& directory : core->io->directories()) {
        if ((directory->health().use() == Health::Use::kOut) == out) directory->Close();
      }
    }
  };
  if (aside_pool_ == nullptr) {
    (void)Thrown(close);
  } else {
    (void)RunWithin(kJoinPatience, "cs-close", close);
  }
}

}  // namespace cachestore
