// Names of block files: docs/format.md.
#ifndef CACHESTORE_POSIX_BLOCK_PATH_H_
#define CACHESTORE_POSIX_BLOCK_PATH_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tier/geometry.h"

namespace cachestore {

// The block id in lower-case hexadecimal, as in the file's name.
std::string HexOf(const BlockId& block);
// None: it isn't the name of a block file.
std::optional<BlockId> BlockOfHex(std::string_view name);

// The first three digits of the name, its directory: 0 to 4095.
uint16_t FanOutOf(const BlockId& block);
std::string FanOutName(uint16_t number);
std::optional<uint16_t> FanOutOfName(std::string_view name);

}  // namespace cachestore

#endif  // CACHESTORE_POSIX_BLOCK_PATH_H_
