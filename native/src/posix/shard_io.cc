#include "posix/shard_io.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>

#include "posix/shard_transfer.h"

namespace cachestore {
namespace {

// How much is read or written by one call, page cache in between: a piece is
// checksummed while it is in a core's own cache. Measured: pieces of 64 to
// 256 KiB cost 7 to 25 % less than a megabyte at once, the more the larger the
// page. With O_DIRECT a shard is one call.
constexpr uint64_t kPieceSize = 128 * 1024;

struct BlockIdHash {
  size_t operator()(const BlockId& block) const {
    size_t value;
    std::memcpy(&value, block.data(), sizeof value);
    return value;
  }
};

}  // namespace

ShardIo::ShardIo(Env& env, EventRing& events, Geometry geometry, RecordFormat format,
                 cs_verify verify, std::vector<std::shared_ptr<Directory>> directories)
    : env_(env),
      events_(events),
      geometry_(std::move(geometry)),
      format_(std::move(format)),
      verify_(verify),
      payload_(geometry_.payload()),
      stride_(AlignUp(geometry_.shard_size)),
      file_size_(geometry_.shards() * stride_ + kRecordSize),
      directories_(std::move(directories)) {}

Directory& ShardIo::DirectoryOf(const BlockId& block) const {
  Directory* best = directories_.front().get();
  if (directories_.size() == 1) return *best;
  uint64_t best_score = best->Score(block);
  for (const auto& directory : directories_) {
    const uint64_t score = directory->Score(block);
    if (score > best_score) {
      best = directory.get();
      best_score = score;
    }
  }
  return *best;
}

Places ShardIo::PlacesOf(const BlockId& block) const {
  Places places;
  Directory& best = DirectoryOf(block);
  if (best.health().use() == Health::Use::kFull) {
    places.Add(best);
    return places;
  }
  std::vector<Directory*> order;
  for (const auto& directory : directories_) order.push_back(directory.get());
  std::sort(order.begin(), order.end(), [&](const Directory* a, const Directory* b) {
    return a->Score(block) > b->Score(block);
  });
  for (Directory* const directory : order) {
    const Health::Use use = directory->health().use();
    if (use != Health::Use::kOut) places.Add(*directory);
    if (use == Health::Use::kFull) break;
  }
  return places;
}

bool ShardIo::Exists(const BlockId& block, Request* request, size_t shard) const {
  if (unreadable_.Contains(block)) return false;
  const Places places = PlacesOf(block);
  for (size_t i = 0; i < places.size(); ++i) {
    if (request != nullptr) request->NotePlace(shard, &places[i]);
    const Result<FileInfo> info = env_.Stat(places[i].BlockPath(block));
    places[i].health().Note(Health::Call::kRead, info.status());
    if (info.ok() && info.value().is_regular && info.value().size == file_size_) return true;
  }
  return false;
}

Result<std::shared_ptr<BlockWrites>> ShardIo::PlanDump(const Batch& batch) const {
  auto plan = std::make_shared<BlockWrites>();
  plan->block_of.resize(batch.size());
  const size_t shards = geometry_.shards();
  // A request may name a block twice (the same prefix in two nodes): each time
  // is a write of its own.
  std::unordered_map<BlockId, BlockWrite*, BlockIdHash> unfinished;
  for (size_t i = 0; i < batch.size(); ++i) {
    BlockWrite*& block = unfinished[batch.blocks[i]];
    if (block == nullptr || block->shards.size() == shards) {
      plan->blocks.push_back(std::make_unique<BlockWrite>());
      block = plan->blocks.back().get();
      const Places places = PlacesOf(batch.blocks[i]);
      if (places.size() > 0) {
        Directory& last = places[places.size() - 1];
        if (last.health().use() == Health::Use::kFull) block->directory = &last;
      }
      if (block->directory != nullptr) block->temporary = block->directory->NewTemporaryPath();
      block->checksums.resize(shards * geometry_.tensor_sizes.size());
      block->remaining.store(shards, std::memory_order_relaxed);
    }
    for (const size_t other : block->shards) {
      if (batch.shard_indices[other] == batch.shard_indices[i]) {
        return Status(CS_INVALID, "shard " + std::to_string(batch.shard_indices[i]) +
                                      " of one block is given twice in one dump");
      }
    }
    block->shards.push_back(i);
    plan->block_of[i] = block;
  }
  for (const auto& block : plan->blocks) {
    if (block->shards.size() != shards) {
      return Status(CS_INVALID, "a dump has " + std::to_string(block->shards.size()) +
                                    " shards of a block of " + std::to_string(shards) +
                                    ": it must have them all");
    }
  }
  return plan;
}

bool ShardIo::IsAligned(std::span<uint8_t* const> tensors) const {
  const auto aligned = [](uint64_t number) { return number % kAlignment == 0; };
  return std::all_of(geometry_.tensor_sizes.begin(), geometry_.tensor_sizes.end(), aligned) &&
         std::all_of(tensors.begin(), tensors.end(), [&](const uint8_t* tensor) {
           return aligned(reinterpret_cast<uintptr_t>(tensor));
         });
}

// A shard, and the record with its block's last one, as the calls that move it.
std::vector<ShardIo::Piece> ShardIo::Pieces(const Transfer& transfer, bool with_record) const {
  const uint64_t most = transfer.direct ? UINT64_MAX : kPieceSize;
  std::vector<Piece> pieces(1);
  pieces.back().offset = transfer.index * stride_;
  const size_t tensors = transfer.tensors.size();
  for (size_t i = 0; i < tensors; ++i) {
    for (uint64_t at = 0; at < geometry_.tensor_sizes[i];) {
      if (pieces.back().size >= most) {
        const uint64_t offset = pieces.back().offset + pieces.back().size;
        pieces.emplace_back().offset = offset;
      }
      const uint64_t n = std::min(geometry_.tensor_sizes[i] - at, most - pieces.back().size);
      pieces.back().Add(transfer.tensors[i] + at, n, i);
      at += n;
    }
  }
  pieces.back().Add(transfer.padding, stride_ - payload_, tensors - 1);
  if (with_record) pieces.back().Add(transfer.record, kRecordSize, Piece::kNoTensor);
  return pieces;
}

}  // namespace cachestore
