// Status and Result<T>: how every fallible call in the store reports.
#ifndef CACHESTORE_BASE_STATUS_H_
#define CACHESTORE_BASE_STATUS_H_

#include <new>
#include <string>
#include <utility>
#include <variant>

#include "cachestore/c_api.h"

namespace cachestore {

// The codes are the C interface's own, so there is one table of them.
using Code = cs_code;

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string text) : code_(code), text_(std::move(text)) {}

  static Status Ok() { return {}; }
  // From an errno value: "what path: reason". ENOSPC and EDQUOT are
  // CS_NO_SPACE, ENOENT and ENOTDIR CS_NOT_FOUND, EINVAL CS_INVALID, ENOMEM
  // CS_NO_MEMORY, all else CS_IO.
  static Status FromErrno(int error, const char* what, const std::string& path);

  bool ok() const { return code_ == CS_OK; }
  Code code() const { return code_; }
  const std::string& text() const { return text_; }
  // The errno value that it came from; 0: from none.
  int error() const { return error_; }

 private:
  Code code_ = CS_OK;
  int error_ = 0;
  std::string text_;
};

// A value or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}         // NOLINT: implicit on purpose
  Result(Status status) : state_(std::move(status)) {}  // NOLINT: implicit on purpose

  bool ok() const { return std::holds_alternative<T>(state_); }
  Status status() const { return ok() ? Status::Ok() : std::get<Status>(state_); }
  T& value() { return std::get<T>(state_); }
  const T& value() const { return std::get<T>(state_); }

 private:
  std::variant<T, Status> state_;
};

// Runs a piece of work on a thread that has no caller to throw to; the code for
// what it has thrown, CS_OK for nothing.
template <typename Work>
[[nodiscard]] Code Thrown(Work work) noexcept {
  try {
    work();
    return CS_OK;
  } catch (const std::bad_alloc&) {
    return CS_NO_MEMORY;
  } catch (...) {
    return CS_INTERNAL;
  }
}

}  // namespace cachestore

#endif  // CACHESTORE_BASE_STATUS_H_
