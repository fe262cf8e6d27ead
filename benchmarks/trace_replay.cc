// Replays a request trace through a real tier: how often its replacement finds a
// block. Beside it: plain LRU, simulated in a few lines, over the same blocks.
//
//   trace_replay cache TRACE.jsonl SHARE...
//   trace_replay posix=DIR TRACE.jsonl SHARE...
//   trace_replay posix-watermarks=DIR TRACE.jsonl SHARE...
//
// cache: pages of 64 bytes, in slots of 4096; below the tier is one that stores
// nothing, so that every hit is the cache's own.
// posix: files of 8 KiB below DIR. What is kept after each request is exactly the
// capacity. With watermarks, it is kept between the default ones, and what
// doesn't fit when it comes isn't stored.
//
// For each share, a capacity as a part of the trace's distinct blocks, one line
// of JSON. A block counts as a hit when it and all before it in its request are
// cached; the request then loads those and dumps the rest, as SGLang does, in
// batches of 128 of which each names the block before it.
#include <stdlib.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cache/cache_tier.h"
#include "posix/posix_tier.h"

namespace cachestore {
namespace {

constexpr size_t kBatch = 128;
constexpr uint64_t kPage = 64;        // of the cache
constexpr uint64_t kFilePage = 4096;  // of files
constexpr uint64_t kFileSize = 8192;  // with the record

constexpr int kNoRoom = 3;  // the exit status

using Trace = std::vector<std::vector<uint64_t>>;

[[noreturn]] void Die(const std::string& text) {
  std::fprintf(stderr, "trace_replay: %s\n", text.c_str());
  std::exit(2);
}

// The numbers of "hash_ids" in each line.
Trace Read(const char* path) {
  std::ifstream file(path);
  if (!file) Die(std::string("can't read ") + path);
  Trace trace;
  for (std::string line; std::getline(file, line);) {
    const size_t key = line.find("\"hash_ids\"");
    const size_t open = key == std::string::npos ? key : line.find('[', key);
    if (open == std::string::npos) Die(std::string("a line without hash_ids in ") + path);
    std::vector<uint64_t>& blocks = trace.emplace_back();
    const char* at = line.c_str() + open + 1;
    while (*at != ']' && *at != '\0') {
      char* end = nullptr;
      const uint64_t number = std::strtoull(at, &end, 10);
      if (end == at) break;
      blocks.push_back(number);
      at = end + std::strspn(end, ", ");
    }
  }
  return trace;
}

BlockId IdOf(uint64_t number) {
  BlockId id{};
  const uint64_t mixed = (number + 1) * 0x9e3779b97f4a7c15u;
  std::memcpy(id.data(), &mixed, sizeof mixed);
  std::memcpy(id.data() + sizeof mixed, &number, sizeof number);
  return id;
}

// Takes every dump and has nothing.
class Nothing final : public Tier {
 public:
  Status OpenPool(PoolOptions) override { return Status::Ok(); }
  void Lookup(uint32_t, std::span<const BlockId>, std::span<uint8_t> present) override {
    std::fill(present.begin(), present.end(), uint8_t{0});
  }
  size_t LookupPrefix(uint32_t, std::span<const BlockId>) override { return 0; }
  Status Load(const std::shared_ptr<Request>& request) override {
    return End(*request, CS_NOT_FOUND);
  }
  Status Dump(const std::shared_ptr<Request>& request) override { return End(*request, CS_OK); }
  void Cancel(const std::shared_ptr<Request>& request, Code code) override {
    (void)request->Cancel(code);
  }
  Status Clear() override { return Status::Ok(); }
  uint64_t Epoch() const override { return 0; }
  uint64_t LatestClear() const override { return 0; }
  void AddStats(cs_stats&) const override {}
  void AddSideStats(cs_stats&) const override {}
  void Stop() override {}
  void Close() override {}

