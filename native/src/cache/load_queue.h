// LoadQueue: what happens to each shard of a load: scattered from a ready slot,
// or loaded into a slot by the first who wants it while the others wait, or
// loaded past the cache. It coordinates only: the copy is the executor's, the
// slots are the table's, and no worker waits for either storage or another
// process.
//
// Thread-safe.
#ifndef CACHESTORE_CACHE_LOAD_QUEUE_H_
#define CACHESTORE_CACHE_LOAD_QUEUE_H_

#include <atomic>
#include <memory>

#include "cache/cache_core.h"
#include "host_copy/host_copy_executor.h"
#include "tier/admission.h"

namespace cachestore {

class LoadQueue {
 public:
  LoadQueue(CacheCore& core, HostCopyExecutor& executor, uint64_t depth)
      : core_(core), executor_(executor), admission_(depth) {}

  Status Load(const std::shared_ptr<Request>& request);
  // Accepts nothing more.
  void Stop() { stopped_.store(true); }
  const Admission& admission() const { return admission_; }

 private:
  struct Call;
  // One shard on its way. Where its bytes come from decides how it is counted.
  struct Step {
    std::shared_ptr<Request> request;
    size_t shard;
    enum Origin { kHit, kWaited, kLoaded, kDirect } origin = kHit;
    int tries = 0;
  };

  void Queue(Step step);
  void Run(const Step& step, size_t worker);
  void Serve(Step step, size_t worker);
  void LoadIntoSlot(Step step, SlotRef ref);
  void LoadDirect(Step step);
  void End(const Step& step, Code code);

  CacheCore& core_;
  HostCopyExecutor& executor_;
  Admission admission_;
  std::atomic<bool> stopped_{false};
};

}  // namespace cachestore

#endif  // CACHESTORE_CACHE_LOAD_QUEUE_H_
