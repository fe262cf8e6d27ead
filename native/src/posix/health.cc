#include "posix/health.h"

#include <algorithm>
#include <cerrno>
#include <utility>

namespace cachestore {
namespace {

// A directory that has been in full use for so long has recovered.
constexpr std::chrono::minutes kRecovered{2};

// Errors that speak of the device, the mount or the server behind it.
bool IsOfTheDirectory(int error) {
  switch (error) {
    case EACCES:
    case EPERM:
    case EROFS:
    case EIO:
    case ENODEV:
    case ENXIO:
    case ENOMEDIUM:
    case EREMOTEIO:
    case EUCLEAN:  // "structure needs cleaning"
    case EBADMSG:
    case ETIMEDOUT:
    case ESTALE:
    case ENOTCONN:  // the process behind a FUSE mount is gone
    case ECONNABORTED:
    case ECONNREFUSED:
    case ECONNRESET:
    case ESHUTDOWN:
    case EHOSTDOWN:
    case EHOSTUNREACH:
    case ENETDOWN:
    case ENETUNREACH:
      return true;
    default:
      return false;
  }
}

}  // namespace

bool SaysReadOnly(const Status& status) {
  return status.error() == EROFS || status.error() == EACCES || status.error() == EPERM;
}

Health::Health(EventRing& events, std::string root) : events_(events), root_(std::move(root)) {}

void Health::Note(Call call, const Status& status) {
  if (status.code() == CS_NO_SPACE) {
    if (full()) return;
    const std::lock_guard lock(mutex_);
    full_.store(true);
    UpdateTroubled();
    if (use() == Use::kFull) PauseProbes(Clock::now());
  } else if (IsOfTheDirectory(status.error())) {
    NoteFailure(call, status);
  } else if (status.ok() || (call == Call::kRead && status.code() == CS_NOT_FOUND)) {
    if (troubled_.load(std::memory_order_relaxed)) NoteSuccess(call);
  }
}

void Health::NoteHung(Call call) { NoteFailure(call, {CS_TIMEOUT, "it doesn't answer in time"}); }

void Health::NoteSuccess(Call call) {
  const std::lock_guard lock(mutex_);
  read_failures_ = 0;
  if (call == Call::kRead) {
    has_read_ = true;
  } else {
    write_failures_ = 0;
    full_.store(false);
  }
  UpdateTroubled();
}

void Health::NoteFailure(Call call, const Status& status) {
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  if (call == Call::kRead) {
    if (use() != Use::kOut && ++read_failures_ >= kPatience) Become(Use::kOut, status, now);
  } else if (use() == Use::kFull) {
    if (++write_failures_ == 1) has_read_ = false;
    if (status.error() == EROFS) {
      Become(Use::kReadOnly, status, now);
    } else if (write_failures_ >= kPatience) {
      // A disk that still reads is still good for that.
      Become(SaysReadOnly(status) || has_read_ ? Use::kReadOnly : Use::kOut, status, now);
    }
  }
  UpdateTroubled();
}

void Health::StartAs(Use use, const Status& why) {
  const std::lock_guard lock(mutex_);
  Become(use, why, Clock::now());
  UpdateTroubled();
}

void Health::UpdateTroubled() { troubled_.store(full() || read_failures_ + write_failures_ > 0); }

bool Health::ProbeIsDue(Clock::time_point now) {
  if (use() == Use::kFull && !full()) return false;
  const std::lock_guard lock(mutex_);
  return now >= next_probe_;
}

void Health::NoteProbe(const Status& read, const Status& written, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  const bool full = written.code() == CS_NO_SPACE;
  Use found = Use::kOut;
  if (read.ok()) {
    // Out of use for more than a refusal to write: not yet trusted with reads.
    const bool reads = SaysReadOnly(written) || use() != Use::kOut;
    found = written.ok() || full ? Use::kFull : reads ? Use::kReadOnly : Use::kOut;
  } else if (use() == Use::kFull) {
    found = Use::kFull;  // probed for room only: the calls decide
  }
  full_.store(full || (found != Use::kFull && this->full()));
  if (found != use()) Become(found, read.ok() ? written : read, now);
  UpdateTroubled();
  // Doubled as long as it stays as it was.
  pause_ = std::min(2 * pause_, kLongestPause);
  next_probe_ = now + pause_;
}

void Health::Become(Use use, const Status& why, Clock::time_point now) {
  const Use before = this->use();
  read_failures_ = 0;
  write_failures_ = 0;
  use_.store(use);
  if (use == Use::kFull) {
    brought_back_ = now;
    events_.Add(CS_EVENT_INFO, root_ + " is in full use again");
    return;
  }
  if (before == Use::kFull) PauseProbes(now);
  if (use == Use::kOut) {
    events_.Add(CS_EVENT_WARNING, root_ +
                                      " is out of use until it works again; what lies there is "
                                      "missed: " +
                                      why.text());
  } else if (before == Use::kOut) {
    events_.Add(CS_EVENT_INFO, root_ + " is in use again, but can only be read: " + why.text());
  } else {
    events_.Add(CS_EVENT_WARNING,
                root_ + " is only read from until it can be written again: " + why.text());
  }
}

void Health::PauseProbes(Clock::time_point now) {
  if (now - brought_back_ >= kRecovered) pause_ = kFirstProbe;
  next_probe_ = now + pause_;
}

}  // namespace cachestore
