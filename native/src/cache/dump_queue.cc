#include "cache/dump_queue.h"

#include <utility>
#include <vector>

#include "cache/direct_requests.h"

namespace cachestore {
namespace {

constexpr int kTries = 3;
// Of a slot that a dump gives up, whatever the reason: a load that waited for it
// starts afresh, since the block may be in the tier below.
constexpr Code kGivenUp = CS_CLOSED;

}  // namespace

// Belongs to the request, and so doesn't hold it.
struct DumpQueue::Call : QueueCall {
  std::atomic<size_t> on_their_way{0};  // shards that haven't arrived; acq_rel
  // When it was accepted: of the region, and of the tier below.
  uint64_t epoch = 0;
  uint64_t epoch_below = 0;
};

// Shards that are published and stored together: those of a request, less those
// that had to wait, each of which is a group of its own.
struct DumpQueue::Group {
  struct Gathered {
    size_t shard;
    SlotRef ref;
    uint32_t checksum;
  };

  explicit Group(size_t shards) : on_their_way(shards) {
    gathered.reserve(shards);  // so that noting a shard can't fail
    through.reserve(shards);
  }

  std::atomic<size_t> on_their_way;  // shards that haven't left; acq_rel
  std::mutex mutex;                  // guards the two lists until all have left
  std::vector<Gathered> gathered;
  std::vector<size_t> through;
};

DumpQueue::Call& DumpQueue::DumpOf(const Request& request) {
  return static_cast<Call&>(CallOf(request));
}

Status DumpQueue::Dump(const std::shared_ptr<Request>& request) {
  if (stopped_.load()) return {CS_CLOSED, "the store is closing"};
  auto call = std::make_shared<Call>();
  call->on_their_way.store(request->size(), std::memory_order_relaxed);
  const auto group = std::make_shared<Group>(request->size());
  std::vector<HostCopyExecutor::Step> steps;
  steps.reserve(request->size());
  for (size_t i = 0; i < request->size(); ++i) {
    steps.push_back([this, step = Step{request, i, group}](size_t) { Run(step); });
  }
  if (Status admitted =
          admission_.Admit(*request, core_.payload(), std::shared_ptr<QueueCall>(call));
      !admitted.ok()) {
    return admitted;
  }
  // Not before: a refused request does no I/O.
  core_.FollowClears();
  call->epoch = core_.slots().epoch();
  call->epoch_below = core_.below().Epoch();
  return admission_.Submit(*request, [&] {
    return executor_.Submit(std::move(steps)) ? Status::Ok()
                                              : Status(CS_CLOSED, "the store is closing");
  });
}

void DumpQueue::Queue(Step step) {
  bool queued = false;
  const Code thrown =
      Thrown([&] { queued = executor_.Submit({[this, step](size_t) { Run(step); }}); });
  if (queued) return;
  step.request->Finish(step.shard, thrown == CS_OK ? CS_CLOSED : thrown);
  Arrive(step);
}

// Throws nothing: a shard that doesn't arrive would hold up its group.
void DumpQueue::Run(Step step) {
  Request& request = *step.request;
  if (step.tries == 0 && !request.Begin(step.shard, /*touches=*/false)) {
    return Arrive(step);
  }
  if (step.tries++ >= kTries) return WriteThrough(step);
  const Claim claim = core_.slots().ClaimForDump(request.batch().blocks[step.shard]);
  switch (claim.kind) {
    case Claim::kReady:
      core_.counters().dump_existing.fetch_add(1, std::memory_order_relaxed);
      request.Finish(step.shard, CS_OK);
      return Arrive(step);
    case Claim::kLoading: {  // joins its outcome
      std::shared_ptr<Group> alone;
      if (Thrown([&] { alone = std::make_shared<Group>(1); }) != CS_OK) return WriteThrough(step);
      const auto group = std::exchange(step.group, std::move(alone));
      const auto resume = [this, step](bool in_time) {
        in_time ? Queue(step) : WriteThrough(step);
      };
      if (Thrown([&] { core_.waits().Add(claim.ref, resume); }) != CS_OK) WriteThrough(step);
      return Leave(step.request, *group);
    }
    case Claim::kClaimed:
      return GatherInto(step, claim.ref);
    case Claim::kNoSlot:
      core_.ReclaimSoon();
      return WriteThrough(step);
    case Claim::kFailed:
    case Claim::kLocked:
      return WriteThrough(step);
  }
}

void DumpQueue::GatherInto(const Step& step, SlotRef ref) {
  Request& request = *step.request;
  Code code = CS_TIMEOUT;
  uint32_t checksum = 0;
  if (request.StartTouching(step.shard)) {
    code = executor_
               .Gather(core_.slots().bytes(ref), core_.region().header().slot_size,
                       request.batch().tensors_of(step.shard), core_.geometry().tensor_sizes,
                       &checksum)
               .code();
    if (!request.StopTouching(step.shard)) code = CS_TIMEOUT;
  }
  if (code == CS_OK) {
    const std::lock_guard lock(step.group->mutex);
    step.group->gathered.push_back({step.shard, ref, checksum});
  } else {
    core_.Fail(ref, kGivenUp);
    request.Finish(step.shard, code);
  }
  Arrive(step);
}

void DumpQueue::WriteThrough(const Step& step) {
  {
    const std::lock_guard lock(step.group->mutex);
    step.group->through.push_back(step.shard);
  }
  Arrive(step);
}

void DumpQueue::Arrive(const Step& step) {
  Leave(step.request, *step.group);
  if (DumpOf(*step.request).on_their_way.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  // A request's first block is the one used last.
  const Batch& batch = step.request->batch();
  core_.NoteUse(batch.blocks, batch.parent);
}

void DumpQueue::Leave(const std::shared_ptr<Request>& request, Group& group) {
  if (group.on_their_way.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  StoreGathered(request, group);
  WriteRest(request, group);
}

void DumpQueue::StoreGathered(const std::shared_ptr<Request>& request, Group& group) {
  std::erase_if(group.gathered, [&](const Group::Gathered& each) {
    // From here on Cancel waits for us: a dump whose waiter was failed before
    // is not published, and one that is published doesn't fail its waiter.
    if (request->StartTouching(each.shard)) return false;
    core_.Fail(each.ref, kGivenUp);
    return true;
  });
  if (group.gathered.empty()) return;
  const Call& call = DumpOf(*request);
  for (const Group::Gathered& each : group.gathered) {
    core_.PublishDump(each.ref, each.checksum, call.epoch);
  }
  Status started{CS_NO_MEMORY, "no memory for a request to the tier below"};
  (void)Thrown([&] {
    std::vector<SlotRef> slots;
    for (const Group::Gathered& each : group.gathered) slots.push_back(each.ref);
    started = core_.StoreOnce(slots, call.epoch_below);
  });
  if (!started.ok()) {
    for (const Group::Gathered& each : group.gathered) core_.Revoke(each.ref, kGivenUp);
  } else {
    core_.counters().dump_cached.fetch_add(group.gathered.size(), std::memory_order_relaxed);
  }
  for (const Group::Gathered& each : group.gathered) {
    request->Finish(each.shard, started.code());
  }
}

void DumpQueue::WriteRest(const std::shared_ptr<Request>& request, const Group& group) {
  if (group.through.empty()) return;
  std::shared_ptr<std::vector<size_t>> shards;
  Batch batch;
  CacheCore::Done ended;
  const Code thrown = Thrown([&] {
    shards = std::make_shared<std::vector<size_t>>();
    batch.tensors = request->batch().tensors;
    batch.is_chain = false;  // with gaps
    shards->reserve(group.through.size());
    batch.blocks.reserve(group.through.size());
    batch.shard_indices.reserve(group.through.size());
    batch.addresses.reserve(group.through.size() * batch.tensors);
    ended = [this, request, shards](const std::vector<Code>& codes) {
      std::atomic<uint64_t>& counter = core_.counters().dump_direct;
      for (size_t i = 0; i < shards->size(); ++i) {
        // Before the waiter knows, and taken back if it was faster.
        const uint64_t ok = codes[i] == CS_OK ? 1 : 0;
        counter.fetch_add(ok, std::memory_order_relaxed);
        if (!request->Finish((*shards)[i], codes[i])) {
          counter.fetch_sub(ok, std::memory_order_relaxed);
        }
      }
    };
  });
  if (thrown != CS_OK) {
    for (const size_t shard : group.through) request->Finish(shard, thrown);
    return;
  }
  // From here on nothing throws: the waiter can't be failed meanwhile.
  batch.epoch = DumpOf(*request).epoch_below;
  for (const size_t shard : group.through) {
    if (!request->StartTouching(shard)) continue;
    const auto tensors = request->batch().tensors_of(shard);
    shards->push_back(shard);
    batch.blocks.push_back(request->batch().blocks[shard]);
    batch.shard_indices.push_back(request->batch().shard_indices[shard]);
    batch.addresses.insert(batch.addresses.end(), tensors.begin(), tensors.end());
  }
  if (shards->empty()) return;
  const auto started = core_.StartBelow(std::move(batch), &Tier::Dump, std::move(ended));
  if (started.ok()) {
    CallOf(*request).direct.Add(core_.below(), started.value());
  } else {
    for (const size_t shard : *shards) request->Finish(shard, started.status().code());
  }
}

}  // namespace cachestore
