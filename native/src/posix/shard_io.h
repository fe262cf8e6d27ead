// ShardIo: what a worker does for one shard: reads it from its block file and
// checks it, or writes it and, with the block's last shard, publishes the
// block. Says what a block file is; who calls it when is the tier's.
//
// Thread-safe; every call works on its own shard and its worker's Scratch.
#ifndef CACHESTORE_POSIX_SHARD_IO_H_
#define CACHESTORE_POSIX_SHARD_IO_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/env.h"
#include "base/event_ring.h"
#include "base/worker_pool.h"
#include "posix/directory.h"
#include "posix/record.h"
#include "posix/space.h"
#include "posix/unreadable.h"
#include "tier/geometry.h"
#include "tier/request.h"

namespace cachestore {

// One block of a dump request. Its shards are written by different workers;
// whoever comes last publishes it. No worker waits for another.
struct BlockWrite {
  static constexpr uint64_t kCleared = UINT64_MAX;  // an epoch that never is

  std::vector<size_t> shards;      // where they stand in the request
  Directory* directory = nullptr;  // where it goes; null: none takes it now
  std::string temporary;
  uint64_t epoch = 0;    // of its directory, when it was accepted
  std::once_flag asked;  // for room, by the first shard that is written
  Reservation room;
  std::vector<uint32_t> checksums;   // each shard's worker writes its own
  std::atomic<size_t> remaining{0};  // acq_rel: its end makes `checksums` visible
  std::atomic<bool> existing{false};
  std::atomic<bool> opened{false};
  std::atomic<uint64_t> inode{0};    // of `temporary`, where several shards open it
  std::atomic<Code> failure{CS_OK};  // the first one
};

// The blocks of one dump request; block_of[i] is that of shard i.
struct BlockWrites {
  std::vector<std::unique_ptr<BlockWrite>> blocks;
  std::vector<BlockWrite*> block_of;
};

// The directories that a block may lie in, best first. Nearly always one.
class Places {
 public:
  void Add(Directory& directory) {
    if (first_ == nullptr) {
      first_ = &directory;
    } else {
      others_.push_back(&directory);
    }
  }
  size_t size() const { return first_ == nullptr ? 0 : 1 + others_.size(); }
  Directory& operator[](size_t i) const { return i == 0 ? *first_ : *others_[i - 1]; }

 private:
  Directory* first_ = nullptr;
  std::vector<Directory*> others_;
};

class ShardIo {
 public:
  ShardIo(Env& env, EventRing& events, Geometry geometry, RecordFormat format, cs_verify verify,
          std::vector<std::shared_ptr<Directory>> directories);

  const Geometry& geometry() const { return geometry_; }
  std::span<const std::shared_ptr<Directory>> directories() const { return directories_; }
  // The one that wants a block most, whatever it is good for.
  Directory& DirectoryOf(const BlockId& block) const;
  // Where a block is looked for: up to and with the first directory in full use,
  // without those out of use.
  Places PlacesOf(const BlockId& block) const;

  // Whether a whole block file lies there: one system call, but where directories
  // are not in full use. `request`, if it may be given up: it is told where its
  // shard looks, as by all that is done here for a request.
  bool Exists(const BlockId& block, Request* request = nullptr, size_t shard = 0) const;
  // Groups a dump request by block; CS_INVALID unless each has all its shards.
  // No I/O; the epochs are the caller's to note.
  Result<std::shared_ptr<BlockWrites>> PlanDump(const Batch& batch) const;

  void Load(Request& request, size_t shard, WorkerPool::Scratch& scratch);
  void Dump(Request& request, size_t shard, WorkerPool::Scratch& scratch);

  // For a dump's job that will never run: its block fails with `code`. No I/O.
  void DropDump(Request& request, size_t shard, Code code);

  // Shards whose bytes a load took unchecked.
  uint64_t verify_skipped() const { return verify_skipped_.load(std::memory_order_relaxed); }
  // Shards that a dump found stored already.
  uint64_t existing() const { return existing_.load(std::memory_order_relaxed); }

 private:
  struct Transfer;
  struct Piece;
  struct How {
    bool direct;     // O_DIRECT
    bool zero_copy;  // no buffer of ours between
  };

  // How an attempt to read ended, and what it found.
  struct Outcome {
    Status status;
    FileInfo info = {};
    FileCloser file = {};  // open: no other file gets its number
  };

  bool MustVerify();
  Code ReadAndCheck(Transfer& transfer);
  Outcome TryRead(Transfer& transfer, const std::string& path);
  Status ReadChecked(Transfer& transfer, Fd file, const FileInfo& info);
  Status Read(Fd file, const Piece& piece);
  std::vector<Piece> Pieces(const Transfer& transfer, bool with_record) const;
  // False: it is still there.
  bool SetAside(Transfer& transfer, const std::string& path, const FileInfo& info,
                const std::string& why);

  void WriteFailed(Directory& directory, BlockWrite& block, const Status& why);
  bool HasRoom(Directory& directory, BlockWrite& block);
  void WriteShard(Request& request, size_t shard, Directory& directory, BlockWrite& block, How how,
                  WorkerPool::Scratch& scratch);
  template <typename Attempt>
  Status WriteDirectIfPossible(Directory& directory, bool direct, Attempt write);
  Status Write(const Transfer& transfer, BlockWrite& block);
  Result<FileCloser> OpenTemporary(Directory& directory, BlockWrite& block, bool direct);
  void EndBlock(Request& request, size_t shard, BlockWrite& block, WorkerPool::Scratch& scratch);
  void WriteRecord(const BlockId& id, Directory& directory, BlockWrite& block,
                   WorkerPool::Scratch& scratch);
  bool IsTheOnlyTemporary(BlockWrite& block, Fd file);
  void RemoveTemporary(const BlockWrite& block);

  bool IsAligned(std::span<uint8_t* const> tensors) const;

  Env& env_;
  EventRing& events_;
  const Geometry geometry_;
  const RecordFormat format_;
  const cs_verify verify_;
  const uint64_t payload_;  // of a shard
  const uint64_t stride_;   // from one shard to the next in a file
  const uint64_t file_size_;
  const std::vector<std::shared_ptr<Directory>> directories_;
  Unreadable unreadable_;
  std::atomic<uint64_t> existing_{0};
  std::atomic<uint64_t> sampled_{0};  // loads under CS_VERIFY_SAMPLE
  std::atomic<uint64_t> verify_skipped_{0};
};

}  // namespace cachestore

#endif  // CACHESTORE_POSIX_SHARD_IO_H_
