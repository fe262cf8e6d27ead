// Health: what a storage directory is good for, judged by what the calls in it
// say and by probes:
//
//   full use    read and written
//   read-only   what lies there is served, nothing is stored there
//   out of use  nothing goes there but probes
//
// A read-only filesystem says so at once; else it takes kPatience failures in a
// row, a success between them starts the row anew. An error that is about one
// file or about us (not there, no memory, no descriptors) is no failure of the
// directory, and neither is a full disk. Only a probe brings a directory back,
// after 1 s and then at doubled distances up to 30 s; one that fails again soon
// after it was brought back waits longer each time.
//
// Thread-safe. `use`, and noting a success while all is well, are one load each.
#ifndef CACHESTORE_POSIX_HEALTH_H_
#define CACHESTORE_POSIX_HEALTH_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

#include "base/event_ring.h"
#include "base/status.h"

namespace cachestore {

class Health {
 public:
  enum class Use : uint8_t { kFull, kReadOnly, kOut };
  enum class Call : uint8_t { kRead, kWrite };
  using Clock = std::chrono::steady_clock;

  static constexpr uint32_t kPatience = 3;
  static constexpr std::chrono::milliseconds kFirstProbe{1000};
  static constexpr std::chrono::milliseconds kLongestPause{30000};

  // `root`: the directory's name in events. `events` must outlive it.
  Health(EventRing& events, std::string root);

  Use use() const { return use_.load(std::memory_order_relaxed); }
  // A write found no room, and none has succeeded since.
  bool full() const { return full_.load(std::memory_order_relaxed); }

  // How a call in the directory has ended.
  void Note(Call call, const Status& status);
  // A call in the directory hasn't ended in time, and was given up.
  void NoteHung(Call call);
  // It couldn't be opened, or only be read.
  void StartAs(Use use, const Status& why);

  // Whether a probe is due: out of use, read-only, or full, and not probed lately.
  bool ProbeIsDue(Clock::time_point now);
  // What a probe has found: whether the directory can be read, and written.
  void NoteProbe(const Status& read, const Status& written, Clock::time_point now);

 private:
  void NoteSuccess(Call call);
  void NoteFailure(Call call, const Status& status);
  // With mutex_ held.
  void Become(Use use, const Status& why, Clock::time_point now);
  void PauseProbes(Clock::time_point now);
  void UpdateTroubled();

  EventRing& events_;
  const std::string root_;
  std::atomic<Use> use_{Use::kFull};
  std::atomic<bool> full_{false};
  std::atomic<bool> troubled_{false};  // full, or a row of failures has begun

  std::mutex mutex_;  // guards all below, and changes of the above
  uint32_t read_failures_ = 0;
  uint32_t write_failures_ = 0;
  bool has_read_ = false;  // since the row of failed writes has begun
  std::chrono::milliseconds pause_ = kFirstProbe;
  Clock::time_point next_probe_{};
  Clock::time_point brought_back_{};
};

// A write that failed so can't succeed later: the filesystem, or our rights in it.
bool SaysReadOnly(const Status& status);

}  // namespace cachestore

#endif  // CACHESTORE_POSIX_HEALTH_H_
