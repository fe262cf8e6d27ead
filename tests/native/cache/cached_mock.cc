#include "cache/cached_mock.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/aligned_buffer.h"
#include "cache/region_layout.h"
#include "harness.h"

namespace cachestore::test {

uint64_t RegionBytes(uint64_t slots, uint64_t slot_size) {
  const uint64_t buckets = std::bit_ceil(std::max<uint64_t>(2 * slots, 8));
  return AlignUp(AlignUp(sizeof(RegionHeader)) + sizeof(ProcessEntry) * kMaxProcesses +
                 sizeof(SlotEntry) * slots + sizeof(uint32_t) * buckets) +
         slots * slot_size;
}

CachedMock::CachedMock(StoreSetup store_setup, size_t slots) : setup(std::move(store_setup)) {
  const cs_config config = setup.Config();
  options.geometry = {setup.tensor_sizes, config.shard_size, config.block_size};
  options.shared = false;
  options.capacity = RegionBytes(slots, AlignUp(config.shard_size));
  options.workers = setup.copy_workers;
  options.queue_depth = setup.copy_queue_depth;
  options.cpu_affinity = "none";
  options.timeout = std::chrono::milliseconds(setup.timeout_ms);
  options.peer_timeout = std::chrono::milliseconds(setup.peer_timeout_ms);
  options.dirty_percent = 80;
}

CachedMock::~CachedMock() { Close(); }

bool CachedMock::Open() {
  auto mock = std::make_unique<MockTier>(options.geometry);
  MockTier* const opened_below = mock.get();
  Result<std::unique_ptr<Tier>> opened = CacheTier::Open(options, std::move(mock), events);
  if (!EXPECT_OK(opened)) return false;
  tier = std::move(opened.value());
  below = opened_below;
  return true;
}

void CachedMock::Close() {
  if (tier == nullptr) return;
  tier->Stop();
  tier->Close();
}

CachedMock::Asked CachedMock::Ask(Direction direction, Batch batch) {
  Asked asked;
  asked.request = std::make_shared<Request>(std::move(batch));
  asked.started = direction == kLoad ? tier->Load(asked.request) : tier->Dump(asked.request);
  return asked;
}

EndCodes CachedMock::EndsOf(const Asked& asked, std::chrono::milliseconds timeout) {
  if (!asked.started.ok()) return EndCodes(asked.request->size(), asked.started.code());
  if (!asked.request->WaitUntil(Request::Clock::now() + timeout)) {
    tier->Cancel(asked.request, CS_TIMEOUT);
    asked.request->Wait();
  }
  return asked.request->results();
}

cs_stats CachedMock::Stats() const {
  cs_stats stats = {};
  tier->AddStats(stats);
  return stats;
}

bool CachedMock::IsIdle() const {
  return Eventually([&] {
    const cs_stats stats = Stats();
    return stats.load_outstanding == 0 && stats.dump_outstanding == 0 &&
           stats.cache_slots_loading == 0 && stats.cache_load_queued == 0 &&
           stats.cache_load_running == 0 && stats.cache_dump_queued == 0 &&
           stats.cache_dump_running == 0;
  });
}

bool CachedMock::IsStored() const {
  return IsIdle() && Eventually([&] { return Stats().cache_slots_dirty == 0; });
}

bool CachedMock::HasEvent(const std::string& text) {
  bool found = false;
  while (const auto event = events->Take()) {
    found = found || event->text.find(text) != std::string::npos;
  }
  return found;
}

Batch CachedMock::BatchOf(const Pages& pages) {
  const cs_batch all = pages.batch();
  Batch batch;
  batch.tensors = all.m;
  batch.blocks = pages.block_ids();
  batch.shard_indices.assign(all.n, 0);
  for (size_t i = 0; i < all.n * all.m; ++i) {
    batch.addresses.push_back(reinterpret_cast<uint8_t*>(all.addresses[i]));
  }
  return batch;
}

std::vector<uint8_t> CachedMock::PayloadOf(const Pages& pages, size_t shard) const {
  std::vector<uint8_t> payload;
  for (size_t t = 0; t < setup.tensor_sizes.size(); ++t) {
    const uint8_t* const tensor = pages.tensor(shard, t);
    payload.insert(payload.end(), tensor, tensor + setup.tensor_sizes[t]);
  }
  return payload;
}

void CachedMock::Put(const Pages& pages) {
  const std::vector<BlockId> ids = pages.block_ids();
  for (size_t i = 0; i < ids.size(); ++i) below->Put(ids[i], PayloadOf(pages, i));
}

bool CachedMock::Stores(const Pages& pages, size_t shard) const {
  return below->Stored(pages.block_ids()[shard]) == PayloadOf(pages, shard);
}

}  // namespace cachestore::test
