// Directory: one storage backend directory as one identity sees it, and where
// everything lies in it (docs/format.md):
//
//   <root>/<identity>/identity.json       what is kept here, for people
//   <root>/<identity>/blocks/abc/abc...   block files, by the block id's hex
//   <root>/<identity>/tmp/<instance>/     files being written by one store;
//                            .../lock     locked for as long as it lives
//   <root>/<identity>/trash/              cleared blocks, being removed
//   <root>/<identity>/cleared             an empty file, new with each clear
//
// Thread-safe.
#ifndef CACHESTORE_POSIX_DIRECTORY_H_
#define CACHESTORE_POSIX_DIRECTORY_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "base/env.h"
#include "base/event_ring.h"
#include "posix/root.h"
#include "tier/geometry.h"

namespace cachestore {

// Whether I/O on a filesystem is sure to end by itself: the local ones, by
// statfs type. On the others (network, FUSE, unknown) it may hang for ever.
bool IsSureToEnd(uint64_t filesystem_type);

struct DirectoryOptions {
  std::string root;  // absolute, no trailing slash
  std::string identity_name;
  std::string manifest;
  cs_direct direct = CS_DIRECT_OFF;
  cs_zero_copy zero_copy = CS_ZERO_COPY_AUTO;
  SpaceLimits limits = {};
};

class Directory {
 public:
  // `root`: shared with other pools' directories there; null: its own.
  Directory(Env& env, EventRing& events, DirectoryOptions options,
            std::shared_ptr<Root> root = nullptr);

  // Makes what is missing and writes the manifest. A directory that can only
  // be read is no error, unless this identity has nothing there; one that can't
  // do O_DIRECT is, where that is required.
  Status Open();
  // Tries whether what was found to be wrong is over, and says so to Health;
  // does what opening and clearing have left to do.
  void Probe();
  // The same for all directories that share a root: it is as good as the worst.
  static void Probe(std::span<Directory* const> directories);
  Health& health() { return root_->health; }
  const Health& health() const { return root_->health; }
  // The root itself, whatever name it is given by.
  Result<FileInfo> Place() { return env_.Stat(options_.root + "/."); }

  const std::string& root() const { return options_.root; }
  // The name of this store's directory in tmp/.
  const std::string& instance() const { return root_->instance; }
  Space& space() { return root_->space; }
  // Lets whoever collects know what this store has added and removed.
  Status WriteChanges(const SpaceChanges& changes);
  // I/O may use the caller's memory and the caller's thread.
  bool zero_copy() const { return zero_copy_.load(std::memory_order_relaxed); }
  // Files are opened with O_DIRECT.
  bool direct() const { return root_->direct.load(std::memory_order_relaxed); }
  // An error is better than I/O without.
  bool requires_direct() const { return options_.direct == CS_DIRECT_REQUIRED; }
  // The filesystem doesn't do O_DIRECT: buffered from now on, said once.
  void DisableDirect(const Status& why);
  // How much this directory wants a block: the highest wins (rendezvous
  // hashing), so that adding a directory moves only what it gets.
  uint64_t Score(const BlockId& block) const;

  std::string BlockPath(const BlockId& block) const;
  // A path that nobody else writes. Its directory may have been deleted:
  // after CS_NOT_FOUND, MakeTemporaryDirectory and try again.
  std::string NewTemporaryPath();
  Status MakeTemporaryDirectory();
  // Moves a whole file to its final name, making the fan-out directory. False: it is
  // removed instead, as what was accepted in an earlier epoch was cleared, or as the block
  // is there already (`is_unreadable`: what is there is replaced). One that a clear
  // overtakes is cleared with the directory that it was about to go to.
  Result<bool> Publish(const std::string& temporary, const BlockId& block, uint64_t epoch,
                       bool is_unreadable = false);
  // Changes with each clear that this store has made or noticed.
  uint64_t epoch() const { return epoch_.load(); }
  // Looks whether another process, or another host, has cleared: what is
  // accepted from now on comes after that.
  // An error: it couldn't look.
  Status NoticeClear();
  // Of the latest clear that was made or noticed, in this or any process; 0:
  // none.
  uint64_t latest_clear() const { return latest_clear_.load(); }

  // Makes all blocks disappear at once; RemoveTrash then frees their space. While
  // the directory is out of use it is an error, and done before that is over.
  Status Clear();
  // Removes cleared blocks and the temporary files of stores that are gone
  // (their lock is free). `stop` is asked between files. Only then is a clear
  // sure to outlast a power cut.
  void RemoveTrash(const std::function<bool()>& stop);
  // Removes a file, unless another one has taken its name: true if it did. (One that
  // takes it at that moment is removed.)
  Result<bool> RemoveSame(const std::string& path, const FileInfo& info);
  // Removes this store's own temporary directory.
  void Close();

 private:
  // Of what another process or thread can undo between two steps of ours.
  static constexpr int kTries = 8;

  Status OpenOnce(bool last);  // with open_mutex_ held
  struct Tried {
    Status read;
    Status written;
  };
  Tried TryUse();
  Status TryWriting();
  Status CheckDirect(uint64_t filesystem_type);
  Status WriteTemporary(const std::function<Status()>& write);
  Status WriteManifest();
  Result<Fd> OpenFanOut(const std::string& path);
  Status MakeWay(const std::string& path, const FileInfo& info);
  bool OweClear();
  Status MoveBlocksToTrash();
  Status MarkClear();
  struct Mark {
    uint64_t clear = 0;    // tells one clear from the next; 0: none
    uint64_t time_ns = 0;  // when it was made, as files have it
  };
  Result<Mark> ReadMark();
  Status ReplaceMark(const std::string& temporary);
  Status MakeTrash();
  bool HoldsLock(const std::string& path);  // with mutex_ held
  Status RemoveInstance(const std::string& path, const std::function<bool()>& stop);

  Env& env_;
  EventRing& events_;
  const DirectoryOptions options_;
  const std::string base_;  // <root>/<identity>
  const uint64_t seed_;
  const std::shared_ptr<Root> root_;
  std::atomic<bool> zero_copy_{false};  // set by Open, which may come later
  std::atomic<bool> owes_sync_{false};
  std::atomic<bool> has_manifest_{false};  // has written it once
  std::atomic<uint64_t> next_temporary_{0};
  std::atomic<uint64_t> epoch_{0};
  // Changed with Root::clear_mutex held, and epoch_ after it.
  std::atomic<uint64_t> latest_clear_{0};
  // Guarded by Root::clear_mutex, with which a probe brings the directory back. So one that
  // is in use owes nothing, and what was stored before a clear doesn't outlast it: it
  // lies in `blocks` when that is moved, or goes to where that is by then.
  uint64_t clears_owed_ = 0;  // in all
  uint64_t clears_made_ = 0;  // of those

  std::mutex open_mutex_;  // held while it is opened
  bool opened_ = false;    // guarded by open_mutex_

  std::mutex mutex_;  // guards the lock file; held while tmp/<instance> is made
  FileCloser lock_;
};

}  // namespace cachestore

#endif  // CACHESTORE_POSIX_DIRECTORY_H_
