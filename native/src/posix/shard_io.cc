#include "posix/shard_io.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/checksum.h"

namespace cachestore {
namespace {

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
  uint32_t index;                       // of the shard in its block
  bool direct;                          // O_DIRECT
  std::span<uint8_t* const> tensors;    // the bytes: the caller's or ours
  uint8_t* padding;                     // stride - payload bytes, ours
  uint8_t* record;                      // kRecordSize bytes, ours
  std::vector<iovec> parts;             // tensors and padding, in file order
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
  return info.ok() && !info.value().is_directory && info.value().size == file_size_;
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
      block->epoch = directory.epoch();
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

std::vector<iovec> Parts(const Geometry& geometry, std::span<uint8_t* const> tensors,
                         uint8_t* padding, uint64_t padding_size) {
  std::vector<iovec> parts;
  parts.reserve(tensors.size() + 2);
  for (size_t i = 0; i < tensors.size(); ++i) {
    parts.push_back({tensors[i], geometry.tensor_sizes[i]});
  }
  if (padding_size > 0) parts.push_back({padding, padding_size});
  return parts;
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
                    zero_copy ? small : large + stride_,
                    {}};
  transfer.parts = zero_copy ? Parts(geometry_, target, transfer.padding, stride_ - payload_)
                             : std::vector<iovec>{{large, stride_}};

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
  if (info.value().is_directory) return corrupt("a directory");
  if (info.value().size != file_size_) {
    return corrupt(std::to_string(info.value().size) + " bytes, not " +
                   std::to_string(file_size_));
  }

  // The last shard and the record after it are one read.
  const uint64_t offset = transfer.index * stride_;
  const bool is_last = transfer.index + 1 == geometry_.shards();
  if (is_last) transfer.parts.push_back({transfer.record, kRecordSize});
  const uint64_t wanted = stride_ + (is_last ? kRecordSize : 0);
  Result<uint64_t> read = env_.ReadFull(file.get(), transfer.parts, offset);
  if (!read.ok()) return failed(read.status());
  if (read.value() != wanted) return corrupt("it ended early");
  if (!is_last) {
    iovec part{transfer.record, kRecordSize};
    read = env_.ReadFull(file.get(), {&part, 1}, file_size_ - kRecordSize);
    if (!read.ok()) return failed(read.status());
    if (read.value() != kRecordSize) return corrupt("it ended early");
  }

  if (Status status = format_.Check(transfer.block, transfer.record); !status.ok()) {
    return corrupt(status.text());
  }
  const size_t tensors = transfer.tensors.size();
  for (size_t i = 0; i < tensors; ++i) {
    uint32_t checksum = Crc32c(0, transfer.tensors[i], geometry_.tensor_sizes[i]);
    if (i + 1 == tensors) checksum = Crc32c(checksum, transfer.padding, stride_ - payload_);
    if (checksum != format_.checksum(transfer.record, transfer.index * tensors + i)) {
      return corrupt("checksum of tensor " + std::to_string(i) + " of shard " +
                     std::to_string(transfer.index) + " differs");
    }
  }
  return CS_OK;
}

void ShardIo::SetAside(const std::string& path, const FileInfo& info, const std::string& why) {
  // Not if somebody has just published a new one under this name.
  const Result<FileInfo> there = env_.Stat(path);
  const bool same = there.ok() && there.value().device == info.device &&
                    there.value().inode == info.inode;
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
                    how.zero_copy ? small : large + stride_,
                    {}};
  std::memset(transfer.padding, 0, stride_ - payload_);
  transfer.parts = how.zero_copy ? Parts(geometry_, source, transfer.padding, stride_ - payload_)
                                 : std::vector<iovec>{{large, stride_}};
  const Status written = Write(transfer, block);
  if (written.ok()) return;
  SetOnce(block.failure, written.code() == CS_NOT_FOUND ? CS_IO : written.code());
  events_.Add(CS_EVENT_WARNING, "dump to " + block.temporary + ": " + written.text());
}

Status ShardIo::Write(Transfer& transfer, BlockWrite& block) {
  const size_t tensors = transfer.tensors.size();
  const std::span<uint32_t> checksums =
      std::span(block.checksums).subspan(transfer.index * tensors, tensors);
  for (size_t i = 0; i < tensors; ++i) {
    checksums[i] = Crc32c(0, transfer.tensors[i], geometry_.tensor_sizes[i]);
  }
  checksums.back() = Crc32c(checksums.back(), transfer.padding, stride_ - payload_);
  if (geometry_.shards() == 1) {
    format_.Encode(transfer.block, block.checksums, transfer.record);
    transfer.parts.push_back({transfer.record, kRecordSize});
  }
  return WriteParts(transfer.directory, block, transfer.direct, transfer.parts,
                    transfer.index * stride_);
}

Status ShardIo::WriteParts(Directory& directory, BlockWrite& block, bool direct,
                           std::span<iovec> parts, uint64_t offset) {
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
  FileCloser file(env_, opened.value());
  if (Status written = env_.WriteFull(file.get(), parts, offset); !written.ok()) return written;
  return file.Close();
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
  iovec part{record, kRecordSize};
  const Status written = WriteParts(directory, block, directory.direct(), {&part, 1},
                                    file_size_ - kRecordSize);
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
