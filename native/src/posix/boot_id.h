// The id that the kernel draws at each boot of a host. Bytes that were written
// under this one are still in the hands of the kernel that took them: no power
// cut has come between, and no other host wrote them.
#ifndef CACHESTORE_POSIX_BOOT_ID_H_
#define CACHESTORE_POSIX_BOOT_ID_H_

#include <array>
#include <cstdint>

#include "base/env.h"

namespace cachestore {

using BootId = std::array<uint8_t, 16>;

// All zeros if it can't be read: no boot at all.
BootId ReadBootId(Env& env);

}  // namespace cachestore

#endif  // CACHESTORE_POSIX_BOOT_ID_H_
