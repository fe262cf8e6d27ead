#include "posix/shard_io.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/checksum.h"

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

void SetOnce(std::atomic<Code>& code, Code value) {
  Code none = CS_OK;
  code.compare_exchange_strong(none, value, std::memory_order_relaxed);
}

}  // namespace

struct ShardIo::Transfer {
  Directory& directory;
  const BlockId& block;
  uint32_t index;                     // of the shard in its block
  bool direct;                        // O_DIRECT
  std::span<uint8_t* const> tensors;  // the bytes: the caller's or ours
  uint8_t* padding;                   // stride - payload bytes, ours
  uint8_t* record;                    // kRecordSize bytes, ours
};

// What one vectored call moves.
struct ShardIo::Piece {
  struct Range {
    uint8_t* data;
    uint64_t size;
    size_t tensor;  // whose checksum it counts for; kNoTensor: none
  };
  static constexpr size_t kNoTensor = SIZE_MAX;

  std::vector<Range> ranges;
  uint64_t offset = 0;  // in the file
  uint64_t size = 0;

  void Add(uint8_t* data, uint64_t n, size_t tensor) {
    if (n > 0) ranges.push_back({data, n, tensor});
    size += n;
  }
  std::vector<iovec> Vector() const {
    std::vector<iovec> parts;
    for (const Range& range : ranges) {
      // What lies together is one part: a bounced shard is one, as O_DIRECT wants it.
      if (!parts.empty() &&
          static_cast<uint8_t*>(parts.back().iov_base) + parts.back().iov_len == range.data) {
        parts.back().iov_len += range.size;
      } else {
        parts.push_back({range.data, range.size});
      }
    }
    return parts;
  }
  void Checksum(std::span<uint32_t> checksums) const {
    for (const Range& range : ranges) {
      if (range.tensor == kNoTensor) continue;
      checksums[range.tensor] = Crc32c(checksums[range.tensor], range.data, range.size);
    }
  }
};

ShardIo::ShardIo(Env& env, EventRing& events, Geometry geometry, RecordFormat format,
                 std::vector<std::unique_ptr<Directory>> directories)
    : env_(env),
      events_(events),
      geometry_(std::move(geometry)),
      format_(std::move(format)),
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

