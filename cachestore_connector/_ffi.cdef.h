/* What cffi declares: native/include/cachestore/c_api.h between its two marks,
 * without the comments. A test compares the two token by token. */
typedef enum {
  CS_OK = 0,
  CS_NOT_FOUND = 1,
  CS_INVALID = 2,
  CS_CORRUPT = 3,
  CS_IO = 4,
  CS_NO_SPACE = 5,
  CS_TIMEOUT = 6,
  CS_REFUSED = 7,
  CS_CLOSED = 8,
  CS_NO_MEMORY = 9,
  CS_INTERNAL = 10
} cs_code;

typedef enum {
  CS_ZERO_COPY_AUTO = 0,
  CS_ZERO_COPY_ALWAYS = 1,
  CS_ZERO_COPY_NEVER = 2
} cs_zero_copy;

typedef enum {
  CS_DIRECT_OFF = 0,
  CS_DIRECT_ON = 1,
  CS_DIRECT_REQUIRED = 2
} cs_direct;

typedef enum {
  CS_VERIFY_ALWAYS = 0,
  CS_VERIFY_SAMPLE = 1,
  CS_VERIFY_NEVER = 2
} cs_verify;
typedef enum { CS_EVENT_INFO = 0, CS_EVENT_WARNING = 1, CS_EVENT_ERROR = 2 } cs_event_level;

typedef struct cs_store cs_store;
typedef uint64_t cs_task;

typedef struct {
  size_t struct_size;
  const char* pipeline;
  const char* const* storage_backends;
  size_t storage_backend_count;
  const char* identity_name;
  const char* identity_manifest;
  uint8_t identity_fingerprint[32];
  const uint64_t* tensor_sizes;
  size_t tensor_count;
  uint64_t shard_size;
  uint64_t block_size;
  uint32_t posix_load_worker_number;
  uint32_t posix_dump_worker_number;
  uint32_t posix_queue_depth;
  uint32_t io_direct;
  uint32_t posix_zero_copy;
  uint32_t timeout_ms;
  uint32_t verify;
  const uint64_t* posix_capacities;
  uint64_t posix_free_space_reserve;
  uint32_t posix_high_watermark_percent;
  uint32_t posix_low_watermark_percent;
  uint32_t share_buffer_enable;
  const char* cache_buffer_directory;
  uint64_t cache_buffer_capacity;
  uint32_t cache_h2h_worker_number;
  uint32_t cache_h2h_queue_depth;
  const char* cache_h2h_cpu_affinity;
  uint32_t cache_peer_timeout_ms;
  uint32_t cache_dirty_percent;
} cs_config;

typedef struct {
  size_t struct_size;
  const char* identity_name;
  const char* identity_manifest;
  uint8_t identity_fingerprint[32];
  const uint64_t* tensor_sizes;
  size_t tensor_count;
  uint64_t shard_size;
  uint64_t block_size;
} cs_pool_config;

typedef struct {
  size_t n;
  const uint8_t* block_ids;
  const uint32_t* shard_indices;
  size_t m;
  const uint64_t* addresses;
  const uint64_t* sizes;
  const uint8_t* parent_id;
  uint32_t pool;
} cs_batch;

typedef struct {
  uint64_t lookup_blocks;
  uint64_t lookup_hits;
  uint64_t load_requested;
  uint64_t load_ok;
  uint64_t load_absent;
  uint64_t load_corrupt;
  uint64_t load_failed;
  uint64_t load_timeout;
  uint64_t load_refused;
  uint64_t load_bytes;
  uint64_t dump_requested;
  uint64_t dump_ok;
  uint64_t dump_existing;
  uint64_t dump_failed;
  uint64_t dump_no_space;
  uint64_t dump_timeout;
  uint64_t dump_refused;
  uint64_t dump_bytes;
  uint64_t load_outstanding;
  uint64_t dump_outstanding;
  uint64_t stuck_workers;
  uint64_t dropped_events;

  uint64_t cache_hit;
  uint64_t cache_waited;
  uint64_t cache_loaded;
  uint64_t cache_direct;
  uint64_t cache_dumped;
  uint64_t cache_dumped_direct;
  uint64_t cache_stored;
  uint64_t cache_store_failed;
  uint64_t cache_given_up;
  uint64_t cache_slots;
  uint64_t cache_slots_free;
  uint64_t cache_slots_dirty;
  uint64_t cache_slots_loading;
  uint64_t cache_load_queued;
  uint64_t cache_load_running;
  uint64_t cache_dump_queued;
  uint64_t cache_dump_running;
  uint64_t storage_loads;
  uint64_t storage_dumps;
  uint64_t verify_skipped;
  uint64_t evicted_blocks;
  uint64_t evicted_bytes;
  uint64_t posix_uses_dropped;
  uint64_t posix_used_bytes;
  uint64_t posix_capacity_bytes;
  uint64_t posix_directories;
  uint64_t posix_directories_out;
  uint64_t posix_directories_read_only;
  uint64_t posix_directories_full;
  uint64_t posix_collecting;
  uint64_t posix_uses_pending;
} cs_stats;

int cs_open(const cs_config* config, cs_store** out);

int cs_open_pool(cs_store* store, const cs_pool_config* config, uint32_t* pool);
int cs_lookup(cs_store* store, uint32_t pool, size_t n, const uint8_t* block_ids,
              uint8_t* present);

int cs_lookup_prefix(cs_store* store, uint32_t pool, size_t n, const uint8_t* block_ids,
                     size_t* length);

int cs_load(cs_store* store, const cs_batch* batch, cs_task* task);

int cs_dump(cs_store* store, const cs_batch* batch, cs_task* task);

int cs_wait(cs_store* store, cs_task task, uint32_t timeout_ms, int32_t* results, size_t n);

int cs_clear(cs_store* store);

int cs_get_stats(cs_store* store, cs_stats* out);

int cs_next_event(cs_store* store, char* text, size_t capacity, int32_t* level);

const char* cs_last_error(void);

uint32_t cs_crc32c(uint32_t seed, const void* data, size_t length);

void cs_shutdown(cs_store* store);

void cs_close(cs_store* store);
