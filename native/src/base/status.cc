#include "base/status.h"

#include <cerrno>
#include <system_error>

namespace cachestore {

Status Status::FromErrno(int error, const char* what, const std::string& path) {
  Code code = CS_IO;
  switch (error) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:  // RLIMIT_FSIZE or the filesystem's own limit: no room for this file
      code = CS_NO_SPACE;
      break;
    case ENOENT:
    case ENOTDIR:
    case ESTALE:  // another host has removed it
      code = CS_NOT_FOUND;
      break;
    case EINVAL:
      code = CS_INVALID;
      break;
    case ENOMEM:
      code = CS_NO_MEMORY;
      break;
    default:
      break;
  }
  Status status(code,
                std::string(what) + " " + path + ": " + std::generic_category().message(error));
  status.error_ = error;
  return status;
}

}  // namespace cachestore
