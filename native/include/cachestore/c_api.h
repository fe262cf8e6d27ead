/* CacheStore: the C interface. Start here.
 *
 * A store keeps fixed-size blocks, each named by a 16-byte block id, for one
 * pool or several: each has an identity (everything that changes the bytes of a
 * page) and sizes of its own; workers, queues, space and counters are those of
 * the store. A block has one or more shards; a shard is a fixed list of tensors,
 * each one contiguous range of the caller's memory.
 *
 * Pool 0 is cs_open's. The others keep what else belongs to the same blocks: a
 * block of theirs is used when pool 0's of the same id is, is evicted with it, and
 * is in files only, also with a Cache tier.
 *
 * Rules
 *  1. Handles. cs_store is opaque, made by cs_open and ended by cs_close,
 *     exactly once. No call may start on it once cs_close was entered; those
 *     that are inside are waited for. A cs_task is a number, made by cs_load or
 *     cs_dump and ended by the one cs_wait on it; 0 is never a task.
 *  2. Memory. Every array passed in is read before the call returns and never
 *     kept, save the tensor addresses of cs_load and cs_dump: the memory behind
 *     them is lent to the store until cs_wait returns for that task (or
 *     cs_shutdown or cs_close does). After that it is neither read nor written, also when the
 *     task failed, timed out or was cancelled.
 *  3. Threads. Every call but cs_open and cs_close may be made from any number
 *     of threads at once. The store creates its own threads; it installs no
 *     signal handler, and its threads block all signals.
 *  4. Errors. Every call that can fail returns a cs_code, 0 being success; no
 *     exception passes this interface. cs_last_error gives the text of the
 *     calling thread's latest failure. Shards fail one by one: a task's result
 *     is one cs_code a shard, in the order they were given.
 *  5. All or nothing. cs_load and cs_dump accept a whole request or none of it.
 *     A refused one (CS_REFUSED: no room) had no effect and did no I/O.
 *  6. Bounded. Every accepted task ends: cs_wait ends it at its time limit at
 *     the latest, but for a transfer that is running on the caller's memory on
 *     a filesystem whose I/O is sure to end, which is waited for.
 *  7. Nulls. A null pointer where an array of n > 0 elements is due gives
 *     CS_INVALID. n == 0 is allowed everywhere and succeeds at once.
 *  8. Versions. struct_size must be the size of its struct as the caller
 *     compiled it; any other gives CS_INVALID. Zero in a numeric field does not
 *     mean a default: Python fills in every field.
 */
#ifndef CACHESTORE_C_API_H_
#define CACHESTORE_C_API_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The declarations between the two marks are those of
 * cachestore_connector/_ffi.cdef.h, token by token; a test compares them. */
/* cdef: begin */

typedef enum {
  CS_OK = 0,
  CS_NOT_FOUND = 1, /* the block isn't stored */
  CS_INVALID = 2,   /* an argument is wrong; the error text names it */
  CS_CORRUPT = 3,   /* stored, but not what was written; set aside */
  CS_IO = 4,        /* the operating system refused; the text has its reason */
  CS_NO_SPACE = 5,  /* disk or quota full */
  CS_TIMEOUT = 6,   /* not done by its time limit */
  CS_REFUSED = 7,   /* no room in the queue for the whole request */
  CS_CLOSED = 8,    /* the store is closing */
  CS_NO_MEMORY = 9,
  CS_INTERNAL = 10 /* a bug in the store */
} cs_code;

typedef enum {
  CS_ZERO_COPY_AUTO = 0,   /* by filesystem type */
  CS_ZERO_COPY_ALWAYS = 1, /* I/O on the caller's memory everywhere */
  CS_ZERO_COPY_NEVER = 2   /* always through a buffer of the store's */
} cs_zero_copy;

typedef enum {
  CS_DIRECT_OFF = 0,
  CS_DIRECT_ON = 1,      /* O_DIRECT where the filesystem can */
  CS_DIRECT_REQUIRED = 2 /* O_DIRECT, or cs_open fails */
} cs_direct;

typedef enum {
  CS_VERIFY_ALWAYS = 0,
  CS_VERIFY_SAMPLE = 1, /* one load in 16, and all that this boot of this host hasn't written */
  CS_VERIFY_NEVER = 2   /* only what this boot of this host hasn't written */
} cs_verify;

typedef enum { CS_EVENT_INFO = 0, CS_EVENT_WARNING = 1, CS_EVENT_ERROR = 2 } cs_event_level;

typedef struct cs_store cs_store;
typedef uint64_t cs_task;

