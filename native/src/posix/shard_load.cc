// ShardIo's loads.
#include <cstring>
#include <string>
#include <utility>

#include "posix/shard_io.h"
#include "posix/shard_transfer.h"

namespace cachestore {

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

void ShardIo::SetAside(const std::string& path, const FileInfo& info, const std::string& why) {
  // Not if somebody has just published a new one under this name.
  const Result<FileInfo> there = env_.Stat(path);
  const bool same =
      there.ok() && there.value().device == info.device && there.value().inode == info.inode;
  const Status removed = same ? env_.Unlink(path) : Status::Ok();
  events_.Add(CS_EVENT_WARNING, "damaged block " + path + " (" + why + ")" +
                                    (removed.ok() ? " removed" : ": " + removed.text()));
}

}  // namespace cachestore
