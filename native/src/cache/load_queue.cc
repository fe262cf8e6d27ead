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
  const auto last_touches = [this, call = call.get(), request = request.get()] {
    if (call->remaining.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    (void)executor_.Submit(
        {[this, blocks = request->batch().blocks, parent = request->batch().parent](size_t) {
          core_.slots().Touch(blocks, parent ? &*parent : nullptr);
        }});
  };
  if (Status admitted = admission_.Admit(*request, std::shared_ptr<QueueCall>(call), last_touches);
      !admitted.ok()) {
    return admitted;
  }
  std::vector<HostCopyExecutor::Step> steps;
  steps.reserve(request->size());
  for (size_t i = 0; i < request->size(); ++i) {
    steps.push_back([this, step = Step{request, i}](size_t worker) { Run(step, worker); });
  }
  if (executor_.Submit(std::move(steps))) return Status::Ok();
  admission_.TakeBack(request->size());
  return {CS_CLOSED, "the store is closing"};
}

void LoadQueue::Queue(Step step) {
  if (!executor_.Submit({[this, step](size_t worker) { Run(step, worker); }})) {
    End(step, CS_CLOSED);
  }
}

void LoadQueue::Run(Step step, size_t worker) {
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
  const auto started = core_.StartBelow(core_.BatchOf({&ref, 1}), &Tier::Load,
                                        [this, step, ref](const std::vector<Code>& codes) {
                                          if (codes[0] == CS_OK) {
                                            core_.PublishLoad(ref);
                                            Queue(step);
                                          } else {
                                            core_.Fail(ref, codes[0]);
                                            End(step, codes[0]);
                                          }
                                        });
  if (started.ok()) return;
  core_.Fail(ref, started.status().code());
  End(step, started.status().code());
}

void LoadQueue::LoadDirect(const Step& step) {
  Request& request = *step.request;
  if (!request.Begin(step.shard, /*touches=*/true)) return;
  core_.counters().direct.fetch_add(1, std::memory_order_relaxed);
  Batch batch;
  const auto tensors = request.batch().tensors_of(step.shard);
  batch.tensors = tensors.size();
  batch.blocks = {request.batch().blocks[step.shard]};
  batch.shard_indices = {request.batch().shard_indices[step.shard]};
  batch.addresses.assign(tensors.begin(), tensors.end());
  const auto started = core_.StartBelow(
      std::move(batch), &Tier::Load,
      [step](const std::vector<Code>& codes) { step.request->Finish(step.shard, codes[0]); });
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
  std::atomic<uint64_t>& counter = step.origin == Step::kHit      ? counters.hit
                                   : step.origin == Step::kWaited ? counters.waited
                                                                  : counters.loaded;
  // Before the waiter knows, and taken back if it was faster.
  counter.fetch_add(1, std::memory_order_relaxed);
  if (!step.request->Finish(step.shard, code)) counter.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace cachestore