typedef struct {
  size_t struct_size;
  const char* pipeline;                /* "Posix" or "Cache|Posix" */
  const char* const* storage_backends; /* absolute directories, UTF-8 */
  size_t storage_backend_count;        /* >= 1 */
  const char* identity_name;           /* directory name of this identity */
  const char* identity_manifest;       /* human-readable text kept beside it */
  uint8_t identity_fingerprint[32];    /* in every block; a mismatch is a miss */
  const uint64_t* tensor_sizes;        /* bytes of each tensor of a shard */
  size_t tensor_count;                 /* 1 .. 320 over all shards of a block */
  uint64_t shard_size;                 /* >= the sum of tensor_sizes */
  uint64_t block_size;                 /* a multiple of shard_size */
  uint32_t posix_load_worker_number;
  uint32_t posix_dump_worker_number;
  uint32_t posix_queue_depth; /* shards queued + running, per direction */
  uint32_t io_direct;         /* a cs_direct */
  uint32_t posix_zero_copy;   /* a cs_zero_copy */
  uint32_t timeout_ms;        /* bound of the calls that do I/O themselves */
  uint32_t verify;            /* a cs_verify: of the bytes; a block's record is always checked */
  /* Space. What is used longest ago is evicted, of all identities in a directory. */
  const uint64_t* posix_capacities;      /* bytes for each directory, 0: no limit; null: none has */
  uint64_t posix_free_space_reserve;     /* bytes to leave free on each filesystem; 0: none */
  uint32_t posix_high_watermark_percent; /* of the capacity: eviction begins above; 1 to 100 */
  uint32_t posix_low_watermark_percent;  /* and ends below; 1 to the high one */
  /* Of the Cache tier; not looked at without one. */
  uint32_t share_buffer_enable;       /* 0 or 1: one buffer for all processes of a host */
  const char* cache_buffer_directory; /* of the shared buffer: a tmpfs */
  uint64_t cache_buffer_capacity;     /* bytes; 0: by what memory is free */
  uint32_t cache_h2h_worker_number;   /* copy workers, per direction: 1 to 64 */
  uint32_t cache_h2h_queue_depth;     /* shards queued + running, per direction */
  const char* cache_h2h_cpu_affinity; /* "none", "auto" or CPUs such as "0-3,8" */
  uint32_t cache_peer_timeout_ms;     /* for another process to load a block */
  uint32_t cache_dirty_percent;       /* of the slots, not stored yet at most: 1 to 87 */
} cs_config;

/* A further pool: as the fields of cs_config of these names. */
typedef struct {
  size_t struct_size;
  const char* identity_name; /* no other pool's */
  const char* identity_manifest;
  uint8_t identity_fingerprint[32];
  const uint64_t* tensor_sizes;
  size_t tensor_count;
  uint64_t shard_size;
  uint64_t block_size;
} cs_pool_config;

/* n shards of blocks. Shard i is shard shard_indices[i] of block
 * block_ids + 16 * i; its tensors are m ranges at addresses[i * m ...] of
 * sizes[i * m ...] bytes, and must match the pool's tensor_sizes. The blocks
 * are taken for a prefix chain, and parent_id for the block before the first:
 * in a cache that is full, a block goes before those that it follows. */
typedef struct {
  size_t n;
  const uint8_t* block_ids;
  const uint32_t* shard_indices; /* null: all 0 */
  size_t m;
  const uint64_t* addresses;
  const uint64_t* sizes;
  const uint8_t* parent_id; /* null: not known */
  uint32_t pool;
} cs_batch;

