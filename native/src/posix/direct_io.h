// Whether a filesystem does O_DIRECT. Some refuse the flag when a file is opened,
// some accept it and refuse the transfers, for ever or for our alignment.
#ifndef CACHESTORE_POSIX_DIRECT_IO_H_
#define CACHESTORE_POSIX_DIRECT_IO_H_

#include <string>

#include "base/env.h"

namespace cachestore {

// Writes and reads a file there and removes it. CS_INVALID: refused. Any other
// error says nothing about O_DIRECT.
Status TryDirect(Env& env, const std::string& path);

}  // namespace cachestore

#endif  // CACHESTORE_POSIX_DIRECT_IO_H_
