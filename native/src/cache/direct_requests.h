// What a request of the cache tier carries: QueueCall. And DirectRequests: what
// one request has asked of the tier below for its own
// memory, past the cache, so that giving up the request gives these up too.
// Thread-safe.
#ifndef CACHESTORE_CACHE_DIRECT_REQUESTS_H_
#define CACHESTORE_CACHE_DIRECT_REQUESTS_H_

#include <memory>
#include <mutex>
#include <vector>

#include "tier/tier.h"

namespace cachestore {

class DirectRequests {
 public:
  void Add(Tier& below, const std::shared_ptr<Request>& request) {
    Code code = CS_OK;
    {
      const std::lock_guard lock(mutex_);
      code = cancelled_;
      // Without memory for it the request ends by itself, at its time limit.
      if (Thrown([&] { requests_.push_back(request); }) != CS_OK) return;
    }
    if (code != CS_OK) below.Cancel(request, code);
  }

  void Cancel(Tier& below, Code code) {
    std::vector<std::weak_ptr<Request>> requests;
    {
      const std::lock_guard lock(mutex_);
      cancelled_ = code;
      requests.swap(requests_);
    }
    for (const auto& weak : requests) {
      if (const auto request = weak.lock()) below.Cancel(request, code);
    }
  }

 private:
  std::mutex mutex_;  // guards all below
  std::vector<std::weak_ptr<Request>> requests_;
  Code cancelled_ = CS_OK;
};

// The queue's own data of a request are derived from this.
struct QueueCall {
  DirectRequests direct;
};

inline QueueCall& CallOf(const Request& request) {
  return *static_cast<QueueCall*>(request.tier_data());
}

}  // namespace cachestore

#endif  // CACHESTORE_CACHE_DIRECT_REQUESTS_H_
