#include "fault_env.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <thread>

#include "harness.h"

namespace cachestore::test {
namespace {

// The parts' first `bytes` bytes.
std::vector<iovec> Cut(std::span<const iovec> parts, uint64_t bytes) {
  std::vector<iovec> cut;
  for (const iovec& part : parts) {
    if (bytes == 0) break;
    cut.push_back({part.iov_base, std::min<uint64_t>(part.iov_len, bytes)});
    bytes -= cut.back().iov_len;
  }
  return cut;
}

size_t EntriesOf(const char* path) {
  namespace fs = std::filesystem;
  return static_cast<size_t>(std::distance(fs::directory_iterator(path), {}));
}

Status StatusOf(const Status& status) { return status; }
template <typename T>
Status StatusOf(const Result<T>& result) {
  return result.status();
}

}  // namespace

void Gate::Pass() {
  std::unique_lock lock(mutex_);
  ++arrived_;
  changed_.notify_all();
  if (!changed_.wait_for(lock, 2 * kWaitBound, [&] { return open_; })) {
    Fail(__FILE__, __LINE__, "a gate was never opened");
  }
}

void Gate::Open() {
  const std::lock_guard lock(mutex_);
  open_ = true;
  changed_.notify_all();
}

bool Gate::WaitArrived(size_t n) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, kWaitBound, [&] { return arrived_ >= n; });
}

bool Gate::StaysAt(size_t n) {
  std::unique_lock lock(mutex_);
  return !changed_.wait_for(lock, std::chrono::milliseconds(50), [&] { return arrived_ > n; });
}

size_t Gate::arrived() const {
  const std::lock_guard lock(mutex_);
  return arrived_;
}

