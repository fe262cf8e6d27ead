// Admission: one direction of a tier: room for whole requests, and how their
// shards ended. Thread-safe.
#ifndef CACHESTORE_TIER_ADMISSION_H_
#define CACHESTORE_TIER_ADMISSION_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "base/quota.h"
#include "tier/request.h"

namespace cachestore {

class Admission {
 public:
  explicit Admission(uint64_t depth) : quota_(depth) {}

  // Takes room for all shards of a request, to be given back shard by shard as
  // they end, or refuses. `also`: called for each shard as it ends, under the
  // rules of Request::OnShard. The Admission must outlive the request.
  Status Admit(Request& request, std::shared_ptr<void> tier_data, Request::OnShard also = {}) {
    const size_t shards = request.size();
    requested_.fetch_add(shards, std::memory_order_relaxed);
    if (!quota_.TryTake(shards)) {
      Refuse(shards);
      return {CS_REFUSED, "no room for " + std::to_string(shards) + " shards in a queue of " +
                              std::to_string(quota_.limit())};
    }
    request.Prepare(
        [this, also = std::move(also)](size_t shard, Code code) {
          Count(code);
          quota_.GiveBack(1);
          if (also) also(shard, code);
        },
        std::move(tier_data));
    return Status::Ok();
  }
  // After Admit: has `queue` queue all of the request or nothing. If that fails or
  // throws, the room is taken back.
  template <typename Queue>
  Status Submit(const Request& request, Queue queue) {
    Status queued{CS_NO_MEMORY, "no memory for a request"};
    (void)Thrown([&] { queued = queue(); });
    if (!queued.ok()) {
      quota_.GiveBack(request.size());
      Refuse(request.size());
    }
    return queued;
  }

  // `payload`: bytes of a shard. `existing`: of the dumps that ended well, those
  // that found their block stored already.
  void AddLoadStats(cs_stats& stats, uint64_t payload) const {
    stats.load_requested += Value(requested_);
    stats.load_ok += Ended(CS_OK);
    stats.load_absent += Ended(CS_NOT_FOUND);
    stats.load_corrupt += Ended(CS_CORRUPT);
    stats.load_failed += OtherFailures() + Ended(CS_NO_SPACE);
    stats.load_timeout += Ended(CS_TIMEOUT);
    stats.load_refused += Value(refused_);
    stats.load_bytes += Ended(CS_OK) * payload;
    stats.load_outstanding += quota_.taken();
  }
  void AddDumpStats(cs_stats& stats, uint64_t existing, uint64_t payload) const {
    // The two are read one after the other: never less than none.
    const uint64_t ok = Ended(CS_OK);
    const uint64_t written = ok - std::min(ok, existing);
    stats.dump_requested += Value(requested_);
    stats.dump_ok += written;
    stats.dump_existing += existing;
    stats.dump_failed += OtherFailures() + Ended(CS_NOT_FOUND) + Ended(CS_CORRUPT);
    stats.dump_no_space += Ended(CS_NO_SPACE);
    stats.dump_timeout += Ended(CS_TIMEOUT);
    stats.dump_refused += Value(refused_);
    stats.dump_bytes += written * payload;
    stats.dump_outstanding += quota_.taken();
  }

 private:
  static uint64_t Value(const std::atomic<uint64_t>& counter) {
    return counter.load(std::memory_order_relaxed);
  }
  uint64_t Ended(Code code) const { return Value(ended_[code]); }
  uint64_t OtherFailures() const {
    return Ended(CS_INVALID) + Ended(CS_IO) + Ended(CS_REFUSED) + Ended(CS_CLOSED) +
           Ended(CS_NO_MEMORY) + Ended(CS_INTERNAL);
  }
  void Count(Code code) { ended_[code].fetch_add(1, std::memory_order_relaxed); }
  void Refuse(size_t shards) { refused_.fetch_add(shards, std::memory_order_relaxed); }

  Quota quota_;
  std::atomic<uint64_t> requested_{0};
  std::atomic<uint64_t> refused_{0};
  std::atomic<uint64_t> ended_[CS_INTERNAL + 1] = {};
};

}  // namespace cachestore

#endif  // CACHESTORE_TIER_ADMISSION_H_
