// Directory's block files: how they come to their names, and go.
#include <cerrno>
#include <utility>

#include "posix/directory.h"

namespace cachestore {

Result<bool> Directory::Publish(const std::string& temporary, const BlockId& block, uint64_t epoch,
                                bool is_unreadable) {
  const auto drop = [&]() -> Result<bool> {
    if (Status removed = env_.Unlink(temporary); !removed.ok()) return removed;
    return false;
  };
  const uint64_t mark_time = mark_time_ns_.load();
  // Who can't look may have missed a clear.
  if (Status looked = NoticeClear(); !looked.ok()) return looked;
  if (epoch != this->epoch()) return drop();              // as if before the clear
  const Result<FileInfo> written = env_.Stat(temporary);  // to know it again
  if (!written.ok()) return written.status();
  // It comes after the mark, as the epoch says, and was written in the same tick of the
  // clock. A failure makes it absent for some seconds.
  if (PrecedesClear(written.value())) (void)env_.SetModified(temporary, mark_time + 1);
  const std::string path = BlockPath(block);
  Status moved;
  // Others may store the block, or undo a step of ours: a few tries are always enough.
  for (int tries = 0; tries < kTries; ++tries) {
    moved = env_.RenameNew(temporary, path);
    if (moved.code() == CS_NOT_FOUND) {
      // The fan-out directory isn't there yet, or was deleted or cleared.
      const Status made = env_.MakeDirectories(path.substr(0, path.find_last_of('/')));
      if (!made.ok() && made.code() != CS_NOT_FOUND) return made;
      continue;
    }
    if (moved.error() != EEXIST) break;
    const Result<FileInfo> there = env_.Stat(path);
    if (there.status().code() == CS_NOT_FOUND) continue;
    if (!there.ok()) return there.status();
    const bool is_block = there.value().is_regular && there.value().size == written.value().size;
    if (is_block && !is_unreadable && !PrecedesClear(there.value())) return drop();
    // It may have come after a clear that came after the look above.
    if (Status looked = NoticeClear(); !looked.ok()) return looked;
    if (epoch != this->epoch()) return drop();
    if (Status gone = MakeWay(path, there.value()); !gone.ok()) return gone;
  }
  if (!moved.ok()) return moved;
  // A clear is marked first and moves the blocks then: one that has missed this
  // block is noticed here.
  Status looked = NoticeClear();
  if (looked.ok() && epoch == this->epoch()) return true;
  (void)RemoveSame(path, written.value());
  if (!looked.ok()) return looked;
  return false;
}

Status Directory::MakeWay(const std::string& path, const FileInfo& info) {
  if (!info.is_directory) return RemoveSame(path, info).status();
  // Whoever made a directory of that name: no file could ever take its place.
  if (Status made = MakeTrash(); !made.ok()) return made;
  return env_.Rename(path, base_ + "/trash/" + env_.UniqueName());
}

Result<bool> Directory::RemoveSame(const std::string& path, const FileInfo& info) {
  const Result<FileInfo> there = env_.Stat(path);
  if (!there.ok() || !there.value().IsSameFile(info)) return false;
  // Another file may take its name meanwhile. So it gets a name that nobody else uses,
  // and is looked at there.
  const std::string taken = NewTemporaryPath() + "-taken";
  const Status moved = WriteTemporary([&] { return env_.Rename(path, taken); });
  if (moved.code() == CS_NOT_FOUND) return false;
  if (!moved.ok()) {  // as on a full disk
    if (Status removed = env_.Unlink(path); !removed.ok()) return removed;
    return true;
  }
  const Result<FileInfo> what = env_.Stat(taken);
  const bool is_same = what.ok() && what.value().IsSameFile(info);
  if (!is_same && env_.RenameNew(taken, path).ok()) return false;
  if (Status removed = env_.Unlink(taken); !removed.ok()) return removed;
  return is_same;
}

}  // namespace cachestore
