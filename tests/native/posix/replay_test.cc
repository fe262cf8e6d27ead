// The order of eviction is that of use: what is kept is what a plain LRU list
// would keep, request by request, through real files and the real collector.
#include <algorithm>
#include <chrono>
#include <list>
#include <memory>
#include <random>
#include <vector>

#include "fault_env.h"
#include "fixture.h"
#include "harness.h"
#include "posix/posix_tier.h"

namespace cachestore::test {
namespace {

constexpr uint64_t kFileSize = 8192;
constexpr size_t kMostBlocks = 8;  // of a request
using Blocks = std::vector<uint64_t>;

// Requests whose prefixes come again: each goes down a tree, along a path taken
// before for a while, then along a new one.
class Requests {
 public:
  explicit Requests(uint32_t seed) : random_(seed) {}

  Blocks Next() {
    Blocks blocks;
    if (!all_.empty() && random_() % 4 != 0) {
      // The later ones more often.
      const size_t back = std::min<size_t>(random_() % 40, random_() % 40);
      const Blocks& before = all_[all_.size() - 1 - std::min(back, all_.size() - 1)];
      blocks.assign(before.begin(),
                    before.begin() + static_cast<ptrdiff_t>(1 + random_() % before.size()));
    }
    const size_t size = std::max<size_t>(blocks.size(), 1 + random_() % kMostBlocks);
    while (blocks.size() < size) blocks.push_back(next_++);
    all_.push_back(blocks);
    return blocks;
  }

 private:
  std::mt19937 random_;
  uint64_t next_ = 0;
  std::vector<Blocks> all_;
};

// Every block in the order of use, the latest first, cut at the capacity.
class Lru {
 public:
  explicit Lru(size_t capacity) : capacity_(capacity) {}

  size_t Hits(const Blocks& blocks) const {
    size_t hits = 0;
    while (hits < blocks.size() &&
           std::find(order_.begin(), order_.end(), blocks[hits]) != order_.end()) {
      ++hits;
    }
    return hits;
  }
  void Use(const Blocks& blocks) {
    for (size_t i = blocks.size(); i-- > 0;) {
      order_.remove(blocks[i]);
      order_.push_front(blocks[i]);
    }
    if (order_.size() > capacity_) order_.resize(capacity_);
  }

 private:
  const size_t capacity_;
  std::list<uint64_t> order_;
};

class Replay {
 public:
  explicit Replay(size_t capacity) : most_(capacity * kFileSize) {
    PosixOptions options;
    options.roots = {dir_.path()};
    options.first.identity_name = "replay";
    options.first.manifest = "{}";
    options.first.geometry = {{kPage}, kPage, kPage};
    options.load_workers = options.dump_workers = 2;
    options.queue_depth = kMostBlocks;
    options.use_interval = options.evict_interval = std::chrono::milliseconds(1);
    // Room for what a request brings; after it half of that is kept.
    options.capacities = {2 * most_};
    options.high_watermark_percent = options.low_watermark_percent = 50;
    Result<std::unique_ptr<Tier>> tier =
        PosixTier::Open(Env::Real(), std::make_shared<EventRing>(), std::move(options));
    if (EXPECT_OK(tier)) tier_ = std::move(tier.value());
  }
  ~Replay() {
    tier_->Stop();
    tier_->Close();
  }
  bool ok() const { return tier_ != nullptr; }

  size_t Hits(const Blocks& numbers) { return tier_->LookupPrefix(0, Ids(numbers)); }
  void Serve(const Blocks& numbers, size_t hits) {
    const std::vector<BlockId> ids = Ids(numbers);
    const std::span<const BlockId> all(ids);
    Run(all.first(hits), nullptr, &Tier::Load);
    WaitQuiet();
    Run(all.subspan(hits), hits == 0 ? nullptr : &ids[hits - 1], &Tier::Dump);
    WaitQuiet();
  }

 private:
  static constexpr size_t kPage = 4096;

  static std::vector<BlockId> Ids(const Blocks& numbers) {
    std::vector<BlockId> ids;
    for (const uint64_t number : numbers) ids.push_back(IdOf(number));
    return ids;
  }
  void Run(std::span<const BlockId> ids, const BlockId* parent,
           Status (Tier::*start)(const std::shared_ptr<Request>&)) {
    if (ids.empty()) return;
    Batch batch;
    batch.tensors = 1;
    batch.blocks.assign(ids.begin(), ids.end());
    batch.shard_indices.assign(ids.size(), 0);
    for (size_t i = 0; i < ids.size(); ++i) batch.addresses.push_back(pages_.data() + i * kPage);
    if (parent != nullptr) batch.parent = *parent;
    const auto request = std::make_shared<Request>(std::move(batch));
    ASSERT_OK((tier_.get()->*start)(request));
    request->Wait();
    for (const Code code : request->results()) EXPECT_EQ(code, CS_OK);
  }
  void WaitQuiet() {
    EXPECT_TRUE(Eventually([&] {
      cs_stats stats = {};
      tier_->AddStats(stats);
      return stats.posix_uses_pending == 0 && stats.posix_used_bytes <= most_;
    }));
  }

  const TempDir dir_;
  const uint64_t most_;
  std::vector<uint8_t> pages_ = std::vector<uint8_t>(kMostBlocks * kPage);
  std::unique_ptr<Tier> tier_;
};

}  // namespace

TEST(Replay, KeepsWhatLruKeeps) {
  constexpr size_t kCapacity = 40;
  Requests requests(20261130);
  Lru lru(kCapacity);
  Replay replay(kCapacity);
  ASSERT_TRUE(replay.ok());
  size_t hits = 0;
  size_t blocks = 0;
  for (int i = 0; i < 150; ++i) {
    const Blocks request = requests.Next();
    const size_t found = replay.Hits(request);
    ASSERT_EQ(found, lru.Hits(request));
    replay.Serve(request, found);
    lru.Use(request);
    hits += found;
    blocks += request.size();
  }
  EXPECT_GT(hits, blocks / 6);  // else this shows nothing
  EXPECT_LT(hits, blocks * 3 / 4);
}

}  // namespace cachestore::test
