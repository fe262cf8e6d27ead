#include "fixture.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>

#include "base/aligned_buffer.h"
#include "base/mix.h"
#include "harness.h"

namespace cachestore::test {
namespace {

constexpr uint8_t kPoison = 0xa5;
constexpr uint8_t kGuard = 0x5c;
constexpr uint64_t kGuardSize = 64;
// So that 0 isn't 0.
uint64_t Spread(uint64_t x) { return Mix(x + 0x9e3779b97f4a7c15u); }

}  // namespace

uint64_t StoreSetup::payload() const {
  return std::accumulate(tensor_sizes.begin(), tensor_sizes.end(), uint64_t{0});
}

uint64_t StoreSetup::file_size() const {
  return shards * AlignUp(shard_size == 0 ? payload() : shard_size) + 4096;
}

cs_config StoreSetup::Config() const {
  root_pointers_.clear();
  for (const std::string& root : roots) root_pointers_.push_back(root.c_str());
  cs_config config = {};
  config.struct_size = sizeof config;
  config.pipeline = pipeline.c_str();
  config.storage_backends = root_pointers_.data();
  config.storage_backend_count = root_pointers_.size();
  config.identity_name = identity.c_str();
  config.identity_manifest = manifest.c_str();
  std::memset(config.identity_fingerprint, fingerprint, sizeof config.identity_fingerprint);
  config.tensor_sizes = tensor_sizes.data();
  config.tensor_count = tensor_sizes.size();
  config.shard_size = shard_size == 0 ? payload() : shard_size;
  config.block_size = config.shard_size * shards;
  config.posix_load_worker_number = load_workers;
  config.posix_dump_worker_number = dump_workers;
  config.posix_queue_depth = queue_depth;
  config.io_direct = !direct ? CS_DIRECT_OFF : direct_required ? CS_DIRECT_REQUIRED : CS_DIRECT_ON;
  config.posix_zero_copy = zero_copy;
  config.timeout_ms = timeout_ms;
  config.verify = verify;
  config.posix_capacities = capacities.empty() ? nullptr : capacities.data();
  config.posix_free_space_reserve = free_space_reserve;
  config.posix_high_watermark_percent = high_watermark_percent;
  config.posix_low_watermark_percent = low_watermark_percent;
  config.share_buffer_enable = share_buffer ? 1 : 0;
  config.cache_buffer_directory = buffer_directory.c_str();
  config.cache_buffer_capacity = buffer_capacity;
  config.cache_h2h_worker_number = copy_workers;
  config.cache_h2h_queue_depth = copy_queue_depth;
  config.cache_h2h_cpu_affinity = "none";
  config.cache_peer_timeout_ms = peer_timeout_ms;
  config.cache_dirty_percent = dirty_percent;
  return config;
}

cs_pool_config StoreSetup::PoolConfig() const {
  const cs_config all = Config();
  cs_pool_config config = {};
  config.struct_size = sizeof config;
  config.identity_name = all.identity_name;
  config.identity_manifest = all.identity_manifest;
  std::memcpy(config.identity_fingerprint, all.identity_fingerprint,
              sizeof config.identity_fingerprint);
  config.tensor_sizes = all.tensor_sizes;
  config.tensor_count = all.tensor_count;
  config.shard_size = all.shard_size;
  config.block_size = all.block_size;
  return config;
}

Result<std::unique_ptr<Store>> StoreSetup::Open(Env& env) const {
  return Store::Open(Config(), env);
}

std::unique_ptr<Store> OpenOrFail(const StoreSetup& setup, Env& env) {
  Result<std::unique_ptr<Store>> opened = setup.Open(env);
  if (!EXPECT_OK(opened)) return nullptr;
  return std::move(opened.value());
}

BlockId IdOf(uint64_t n) {
  BlockId id;
  const uint64_t low = Spread(n);
  const uint64_t high = Spread(low ^ 0x55);
  std::memcpy(id.data(), &low, 8);
  std::memcpy(id.data() + 8, &high, 8);
  return id;
}

void Pages::Free::operator()(uint8_t* p) const { std::free(p); }

Pages::Pages(const StoreSetup& setup, uint64_t first, size_t blocks, size_t skew)
    : sizes_(setup.tensor_sizes), shards_(setup.shards), pool_(setup.pool) {
  uint64_t total = 0;
  for (size_t b = 0; b < blocks; ++b) {
    for (uint32_t s = 0; s < setup.shards; ++s) {
      ids_.push_back(IdOf(first + b));
      indices_.push_back(s);
      for (const uint64_t size : sizes_) {
        addresses_.push_back(total + skew);
        all_sizes_.push_back(size);
        total = AlignUp(total + skew + size + kGuardSize);
      }
    }
  }
  memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(kAlignment, std::max(total, kAlignment))));
  std::memset(memory_.get(), kGuard, total);
  for (uint64_t& address : addresses_) address += reinterpret_cast<uintptr_t>(memory_.get());
}

cs_batch Pages::batch() const { return part(0, size()); }

cs_batch Pages::part(size_t from, size_t n) const {
  cs_batch batch = {};
  batch.n = n;
  batch.block_ids = ids_.data()->data() + 16 * from;
  batch.shard_indices = indices_.data() + from;
  batch.m = sizes_.size();
  batch.addresses = addresses_.data() + from * sizes_.size();
  batch.sizes = all_sizes_.data() + from * sizes_.size();
  batch.pool = pool_;
  return batch;
}

std::vector<BlockId> Pages::block_ids() const {
  std::vector<BlockId> ids;
  for (size_t i = 0; i < ids_.size(); i += shards_) ids.push_back(ids_[i]);
  return ids;
}

