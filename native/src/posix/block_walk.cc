#include "posix/block_walk.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "posix/block_path.h"

namespace cachestore {
namespace {

// A directory that changes within so long after it was listed may have the same
// time as before: clocks of filesystems are coarse, and other hosts' differ.
constexpr uint64_t kUnsureNs = 2000000000;
// How many names of a directory cost as much as looking at one file.
constexpr size_t kNamesPerEntry = 32;

}  // namespace

BlockWalk::BlockWalk(Env& env, std::string root) : env_(env), root_(std::move(root)) {}

void BlockWalk::Start(bool whole, Oldest* oldest) {
  whole_ = whole;
  oldest_ = oldest;
  ++pass_;
  entries_ = 0;
  status_ = Status::Ok();
  has_listed_ = false;
  stage_ = Stage::kRoot;
}

bool BlockWalk::Step(size_t entries) {
  const uint64_t until = entries_ + entries;
  while (stage_ != Stage::kEnded && entries_ < until) {
    switch (stage_) {
      case Stage::kRoot:
        StepRoot();
        break;
      case Stage::kIdentity:
        StepIdentity();
        break;
      case Stage::kDirectory:
        StepDirectory();
        break;
      case Stage::kFile:
        StepFile();
        break;
      case Stage::kEnded:
        break;
    }
  }
  return stage_ == Stage::kEnded;
}

void BlockWalk::StepRoot() {
  ++entries_;
  const Result<std::vector<std::string>> names = env_.List(root_ + "/.");  // may be a link
  if (!names.ok()) {
    Note(names.status());
    stage_ = Stage::kEnded;
    return;
  }
  has_listed_ = true;
  entries_ += names.value().size() / kNamesPerEntry;
  to_do_.clear();
  for (const std::string& name : names.value()) {
    if (name.starts_with('.') || name == "collector") continue;
    Identity& identity = IdentityOf(name);
    identity.pass = pass_;
    to_do_.push_back(static_cast<size_t>(&identity - identities_.data()));
  }
  stage_ = Stage::kIdentity;
}

BlockWalk::Identity& BlockWalk::IdentityOf(const std::string& name) {
  Identity* free = nullptr;
  for (Identity& identity : identities_) {
    if (identity.name == name) return identity;
    // Files of the latest whole pass may still bear the number of a vanished one.
    if (identity.name.empty() && identity.pass + 2 < pass_) free = &identity;
  }
  if (free == nullptr) free = &identities_.emplace_back();
  free->name = name;
  return *free;
}

void BlockWalk::StepIdentity() {
  if (to_do_.empty()) return EndPass();
  Identity& identity = identities_[to_do_.back()];
  entries_ += 2;
  const std::string path = root_ + "/" + identity.name;
  directories_.clear();
  // What a link leads to isn't in this root.
  const Result<FileInfo> info = env_.Stat(path);
  if (info.ok() && !info.value().is_directory) return EndIdentity();
  const Result<std::vector<std::string>> names = env_.List(path + "/blocks");
  if (!names.ok()) {
    // Of another user: neither counted nor evicted.
    if (names.status().error() == EACCES) return EndIdentity();
    if (names.status().code() == CS_NOT_FOUND) return EndIdentity();
    // It can't be looked at now; what it had still counts.
    Note(names.status());
    to_do_.pop_back();
    return;
  }
  if (identity.sums == nullptr) identity.sums = std::make_unique<std::array<Sum, kFanOut>>();
  entries_ += names.value().size() / kNamesPerEntry;
  for (const std::string& name : names.value()) {
    if (const auto number = FanOutOfName(name)) directories_.push_back(*number);
  }
  std::sort(directories_.rbegin(), directories_.rend());
  stage_ = Stage::kDirectory;
}

void BlockWalk::StepDirectory() {
  if (directories_.empty()) return EndIdentity();
  Identity& identity = identities_[to_do_.back()];
  const uint16_t number = directories_.back();
  Sum& sum = (*identity.sums)[number];
  const std::string path = root_ + "/" + identity.name + "/blocks/" + FanOutName(number);
  const auto skip = [&](bool there) {
    if (there) sum.pass = pass_;  // else EndIdentity forgets it
    directories_.pop_back();
  };
  ++entries_;
  const Result<FileInfo> info = env_.Stat(path);
  if (!info.ok() || !info.value().is_directory) {
    const bool gone = info.ok() || info.status().code() == CS_NOT_FOUND;
    if (!gone) Note(info.status());
    return skip(!gone);
  }
  const uint64_t modified = info.value().modified_ns;
  if (!whole_ && sum.modified_ns != 0 && sum.modified_ns == modified) return skip(true);
  // Unsure times are not remembered: it is listed again next time.
  listed_modified_ns_ = modified + kUnsureNs < env_.Now() ? modified : 0;
  ++entries_;
  const Result<std::vector<std::string>> names = env_.List(path);
  if (!names.ok()) {
    const bool gone = names.status().code() == CS_NOT_FOUND;
    if (!gone) Note(names.status());
    return skip(!gone);
  }
  entries_ += names.value().size() / kNamesPerEntry;
  names_.clear();
  for (const std::string& name : names.value()) {
    const std::optional<BlockId> block = BlockOfHex(name);
    if (block.has_value() && FanOutOf(*block) == number) names_.push_back(*block);
  }
  listing_ = {};
  stage_ = Stage::kFile;
}

void BlockWalk::StepFile() {
  Identity& identity = identities_[to_do_.back()];
  const uint16_t number = directories_.back();
  if (names_.empty()) {
    Sum& sum = (*identity.sums)[number];
    Forget(sum);
    bytes_ += listing_.bytes;
    files_ += listing_.files;
    sum = {listed_modified_ns_, listing_.bytes, listing_.files, pass_};
    directories_.pop_back();
    stage_ = Stage::kDirectory;
    return;
  }
  OldFile file;
  file.block = names_.back();
  file.identity = static_cast<uint32_t>(to_do_.back());
  names_.pop_back();
  ++entries_;
  const Result<FileInfo> info = env_.Stat(PathOf(file));
  if (!info.ok() && info.status().code() != CS_NOT_FOUND) {
    Note(info.status());
    listed_modified_ns_ = 0;
  }
  if (!info.ok() || !info.value().is_regular) return;
  file.used_ns = info.value().modified_ns;
  file.size_4k = In4K(info.value().size);
  listing_.bytes += uint64_t{file.size_4k} * 4096;
  ++listing_.files;
  largest_ = std::max(largest_, uint64_t{file.size_4k} * 4096);
  if (oldest_ != nullptr) oldest_->Show(file);
}

void BlockWalk::EndIdentity() {
  Identity& identity = identities_[to_do_.back()];
  if (identity.sums != nullptr) {
    for (Sum& sum : *identity.sums) {
      if (sum.pass != pass_) Forget(sum);
    }
  }
  to_do_.pop_back();
  stage_ = Stage::kIdentity;
}

void BlockWalk::EndPass() {
  for (Identity& identity : identities_) {
    if (identity.pass == pass_ || identity.name.empty()) continue;
    if (identity.sums != nullptr) {
      for (Sum& sum : *identity.sums) Forget(sum);
    }
    identity.sums.reset();
    identity.name.clear();
  }
  stage_ = Stage::kEnded;
}

void BlockWalk::Forget(Sum& sum) {
  bytes_ -= sum.bytes;
  files_ -= sum.files;
  sum = {};
}

void BlockWalk::Note(const Status& failed) {
  if (status_.ok()) status_ = failed;
}

std::string BlockWalk::PathOf(const OldFile& file) const {
  const std::string hex = HexOf(file.block);
  std::string path;
  const std::string& name = identities_[file.identity].name;
  path.reserve(root_.size() + name.size() + 48);
  path.append(root_).append("/").append(name).append("/blocks/");
  return path.append(hex, 0, 3).append("/").append(hex);
}

std::vector<OldFile> BlockWalk::PartsBeside(const OldFile& file) const {
  const auto family_of = [](std::string_view name) {
    const size_t dot = name.rfind('.');
    return dot == std::string_view::npos ? std::string_view() : name.substr(0, dot);
  };
  std::vector<OldFile> parts;
  const std::string_view family = family_of(identities_[file.identity].name);
  if (family.empty()) return parts;
  for (uint32_t i = 0; i < identities_.size(); ++i) {
    if (i == file.identity || family_of(identities_[i].name) != family) continue;
    OldFile& part = parts.emplace_back();
    part.block = file.block;
    part.identity = i;
  }
  return parts;
}

void BlockWalk::NoteEvicted(const OldFile& file) {
  const Identity& identity = identities_[file.identity];
  if (identity.sums == nullptr) return;
  const uint16_t number = FanOutOf(file.block);
  Sum& sum = (*identity.sums)[number];
  sum.modified_ns = 0;
  const uint64_t bytes = std::min(sum.bytes, uint64_t{file.size_4k} * 4096);
  sum.bytes -= bytes;
  bytes_ -= bytes;
  if (sum.files > 0) {
    --sum.files;
    --files_;
  }
  // In the directory being listed at this moment, and counted already?
  const bool listing = stage_ == Stage::kFile && to_do_.back() == file.identity &&
                       directories_.back() == number &&
                       std::find(names_.begin(), names_.end(), file.block) == names_.end();
  if (listing && listing_.files > 0) {
    listing_.bytes -= std::min(listing_.bytes, uint64_t{file.size_4k} * 4096);
    --listing_.files;
  }
}

}  // namespace cachestore