 private:
  static Status End(Request& request, Code code) {
    for (size_t i = 0; i < request.size(); ++i) {
      if (request.Begin(i, /*touches=*/true)) request.Finish(i, code);
    }
    return Status::Ok();
  }
};

std::unique_ptr<Tier> OpenCache(uint64_t slots) {
  const auto open = [](uint64_t capacity) {
    CacheOptions options;
    options.geometry = {{kPage}, kPage, kPage};
    options.shared = false;
    options.capacity = capacity;
    options.workers = 1;  // one after another: the same run gives the same figures
    options.cpu_affinity = "none";
    Result<std::unique_ptr<Tier>> tier = CacheTier::Open(
        std::move(options), std::make_unique<Nothing>(), std::make_shared<EventRing>());
    if (!tier.ok()) Die(tier.status().text());
    return std::move(tier.value());
  };
  // The capacity that gives this many slots: its metadata take some of it.
  uint64_t low = slots * 4096;
  uint64_t high = slots * 4096 * 2 + (1 << 20);
  while (low < high) {
    const uint64_t middle = (low + high) / 2;
    auto tier = open(middle);
    cs_stats stats = {};
    tier->AddStats(stats);
    if (stats.cache_slots == slots) return tier;
    (stats.cache_slots < slots ? low : high) = stats.cache_slots < slots ? middle + 1 : middle;
  }
  Die("no capacity gives " + std::to_string(slots) + " slots");
}

// Where the uses are written and the surplus is evicted at once.
std::unique_ptr<Tier> OpenPosix(const std::string& directory, uint64_t blocks, bool watermarks) {
  PosixOptions options;
  options.roots = {directory};
  options.first.identity_name = "replay";
  options.first.manifest = "{}";
  options.first.geometry = {{kFilePage}, kFilePage, kFilePage};
  options.load_workers = 2;
  options.dump_workers = 2;
  options.queue_depth = kBatch;
  options.use_interval = options.evict_interval = std::chrono::milliseconds(1);
  options.capacities = {blocks * kFileSize};
  if (!watermarks) {
    // Room for what a request brings, and after it half of that is kept.
    options.capacities = {2 * blocks * kFileSize};
    options.high_watermark_percent = options.low_watermark_percent = 50;
  }
  Result<std::unique_ptr<Tier>> tier =
      PosixTier::Open(Env::Real(), std::make_shared<EventRing>(), std::move(options));
  if (!tier.ok()) Die(tier.status().text());
  return std::move(tier.value());
}

class Replay {
 public:
  // `most`: bytes that may be in use after a request; 0: there are no files.
  Replay(std::unique_ptr<Tier> tier, uint64_t most) : tier_(std::move(tier)), most_(most) {}
  ~Replay() {
    tier_->Stop();
    tier_->Close();
  }

  size_t Serve(const std::vector<uint64_t>& numbers) {
    std::vector<BlockId> blocks;
    for (const uint64_t number : numbers) blocks.push_back(IdOf(number));
    const size_t hits = tier_->LookupPrefix(0, blocks);
    const size_t loaded = Run(blocks, 0, hits, &Tier::Load);
    if (loaded != hits) Die("a block that was there isn't");
    (void)Run(blocks, hits, blocks.size(), &Tier::Dump);
    return hits;
  }

 private:
  // How many of the shards ended well.
  size_t Run(const std::vector<BlockId>& blocks, size_t from, size_t to,
             Status (Tier::*start)(const std::shared_ptr<Request>&)) {
    size_t ok = 0;
    for (; from < to; from += std::min(kBatch, to - from)) {
      const size_t n = std::min(kBatch, to - from);
      Batch batch;
      batch.tensors = 1;
      batch.blocks.assign(blocks.begin() + static_cast<std::ptrdiff_t>(from),
                          blocks.begin() + static_cast<std::ptrdiff_t>(from + n));
      batch.shard_indices.assign(n, 0);
      batch.addresses.assign(n, page_);
      if (from > 0) batch.parent = blocks[from - 1];
      const auto request = std::make_shared<Request>(std::move(batch));
      if (Status started = (tier_.get()->*start)(request); !started.ok()) Die(started.text());
      request->Wait();
      WaitIdle();
      ok += static_cast<size_t>(
          std::count(request->results().begin(), request->results().end(), CS_OK));
    }
    return ok;
  }

  // Until the use of a request's blocks is counted, too: it comes last. And until
  // what is too much is gone.
  void WaitIdle() const {
    for (;; std::this_thread::sleep_for(std::chrono::microseconds(most_ > 0 ? 100 : 0))) {
      cs_stats stats = {};
      tier_->AddStats(stats);
      if (stats.cache_load_queued + stats.cache_load_running + stats.cache_dump_queued +
                  stats.cache_dump_running + stats.posix_uses_pending ==
              0 &&
          stats.posix_used_bytes <= most_) {
        return;
      }
    }
  }