/* Counters since cs_open; shards unless said otherwise. */
typedef struct {
  uint64_t lookup_blocks;
  uint64_t lookup_hits;
  uint64_t load_requested;
  uint64_t load_ok;
  uint64_t load_absent;
  uint64_t load_corrupt; /* present, but damaged or of another identity */
  uint64_t load_failed;  /* I/O errors */
  uint64_t load_timeout;
  uint64_t load_refused;
  uint64_t load_bytes;
  uint64_t dump_requested;
  uint64_t dump_ok;       /* written and published */
  uint64_t dump_existing; /* already stored: nothing written */
  uint64_t dump_failed;
  uint64_t dump_no_space;
  uint64_t dump_timeout;
  uint64_t dump_refused;
  uint64_t dump_bytes;
  uint64_t load_outstanding; /* now: queued + running */
  uint64_t dump_outstanding;
  uint64_t stuck_workers;  /* now: in I/O that outlived its request */
  uint64_t dropped_events; /* the event ring was full */
  /* Of the Cache tier. The counters above are of what callers asked for, with
   * or without one. */
  uint64_t cache_hit;           /* loads from a ready slot */
  uint64_t cache_waited;        /* loads that waited for another's load of the block */
  uint64_t cache_loaded;        /* loads into a slot, from the storage */
  uint64_t cache_direct;        /* loads past the cache */
  uint64_t cache_dumped;        /* dumps into a slot, stored behind the caller's back */
  uint64_t cache_dumped_direct; /* dumps past the cache */
  uint64_t cache_stored;        /* slots that went to the storage */
  uint64_t cache_store_failed;  /* attempts at that */
  uint64_t cache_given_up;      /* slots that never did */
  uint64_t cache_slots;
  uint64_t cache_slots_free;    /* now, and of all processes */
  uint64_t cache_slots_dirty;   /* likewise */
  uint64_t cache_slots_loading; /* likewise */
  uint64_t cache_load_queued;   /* now: shards that wait for a copy worker */
  uint64_t cache_load_running;  /* now: shards that a copy worker has */
  uint64_t cache_dump_queued;
  uint64_t cache_dump_running;
  uint64_t storage_loads; /* shards read from the storage */
  uint64_t storage_dumps; /* shards written to it */
  /* Of the files. */
  uint64_t verify_skipped; /* loads whose bytes weren't checked */
  uint64_t evicted_blocks; /* by this store: one of those that have a directory open evicts */
  uint64_t evicted_bytes;
  uint64_t posix_uses_dropped; /* uses of blocks that were never noted in the files' times */
  /* Now; of all identities, processes and hosts; of directories with a limit. */
  uint64_t posix_used_bytes;
  uint64_t posix_capacity_bytes;
  uint64_t posix_directories;           /* now */
  uint64_t posix_directories_out;       /* now out of use */
  uint64_t posix_directories_read_only; /* now only read from */
  uint64_t posix_directories_full;      /* now without room */
  uint64_t posix_collecting;            /* now: directories that this store evicts from */
  uint64_t posix_uses_pending;          /* now: uses not noted yet */
} cs_stats;

/* Opens a store. On failure *out is null. Creates the directories it needs. */
int cs_open(const cs_config* config, cs_store** out);

/* Opens a pool beside those that are open, in the same directories, and gives its
 * number: from 1 on, 31 at most. It is closed with the store. */
int cs_open_pool(cs_store* store, const cs_pool_config* config, uint32_t* pool);

/* present[i] = 1 if block i is stored, else 0. A block that can't be looked up
 * within timeout_ms of the config counts as not stored. */
int cs_lookup(cs_store* store, uint32_t pool, size_t n, const uint8_t* block_ids, uint8_t* present);

/* *length = how many of the first blocks are stored without a gap. */
int cs_lookup_prefix(cs_store* store, uint32_t pool, size_t n, const uint8_t* block_ids,
                     size_t* length);

/* Starts reading shards into the caller's memory. */
int cs_load(cs_store* store, const cs_batch* batch, cs_task* task);

/* Starts storing shards. A request has all shards of each of its blocks. A
 * block becomes visible only when all its shards are written. */
int cs_dump(cs_store* store, const cs_batch* batch, cs_task* task);

/* Waits for a task up to timeout_ms from now, then ends it: what is not done
 * by then is CS_TIMEOUT. results: one cs_code a shard, n as in the batch.
 * Returns CS_OK if the task was known, whatever its shards' results. */
int cs_wait(cs_store* store, cs_task task, uint32_t timeout_ms, int32_t* results, size_t n);

/* Forgets every block of this store's identities, no other's, and those that this
 * store has accepted for dumping and not published yet. */
int cs_clear(cs_store* store);

int cs_get_stats(cs_store* store, cs_stats* out);

/* Takes the oldest background event: copies its text (cut to capacity, always
 * terminated) and level, and returns 1; 0 when there is none. */
int cs_next_event(cs_store* store, char* text, size_t capacity, int32_t* level);

/* The calling thread's latest error text; "" if none. Valid until this
 * thread's next failing call. */
const char* cs_last_error(void);

/* The checksum of the block format (CRC-32C), for tools and tests. */
uint32_t cs_crc32c(uint32_t seed, const void* data, size_t length);

/* Stops accepting, fails what is queued, completes what is running (or, after a
 * few seconds, gives it up; what further pools have queued below a cache counts as
 * running) and makes every cs_wait return; then stores what is
 * only in a cache, within timeout_ms. The handle stays valid, so a binding can
 * wait for its own threads to leave, and take the last counters and events,
 * before cs_close. A second call does nothing. */
void cs_shutdown(cs_store* store);

/* cs_shutdown, then joins the threads (one stuck in a hung filesystem is left
 * behind, on memory of the store's own) and frees the handle. */
void cs_close(cs_store* store);

/* cdef: end */

#ifdef __cplusplus
}
#endif

#endif /* CACHESTORE_C_API_H_ */
