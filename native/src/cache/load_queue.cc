#include "cache/load_queue.h"

#include <utility>
#include <vector>

#include "cache/direct_requests.h"

namespace cachestore {
namespace {

// A shard whose slot is gone again each time it comes to copy from it goes past
// the cache.
constexpr int kTries = 3;

}  // namespace

// Belongs to the request, and so doesn't hold it.
struct LoadQueue::Call : QueueCall {
  std::atomic<size_t> remaining{0};
};

Status LoadQueue::Load(const std::shared_ptr<Request>& request) {
  if (stopped_.load()) return {CS_CLOSED, "the store is closing"};
  auto call = std::make_shared<Call>();
  call->remaining.store(request->size(), std::memory_order_relaxed);
  // Once the last shard has ended: the first block is the one used last.
  const auto last_touches = [this, call = call.get(), request = request.get()](size_t, Code) {
    if (call->remaining.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    // Without memory for it the order of use is less exact, no more.
    (void)Thrown([&] {
      (void)executor_.Submit(
          {[this, blocks = request->batch().blocks, parent = request->batch().parent](size_t) {
            core_.NoteUse(blocks, parent);
          }});
    });
  };
  std::vector<HostCopyExecutor::Step> steps;
  steps.reserve(request->size());
  for (size_t i = 0; i < request->size(); ++i) {
    steps.push_back([this, step = Step{request, i}](size_t worker) { Run(step, worker); });
  }
  if (Status admitted = admission_.Admit(*request, core_.payload(),
                                         std::shared_ptr<QueueCall>(call), last_touches);
      !admitted.ok()) {
    return admitted;
  }
  core_.FollowClears();
  return admission_.Submit(*request, [&] {
    return executor_.Submit(std::move(steps)) ? Status::Ok()
                                              : Status(CS_CLOSED, "the store is closing");
  });
}

void LoadQueue::Queue(Step step) {
  bool queued = false;
  const Code thrown = Thrown(
      [&] { queued = executor_.Submit({[this, step](size_t worker) { Run(step, worker); }}); });
  if (!queued) End(step, thrown == CS_OK ? CS_CLOSED : thrown);
}

void LoadQueue::Run(const Step& step, size_t worker) {
  const Code thrown = Thrown([&] { Serve(step, worker); });
  if (thrown != CS_OK) (void)step.request->Finish(step.shard, thrown);
}

void LoadQueue::Serve(Step step, size_t worker) {
  Request& request = *step.request;
  if (step.tries >= kTries) return LoadDirect(step);
  const BlockId& block = request.batch().blocks[step.shard];
  const Claim claim = core_.slots().ClaimForLoad(block, static_cast<uint32_t>(worker),
                                                 step.origin == Step::kWaited);
  switch (claim.kind) {
    case Claim::kReady: {
      Code code = CS_TIMEOUT;
      if (request.Begin(step.shard, /*touches=*/true)) {
        code = executor_
                   .Scatter(core_.slots().bytes(claim.ref), request.batch().tensors_of(step.shard),
                            core_.geometry().tensor_sizes)
                   .code();
      }
      core_.slots().Unpin(static_cast<uint32_t>(worker));
      return End(step, code);
    }
    case Claim::kLoading:
      if (step.origin == Step::kHit) step.origin = Step::kWaited;
      return core_.waits().Add(
          claim.ref, [this, step](bool in_time) { in_time ? Queue(step) : LoadDirect(step); });
    case Claim::kClaimed:
      ++step.tries;
      return LoadIntoSlot(std::move(step), claim.ref);
    case Claim::kFailed:
      if (claim.code != CS_CLOSED) return End(step, claim.code);
      step.origin = Step::kHit;  // who loaded it died, or was a dump and gave up: start afresh
      ++step.tries;
      return Queue(std::move(step));
    case Claim::kNoSlot:
      core_.ReclaimSoon();
      return LoadDirect(step);
    case Claim::kLocked:
      return LoadDirect(step);
  }
}

void LoadQueue::LoadIntoSlot(Step step, SlotRef ref) {
  step.origin = Step::kLoaded;
  Code code = CS_OK;
  const auto ended = [this, step, ref](const std::vector<Code>& codes) {
    if (codes[0] == CS_OK) {
      core_.PublishLoad(ref);
      Queue(step);
    } else {
      core_.Fail(ref, codes[0]);
      End(step, codes[0]);
    }
  };
  const Code thrown = Thrown([&] {
    code = core_.StartBelow(core_.BatchOf({&ref, 1}), &Tier::Load, ended).status().code();
  });
  if (thrown != CS_OK) code = thrown;
  if (code == CS_OK) return;
  core_.Fail(ref, code);
  End(step, code);
}

void LoadQueue::LoadDirect(Step step) {
  step.origin = Step::kDirect;
  Request& request = *step.request;
  Batch batch;
  const auto tensors = request.batch().tensors_of(step.shard);
  batch.tensors = tensors.size();
  batch.is_chain = false;
  batch.blocks = {request.batch().blocks[step.shard]};
  batch.shard_indices = {request.batch().shard_indices[step.shard]};
  batch.addresses.assign(tensors.begin(), tensors.end());
  CacheCore::Done ended = [this, step](const std::vector<Code>& codes) { End(step, codes[0]); };
  // From here on nothing throws: the waiter can't be failed meanwhile.
  if (!request.Begin(step.shard, /*touches=*/true)) return;
  const auto started = core_.StartBelow(std::move(batch), &Tier::Load, std::move(ended));
  if (started.ok()) {
    CallOf(request).direct.Add(core_.below(), started.value());
  } else {
    request.Finish(step.shard, started.status().code());
  }
}

void LoadQueue::End(const Step& step, Code code) {
  if (code != CS_OK) {
    (void)step.request->Finish(step.shard, code);
    return;
  }
  CacheCounters& counters = core_.counters();
  std::atomic<uint64_t>& counter = step.origin == Step::kDirect   ? counters.direct
                                   : step.origin == Step::kHit    ? counters.hit
                                   : step.origin == Step::kWaited ? counters.waited
                                                                  : counters.loaded;
  // Before the waiter knows, and taken back if it was faster.
  counter.fetch_add(1, std::memory_order_relaxed);
  if (!step.request->Finish(step.shard, code)) counter.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace cachestore