uint8_t* Pages::tensor(size_t shard, size_t t) const {
  return reinterpret_cast<uint8_t*>(addresses_[shard * sizes_.size() + t]);
}

void Pages::Expected(size_t shard, size_t t, uint8_t version, std::vector<uint8_t>& out) const {
  uint64_t seed;
  std::memcpy(&seed, ids_[shard].data(), sizeof seed);
  seed = Spread(seed ^ (indices_[shard] << 16) ^ (t << 8) ^ version);
  out.resize(sizes_[t]);
  for (size_t i = 0; i < out.size(); i += 8) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    const uint64_t word = seed ^ (seed >> 29);
    std::memcpy(out.data() + i, &word, std::min<size_t>(8, out.size() - i));
  }
}

void Pages::Fill(uint8_t version) {
  std::vector<uint8_t> bytes;
  for (size_t i = 0; i < size(); ++i) {
    for (size_t t = 0; t < sizes_.size(); ++t) {
      Expected(i, t, version, bytes);
      std::memcpy(tensor(i, t), bytes.data(), bytes.size());
    }
  }
}

bool Pages::Holds(size_t shard, uint8_t version) const {
  std::vector<uint8_t> bytes;
  for (size_t t = 0; t < sizes_.size(); ++t) {
    Expected(shard, t, version, bytes);
    if (std::memcmp(tensor(shard, t), bytes.data(), bytes.size()) != 0) return false;
  }
  return true;
}

bool Pages::HoldsAll(uint8_t version) const {
  for (size_t i = 0; i < size(); ++i) {
    if (!Holds(i, version)) return false;
  }
  return true;
}

void Pages::Poison() {
  for (size_t i = 0; i < size(); ++i) {
    for (size_t t = 0; t < sizes_.size(); ++t) std::memset(tensor(i, t), kPoison, sizes_[t]);
  }
}

bool Pages::IsPoisoned(size_t shard) const {
  for (size_t t = 0; t < sizes_.size(); ++t) {
    const uint8_t* const begin = tensor(shard, t);
    if (!std::all_of(begin, begin + sizes_[t], [](uint8_t b) { return b == kPoison; })) {
      return false;
    }
  }
  return true;
}

bool Pages::IsPoisoned() const {
  for (size_t i = 0; i < size(); ++i) {
    if (!IsPoisoned(i)) return false;
  }
  return true;
}

bool Pages::GuardsIntact() const {
  for (size_t i = 0; i < size(); ++i) {
    for (size_t t = 0; t < sizes_.size(); ++t) {
      const uint8_t* const begin = tensor(i, t) + sizes_[t];
      if (!std::all_of(begin, begin + kGuardSize, [](uint8_t b) { return b == kGuard; })) {
        return false;
      }
    }
  }
  return true;
}

Codes Repeated(size_t n, int32_t code) { return Codes(n, code); }

Codes WaitFor(Store& store, cs_task task, size_t n, std::chrono::milliseconds timeout) {
  Codes codes(n, -1);
  const Status waited = store.Wait(task, timeout, codes);
  if (!waited.ok()) return Repeated(n, waited.code());
  return codes;
}

Codes DumpAll(Store& store, const Pages& pages, std::chrono::milliseconds timeout) {
  Result<cs_task> task = store.Dump(pages.batch());
  if (!task.ok()) return Repeated(pages.size(), task.status().code());
  return WaitFor(store, task.value(), pages.size(), timeout);
}

Codes LoadAll(Store& store, const Pages& pages, std::chrono::milliseconds timeout) {
  Result<cs_task> task = store.Load(pages.batch());
  if (!task.ok()) return Repeated(pages.size(), task.status().code());
  return WaitFor(store, task.value(), pages.size(), timeout);
}

std::vector<uint8_t> LookupAll(Store& store, const Pages& pages) {
  const std::vector<BlockId> ids = pages.block_ids();
  std::vector<uint8_t> present(ids.size(), 2);
  EXPECT_OK(store.Lookup(0, ids, present));
  return present;
}

bool IsPresent(Store& store, const BlockId& id) {
  uint8_t present = 2;
  EXPECT_OK(store.Lookup(0, {&id, 1}, {&present, 1}));
  return present == 1;
}

std::string BlockPath(const StoreSetup& setup, const BlockId& id) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  for (const uint8_t byte : id) {
    hex += kDigits[byte >> 4];
    hex += kDigits[byte & 15];
  }
  return setup.roots[0] + "/" + setup.identity + "/blocks/" + hex.substr(0, 3) + "/" + hex;
}

std::string TemporaryRoot(const StoreSetup& setup) {
  return setup.roots[0] + "/" + setup.identity + "/tmp";
}

void WaitCleaned(const StoreSetup& setup, FaultEnv& env) {
  // trash/ and tmp/ are listed, in each root.
  EXPECT_TRUE(Eventually([&] { return env.calls(Op::kList) >= 2 * setup.roots.size(); }));
  EXPECT_TRUE(env.WaitIdle());
}

std::vector<std::string> FilesBelow(const std::string& directory) {
  namespace fs = std::filesystem;
  std::vector<std::string> files;
  std::error_code error;
  for (fs::recursive_directory_iterator it(directory, error), end; !error && it != end;
       it.increment(error)) {
    std::error_code ignored;
    if (it->is_regular_file(ignored) && it->path().filename() != "lock") {
      files.push_back(it->path().string());
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

std::vector<uint8_t> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void WriteFile(const std::string& path, const std::vector<uint8_t>& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
}

}  // namespace cachestore::test
