#include "posix/directory.h"

#include <cstring>
#include <utility>

namespace cachestore {
namespace {

// Of what another process or thread can undo between two steps of ours.
constexpr int kTries = 8;

std::string Hex(const BlockId& block) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * block.size());
  for (const uint8_t byte : block) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

// Bijective and well mixed (the finaliser of splitmix64).
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// FNV-1a.
uint64_t Hash(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return hash;
}

}  // namespace

bool IsSureToEnd(uint64_t filesystem_type) {
  switch (filesystem_type) {
    case 0xef53:      // ext2, ext3, ext4
    case 0x58465342:  // xfs
    case 0x9123683e:  // btrfs
    case 0xf2f52010:  // f2fs
    case 0x2fc12fc1:  // zfs
    case 0xca451a4e:  // bcachefs
    case 0x3153464a:  // jfs
    case 0x01021994:  // tmpfs
    case 0x858458f6:  // ramfs
    case 0x794c7630:  // overlayfs, as in containers
      return true;
    default:
      return false;
  }
}

Directory::Directory(Env& env, EventRing& events, DirectoryOptions options)
    : env_(env),
      events_(events),
      options_(std::move(options)),
      base_(options_.root + "/" + options_.identity_name),
      instance_(env.UniqueName()),
      seed_(Hash(options_.root)),
      direct_(options_.direct) {}

Status Directory::Open() {
  if (Status made = env_.MakeDirectories(base_ + "/blocks"); !made.ok()) return made;
  const Result<uint64_t> type = env_.FilesystemType(base_);
  if (!type.ok()) return type.status();
  zero_copy_ = options_.zero_copy == CS_ZERO_COPY_ALWAYS ||
               (options_.zero_copy == CS_ZERO_COPY_AUTO && IsSureToEnd(type.value()));
  latest_clear_.store(ReadClear());
  Status written = MakeTemporaryDirectory();
  if (written.ok()) written = WriteManifest();
  if (!written.ok()) {
    // A full or read-only directory still serves what it has.
    events_.Add(CS_EVENT_WARNING, "nothing can be stored at present: " + written.text());
  }
  return Status::Ok();
}

void Directory::DisableDirect() {
  if (direct_.exchange(false)) {
    events_.Add(CS_EVENT_WARNING, "the filesystem of " + options_.root +
                                      " doesn't support O_DIRECT: io_direct is off for it");
  }
}

uint64_t Directory::Score(const BlockId& block) const {
  uint64_t low;
  std::memcpy(&low, block.data(), sizeof low);
  return Mix(seed_ ^ low);
}

std::string Directory::BlockPath(const BlockId& block) const {
  const std::string hex = Hex(block);
  std::string path;
  path.reserve(base_.size() + 48);
  path.append(base_).append("/blocks/").append(hex, 0, 3).append("/").append(hex);
  return path;
}

std::string Directory::NewTemporaryPath() {
  return base_ + "/tmp/" + instance_ + "/" + std::to_string(next_temporary_.fetch_add(1));
}

Status Directory::MakeTemporaryDirectory() {
  const std::lock_guard lock(mutex_);
  const std::string path = base_ + "/tmp/" + instance_;
  // A cleaner of another process may get between our steps and remove the
  // directory: a few tries are always enough.
  Status made;
  for (int tries = 0; tries < kTries; ++tries) {
    made = env_.MakeDirectories(path);
    if (!made.ok()) continue;
    if (HoldsLock(path)) return Status::Ok();  // another thread was faster
    Result<Fd> locked = env_.OpenLocked(path + "/lock", /*create=*/true);
    if (locked.ok()) {
      lock_ = FileCloser(env_, locked.value());
    } else if (locked.status().code() == CS_REFUSED || locked.status().code() == CS_NOT_FOUND) {
      made = locked.status();
    } else {
      // A filesystem without locks: cleaners can't lock either, and leave the
      // directory alone.
      return Status::Ok();
    }
  }
  return made;
}

bool Directory::HoldsLock(const std::string& path) {
  if (!lock_) return false;
  const Result<FileInfo> ours = env_.StatFd(lock_.get());
  const Result<FileInfo> there = env_.Stat(path + "/lock");
  return ours.ok() && there.ok() && ours.value().device == there.value().device &&
         ours.value().inode == there.value().inode;
}

Status Directory::Publish(const std::string& temporary, const BlockId& block, uint64_t epoch) {
  NoticeClear();
  if (epoch != this->epoch()) return env_.Unlink(temporary);  // as if before the clear
  const std::string path = BlockPath(block);
  Status moved = env_.Rename(temporary, path);
  // The fan-out directory isn't there yet, or was deleted. A clear can take it
  // away again between our steps: a few tries are always enough.
  for (int tries = 0; tries < kTries && moved.code() == CS_NOT_FOUND; ++tries) {
    const Status made = env_.MakeDirectories(path.substr(0, path.find_last_of('/')));
    if (!made.ok() && made.code() != CS_NOT_FOUND) return made;
    moved = env_.Rename(temporary, path);
  }
  // A clear is marked first and moves the blocks then: one that has missed this
  // block is noticed here.
  if (moved.ok()) NoticeClear();
  if (moved.ok() && epoch != this->epoch()) (void)env_.Unlink(path);
  if (moved.ok() || moved.code() == CS_NOT_FOUND) return moved;
  const Result<FileInfo> there = env_.Stat(path);
  if (!there.ok() || !there.value().is_directory) return moved;
  // Whoever made a directory of that name: no file could ever take its place.
  if (Status made = env_.MakeDirectories(base_ + "/trash"); !made.ok()) return made;
  const Status aside = env_.Rename(path, base_ + "/trash/" + env_.UniqueName());
  return aside.ok() ? env_.Rename(temporary, path) : aside;
}

