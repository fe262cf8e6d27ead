// ShardIo's dumps.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "posix/shard_io.h"
#include "posix/shard_transfer.h"

namespace cachestore {
namespace {

void SetOnce(std::atomic<Code>& code, Code value) {
  Code none = CS_OK;
  code.compare_exchange_strong(none, value, std::memory_order_relaxed);
}

// What the caller is told: it isn't its argument that is wrong, nor a block that
// isn't there.
Code FailureOf(const Status& written) {
  const Code code = written.code();
  return code == CS_NOT_FOUND || code == CS_INVALID ? CS_IO : code;
}

}  // namespace

void ShardIo::Dump(Request& request, size_t shard, WorkerPool::Scratch& scratch) {
  const Batch& batch = request.batch();
  BlockWrite& block = *static_cast<BlockWrites*>(request.tier_data())->block_of[shard];
  Directory* const directory = block.directory;
  const std::span<uint8_t* const> source = batch.tensors_of(shard);
  const bool direct = directory != nullptr && directory->direct();
  const bool zero_copy =
      directory != nullptr && directory->zero_copy() && (!direct || IsAligned(source));
  if (request.Begin(shard, zero_copy)) {
    const Code thrown = Thrown([&] {
      if (Exists(batch.blocks[shard], &request, shard)) {
        block.existing.store(true, std::memory_order_relaxed);
      } else if (directory == nullptr || directory->health().use() != Health::Use::kFull) {
        SetOnce(block.failure, CS_IO);  // said when it was taken out of use
      } else if (HasRoom(*directory, block)) {
        WriteShard(request, shard, *directory, block, {direct, zero_copy}, scratch);
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
  const Code thrown = Thrown([&] { EndBlock(request, shard, block, scratch); });
  if (thrown != CS_OK) request.FinishAll(block.shards, thrown);
}

void ShardIo::WriteFailed(Directory& directory, BlockWrite& block, const Status& why) {
  SetOnce(block.failure, FailureOf(why));
  directory.health().Note(Health::Call::kWrite, why);
  if (why.code() == CS_NO_SPACE) directory.space().NoteFull(file_size_);
  events_.Add(CS_EVENT_WARNING, "dump to " + block.temporary + ": " + why.text());
}

// False: the block has failed, here or before.
bool ShardIo::HasRoom(Directory& directory, BlockWrite& block) {
  std::call_once(block.asked, [&] {
    const Status reserved = block.room.Take(directory.space(), file_size_);
    if (reserved.ok()) return;
    SetOnce(block.failure, reserved.code());
    events_.Add(CS_EVENT_WARNING, "dump to " + directory.root() + ": " + reserved.text());
  });
  return block.failure.load(std::memory_order_relaxed) == CS_OK;
}

void ShardIo::WriteShard(Request& request, size_t shard, Directory& directory, BlockWrite& block,
                         How how, WorkerPool::Scratch& scratch) {
  request.NotePlace(shard, &directory);
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
  const Status written = WriteDirectIfPossible(directory, how.direct, [&](bool direct) {
    transfer.direct = direct;
    return Write(transfer, block);
  });
  if (!written.ok()) WriteFailed(directory, block, written);
}

// `write` gets whether to use O_DIRECT, and is called again without where that
// is refused, as some filesystems do no sooner than at a write.
template <typename Attempt>
Status ShardIo::WriteDirectIfPossible(Directory& directory, bool direct, Attempt write) {
  const Status written = write(direct);
  if (written.code() != CS_INVALID || !direct || directory.requires_direct()) return written;
  const Status buffered = write(false);
  if (buffered.ok()) directory.DisableDirect(written);
  return buffered;
}

Status ShardIo::Write(const Transfer& transfer, BlockWrite& block) {
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

Result<FileCloser> ShardIo::OpenTemporary(Directory& directory, BlockWrite& block, bool direct) {
  Result<Fd> opened = env_.OpenWrite(block.temporary, direct);
  // Not where another shard has had it already: that one's bytes are gone.
  if (!opened.ok() && opened.status().code() == CS_NOT_FOUND && block.inode.load() == 0) {
    if (Status made = directory.MakeTemporaryDirectory(); !made.ok()) return made;
    opened = env_.OpenWrite(block.temporary, direct);
  }
  if (!opened.ok()) return opened.status();
  block.opened.store(true, std::memory_order_relaxed);
  FileCloser file(env_, opened.value());
  if (geometry_.shards() > 1 && !IsTheOnlyTemporary(block, file.get())) {
    return Status(CS_IO, "it was deleted while it was written");
  }
  return file;
}

// Whether it is the file that the block's other shards are written to.
bool ShardIo::IsTheOnlyTemporary(BlockWrite& block, Fd file) {
  const Result<FileInfo> info = env_.StatFd(file);
  if (!info.ok()) return false;
  uint64_t known = 0;
  return block.inode.compare_exchange_strong(known, info.value().inode) ||
         known == info.value().inode;
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
void ShardIo::EndBlock(Request& request, size_t shard, BlockWrite& block,
                       WorkerPool::Scratch& scratch) {
  const BlockId& id = request.batch().blocks[shard];
  const auto finish = [&](Code code) { return request.FinishAll(block.shards, code); };
  request.NotePlace(shard, block.directory);
  if (block.existing.load(std::memory_order_relaxed)) {
    RemoveTemporary(block);
    // Counted before the waiter can look, and only what wasn't given up.
    const size_t shards = block.shards.size();
    existing_.fetch_add(shards, std::memory_order_relaxed);
    existing_.fetch_sub(shards - finish(CS_OK), std::memory_order_relaxed);
    return;
  }
  if (block.directory == nullptr) {
    finish(block.failure.load(std::memory_order_relaxed));
    return;
  }
  Directory& directory = *block.directory;
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
  const Result<bool> published = block.room.Publish([&] {
    return directory.Publish(block.temporary, id, block.epoch, unreadable_.Contains(id));
  });
  const Status& status = published.status();
  directory.health().Note(Health::Call::kWrite, status);
  if (!status.ok()) {
    events_.Add(CS_EVENT_WARNING,
                "publishing a block in " + directory.root() + ": " + status.text());
    RemoveTemporary(block);
    finish(status.code() == CS_NOT_FOUND ? CS_IO : status.code());
    return;
  }
  unreadable_.Remove(id);
  if (finish(CS_OK) > 0 || !published.value()) return;
  // The waiter was told that the dump failed while the rename hung: lookups must
  // say the same.
  const Result<bool> removed = directory.RemoveSame(directory.BlockPath(id), written.value());
  if (removed.ok() && removed.value()) directory.space().Remove(file_size_);
}

void ShardIo::WriteRecord(const BlockId& id, Directory& directory, BlockWrite& block,
                          WorkerPool::Scratch& scratch) {
  uint8_t* const record = scratch.small.Get(kRecordSize + kAlignment);
  if (record == nullptr) return SetOnce(block.failure, CS_NO_MEMORY);
  format_.Encode(id, block.checksums, record);
  const Status written = WriteDirectIfPossible(directory, directory.direct(), [&](bool direct) {
    Result<FileCloser> file = OpenTemporary(directory, block, direct);
    if (!file.ok()) return file.status();
    iovec part{record, kRecordSize};
    const Status done = env_.WriteFull(file.value().get(), {&part, 1}, file_size_ - kRecordSize);
    return done.ok() ? file.value().Close() : done;
  });
  if (!written.ok()) WriteFailed(directory, block, written);
}

void ShardIo::RemoveTemporary(const BlockWrite& block) {
  if (!block.opened.load(std::memory_order_relaxed)) return;
  // Else it goes with the directory of temporary files.
  if (block.directory->health().use() != Health::Use::kOut) (void)env_.Unlink(block.temporary);
}

}  // namespace cachestore
