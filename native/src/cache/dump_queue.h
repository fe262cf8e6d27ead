// DumpQueue: what happens to a dump: each shard that isn't ready in the cache is
// gathered into a slot of its own; when all are, whoever comes last marks the
// slots ready and dirty, makes one request of them to the tier below, and
// completes the waiter, who doesn't wait for the storage. What gets no slot is
// written through, and waited for. It coordinates only, as LoadQueue does.
//
// A shard whose block somebody else is filling waits for that by itself: the
// rest of its request doesn't, since their slots would be held meanwhile, and
// the one it waits for may be among them, or held by one that waits for ours.
//
// Thread-safe.
#ifndef CACHESTORE_CACHE_DUMP_QUEUE_H_
#define CACHESTORE_CACHE_DUMP_QUEUE_H_

#include <atomic>
#include <memory>

#include "cache/cache_core.h"
#include "host_copy/host_copy_executor.h"
#include "tier/admission.h"

namespace cachestore {

class DumpQueue {
 public:
  DumpQueue(CacheCore& core, HostCopyExecutor& executor, uint64_t depth)
      : core_(core), executor_(executor), admission_(depth) {}

  Status Dump(const std::shared_ptr<Request>& request);
  // Accepts nothing more.
  void Stop() { stopped_.store(true); }
  const Admission& admission() const { return admission_; }

 private:
  struct Call;
  struct Group;
  struct Step {
    std::shared_ptr<Request> request;
    size_t shard;
    std::shared_ptr<Group> group;
    int tries = 0;
  };

  static Call& DumpOf(const Request& request);
  void Queue(Step step);
  void Run(Step step);
  void GatherInto(const Step& step, SlotRef ref);
  void WriteThrough(const Step& step);
  void Arrive(const Step& step);
  void Leave(const std::shared_ptr<Request>& request, Group& group);
  void StoreGathered(const std::shared_ptr<Request>& request, Group& group);
  void WriteRest(const std::shared_ptr<Request>& request, const Group& group);

  CacheCore& core_;
  HostCopyExecutor& executor_;
  Admission admission_;
  std::atomic<bool> stopped_{false};
};

}  // namespace cachestore

#endif  // CACHESTORE_CACHE_DUMP_QUEUE_H_
