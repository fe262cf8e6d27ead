// ShardIo's loads.
#include <cstring>
#include <string>
#include <utility>

#include "posix/shard_io.h"
#include "posix/shard_transfer.h"

namespace cachestore {

void ShardIo::Load(Request& request, size_t shard, WorkerPool::Scratch& scratch) {
  const Batch& batch = request.batch();
  const Places places = PlacesOf(batch.blocks[shard]);
  const std::span<uint8_t* const> target = batch.tensors_of(shard);
  bool zero_copy = true;
  for (size_t i = 0; i < places.size(); ++i) {
    zero_copy = zero_copy && places[i].zero_copy() && (!places[i].direct() || IsAligned(target));
  }
  if (!request.Begin(shard, zero_copy)) return;

  uint8_t* const small = scratch.small.Get(kRecordSize + kAlignment);
  uint8_t* const large = zero_copy ? nullptr : scratch.large.Get(stride_ + kRecordSize);
  if (small == nullptr || (!zero_copy && large == nullptr)) {
    request.Finish(shard, CS_NO_MEMORY);
    return;
  }
  const std::vector<uint8_t*> bounced =
      zero_copy ? std::vector<uint8_t*>() : Consecutive(geometry_, large);
  // Out of use, all of them, is nothing there.
  Code code = CS_NOT_FOUND;
  for (size_t i = 0; i < places.size() && code != CS_OK; ++i) {
    Transfer transfer{places[i],
                      batch.blocks[shard],
                      batch.shard_indices[shard],
                      places[i].direct(),
                      zero_copy ? target : std::span<uint8_t* const>(bounced),
                      zero_copy ? small + kRecordSize : large + payload_,
                      zero_copy ? small : large + stride_};
    request.NotePlace(shard, &places[i]);
    const Code found = ReadAndCheck(transfer);
    if (found != CS_NOT_FOUND) code = found;
  }
  if (code == CS_IO) unreadable_.Add(batch.blocks[shard]);
  if (code == CS_OK) unreadable_.Remove(batch.blocks[shard]);
  if (code == CS_OK && !zero_copy) {
    if (!request.StartTouching(shard)) return;
    for (size_t i = 0; i < target.size(); ++i) {
      std::memcpy(target[i], bounced[i], geometry_.tensor_sizes[i]);
    }
  }
  request.Finish(shard, code);
}

// Whether the settings want the bytes of this load checked, whoever wrote them.
bool ShardIo::MustVerify() {
  // One of each sixteen loads, by a count of them. Which one walks by the golden
  // ratio, in step with no number: blocks loaded in turns all get theirs.
  constexpr uint64_t kSample = 16;
  constexpr uint64_t kGoldenRatio = 0x9e3779b97f4a7c15u;  // of 2^64
  switch (verify_) {
    case CS_VERIFY_NEVER:
      return false;
    case CS_VERIFY_SAMPLE: {
      const uint64_t n = sampled_.fetch_add(1, std::memory_order_relaxed);
      return n % kSample == (n / kSample * kGoldenRatio) >> 60;
    }
    default:
      return true;
  }
}

Code ShardIo::ReadAndCheck(Transfer& transfer) {
  const std::string path = transfer.directory.BlockPath(transfer.block);
  Outcome outcome = TryRead(transfer, path);
  // O_DIRECT refused, as some filesystems do no sooner than at a read. A file
  // that is cut under the reader looks alike: so it is what can be read without.
  if (outcome.status.code() == CS_INVALID && transfer.direct &&
      !transfer.directory.requires_direct()) {
    const Status refused = std::move(outcome.status);
    transfer.direct = false;
    outcome = TryRead(transfer, path);
    if (outcome.status.ok()) transfer.directory.DisableDirect(refused);
  }
  const Status& status = outcome.status;
  transfer.directory.health().Note(Health::Call::kRead,
                                   status.code() == CS_CORRUPT ? Status::Ok() : status);
  if (status.code() == CS_CORRUPT) {
    if (!SetAside(transfer, path, outcome.info, status.text())) unreadable_.Add(transfer.block);
  } else if (!status.ok() && status.code() != CS_NOT_FOUND) {
    events_.Add(CS_EVENT_WARNING, "load of " + path + ": " + status.text());
  }
  return status.code() == CS_INVALID ? CS_IO : status.code();
}

// CS_CORRUPT: what is there isn't what was stored.
ShardIo::Outcome ShardIo::TryRead(Transfer& transfer, const std::string& path) {
  const Result<Fd> opened = env_.OpenRead(path, transfer.direct);
  if (!opened.ok()) return {opened.status()};
  FileCloser file(env_, opened.value());
  const Result<FileInfo> info = env_.StatFd(file.get());
  if (!info.ok()) return {info.status()};
  Status read = ReadChecked(transfer, file.get(), info.value());
  return {std::move(read), info.value(), std::move(file)};
}

Status ShardIo::ReadChecked(Transfer& transfer, Fd file, const FileInfo& info) {
  if (!info.is_regular) return {CS_CORRUPT, "not a regular file"};
  if (info.size != file_size_) {
    return {CS_CORRUPT, std::to_string(info.size) + " bytes, not " + std::to_string(file_size_)};
  }
  const size_t tensors = transfer.tensors.size();
  std::vector<uint32_t> checksums(tensors, 0);
  const bool has_record = transfer.index + 1 == geometry_.shards();
  const std::vector<Piece> pieces = Pieces(transfer, has_record);
  const auto read_record = [&]() -> Status {
    Piece record;
    record.offset = file_size_ - kRecordSize;
    record.Add(transfer.record, kRecordSize, Piece::kNoTensor);
    return has_record ? Status::Ok() : Read(file, record);
  };

  // Where the bytes may go unchecked, the record has to say so first, and the
  // piece that it comes with is read before the others.
  const bool record_first = !MustVerify();
  bool verify = true;
  if (record_first) {
    if (Status read = has_record ? Read(file, pieces.back()) : read_record(); !read.ok())
      return read;
    if (Status right = format_.Check(transfer.block, transfer.record); !right.ok()) return right;
    verify = !format_.WrittenInThisBoot(transfer.record);
  }
  for (const Piece& piece : pieces) {
    const bool there = record_first && has_record && &piece == &pieces.back();
    if (Status read = there ? Status::Ok() : Read(file, piece); !read.ok()) return read;
    if (verify) piece.Checksum(checksums);
  }
  if (!record_first) {
    if (Status read = read_record(); !read.ok()) return read;
    if (Status right = format_.Check(transfer.block, transfer.record); !right.ok()) return right;
  }
  if (!verify) {
    verify_skipped_.fetch_add(1, std::memory_order_relaxed);
    return Status::Ok();
  }
  for (size_t i = 0; i < tensors; ++i) {
    if (checksums[i] != format_.checksum(transfer.record, transfer.index * tensors + i)) {
      return {CS_CORRUPT, "checksum of tensor " + std::to_string(i) + " of shard " +
                              std::to_string(transfer.index) + " differs"};
    }
  }
  return Status::Ok();
}

Status ShardIo::Read(Fd file, const Piece& piece) {
  std::vector<iovec> parts = piece.Vector();
  const Result<uint64_t> read = env_.ReadFull(file, parts, piece.offset);
  if (!read.ok()) return read.status();
  if (read.value() != piece.size) return {CS_CORRUPT, "it ended early"};
  return Status::Ok();
}

bool ShardIo::SetAside(Transfer& transfer, const std::string& path, const FileInfo& info,
                       const std::string& why) {
  const Result<bool> removed = transfer.directory.RemoveSame(path, info);
  if (removed.ok() && removed.value()) transfer.directory.space().Remove(info.size);
  events_.Add(CS_EVENT_WARNING, "damaged block " + path + " (" + why + ")" +
                                    (removed.ok() ? " removed" : ": " + removed.status().text()));
  return removed.ok();
}

}  // namespace cachestore
