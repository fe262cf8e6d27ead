// Directory's clears.
#include <utility>

#include "base/mix.h"
#include "posix/directory.h"

namespace cachestore {

// What tells one clear from the next: a new file each time, in the place of the
// one before. Its number and time together don't come again.
Result<Directory::Mark> Directory::ReadMark() {
  const Result<FileInfo> mark = env_.Stat(base_ + "/cleared");
  if (mark.ok()) {
    const uint64_t time = mark.value().modified_ns;
    return Mark{Mix(Mix(mark.value().inode) ^ time) | 1, time};
  }
  if (mark.status().code() != CS_NOT_FOUND) return mark.status();
  return Mark{};
}

Status Directory::NoticeClear() {
  for (int tries = 0; tries < kTries; ++tries) {
    const uint64_t before = epoch();
    const Result<Mark> mark = ReadMark();
    if (!mark.ok()) {
      health().Note(Health::Call::kRead, mark.status());
      return mark.status();
    }
    const std::lock_guard lock(root_->clear_mutex);
    if (mark.value().clear == latest_clear_.load()) return Status::Ok();
    if (before != epoch()) continue;  // one of ours came between
    latest_clear_.store(mark.value().clear);
    epoch_.fetch_add(1);
    break;
  }
  return Status::Ok();
}

Status Directory::MarkClear() {
  epoch_.fetch_add(1);
  const std::string temporary = NewTemporaryPath() + "-cleared";
  Status marked = WriteTemporary([&] { return ReplaceMark(temporary); });
  const Result<Mark> mark = ReadMark();
  const std::lock_guard lock(root_->clear_mutex);
  if (mark.ok()) latest_clear_.store(mark.value().clear);
  epoch_.fetch_add(1);
  return marked;
}

// Later than the mark before it, whatever the clock does.
Status Directory::ReplaceMark(const std::string& temporary) {
  return env_.ReplaceFile(temporary, base_ + "/cleared", "", [&] {
    const Result<Mark> before = ReadMark();
    const Result<FileInfo> made = env_.Stat(temporary);
    const bool is_later =
        !before.ok() || !made.ok() || made.value().modified_ns > before.value().time_ns;
    return is_later ? Status::Ok() : env_.SetModified(temporary, before.value().time_ns + 1);
  });
}

Status Directory::MakeTrash() {
  const std::string path = base_ + "/trash";
  if (Status made = env_.MakeDirectories(path); !made.ok()) return made;
  const Result<FileInfo> there = env_.Stat(path);
  if (!there.ok() || there.value().is_directory) return there.status();
  // A link to a directory: nothing is moved out of here.
  if (Status removed = env_.Unlink(path); !removed.ok()) return removed;
  return env_.MakeDirectories(path);
}

Status Directory::Clear() {
  const auto is_out = [&] { return health().use() == Health::Use::kOut; };
  if (!is_out()) {
    // It may have failed meanwhile, and this with it.
    if (Status moved = MoveBlocksToTrash(); moved.ok() || !is_out()) return moved;
  }
  if (!OweClear()) return MoveBlocksToTrash();  // brought back meanwhile
  return {CS_IO, options_.root + " is out of use: it is cleared before it is used again"};
}

bool Directory::OweClear() {
  const std::lock_guard lock(root_->clear_mutex);
  if (health().use() != Health::Use::kOut) return false;
  ++clears_owed_;
  return true;
}

Status Directory::MoveBlocksToTrash() {
  if (const Result<FileInfo> base = env_.Stat(base_); base.ok() && !base.value().is_directory) {
    return {CS_INVALID, base_ + " is a symbolic link: what is behind it isn't cleared"};
  }
  // Without a mark, as on a full disk, the clear is of this store's dumps only.
  if (const Status marked = MarkClear(); !marked.ok()) {
    events_.Add(CS_EVENT_WARNING, "clear: other processes aren't told: " + marked.text());
  }
  Status moved;
  for (int tries = 0; tries < kTries; ++tries) {
    if (Status made = MakeTrash(); !made.ok() && made.code() != CS_NOT_FOUND) return made;
    moved = env_.Rename(base_ + "/blocks", base_ + "/trash/" + env_.UniqueName());
    owes_sync_.store(true);
    if (moved.code() != CS_NOT_FOUND) return moved;
    // Which of the two isn't there?
    if (env_.Stat(base_ + "/blocks").status().code() == CS_NOT_FOUND) return Status::Ok();
  }
  return moved;
}

}  // namespace cachestore
