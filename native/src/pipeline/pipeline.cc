#include "pipeline/pipeline.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/aligned_buffer.h"
#include "cache/cache_tier.h"
#include "posix/posix_tier.h"

namespace cachestore {
namespace {

constexpr uint64_t kMaxBlockSize = uint64_t{1} << 40;

Status Invalid(const char* field, const std::string& value, const char* allowed) {
  return {CS_INVALID, std::string(field) + " is " + value + "; allowed: " + allowed};
}

Status CheckRange(const char* field, uint64_t value, uint64_t low, uint64_t high) {
  if (low <= value && value <= high) return Status::Ok();
  return {CS_INVALID, std::string(field) + " is " + std::to_string(value) +
                          "; allowed: " + std::to_string(low) + " to " + std::to_string(high)};
}

// A path component that can't leave its directory.
bool IsPlainName(const char* name) {
  return name != nullptr && *name != '\0' && std::strchr(name, '/') == nullptr &&
         std::strcmp(name, ".") != 0 && std::strcmp(name, "..") != 0;
}

Status CheckPosix(const cs_config& config) {
  if (config.storage_backends == nullptr || config.storage_backend_count == 0) {
    return Invalid("storage_backends", "empty", "one or more directories");
  }
  for (size_t i = 0; i < config.storage_backend_count; ++i) {
    const char* path = config.storage_backends[i];
    if (path == nullptr || *path != '/') {
      return Invalid("storage_backends", path == nullptr ? "null" : path, "absolute paths");
    }
  }
  for (const Status& status : {
           CheckRange("posix_load_worker_number", config.posix_load_worker_number, 1, 1024),
           CheckRange("posix_dump_worker_number", config.posix_dump_worker_number, 1, 1024),
           CheckRange("posix_queue_depth", config.posix_queue_depth, 1, uint64_t{1} << 30),
           CheckRange("io_direct", config.io_direct, 0, 2),
           CheckRange("posix_zero_copy", config.posix_zero_copy, 0, 2),
           CheckRange("timeout_ms", config.timeout_ms, 1, uint64_t{1} << 31),
           CheckRange("verify", config.verify, 0, 2),
           CheckRange("posix_high_watermark_percent", config.posix_high_watermark_percent, 1, 100),
           CheckRange("posix_low_watermark_percent", config.posix_low_watermark_percent, 1,
                      config.posix_high_watermark_percent),
       }) {
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

// Below a cache hardly anybody waits for a dump, only who got no slot. The rest
// yields to whoever has something to do, first of all to the waiter that was
// just told that its pages are in the cache.
constexpr int kWriteBehindNice = 10;

Result<std::unique_ptr<Tier>> OpenPosix(const cs_config& config, Env& env,
                                        std::shared_ptr<EventRing> events, PoolOptions pool,
                                        int dump_nice) {
  if (Status checked = CheckPosix(config); !checked.ok()) return checked;
  PosixOptions options;
  options.roots.assign(config.storage_backends,
                       config.storage_backends + config.storage_backend_count);
  options.first = std::move(pool);
  options.load_workers = config.posix_load_worker_number;
  options.dump_workers = config.posix_dump_worker_number;
  options.dump_nice = dump_nice;
  options.queue_depth = config.posix_queue_depth;
  options.direct = static_cast<cs_direct>(config.io_direct);
  options.zero_copy = static_cast<cs_zero_copy>(config.posix_zero_copy);
  options.verify = static_cast<cs_verify>(config.verify);
  if (config.posix_capacities != nullptr) {
    options.capacities.assign(config.posix_capacities,
                              config.posix_capacities + config.storage_backend_count);
  } else {
    options.capacities.assign(config.storage_backend_count, 0);
  }
  options.free_space_reserve = config.posix_free_space_reserve;
  options.high_watermark_percent = config.posix_high_watermark_percent;
  options.low_watermark_percent = config.posix_low_watermark_percent;
  options.timeout = std::chrono::milliseconds(config.timeout_ms);
  return PosixTier::Open(env, std::move(events), std::move(options));
}

Result<CacheOptions> CacheOptionsOf(const cs_config& config, const PoolOptions& pool) {
  for (const Status& status : {
           CheckRange("share_buffer_enable", config.share_buffer_enable, 0, 1),
           CheckRange("cache_h2h_worker_number", config.cache_h2h_worker_number, 1, 64),
           CheckRange("cache_h2h_queue_depth", config.cache_h2h_queue_depth, 1, uint64_t{1} << 30),
           CheckRange("cache_peer_timeout_ms", config.cache_peer_timeout_ms, 1, uint64_t{1} << 31),
           CheckRange("cache_dirty_percent", config.cache_dirty_percent, 1, 87),
       }) {
    if (!status.ok()) return status;
  }
  if (config.cache_buffer_directory == nullptr || *config.cache_buffer_directory != '/') {
    return Invalid("cache_buffer_directory", "not an absolute path", "a directory, as /dev/shm");
  }
  if (config.cache_h2h_cpu_affinity == nullptr) {
    return Invalid("cache_h2h_cpu_affinity", "null", "auto, none, or CPUs such as 0-3,8");
  }
  CacheOptions options;
  options.geometry = pool.geometry;
  options.fingerprint = pool.fingerprint;
  options.shared = config.share_buffer_enable != 0;
  options.directory = config.cache_buffer_directory;
  options.capacity = config.cache_buffer_capacity;
  options.workers = config.cache_h2h_worker_number;
  options.queue_depth = config.cache_h2h_queue_depth;
  options.cpu_affinity = config.cache_h2h_cpu_affinity;
  options.timeout = std::chrono::milliseconds(config.timeout_ms);
  options.peer_timeout = std::chrono::milliseconds(config.cache_peer_timeout_ms);
  options.dirty_percent = config.cache_dirty_percent;
  return options;
}

template <typename Config>
Result<Geometry> GeometryOf(const Config& config) {
  if (config.tensor_sizes == nullptr || config.tensor_count == 0) {
    return Invalid("tensor_sizes", "empty", "one size or more");
  }
  Geometry geometry;
  geometry.tensor_sizes.assign(config.tensor_sizes, config.tensor_sizes + config.tensor_count);
  geometry.shard_size = config.shard_size;
  geometry.block_size = config.block_size;
  for (const uint64_t size : geometry.tensor_sizes) {
    if (Status checked = CheckRange("tensor_sizes", size, 1, kMaxBlockSize); !checked.ok()) {
      return checked;
    }
  }
  if (Status checked = CheckRange("block_size", config.block_size, 1, kMaxBlockSize);
      !checked.ok()) {
    return checked;
  }
  // Padding is there to align a shard, no more.
  const uint64_t payload = geometry.payload();
  if (Status checked = CheckRange("shard_size", config.shard_size, payload, AlignUp(payload));
      !checked.ok()) {
    return checked;
  }
  if (config.block_size % config.shard_size != 0) {
    return Invalid("block_size", std::to_string(config.block_size), "a multiple of shard_size");
  }
  return geometry;
}

// Both structs have these fields.
template <typename Config>
Result<PoolOptions> PoolOfConfig(const Config& config) {
  if (!IsPlainName(config.identity_name)) {
    return Invalid("identity_name", config.identity_name == nullptr ? "null" : config.identity_name,
                   "a directory name without '/'");
  }
  if (config.identity_manifest == nullptr) {
    return Invalid("identity_manifest", "null", "a text");
  }
  Result<Geometry> geometry = GeometryOf(config);
  if (!geometry.ok()) return geometry.status();
  PoolOptions pool;
  pool.identity_name = config.identity_name;
  pool.manifest = config.identity_manifest;
  std::copy(std::begin(config.identity_fingerprint), std::end(config.identity_fingerprint),
            pool.fingerprint.begin());
  pool.geometry = std::move(geometry.value());
  return pool;
}

}  // namespace

Result<PoolOptions> PoolOf(const cs_config& config) { return PoolOfConfig(config); }
Result<PoolOptions> PoolOf(const cs_pool_config& config) { return PoolOfConfig(config); }

Result<std::unique_ptr<Tier>> OpenPipeline(const cs_config& config, Env& env,
                                           std::shared_ptr<EventRing> events) {
  Result<PoolOptions> pool = PoolOf(config);
  if (!pool.ok()) return pool.status();
  const std::string spec = config.pipeline == nullptr ? "null" : config.pipeline;
  if (spec == "Posix") {
    return OpenPosix(config, env, std::move(events), std::move(pool.value()), 0);
  }
  if (spec == "Cache|Posix") {
    Result<CacheOptions> options = CacheOptionsOf(config, pool.value());
    if (!options.ok()) return options.status();
    Result<std::unique_ptr<Tier>> posix =
        OpenPosix(config, env, events, std::move(pool.value()), kWriteBehindNice);
    if (!posix.ok()) return posix;
    return CacheTier::Open(std::move(options.value()), std::move(posix.value()), std::move(events));
  }
  return Invalid("pipeline", spec, "Posix or Cache|Posix");
}

}  // namespace cachestore
