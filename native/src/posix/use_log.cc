#include "posix/use_log.h"

#include <algorithm>

namespace cachestore {
namespace {

// How far a use goes back from a block; what it costs is bounded by it.
constexpr size_t kAncestors = 4096;
// A call of Flush writes no more, nor for longer (between two blocks).
constexpr size_t kPieceBlocks = 512;
constexpr std::chrono::milliseconds kPieceTime{20};
constexpr std::chrono::milliseconds kLastTime{1000};
// What an entry takes beside its blocks, counted as so many of these.
constexpr size_t kEntryWeight = 8;

bool KeepsAny(const UseLogOptions& options) {
  return std::find(options.roots.begin(), options.roots.end(), true) != options.roots.end();
}

}  // namespace

struct UseLog::Entry {
  std::vector<BlockId> blocks;
  std::vector<bool> used;  // of `blocks`; empty: all
  std::optional<BlockId> parent;
  bool is_chain = true;  // each block follows the one before
  size_t uses = 0;       // of `blocks`, how many are used

  size_t weight() const { return blocks.size() + kEntryWeight; }
};

struct UseLog::Following {
  std::list<Entry> one;  // moved to the queue at the end, without any memory
  size_t remaining = 0;
};

struct UseLog::Root {
  std::mutex mutex;                                       // guards `pending`
  std::unordered_map<BlockId, uint64_t, IdHash> pending;  // the time to be written
  // The upkeep's own: of `pending`, what it writes now, the latest last.
  std::vector<std::pair<uint64_t, BlockId>> piece;
  Clock::time_point due{};
};

struct UseLog::Order {
  std::vector<BlockId> blocks;
  std::unordered_set<BlockId, IdHash> known;
  std::vector<BlockId> way;  // of AddTo
};

UseLog::UseLog(Env& env, UseLogOptions options, RootOf root_of, Touch touch)
    : env_(env),
      options_(std::move(options)),
      root_of_(std::move(root_of)),
      touch_(std::move(touch)),
      links_(KeepsAny(options_) ? std::make_unique<ParentLinks>(options_.link_bits) : nullptr),
      roots_([this] {
        std::vector<std::unique_ptr<Root>> roots;
        for (const bool kept : options_.roots) {
          roots.push_back(kept ? std::make_unique<Root>() : nullptr);
        }
        return roots;
      }()) {}

UseLog::~UseLog() = default;

std::shared_ptr<UseLog::Following> UseLog::Follow(const Batch& batch) {
  std::shared_ptr<Following> following;
  if (!keeps()) return following;
  // Without memory for it the order of use is less exact, no more.
  const Code thrown = Thrown([&] {
    auto made = std::make_shared<Following>();
    Entry& entry = made->one.emplace_back();
    entry.blocks = batch.blocks;
    entry.used.resize(batch.size());
    entry.parent = batch.parent;
    entry.is_chain = batch.is_chain;
    made->remaining = batch.size();
    following = std::move(made);
  });
  return thrown == CS_OK ? following : nullptr;
}

void UseLog::Ended(Following& following, size_t shard, Code code) {
  Entry& entry = following.one.front();
  if (code == CS_OK) {
    entry.used[shard] = true;
    ++entry.uses;
  }
  if (--following.remaining == 0) Add(following.one);
}

void UseLog::Use(std::span<const BlockId> blocks, const BlockId* parent) {
  if (!keeps()) return;
  (void)Thrown([&] {
    std::list<Entry> one(1);
    one.front().blocks.assign(blocks.begin(), blocks.end());
    if (parent != nullptr) one.front().parent = *parent;
    one.front().uses = blocks.size();
    Add(one);
  });
}

void UseLog::Chain(std::span<const BlockId> blocks) {
  if (!keeps() || blocks.size() < 2) return;
  (void)Thrown([&] {
    std::list<Entry> one(1);
    one.front().blocks.assign(blocks.begin(), blocks.end());
    one.front().used.resize(blocks.size());
    Add(one);
  });
}

void UseLog::Add(std::list<Entry>& one) {
  std::list<Entry> dropped;
  pending_.fetch_add(one.front().uses, std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    queued_ += one.front().weight();
    queue_.splice(queue_.begin(), one);
    while (queued_ > options_.max_queued) {
      queued_ -= queue_.back().weight();
      dropped.splice(dropped.end(), queue_, std::prev(queue_.end()));
    }
  }
  for (const Entry& entry : dropped) {
    dropped_.fetch_add(entry.uses, std::memory_order_relaxed);
    pending_.fetch_sub(entry.uses, std::memory_order_relaxed);
  }
}

void UseLog::Forget() {
  if (!keeps()) return;
  const std::lock_guard digest(digest_mutex_);
  std::list<Entry> queue;
  {
    const std::lock_guard lock(mutex_);
    queue.swap(queue_);
    queued_ = 0;
  }
  for (const Entry& entry : queue) pending_.fetch_sub(entry.uses, std::memory_order_relaxed);
  for (const auto& root : roots_) {
    if (root == nullptr) continue;
    const std::lock_guard lock(root->mutex);
    pending_.fetch_sub(root->pending.size(), std::memory_order_relaxed);
    root->pending.clear();
  }
}

// Turns what has come in into times.
void UseLog::Digest() {
  const std::lock_guard digest(digest_mutex_);
  std::list<Entry> queue;
  {
    const std::lock_guard lock(mutex_);
    queue.swap(queue_);
    queued_ = 0;
  }
  if (queue.empty()) return;
  uint64_t uses = 0;
  for (const Entry& entry : queue) uses += entry.uses;
  const Code thrown = Thrown([&] {
    std::for_each(queue.rbegin(), queue.rend(), [&](const Entry& entry) { Learn(entry); });
    // From the latest use to the oldest: of a block only the latest counts, and
    // where a way back meets one that is known, so is all before it.
    Order order;
    for (const Entry& entry : queue) {
      for (size_t i = 0; i < entry.blocks.size(); ++i) {
        if (entry.used.empty() || entry.used[i]) AddTo(order, entry.blocks[i]);
      }
    }
    Assign(order);
  });
  if (thrown != CS_OK) dropped_.fetch_add(uses, std::memory_order_relaxed);
  pending_.fetch_sub(uses, std::memory_order_relaxed);
}

void UseLog::Learn(const Entry& entry) {
  if (!entry.is_chain || entry.blocks.empty()) return;
  const BlockId* before = entry.parent ? &*entry.parent : nullptr;
  for (const BlockId& block : entry.blocks) {
    // Shards of one block stand side by side.
    if (before != nullptr && *before != block) links_->Set(block, *before);
    before = &block;
  }
}

// The block, and before it those that it follows and that aren't there yet.
void UseLog::AddTo(Order& order, const BlockId& block) {
  if (!order.known.insert(block).second) return;
  order.way.assign(1, block);
  const BlockId* parent = links_->Find(block);
  while (parent != nullptr && order.way.size() <= kAncestors &&
         order.known.insert(*parent).second) {  // else known, or a circle
    order.way.push_back(*parent);
    parent = links_->Find(order.way.back());
  }
  order.blocks.insert(order.blocks.end(), order.way.rbegin(), order.way.rend());
}

void UseLog::Assign(const Order& order) {
  const uint64_t latest = std::max(env_.Now(), last_ns_ + order.blocks.size());
  last_ns_ = latest;
  for (size_t i = 0; i < order.blocks.size(); ++i) {
    const BlockId& block = order.blocks[i];
    const size_t index = root_of_(block);
    Root* const root = index < roots_.size() ? roots_[index].get() : nullptr;
    if (root == nullptr) continue;
    const std::lock_guard lock(root->mutex);
    const auto found = root->pending.find(block);
    if (found != root->pending.end()) {
      found->second = latest - i;
    } else if (root->pending.size() >= options_.max_pending) {
      dropped_.fetch_add(1, std::memory_order_relaxed);
    } else {
      root->pending.emplace(block, latest - i);
      pending_.fetch_add(1, std::memory_order_relaxed);
    }
  }
}

UseLog::Milliseconds UseLog::Flush(size_t index, bool last, bool now) {
  if (roots_[index] == nullptr) return options_.interval;
  Root& root = *roots_[index];
  const auto begin = Clock::now();
  const auto end = begin + (last ? kLastTime : kPieceTime);
  if (last) root.piece.clear();  // it is pending still, and taken with the rest
  if (root.piece.empty()) {
    if (!last && !now && begin < root.due) {
      return std::chrono::ceil<Milliseconds>(root.due - begin);
    }
    root.due = begin + options_.interval;
    Digest();
    TakePiece(root);
  }
  size_t written = 0;
  while (!root.piece.empty() && (last || written < kPieceBlocks) && Clock::now() < end) {
    const BlockId block = root.piece.back().second;
    root.piece.pop_back();
    Write(index, root, block);
    ++written;
  }
  if (last) {
    const std::lock_guard lock(root.mutex);
    dropped_.fetch_add(root.pending.size(), std::memory_order_relaxed);
    pending_.fetch_sub(root.pending.size(), std::memory_order_relaxed);
    root.pending.clear();
    root.piece.clear();
  }
  if (!root.piece.empty()) return Milliseconds(0);
  // Not 0, which says that there is more.
  return std::max(std::chrono::ceil<Milliseconds>(root.due - Clock::now()), Milliseconds(1));
}

// Written from the latest to the oldest: a prefix is never older than its tail.
void UseLog::TakePiece(Root& root) {
  const std::lock_guard lock(root.mutex);
  root.piece.reserve(root.pending.size());
  for (const auto& [block, time] : root.pending) root.piece.emplace_back(time, block);
  std::sort(root.piece.begin(), root.piece.end());
}

void UseLog::Write(size_t index, Root& root, const BlockId& block) {
  uint64_t time = 0;
  {
    const std::lock_guard lock(root.mutex);
    const auto found = root.pending.find(block);
    if (found == root.pending.end()) return;  // cleared meanwhile
    time = found->second;                     // maybe a later one by now
    root.pending.erase(found);
  }
  Status written{CS_NO_MEMORY, ""};
  (void)Thrown([&] { written = touch_(index, block, time); });
  // A file that is gone needs no time.
  if (!written.ok() && written.code() != CS_NOT_FOUND) {
    dropped_.fetch_add(1, std::memory_order_relaxed);
  }
  pending_.fetch_sub(1, std::memory_order_relaxed);  // last: at none, all is written
}

}  // namespace cachestore
