// Directory's block files: how they come to their names, and go.
#include <cerrno>
#include <utility>

#include "posix/directory.h"

namespace cachestore {

Result<bool> Directory::Publish(const std::string& temporary, const BlockId& block, uint64_t epoch,
                                bool is_unreadable) {
  const std::string path = BlockPath(block);
  const size_t slash = path.find_last_of('/');
  const auto drop = [&]() -> Result<bool> {
    if (Status removed = env_.Unlink(temporary); !removed.ok()) return removed;
    return false;
  };
  Status moved;
  // Others may clear, store the block, or undo a step of ours: a few tries are always enough.
  for (int tries = 0; tries < kTries; ++tries) {
    // Opened before the look for a clear, which is marked before it moves the blocks: one
    // that the look misses takes this directory away, and the file with it.
    const Result<Fd> opened = OpenFanOut(path.substr(0, slash));
    moved = opened.status();
    if (moved.code() == CS_NOT_FOUND) continue;
    if (!moved.ok()) return moved;
    const FileCloser directory(env_, opened.value());
    // Who can't look may have missed a clear.
    if (Status looked = NoticeClear(); !looked.ok()) return looked;
    if (epoch != this->epoch()) return drop();  // as if before the clear
    moved = env_.RenameNew(temporary, directory.get(), path.substr(slash + 1));
    if (moved.ok()) return true;
    if (moved.code() == CS_NOT_FOUND) continue;  // the directory was removed
    if (moved.error() != EEXIST) return moved;
    const Result<FileInfo> there = env_.Stat(path);
    if (there.status().code() == CS_NOT_FOUND) continue;
    if (!there.ok()) return there.status();
    if (there.value().is_regular && !is_unreadable) {
      const Result<FileInfo> written = env_.Stat(temporary);
      if (!written.ok()) return written.status();
      if (written.value().size == there.value().size) return drop();
    }
    // It may have come after a clear that came after the look above.
    if (Status looked = NoticeClear(); !looked.ok()) return looked;
    if (epoch != this->epoch()) return drop();
    if (Status gone = MakeWay(path, there.value()); !gone.ok()) return gone;
  }
  return moved;
}

Result<Fd> Directory::OpenFanOut(const std::string& path) {
  Result<Fd> opened = env_.OpenDirectory(path);
  if (opened.status().code() != CS_NOT_FOUND) return opened;
  if (Status made = env_.MakeDirectories(path); !made.ok()) return made;
  return env_.OpenDirectory(path);
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
  if (Status removed = env_.Unlink(path); !removed.ok()) return removed;
  return true;
}

}  // namespace cachestore