Status Directory::WriteManifest() {
  const std::string temporary = NewTemporaryPath();
  Result<Fd> opened = env_.OpenWrite(temporary, /*direct=*/false);
  if (!opened.ok()) return opened.status();
  FileCloser file(env_, opened.value());
  std::string text = options_.manifest;
  iovec part{text.data(), text.size()};
  Status written = env_.WriteFull(file.get(), {&part, 1}, 0);
  if (written.ok()) written = file.Close();
  if (written.ok()) written = env_.Rename(temporary, base_ + "/identity.json");
  if (!written.ok()) (void)env_.Unlink(temporary);
  return written;
}

// What tells one clear from the next: a new file each time, in the place of the
// one before. Its number and time together don't come again.
uint64_t Directory::ReadClear() {
  const Result<FileInfo> mark = env_.Stat(base_ + "/cleared");
  return mark.ok() ? Mix(Mix(mark.value().inode) ^ mark.value().modified_ns) | 1 : 0;
}

void Directory::NoticeClear() {
  for (int tries = 0; tries < kTries; ++tries) {
    const uint64_t before = epoch();
    const uint64_t latest = ReadClear();
    const std::lock_guard lock(clear_mutex_);
    if (latest == latest_clear_.load()) return;
    if (before != epoch()) continue;  // one of ours came between
    latest_clear_.store(latest);
    epoch_.fetch_add(1);
    return;
  }
}

Status Directory::MarkClear() {
  epoch_.fetch_add(1);
  const std::string temporary = NewTemporaryPath() + "-cleared";
  Result<Fd> opened = env_.OpenWrite(temporary, /*direct=*/false);
  if (opened.status().code() == CS_NOT_FOUND && MakeTemporaryDirectory().ok()) {
    opened = env_.OpenWrite(temporary, /*direct=*/false);
  }
  Status marked = opened.status();
  if (opened.ok()) {
    (void)env_.Close(opened.value());
    marked = env_.Rename(temporary, base_ + "/cleared");
    if (!marked.ok()) (void)env_.Unlink(temporary);
  }
  const uint64_t latest = ReadClear();
  const std::lock_guard lock(clear_mutex_);
  latest_clear_.store(latest);
  epoch_.fetch_add(1);
  return marked;
}

Status Directory::MoveBlocksToTrash() {
  // Without a mark, as on a full disk, the clear is of this store's dumps only.
  if (const Status marked = MarkClear(); !marked.ok()) {
    events_.Add(CS_EVENT_WARNING, "clear: other processes aren't told: " + marked.text());
  }
  Status moved;
  for (int tries = 0; tries < kTries; ++tries) {
    if (Status made = env_.MakeDirectories(base_ + "/trash"); !made.ok()) return made;
    moved = env_.Rename(base_ + "/blocks", base_ + "/trash/" + env_.UniqueName());
    if (moved.code() != CS_NOT_FOUND) return moved;
    // Which of the two isn't there?
    if (env_.Stat(base_ + "/blocks").status().code() == CS_NOT_FOUND) return Status::Ok();
  }
  return moved;
}

void Directory::RemoveTrash(const std::function<bool()>& stop) {
  // What is in trash/, not trash/ itself: a clear may be moving blocks there.
  const Result<std::vector<std::string>> cleared = env_.List(base_ + "/trash");
  if (cleared.ok()) {
    for (const std::string& name : cleared.value()) {
      const Status removed = env_.RemoveTree(base_ + "/trash/" + name, stop);
      if (removed.code() == CS_CLOSED) return;
      if (!removed.ok()) {
        events_.Add(CS_EVENT_WARNING, "removing cleared blocks: " + removed.text());
      }
    }
  }
  const Result<std::vector<std::string>> instances = env_.List(base_ + "/tmp");
  if (!instances.ok()) return;
  for (const std::string& instance : instances.value()) {
    if (instance == instance_) continue;
    const std::string path = base_ + "/tmp/" + instance;
    // Whoever gets the lock has proof that the writer is gone. A directory
    // without a lock file is one just being made, or was left by a maker that
    // died there.
    Result<Fd> locked = env_.OpenLocked(path + "/lock", /*create=*/false);
    if (locked.status().code() == CS_NOT_FOUND) {
      // An empty one goes: its maker makes it again. A power cut can leave files
      // without the lock's name: who makes that anew has the same proof.
      if (env_.RemoveDirectory(path).ok()) continue;
      locked = env_.OpenLocked(path + "/lock", /*create=*/true);
    }
    if (!locked.ok()) continue;
    const FileCloser holder(env_, locked.value());
    if (!RemoveInstance(path, stop).ok()) continue;
    events_.Add(CS_EVENT_INFO, "removed what a store that is gone was writing: " + path);
  }
}

// The lock file goes last: should this end half-way, whoever cleans up next
// still has the proof that it may.
Status Directory::RemoveInstance(const std::string& path, const std::function<bool()>& stop) {
  const Result<std::vector<std::string>> names = env_.List(path);
  if (!names.ok()) return names.status();
  for (const std::string& name : names.value()) {
    if (stop()) return {CS_CLOSED, "stopped while removing " + path};
    if (name == "lock") continue;
    const Status removed = env_.Unlink(path + "/" + name);
    if (!removed.ok() && removed.code() != CS_NOT_FOUND) return removed;
  }
  return env_.RemoveTree(path, stop);
}

void Directory::Close() {
  const std::lock_guard lock(mutex_);
  (void)RemoveInstance(base_ + "/tmp/" + instance_, [] { return false; });
  lock_.Reset();
}

}  // namespace cachestore
