#include "posix/boot_id.h"

#include <algorithm>
#include <string>

#include "posix/block_path.h"

namespace cachestore {

// A number's text, as in 4d8b0ff7-1c3e-4a53-9d8e-0a6b7c1f2e35.
BootId ReadBootId(Env& env) {
  Result<std::string> text = env.ReadText("/proc/sys/kernel/random/boot_id", 36);
  if (!text.ok()) return {};
  std::erase(text.value(), '-');
  return BlockOfHex(text.value()).value_or(BootId{});
}

}  // namespace cachestore
