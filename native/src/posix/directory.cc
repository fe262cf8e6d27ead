#include "posix/directory.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/mix.h"
#include "posix/block_path.h"
#include "posix/collector_state.h"
#include "posix/direct_io.h"

namespace cachestore {
namespace {

// FNV-1a.
uint64_t Hash(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return hash;
}

// As on NFS without a lock daemon: nobody has locks there, cleaners neither.
bool HasNoLocks(const Status& status) {
  return status.error() == ENOLCK || status.error() == ENOSYS || status.error() == EOPNOTSUPP;
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

Directory::Directory(Env& env, EventRing& events, DirectoryOptions options,
                     std::shared_ptr<Root> root)
    : env_(env),
      events_(events),
      options_(std::move(options)),
      base_(options_.root + "/" + options_.identity_name),
      seed_(Hash(options_.root)),
      root_(root != nullptr
                ? std::move(root)
                : std::make_shared<Root>(env, events, options_.root, options_.limits,
                                         /*use_direct=*/options_.direct != CS_DIRECT_OFF)) {}

Status Directory::WriteChanges(const SpaceChanges& changes) {
  uint8_t bytes[kSpaceChangesSize];
  EncodeSpaceChanges(changes, bytes);
  iovec part{bytes, sizeof bytes};
  const std::lock_guard lock(mutex_);
  if (!lock_) return {CS_NOT_FOUND, "no lock file in " + base_ + "/tmp/" + instance()};
  return env_.WriteFull(lock_.get(), {&part, 1}, 0);
}

Status Directory::Open() {
  const std::lock_guard lock(open_mutex_);
  if (opened_) return Status::Ok();
  Status status;
  // Who removes an identity that nobody has open may get between our steps.
  for (int tries = 0; tries < kTries; ++tries) {
    status = OpenOnce(/*last=*/tries + 1 == kTries);
    if (status.code() != CS_NOT_FOUND) break;
  }
  opened_ = status.ok();
  return status;
}

Status Directory::OpenOnce(bool last) {
  const Status made = env_.MakeDirectories(base_ + "/blocks");
  if (!made.ok() && !SaysReadOnly(made)) return made;
  const Result<uint64_t> type = env_.FilesystemType(made.ok() ? base_ : options_.root);
  if (!type.ok()) return made.ok() ? type.status() : made;
  zero_copy_.store(options_.zero_copy == CS_ZERO_COPY_ALWAYS ||
                   (options_.zero_copy == CS_ZERO_COPY_AUTO && IsSureToEnd(type.value())));
  if (!made.ok()) {
    // Nothing of this identity is there, or ever was.
    if (health().use() == Health::Use::kFull) health().StartAs(Health::Use::kReadOnly, made);
    return made;
  }
  const Result<FileInfo> base = env_.Stat(base_);
  if (!base.ok()) return base.status();
  if (!base.value().is_directory) {
    return {CS_INVALID, base_ + " is a symbolic link: what is removed would lie elsewhere"};
  }
  if (const Result<Mark> mark = ReadMark(); mark.ok()) {
    const std::lock_guard lock(root_->clear_mutex);
    latest_clear_.store(mark.value().clear);
  }
  Status written = MakeTemporaryDirectory();
  if (written.ok()) written = WriteManifest();
  // Removed meanwhile; or no directory is in its place, as the last try shows.
  if (written.code() == CS_NOT_FOUND && !last) return written;
  if (!written.ok()) {
    // A full or read-only directory still serves what it has.
    events_.Add(CS_EVENT_WARNING, "nothing can be stored at present: " + written.text());
    health().Note(Health::Call::kWrite, written);
    if (SaysReadOnly(written) && health().use() == Health::Use::kFull) {
      health().StartAs(Health::Use::kReadOnly, written);
    }
    return Status::Ok();
  }
  return direct() ? CheckDirect(type.value()) : Status::Ok();
}

// Where it can't be tried, as on a full disk, the first transfer tells.
Status Directory::CheckDirect(uint64_t filesystem_type) {
  const Status tried = TryDirect(env_, NewTemporaryPath());
  if (tried.code() != CS_INVALID) return Status::Ok();
  if (!requires_direct()) {
    DisableDirect(tried);
    return Status::Ok();
  }
  char type[20];
  std::snprintf(type, sizeof type, "0x%llx", static_cast<unsigned long long>(filesystem_type));
  return {CS_INVALID, "io_direct is required, and the filesystem of " + options_.root + " (type " +
                          type + ") doesn't support O_DIRECT: " + tried.text()};
}

void Directory::Probe() {
  Directory* const all[] = {this};
  Probe(all);
}

void Directory::Probe(std::span<Directory* const> directories) {
  Tried worst;
  for (Directory* const directory : directories) {
    Tried tried = directory->TryUse();
    if (worst.read.ok()) worst.read = std::move(tried.read);
    if (worst.written.ok()) worst.written = std::move(tried.written);
  }
  Root& root = *directories.front()->root_;
  for (bool settled = false; !settled;) {
    std::unique_lock lock(root.clear_mutex);
    settled = true;
    for (Directory* const directory : directories) {
      const uint64_t owed = directory->clears_owed_;
      if (!worst.read.ok() || owed == directory->clears_made_) continue;
      settled = false;
      lock.unlock();
      worst.read = directory->MoveBlocksToTrash();
      lock.lock();
      if (worst.read.ok()) directory->clears_made_ = owed;  // more may be owed by now
    }
    if (settled) root.health.NoteProbe(worst.read, worst.written, Health::Clock::now());
  }
  if (!root.health.full()) root.space.NoteRoom();
}

Directory::Tried Directory::TryUse() {
  Status read = Open();
  Status written = read;
  if (read.ok() || SaysReadOnly(read)) {
    const Status blocks = env_.Stat(base_ + "/blocks").status();
    read = blocks.code() == CS_NOT_FOUND && blocks.error() != ESTALE ? Status::Ok() : blocks;
  }
  if (read.ok() && written.ok()) written = TryWriting();
  return {read, written};
}

// What a dump does, with a small file.
Status Directory::TryWriting() {
  const std::string path = NewTemporaryPath() + "-probe";
  const std::string text(4096, 'p');
  Status status = WriteTemporary([&] { return env_.WriteText(path, text); });
  if (status.ok()) {
    const Result<std::string> read = env_.ReadText(path, text.size());
    status = read.status();
    if (read.ok() && read.value() != text) status = {CS_IO, path + " isn't what was written"};
  }
  const Status removed = env_.Unlink(path);
  return status.ok() ? removed : status;
}

// Calls `write` again if the directory of temporary files isn't there.
Status Directory::WriteTemporary(const std::function<Status()>& write) {
  const Status written = write();
  if (written.code() != CS_NOT_FOUND) return written;
  if (Status made = MakeTemporaryDirectory(); !made.ok()) return made;
  return write();
}

void Directory::DisableDirect(const Status& why) {
  if (root_->direct.exchange(false)) {
    events_.Add(CS_EVENT_WARNING, "the filesystem of " + options_.root +
                                      " doesn't support O_DIRECT: io_direct is off for it (" +
                                      why.text() + ")");
  }
}

uint64_t Directory::Score(const BlockId& block) const {
  uint64_t low;
  std::memcpy(&low, block.data(), sizeof low);
  return Mix(seed_ ^ low);
}

std::string Directory::BlockPath(const BlockId& block) const {
  const std::string hex = HexOf(block);
  std::string path;
  path.reserve(base_.size() + 48);
  path.append(base_).append("/blocks/").append(hex, 0, 3).append("/").append(hex);
  return path;
}

std::string Directory::NewTemporaryPath() {
  return base_ + "/tmp/" + instance() + "/" + std::to_string(next_temporary_.fetch_add(1));
}

Status Directory::MakeTemporaryDirectory() {
  const std::lock_guard lock(mutex_);
  const std::string path = base_ + "/tmp/" + instance();
  // A cleaner of another process may get between our steps and remove the
  // directory: a few tries are always enough.
  Status made;
  for (int tries = 0; tries < kTries; ++tries) {
    made = env_.MakeDirectories(path);
    if (made.code() == CS_NOT_FOUND) continue;
    if (!made.ok()) return made;
    if (HoldsLock(path)) break;  // taken by the step before, or by another thread
    Result<Fd> locked = env_.OpenLocked(path + "/lock", /*create=*/true);
    if (locked.ok()) {
      lock_ = FileCloser(env_, locked.value());
    } else if (HasNoLocks(locked.status())) {
      break;  // cleaners can't lock either, and leave the directory alone
    } else {
      made = locked.status();
      if (made.code() != CS_REFUSED && made.code() != CS_NOT_FOUND) return made;
    }
  }
  // The whole identity was deleted, and its manifest with it.
  if (made.ok() && has_manifest_.load() &&
      env_.Stat(base_ + "/identity.json").status().code() == CS_NOT_FOUND) {
    (void)WriteManifest();
  }
  return made;
}

bool Directory::HoldsLock(const std::string& path) {
  if (!lock_) return false;
  const Result<bool> held = env_.Names(path + "/lock", lock_.get());
  return held.ok() && held.value();
}

Status Directory::WriteManifest() {
  Status written =
      env_.ReplaceFile(NewTemporaryPath(), base_ + "/identity.json", options_.manifest);
  if (written.ok()) has_manifest_.store(true);
  return written;
}

void Directory::RemoveTrash(const std::function<bool()>& stop) {
  if (owes_sync_.exchange(false)) (void)env_.SyncDirectory(base_);
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
    if (instance == root_->instance) continue;
    const std::string path = base_ + "/tmp/" + instance;
    // Whoever gets the lock has proof that the writer is gone. A directory
    // without a lock file is one just being made, or was left by a maker that
    // died there.
    Result<Fd> locked = env_.OpenLocked(path + "/lock", /*create=*/false);
    if (locked.status().code() == CS_NOT_FOUND) {
      // An empty one goes: its maker makes it again. A power cut can leave
      // files without the lock's name: who makes that anew has the same proof.
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
  (void)RemoveInstance(base_ + "/tmp/" + instance(), [] { return false; });
  lock_.Reset();
}

}  // namespace cachestore