bool Eventually(const std::function<bool()>& done) {
  const auto end = std::chrono::steady_clock::now() + kWaitBound;
  while (!done()) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

size_t ThreadCount() {
  // A sanitizer may start a thread of its own beside the first one of ours.
  [[maybe_unused]] static const bool first = (std::thread([] {}).join(), true);
  return EntriesOf("/proc/self/task");
}

size_t DescriptorCount() { return EntriesOf("/proc/self/fd"); }

const char* OpName(Op op) {
  static constexpr const char* kNames[kOpCount] = {
      "OpenRead",    "OpenWrite",     "OpenLocked",      "OpenDirectory", "Close",
      "ReadFull",    "WriteFull",     "StatFd",          "Stat",          "Rename",
      "Unlink",      "MakeDirectory", "RemoveDirectory", "List",          "FilesystemType",
      "SetModified", "Space",         "SyncDirectory",   "UniqueName"};
  return kNames[static_cast<size_t>(op)];
}

class FaultEnv::Running {
 public:
  Running(FaultEnv& env, Op op) : env_(env) {
    env_.counts_[static_cast<size_t>(op)].fetch_add(1);
    const std::lock_guard lock(env_.mutex_);
    ++env_.running_;
  }
  ~Running() {
    const std::lock_guard lock(env_.mutex_);
    if (--env_.running_ == 0) env_.idle_.notify_all();
  }

 private:
  FaultEnv& env_;
};

std::shared_ptr<const FaultEnv::Hooks> FaultEnv::HooksOf(Op op) const {
  const std::lock_guard lock(mutex_);
  const auto found = hooks_.find(op);
  return found == hooks_.end() ? nullptr : found->second;
}

void FaultEnv::Before(Op op, Hook hook) {
  const auto old = HooksOf(op);
  auto hooks =
      std::make_shared<const Hooks>(Hooks{std::move(hook), old == nullptr ? Hook() : old->after});
  const std::lock_guard lock(mutex_);
  hooks_[op] = std::move(hooks);
}

void FaultEnv::After(Op op, Hook hook) {
  const auto old = HooksOf(op);
  auto hooks =
      std::make_shared<const Hooks>(Hooks{old == nullptr ? Hook() : old->before, std::move(hook)});
  const std::lock_guard lock(mutex_);
  hooks_[op] = std::move(hooks);
}

void FaultEnv::NoHooks() {
  const std::lock_guard lock(mutex_);
  hooks_.clear();
}

size_t FaultEnv::calls() const {
  size_t sum = 0;
  for (const auto& count : counts_) sum += count;
  return sum;
}

void FaultEnv::ResetCounts() {
  for (auto& count : counts_) count = 0;
}

bool FaultEnv::WaitIdle() {
  std::unique_lock lock(mutex_);
  return idle_.wait_for(lock, kWaitBound, [&] { return running_ == 0; });
}

template <typename Outcome, typename Operation>
Outcome FaultEnv::Do(Call call, Operation operation) {
  const Running running(*this, call.op);
  const auto hooks = HooksOf(call.op);
  if (hooks != nullptr && hooks->before) {
    if (Status status = hooks->before(call); !status.ok()) {
      if (call.limit.has_value()) (void)operation(call);
      return status;
    }
  }
  Outcome outcome = operation(call);
  if (hooks != nullptr && hooks->after && StatusOf(outcome).ok()) {
    if (Status status = hooks->after(call); !status.ok()) return status;
  }
  return outcome;
}

Result<Fd> FaultEnv::Opened(const std::string& path, Result<Fd> opened) {
  if (opened.ok()) {
    const std::lock_guard lock(mutex_);
    paths_[opened.value()] = path;
  }
  return opened;
}

std::string FaultEnv::PathOf(Fd fd) const {
  const std::lock_guard lock(mutex_);
  const auto found = paths_.find(fd);
  return found == paths_.end() ? "" : found->second;
}

Result<Fd> FaultEnv::OpenRead(const std::string& path, bool direct) {
  return Do<Result<Fd>>({Op::kOpenRead, path},
                        [&](Call&) { return Opened(path, real_.OpenRead(path, direct)); });
}

Result<Fd> FaultEnv::OpenWrite(const std::string& path, bool direct) {
  return Do<Result<Fd>>({Op::kOpenWrite, path},
                        [&](Call&) { return Opened(path, real_.OpenWrite(path, direct)); });
}

Result<Fd> FaultEnv::OpenLocked(const std::string& path, bool create) {
  return Do<Result<Fd>>({Op::kOpenLocked, path},
                        [&](Call&) { return Opened(path, real_.OpenLocked(path, create)); });
}

Result<Fd> FaultEnv::OpenDirectory(const std::string& path) {
  return Do<Result<Fd>>({Op::kOpenDirectory, path},
                        [&](Call&) { return Opened(path, real_.OpenDirectory(path)); });
}

// Fails as close() does: the descriptor is gone all the same.
Status FaultEnv::Close(Fd fd) {
  const std::string path = PathOf(fd);
  {
    const std::lock_guard lock(mutex_);
    paths_.erase(fd);
  }
  bool closed = false;
  Status status = Do<Status>({Op::kClose, path}, [&](Call&) {
    closed = true;
    return real_.Close(fd);
  });
  if (!closed) (void)real_.Close(fd);
  return status;
}

Result<uint64_t> FaultEnv::ReadFull(Fd fd, std::span<iovec> parts, uint64_t offset) {
  return Do<Result<uint64_t>>({Op::kReadFull, PathOf(fd), offset}, [&](Call& call) {
    if (!call.limit.has_value()) return real_.ReadFull(fd, parts, offset);
    std::vector<iovec> cut = Cut(parts, *call.limit);
    return real_.ReadFull(fd, cut, offset);
  });
}

Status FaultEnv::WriteFull(Fd fd, std::span<iovec> parts, uint64_t offset) {
  return Do<Status>({Op::kWriteFull, PathOf(fd), offset}, [&](Call& call) {
    if (!call.limit.has_value()) return real_.WriteFull(fd, parts, offset);
    std::vector<iovec> cut = Cut(parts, *call.limit);
    return real_.WriteFull(fd, cut, offset);
  });
}

Result<FileInfo> FaultEnv::StatFd(Fd fd) {
  return Do<Result<FileInfo>>({Op::kStatFd, PathOf(fd)}, [&](Call&) { return real_.StatFd(fd); });
}

Result<FileInfo> FaultEnv::Stat(const std::string& path) {
  return Do<Result<FileInfo>>({Op::kStat, path}, [&](Call&) { return real_.Stat(path); });
}

Status FaultEnv::Rename(const std::string& from, const std::string& to) {
  return Do<Status>({Op::kRename, to, 0, from}, [&](Call&) { return real_.Rename(from, to); });
}

Status FaultEnv::RenameNew(const std::string& from, Fd directory, const std::string& name) {
  return Do<Status>({Op::kRename, PathOf(directory) + "/" + name, 0, from},
                    [&](Call&) { return real_.RenameNew(from, directory, name); });
}

Status FaultEnv::Unlink(const std::string& path) {
  return Do<Status>({Op::kUnlink, path}, [&](Call&) { return real_.Unlink(path); });
}

Status FaultEnv::MakeDirectory(const std::string& path) {
  return Do<Status>({Op::kMakeDirectory, path}, [&](Call&) { return real_.MakeDirectory(path); });
}

Status FaultEnv::RemoveDirectory(const std::string& path) {
  return Do<Status>({Op::kRemoveDirectory, path},
                    [&](Call&) { return real_.RemoveDirectory(path); });
}

Result<std::vector<std::string>> FaultEnv::List(const std::string& path) {
  return Do<Result<std::vector<std::string>>>({Op::kList, path},
                                              [&](Call&) { return real_.List(path); });
}

Result<uint64_t> FaultEnv::FilesystemType(const std::string& path) {
  return Do<Result<uint64_t>>({Op::kFilesystemType, path}, [&](Call&) {
    const uint64_t type = filesystem_type_;
    return type != 0 ? Result<uint64_t>(type) : real_.FilesystemType(path);
  });
}

Status FaultEnv::SetModified(const std::string& path, uint64_t modified_ns) {
  return Do<Status>({Op::kSetModified, path},
                    [&](Call&) { return real_.SetModified(path, modified_ns); });
}

Result<SpaceInfo> FaultEnv::Space(const std::string& path) {
  return Do<Result<SpaceInfo>>({Op::kSpace, path}, [&](Call&) { return real_.Space(path); });
}

Status FaultEnv::SyncDirectory(const std::string& path) {
  return Do<Status>({Op::kSyncDirectory, path}, [&](Call&) { return real_.SyncDirectory(path); });
}

std::string FaultEnv::UniqueName() {
  const Running running(*this, Op::kUniqueName);
  return real_.UniqueName();
}

FaultEnv::Hook Failing(Code code) {
  return [code](FaultEnv::Call& call) {
    return Status(code, std::string("injected into ") + OpName(call.op) + " " + call.path);
  };
}

FaultEnv::Hook FailingTimes(Code code, size_t times) {
  auto left = std::make_shared<std::atomic<int64_t>>(static_cast<int64_t>(times));
  return [code, left](FaultEnv::Call& call) {
    return left->fetch_sub(1) > 0 ? Failing(code)(call) : Status::Ok();
  };
}

FaultEnv::Hook On(std::string part, FaultEnv::Hook hook) {
  return [part = std::move(part), hook = std::move(hook)](FaultEnv::Call& call) {
    return call.path.find(part) == std::string::npos ? Status::Ok() : hook(call);
  };
}

FaultEnv::Hook At(uint64_t offset, FaultEnv::Hook hook) {
  return [offset, hook = std::move(hook)](FaultEnv::Call& call) {
    return call.offset == offset ? hook(call) : Status::Ok();
  };
}

FaultEnv::Hook Holding(Gate& gate) {
  return [&gate](FaultEnv::Call&) {
    gate.Pass();
    return Status::Ok();
  };
}

}  // namespace cachestore::test
