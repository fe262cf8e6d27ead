// One fault in the n-th system call from a point on, whatever call that is.
#ifndef CACHESTORE_TESTS_POSIX_ONE_FAULT_H_
#define CACHESTORE_TESTS_POSIX_ONE_FAULT_H_

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "fault_env.h"

namespace cachestore::test {

// What a call can say, by its manual page, NFS included; not EINTR, which Env
// retries, and not what would be our own mistake.
inline std::vector<int> ErrorsOf(Op op) {
  switch (op) {
    case Op::kOpenRead:
      return {EIO, ENOENT, ENOMEM, EINVAL, EACCES, EMFILE, ENFILE, ELOOP, ENOTDIR, ESTALE};
    case Op::kOpenWrite:
      return {EIO,    ENOSPC, ENOENT, ENOMEM, EINVAL, EDQUOT, EROFS,
              EACCES, EMFILE, ENFILE, EISDIR, ESTALE, ELOOP};
    case Op::kOpenLocked:
      return {EIO, ENOSPC, ENOENT, ENOMEM, EINVAL, ENOLCK, EROFS, EACCES, EMFILE, ESTALE};
    case Op::kOpenDirectory:
      return {EIO, ENOENT, ENOMEM, ENOTDIR, EACCES, EMFILE, ENFILE, ESTALE, ELOOP};
    case Op::kClose:
      return {EIO, ENOSPC, EDQUOT, ESTALE};
    case Op::kReadFull:
      return {EIO, ESTALE, ENOMEM, EINVAL, EAGAIN};
    case Op::kWriteFull:
      return {EIO, ENOSPC, ESTALE, ENOMEM, EINVAL, EDQUOT, EFBIG, EAGAIN};
    case Op::kStatFd:
      return {EIO, ESTALE, ENOMEM};
    case Op::kStat:
      return {EIO, ENOENT, ENOMEM, EACCES, ENOTDIR, ESTALE, ELOOP};
    case Op::kRename:
      return {EIO,    ENOSPC, ENOENT, ENOMEM, EINVAL, EDQUOT,
              EACCES, EROFS,  EXDEV,  EBUSY,  EMLINK, ESTALE};
    case Op::kUnlink:
      return {EIO, ENOENT, ENOMEM, EACCES, EROFS, EBUSY, EPERM, ESTALE};
    case Op::kMakeDirectory:
      return {EIO, ENOSPC, ENOENT, ENOMEM, EDQUOT, EACCES, EROFS, EMLINK};
    case Op::kRemoveDirectory:
      return {EIO, ENOENT, ENOMEM, EACCES, EROFS, EBUSY, ENOTEMPTY};
    case Op::kList:
      return {EIO, ENOENT, ENOMEM, EACCES, EMFILE, ESTALE};
    case Op::kSetModified:
      return {EIO, ENOENT, EACCES, EPERM, EROFS};
    case Op::kSyncDirectory:
      return {EIO, ENOSPC, ENOENT, EACCES, EINVAL, EROFS};
    default:
      return {EIO, ENOENT, ENOMEM, EACCES};
  }
}

inline bool Changes(Op op) {
  switch (op) {
    case Op::kOpenWrite:
    case Op::kOpenLocked:
    case Op::kClose:
    case Op::kWriteFull:
    case Op::kRename:
    case Op::kUnlink:
    case Op::kMakeDirectory:
    case Op::kRemoveDirectory:
    case Op::kSetModified:
      return true;
    default:
      return false;
  }
}

inline Status Injected(int error, const FaultEnv::Call& call) {
  return Status::FromErrno(error, "injected", std::string(OpName(call.op)) + " " + call.path);
}

enum class Mode : uint8_t {
  kInstead,         // fails, nothing done
  kAfter,           // done, and fails
  kHalf,            // half of the bytes, then it fails
  kFromThenOn,      // it and all after it that can give this error
  kEndsEarly,       // a read: the file is shorter than it was
  kDies,            // the process ends instead
  kDiesHalfWritten  // the process ends after a part of the bytes
};
inline constexpr const char* kModeNames[] = {
    "instead", "after", "half", "from then on", "ends early", "dies", "dies half-written"};
inline constexpr int kDied = 40;
inline constexpr int kFinished = 41;

// What befalls the n-th call from Arm on.
class Fault {
 public:
  Fault(size_t at, Mode mode, int error = EIO) : state_(std::make_shared<State>(at, mode, error)) {}

  void Arm(FaultEnv& env) const {
    for (size_t i = 0; i < kOpCount; ++i) {
      const Op op = static_cast<Op>(i);
      env.Before(op, [state = state_](FaultEnv::Call& call) { return state->Before(call); });
      env.After(op, [state = state_](FaultEnv::Call& call) { return state->After(call); });
    }
  }
  bool fired() const { return state_->fired; }
  Op op() const { return state_->op; }
  std::string path() const { return state_->path; }

 private:
  struct State {
    State(size_t n, Mode how, int with) : at(n), mode(how), error(with) {}

    Status Before(FaultEnv::Call& call) {
      is_the_one = ++calls == at;
      if (is_the_one) {
        op = call.op;
        path = call.path;
        fired = true;
      }
      const bool moves = call.op == Op::kReadFull || call.op == Op::kWriteFull;
      switch (mode) {
        case Mode::kInstead:
          return is_the_one ? Injected(error, call) : Status::Ok();
        case Mode::kFromThenOn: {
          const std::vector<int> errors = ErrorsOf(call.op);
          const bool can = std::find(errors.begin(), errors.end(), error) != errors.end();
          return calls >= at && can ? Injected(error, call) : Status::Ok();
        }
        case Mode::kHalf:
          if (!is_the_one || !moves) return Status::Ok();
          call.limit = 4096;
          return Injected(error, call);
        case Mode::kEndsEarly:
          if (is_the_one && call.op == Op::kReadFull) call.limit = 100;
          return Status::Ok();
        case Mode::kDies:
          if (is_the_one) _exit(kDied);
          return Status::Ok();
        case Mode::kDiesHalfWritten:
          if (is_the_one && moves) call.limit = 4096;
          return Status::Ok();
        case Mode::kAfter:
          if (!is_the_one || (call.op != Op::kOpenWrite && call.op != Op::kOpenLocked)) {
            return Status::Ok();
          }
          // The file is made, and not opened.
          if (const Result<Fd> made = Env::Real().OpenWrite(call.path, false); made.ok()) {
            (void)Env::Real().Close(made.value());
          }
          return Injected(error, call);
      }
      return Status::Ok();
    }
    Status After(FaultEnv::Call& call) {
      if (!is_the_one) return Status::Ok();
      if (mode == Mode::kDiesHalfWritten) _exit(kDied);
      return mode == Mode::kAfter ? Injected(error, call) : Status::Ok();
    }

    const size_t at;
    const Mode mode;
    const int error;
    std::atomic<size_t> calls{0};
    std::atomic<bool> fired{false};
    Op op{};           // of the n-th call; read when all is over
    std::string path;  // likewise
    static inline thread_local bool is_the_one = false;
  };
  const std::shared_ptr<State> state_;
};

}  // namespace cachestore::test

#endif  // CACHESTORE_TESTS_POSIX_ONE_FAULT_H_