  const std::unique_ptr<Tier> tier_;
  const uint64_t most_;
  alignas(64) uint8_t page_[kFilePage] = {};
};

// A directory of one replay, below another.
class ReplayDirectory {
 public:
  explicit ReplayDirectory(const std::string& below) : path_(below + "/replay-XXXXXX") {
    if (mkdtemp(path_.data()) == nullptr) Die("can't make a directory in " + below);
  }
  ~ReplayDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Plain LRU; a request uses its blocks from the last to the first.
class Lru {
 public:
  explicit Lru(uint64_t slots) : slots_(slots) {}

  size_t Serve(const std::vector<uint64_t>& blocks) {
    size_t hits = 0;
    while (hits < blocks.size() && at_.count(blocks[hits]) != 0) ++hits;
    for (size_t i = blocks.size(); i-- > 0;) {
      const auto found = at_.find(blocks[i]);
      if (found != at_.end()) order_.erase(found->second);
      order_.push_front(blocks[i]);
      at_[blocks[i]] = order_.begin();
      if (order_.size() > slots_) {
        at_.erase(order_.back());
        order_.pop_back();
      }
    }
    return hits;
  }

 private:
  const uint64_t slots_;
  std::list<uint64_t> order_;  // latest use first
  std::unordered_map<uint64_t, std::list<uint64_t>::iterator> at_;
};

template <typename Cache>
double HitRate(const Trace& trace, Cache cache) {
  size_t hits = 0;
  size_t blocks = 0;
  for (const auto& request : trace) {
    hits += cache->Serve(request);
    blocks += request.size();
  }
  return blocks == 0 ? 0 : static_cast<double>(hits) / static_cast<double>(blocks);
}

double RateOfTier(const Trace& trace, const std::string& tier, uint64_t slots) {
  if (tier == "cache") return HitRate(trace, std::make_unique<Replay>(OpenCache(slots), 0));
  const bool watermarks = tier.starts_with("posix-watermarks=");
  if (!watermarks && !tier.starts_with("posix=")) Die(tier + ": no such tier");
  const ReplayDirectory directory(tier.substr(tier.find('=') + 1));
  const uint64_t bytes = slots * kFileSize;
  const Result<SpaceInfo> space = Env::Real().Space(directory.path());
  // With what a request brings, and the directories.
  if (!space.ok() || space.value().available < bytes + bytes / 2 + (uint64_t{64} << 20)) {
    std::fprintf(stderr, "%llu MiB don't fit there\n",
                 static_cast<unsigned long long>((bytes + bytes / 2 + (64 << 20)) >> 20));
    std::exit(kNoRoom);
  }
  const uint64_t most = watermarks ? bytes / 100 * 97 : bytes;
  return HitRate(trace,
                 std::make_unique<Replay>(OpenPosix(directory.path(), slots, watermarks), most));
}

}  // namespace
}  // namespace cachestore

int main(int argc, char** argv) {
  using namespace cachestore;
  if (argc < 4) Die("usage: trace_replay cache|posix=DIR TRACE.jsonl SHARE...");
  const std::string tier = argv[1];
  const Trace trace = Read(argv[2]);
  std::unordered_set<uint64_t> distinct;
  for (const auto& request : trace) distinct.insert(request.begin(), request.end());
  for (int i = 3; i < argc; ++i) {
    const double share = std::strtod(argv[i], nullptr);
    if (!(share > 0 && share <= 1)) Die(std::string(argv[i]) + ": a share is above 0, at most 1");
    const uint64_t slots =
        std::max<uint64_t>(1, static_cast<uint64_t>(share * static_cast<double>(distinct.size())));
    std::printf(
        "{\"share\": %g, \"slots\": %llu, \"blocks\": %zu, \"cachestore\": %.4f, "
        "\"lru\": %.4f}\n",
        share, static_cast<unsigned long long>(slots), distinct.size(),
        RateOfTier(trace, tier, slots), HitRate(trace, std::make_unique<Lru>(slots)));
    std::fflush(stdout);
  }
  return 0;
}