bool ShardIo::Exists(const BlockId& block) const {
  const Result<FileInfo> info = env_.Stat(DirectoryOf(block).BlockPath(block));
  return info.ok() && info.value().is_regular && info.value().size == file_size_;
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
      Directory& directory = DirectoryOf(batch.blocks[i]);
      block->temporary = directory.NewTemporaryPath();
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

namespace {

// Where the tensors of a shard lie in one contiguous piece of memory.
std::vector<uint8_t*> Consecutive(const Geometry& geometry, uint8_t* memory) {
  std::vector<uint8_t*> tensors;
  for (const uint64_t size : geometry.tensor_sizes) {
    tensors.push_back(memory);
    memory += size;
  }
  return tensors;
}

}  // namespace

void ShardIo::Load(Request& request, size_t shard, WorkerPool::Scratch& scratch) {
  const Batch& batch = request.batch();
  Directory& directory = DirectoryOf(batch.blocks[shard]);
  const std::span<uint8_t* const> target = batch.tensors_of(shard);
  const bool direct = directory.direct();
  const bool zero_copy = directory.zero_copy() && (!direct || IsAligned(target));
  if (!request.Begin(shard, zero_copy)) return;

  uint8_t* const small = scratch.small.Get(kRecordSize + kAlignment);
  uint8_t* const large = zero_copy ? nullptr : scratch.large.Get(stride_ + kRecordSize);
  if (small == nullptr || (!zero_copy && large == nullptr)) {
    request.Finish(shard, CS_NO_MEMORY);
    return;
  }
  const std::vector<uint8_t*> bounced =
      zero_copy ? std::vector<uint8_t*>() : Consecutive(geometry_, large);
  Transfer transfer{directory,
                    batch.blocks[shard],
                    batch.shard_indices[shard],
                    direct,
                    zero_copy ? target : std::span<uint8_t* const>(bounced),
                    zero_copy ? small + kRecordSize : large + payload_,
                    zero_copy ? small : large + stride_};

  const Code code = ReadAndCheck(transfer);
  if (code == CS_OK && !zero_copy) {
    if (!request.StartTouching(shard)) return;
    for (size_t i = 0; i < target.size(); ++i) {
      std::memcpy(target[i], bounced[i], geometry_.tensor_sizes[i]);
    }
  }
  request.Finish(shard, code);
}

Code ShardIo::ReadAndCheck(Transfer& transfer) {
  const std::string path = transfer.directory.BlockPath(transfer.block);
  Result<Fd> opened = env_.OpenRead(path, transfer.direct);
  if (!opened.ok() && transfer.direct && opened.status().code() == CS_INVALID) {
    transfer.directory.DisableDirect();
    opened = env_.OpenRead(path, /*direct=*/false);
  }
  const auto failed = [&](const Status& status) {
    if (status.code() != CS_NOT_FOUND) {
      events_.Add(CS_EVENT_WARNING, "load of " + path + ": " + status.text());
    }
    return status.code();
  };
  if (!opened.ok()) return failed(opened.status());
  const FileCloser file(env_, opened.value());
  const Result<FileInfo> info = env_.StatFd(file.get());
  if (!info.ok()) return failed(info.status());
  const auto corrupt = [&](const std::string& why) {
    SetAside(path, info.value(), why);
    return CS_CORRUPT;
  };
  if (!info.value().is_regular) return corrupt("not a regular file");
  if (info.value().size != file_size_) {
    return corrupt(std::to_string(info.value().size) + " bytes, not " + std::to_string(file_size_));
  }

  const size_t tensors = transfer.tensors.size();
  const bool has_record = transfer.index + 1 == geometry_.shards();
  std::vector<uint32_t> checksums(tensors, 0);
  for (const Piece& piece : Pieces(transfer, has_record)) {
    std::vector<iovec> parts = piece.Vector();
    const Result<uint64_t> read = env_.ReadFull(file.get(), parts, piece.offset);
    if (!read.ok()) return failed(read.status());
    if (read.value() != piece.size) return corrupt("it ended early");
    piece.Checksum(checksums);
  }
  if (!has_record) {
    iovec part{transfer.record, kRecordSize};
    const Result<uint64_t> read = env_.ReadFull(file.get(), {&part, 1}, file_size_ - kRecordSize);
    if (!read.ok()) return failed(read.status());
    if (read.value() != kRecordSize) return corrupt("it ended early");
  }

  if (Status status = format_.Check(transfer.block, transfer.record); !status.ok()) {
    return corrupt(status.text());
  }
  for (size_t i = 0; i < tensors; ++i) {
    if (checksums[i] != format_.checksum(transfer.record, transfer.index * tensors + i)) {
      return corrupt("checksum of tensor " + std::to_string(i) + " of shard " +
                     std::to_string(transfer.index) + " differs");
    }
  }
  return CS_OK;
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

void ShardIo::SetAside(const std::string& path, const FileInfo& info, const std::string& why) {
  // Not if somebody has just published a new one under this name.
  const Result<FileInfo> there = env_.Stat(path);
  const bool same =
      there.ok() && there.value().device == info.device && there.value().inode == info.inode;
  const Status removed = same ? env_.Unlink(path) : Status::Ok();
  events_.Add(CS_EVENT_WARNING, "damaged block " + path + " (" + why + ")" +
                                    (removed.ok() ? " removed" : ": " + removed.text()));
}

void ShardIo::Dump(Request& request, size_t shard, WorkerPool::Scratch& scratch) {
  const Batch& batch = request.batch();
  BlockWrite& block = *static_cast<BlockWrites*>(request.tier_data())->block_of[shard];
  Directory& directory = DirectoryOf(batch.blocks[shard]);
  const std::span<uint8_t* const> source = batch.tensors_of(shard);
  const bool direct = directory.direct();
  const bool zero_copy = directory.zero_copy() && (!direct || IsAligned(source));
  if (request.Begin(shard, zero_copy)) {
    const Code thrown = Thrown([&] {
      if (Exists(batch.blocks[shard])) {
        block.existing.store(true, std::memory_order_relaxed);
      } else if (block.failure.load(std::memory_order_relaxed) == CS_OK) {
        WriteShard(request, shard, directory, block, {direct, zero_copy}, scratch);
      }
    });
    if (thrown != CS_OK) SetOnce(block.failure, thrown);
  } else {
    SetOnce(block.failure, request.result(shard));
  }
  if (block.remaining.fetch_sub(1, std::memory_order_acq_rel) != 1) {
    (void)request.Park(shard);
    return;
  }
  const Code thrown = Thrown([&] { EndBlock(request, shard, directory, block, scratch); });
  if (thrown != CS_OK) request.FinishAll(block.shards, thrown);
}

void ShardIo::WriteShard(Request& request, size_t shard, Directory& directory, BlockWrite& block,
                         How how, WorkerPool::Scratch& scratch) {
  const Batch& batch = request.batch();
  const std::span<uint8_t* const> source = batch.tensors_of(shard);
  uint8_t* const small = scratch.small.Get(kRecordSize + kAlignment);
  uint8_t* const large = how.zero_copy ? nullptr : scratch.large.Get(stride_ + kRecordSize);
  if (small == nullptr || (!how.zero_copy && large == nullptr)) {
    SetOnce(block.failure, CS_NO_MEMORY);
    return;
  }
  std::vector<uint8_t*> bounced;
  if (!how.zero_copy) {
    bounced = Consecutive(geometry_, large);
    if (!request.StartTouching(shard)) return SetOnce(block.failure, request.result(shard));
    for (size_t i = 0; i < source.size(); ++i) {
      std::memcpy(bounced[i], source[i], geometry_.tensor_sizes[i]);
    }
    if (!request.StopTouching(shard)) return SetOnce(block.failure, request.result(shard));
  }
  Transfer transfer{directory,
                    batch.blocks[shard],
                    batch.shard_indices[shard],
                    how.direct,
                    how.zero_copy ? source : std::span<uint8_t* const>(bounced),
                    how.zero_copy ? small + kRecordSize : large + payload_,
                    how.zero_copy ? small : large + stride_};
  std::memset(transfer.padding, 0, stride_ - payload_);
  const Status written = Write(transfer, block);
  if (written.ok()) return;
  SetOnce(block.failure, written.code() == CS_NOT_FOUND ? CS_IO : written.code());
  events_.Add(CS_EVENT_WARNING, "dump to " + block.temporary + ": " + written.text());
}

Status ShardIo::Write(Transfer& transfer, BlockWrite& block) {
  Result<FileCloser> file = OpenTemporary(transfer.directory, block, transfer.direct);
  if (!file.ok()) return file.status();
  const size_t tensors = transfer.tensors.size();
  const std::span<uint32_t> checksums =
      std::span(block.checksums).subspan(transfer.index * tensors, tensors);
  std::fill(checksums.begin(), checksums.end(), 0u);
  const bool has_record = geometry_.shards() == 1;
  const std::vector<Piece> pieces = Pieces(transfer, has_record);
  for (const Piece& piece : pieces) {
    // After the write, which has brought the bytes near; but the record has
    // all checksums in it.
    const bool before = has_record && &piece == &pieces.back();
    if (before) {
      piece.Checksum(checksums);
      format_.Encode(transfer.block, block.checksums, transfer.record);
    }
    std::vector<iovec> parts = piece.Vector();
    const Status written = env_.WriteFull(file.value().get(), parts, piece.offset);
    if (!written.ok()) return written;
    if (!before) piece.Checksum(checksums);
  }
  return file.value().Close();
}

// `direct` is put out where the filesystem doesn't do it.
Result<FileCloser> ShardIo::OpenTemporary(Directory& directory, BlockWrite& block, bool& direct) {
  Result<Fd> opened = env_.OpenWrite(block.temporary, direct);
  if (!opened.ok() && direct && opened.status().code() == CS_INVALID) {
    directory.DisableDirect();
    direct = false;
    opened = env_.OpenWrite(block.temporary, direct);
  }
  if (!opened.ok() && opened.status().code() == CS_NOT_FOUND) {
    if (Status made = directory.MakeTemporaryDirectory(); !made.ok()) return made;
    opened = env_.OpenWrite(block.temporary, direct);
  }
  if (!opened.ok()) return opened.status();
  block.opened.store(true, std::memory_order_relaxed);
  return FileCloser(env_, opened.value());
}

void ShardIo::DropDump(Request& request, size_t shard, Code code) {
  BlockWrite& block = *static_cast<BlockWrites*>(request.tier_data())->block_of[shard];
  SetOnce(block.failure, code);
  request.EndQueued(shard, code);
  // What was written goes with the directory of temporary files.
  if (block.remaining.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    request.FinishAll(block.shards, code);
  }
}

// The block's last shard decides about the block.
void ShardIo::EndBlock(Request& request, size_t shard, Directory& directory, BlockWrite& block,
                       WorkerPool::Scratch& scratch) {
  const BlockId& id = request.batch().blocks[shard];
  const auto finish = [&](Code code) { return request.FinishAll(block.shards, code); };
  if (block.existing.load(std::memory_order_relaxed)) {
    RemoveTemporary(block);
    // Counted before the waiter can look, and only what wasn't given up.
    const size_t shards = block.shards.size();
    existing_.fetch_add(shards, std::memory_order_relaxed);
    existing_.fetch_sub(shards - finish(CS_OK), std::memory_order_relaxed);
    return;
  }
  if (block.failure.load(std::memory_order_relaxed) == CS_OK && geometry_.shards() > 1) {
    WriteRecord(id, directory, block, scratch);
  }
  // To know it again, should the waiter give up while it is being renamed.
  const bool sure = directory.zero_copy();
  Result<FileInfo> written{FileInfo{}};
  if (!sure && block.failure.load(std::memory_order_relaxed) == CS_OK) {
    written = env_.Stat(block.temporary);
    if (!written.ok()) SetOnce(block.failure, CS_IO);
  }
  if (const Code failure = block.failure.load(std::memory_order_relaxed); failure != CS_OK) {
    RemoveTemporary(block);
    finish(failure);
    return;
  }
  if (!request.BeginPublish(block.shards, shard, sure)) {
    RemoveTemporary(block);
    return;
  }
  const Status published = directory.Publish(block.temporary, id, block.epoch);
  if (!published.ok()) {
    events_.Add(CS_EVENT_WARNING, "publishing a block: " + published.text());
    RemoveTemporary(block);
    finish(published.code() == CS_NOT_FOUND ? CS_IO : published.code());
    return;
  }
  if (finish(CS_OK) == 0) TakeBack(directory.BlockPath(id), written.value());
}

void ShardIo::WriteRecord(const BlockId& id, Directory& directory, BlockWrite& block,
                          WorkerPool::Scratch& scratch) {
  uint8_t* const record = scratch.small.Get(kRecordSize + kAlignment);
  if (record == nullptr) return SetOnce(block.failure, CS_NO_MEMORY);
  format_.Encode(id, block.checksums, record);
  const Status written = [&] {
    bool direct = directory.direct();
    Result<FileCloser> file = OpenTemporary(directory, block, direct);
    if (!file.ok()) return file.status();
    iovec part{record, kRecordSize};
    const Status done = env_.WriteFull(file.value().get(), {&part, 1}, file_size_ - kRecordSize);
    return done.ok() ? file.value().Close() : done;
  }();
  if (written.ok()) return;
  SetOnce(block.failure, written.code() == CS_NOT_FOUND ? CS_IO : written.code());
  events_.Add(CS_EVENT_WARNING, "dump to " + block.temporary + ": " + written.text());
}

void ShardIo::RemoveTemporary(const BlockWrite& block) {
  if (block.opened.load(std::memory_order_relaxed)) (void)env_.Unlink(block.temporary);
}

// The waiter was told that the dump failed while the rename hung: lookups must
// say the same. If the name is somebody else's by now, it stays.
void ShardIo::TakeBack(const std::string& path, const FileInfo& written) {
  const Result<FileInfo> there = env_.Stat(path);
  if (there.ok() && there.value().device == written.device &&
      there.value().inode == written.inode) {
    (void)env_.Unlink(path);
  }
}

}  // namespace cachestore
