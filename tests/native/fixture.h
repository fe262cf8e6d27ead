// A store to test, and the caller's side of it: pages with known bytes.
#ifndef CACHESTORE_TESTS_FIXTURE_H_
#define CACHESTORE_TESTS_FIXTURE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/env.h"
#include "cachestore/c_api.h"
#include "fault_env.h"
#include "store.h"
#include "tier/geometry.h"

namespace cachestore::test {

// A cs_config and what it points to. Change the members, then call Config.
struct StoreSetup {
  explicit StoreSetup(std::vector<std::string> storage_roots = {})
      : roots(std::move(storage_roots)) {}

  std::vector<std::string> roots;
  std::string pipeline = "Posix";
  std::string identity = "identity";
  std::string manifest = "{}";
  uint8_t fingerprint = 1;                         // repeated 32 times
  std::vector<uint64_t> tensor_sizes = {100, 37};  // need padding
  uint64_t shard_size = 0;                         // 0: the sum of tensor_sizes
  uint32_t shards = 1;
  uint32_t pool = 0;  // of the pages: the number that OpenPool has given
  uint32_t load_workers = 2;
  uint32_t dump_workers = 2;
  uint32_t queue_depth = 1024;
  bool direct = false;
  cs_zero_copy zero_copy = CS_ZERO_COPY_AUTO;
  uint32_t timeout_ms = 5000;
  bool direct_required = false;  // with `direct`
  cs_verify verify = CS_VERIFY_ALWAYS;
  std::vector<uint64_t> capacities;  // bytes for each of roots; empty: no limit
  uint64_t free_space_reserve = 0;
  uint32_t high_watermark_percent = 97;
  uint32_t low_watermark_percent = 95;
  // Of the Cache tier.
  bool share_buffer = true;
  std::string buffer_directory = "/dev/shm";
  uint64_t buffer_capacity = 4 << 20;
  uint32_t copy_workers = 2;
  uint32_t copy_queue_depth = 1024;
  uint32_t peer_timeout_ms = 2000;
  uint32_t dirty_percent = 50;

  // Valid until the setup is changed or ends.
  cs_config Config() const;
  cs_pool_config PoolConfig() const;
  Result<std::unique_ptr<Store>> Open(Env& env = Env::Real()) const;

  uint64_t payload() const;  // of a shard
  uint64_t file_size() const;

 private:
  mutable std::vector<const char*> root_pointers_;
};

// Opens or fails the test and gives null.
std::unique_ptr<Store> OpenOrFail(const StoreSetup& setup, Env& env = Env::Real());

// The n-th block id of a test; all differ in many bits.
BlockId IdOf(uint64_t n);

// A batch of whole blocks with memory of its own: block after block, each
// block's shards in order. Every page's tensors lie apart, each with a guard
// zone behind that must never change.
class Pages {
 public:
  // Blocks first, first + 1, ... `skew` moves every tensor from its alignment
  // (4096) by so many bytes.
  Pages(const StoreSetup& setup, uint64_t first, size_t blocks, size_t skew = 0);

  size_t size() const { return ids_.size(); }  // shards
  size_t blocks() const { return ids_.size() / shards_; }
  cs_batch batch() const;
  // Shards from `from` on, `n` of them.
  cs_batch part(size_t from, size_t n) const;
  std::vector<BlockId> block_ids() const;  // one a block

  // Bytes that only this block id, shard and tensor have; another `version`
  // has others.
  void Fill(uint8_t version = 0);
  bool Holds(size_t shard, uint8_t version = 0) const;
  bool HoldsAll(uint8_t version = 0) const;
  // One byte value everywhere.
  void Poison();
  bool IsPoisoned(size_t shard) const;
  bool IsPoisoned() const;  // everywhere
  bool GuardsIntact() const;

  uint8_t* tensor(size_t shard, size_t t) const;

 private:
  void Expected(size_t shard, size_t t, uint8_t version, std::vector<uint8_t>& out) const;

  struct Free {
    void operator()(uint8_t* p) const;
  };
  const std::vector<uint64_t> sizes_;  // of one shard
  const size_t shards_;                // of one block
  const uint32_t pool_;
  std::vector<BlockId> ids_;  // one a shard
  std::vector<uint32_t> indices_;
  std::vector<uint64_t> addresses_;
  std::vector<uint64_t> all_sizes_;
  std::unique_ptr<uint8_t, Free> memory_;
};

inline constexpr std::chrono::milliseconds kLong{20000};

using Codes = std::vector<int32_t>;
Codes Repeated(size_t n, int32_t code);

// Start and wait. A refusal or a failed wait gives its code for every shard.
Codes DumpAll(Store& store, const Pages& pages, std::chrono::milliseconds timeout = kLong);
Codes LoadAll(Store& store, const Pages& pages, std::chrono::milliseconds timeout = kLong);
Codes WaitFor(Store& store, cs_task task, size_t n, std::chrono::milliseconds timeout = kLong);
std::vector<uint8_t> LookupAll(Store& store, const Pages& pages);  // one a block
bool IsPresent(Store& store, const BlockId& id);

// Where a store of this setup keeps a block (in roots[0]).
std::string BlockPath(const StoreSetup& setup, const BlockId& id);
std::string TemporaryRoot(const StoreSetup& setup);
// Opening cleans up in the background: waits until that is over.
void WaitCleaned(const StoreSetup& setup, FaultEnv& env);
// Files below a directory, but for lock files.
std::vector<std::string> FilesBelow(const std::string& directory);
std::vector<uint8_t> ReadFile(const std::string& path);
void WriteFile(const std::string& path, const std::vector<uint8_t>& bytes);

}  // namespace cachestore::test

#endif  // CACHESTORE_TESTS_FIXTURE_H_
