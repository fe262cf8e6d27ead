// Geometry: the sizes of a block. One identity has one geometry; a pool is both.
#ifndef CACHESTORE_TIER_GEOMETRY_H_
#define CACHESTORE_TIER_GEOMETRY_H_

#include <array>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

namespace cachestore {

using BlockId = std::array<uint8_t, 16>;
using Fingerprint = std::array<uint8_t, 32>;  // of an identity

struct Geometry {
  std::vector<uint64_t> tensor_sizes;  // of one shard, in bytes
  uint64_t shard_size = 0;             // >= payload(); the rest is zero padding
  uint64_t block_size = 0;             // shards * shard_size

  uint64_t payload() const {
    return std::accumulate(tensor_sizes.begin(), tensor_sizes.end(), uint64_t{0});
  }
  uint64_t shards() const { return block_size / shard_size; }
};

// Of one store: the first, and what else belongs to the same blocks.
constexpr uint32_t kMaxPools = 32;

struct PoolOptions {
  std::string identity_name;
  std::string manifest;
  Fingerprint fingerprint{};
  Geometry geometry;
};

}  // namespace cachestore

#endif  // CACHESTORE_TIER_GEOMETRY_H_
