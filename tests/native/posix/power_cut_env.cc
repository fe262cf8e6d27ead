#include "posix/power_cut_env.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <random>
#include <utility>

#include "fixture.h"
#include "harness.h"

namespace cachestore::test {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kSector = 512;

// The same numbers for the same seed, with every library.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}

  size_t Below(size_t n) { return engine_() % n; }
  bool Chance(double probability) {
    return static_cast<double>(engine_() >> 11) * 0x1p-53 < probability;
  }
  // How much of one kind is lost in a state: all states would look alike otherwise.
  double Rate() {
    static constexpr double kRates[] = {0, 0, 0.1, 0.5, 1};
    return kRates[Below(std::size(kRates))];
  }

 private:
  std::mt19937_64 engine_;
};

void Apply(std::vector<uint8_t>& file, uint64_t offset, const std::vector<uint8_t>& bytes) {
  file.resize(std::max<size_t>(file.size(), offset + bytes.size()));
  std::copy(bytes.begin(), bytes.end(), file.begin() + static_cast<ptrdiff_t>(offset));
}

}  // namespace

// Decides in the order of the changes, so that a seed gives the same state also
// where names are drawn at random.
class PowerCutEnv::Remains {
 public:
  Remains(const PowerCutEnv& env, size_t cut, Kept kept, uint64_t seed)
      : env_(env), kept_(kept), dice_(seed) {
    ChooseNames(cut);
    for (size_t i = 0; i < cut; ++i) {
      const Change& change = env_.changes_[i];
      if (change.write.has_value()) writes_[change.write->node].push_back(&*change.write);
      if (change.modified.has_value()) {
        times_[change.modified->first].push_back(change.modified->second);
      }
    }
    data_loss_ = dice_.Rate();
    size_loss_ = dice_.Rate();
    time_loss_ = dice_.Rate();
  }

  void Make(const std::string& target) { MakeBelow(kRoot, target); }

 private:
  // Which node each name has. Either the first changes of names, in order, as a
  // journal keeps them, or any of those that each name had.
  void ChooseNames(size_t cut) {
    const bool some = kept_ == Kept::kSome;
    const bool in_order = some && dice_.Chance(0.5);
    const size_t end = in_order ? dice_.Below(cut + 1) : cut;
    std::vector<std::pair<Place, std::vector<Node>>> histories;
    for (size_t i = 0; i < end; ++i) {
      for (const Entry& entry : env_.changes_[i].entries) {
        auto at = std::find_if(histories.begin(), histories.end(),
                               [&](const auto& known) { return known.first == entry.place; });
        if (at == histories.end()) {
          histories.push_back({entry.place, {kNone}});
          at = histories.end() - 1;
        }
        at->second.push_back(entry.node);
      }
    }
    const double loss = some && !in_order ? dice_.Rate() : 0;
    for (const auto& [place, nodes] : histories) {
      const Node node = dice_.Chance(loss) ? nodes[dice_.Below(nodes.size())] : nodes.back();
      if (node != kNone) names_[place.directory].push_back({place, node});
    }
  }

  void MakeBelow(Node directory, const std::string& path) {
    for (const Entry& entry : names_[directory]) {
      const std::string child = path + "/" + entry.place.name;
      if (env_.nodes_[entry.node].is_directory) {
        // No filesystem leaves a directory two names.
        if (!made_.emplace(entry.node, child).second) continue;
        std::filesystem::create_directory(child);
        MakeBelow(entry.node, child);
      } else if (const auto first = made_.find(entry.node); first != made_.end()) {
        std::filesystem::create_hard_link(first->second, child);
      } else {
        made_.emplace(entry.node, child);
        WriteFile(child, Bytes(entry.node));
        const std::vector<uint64_t>& times = times_[entry.node];
        if (!times.empty() && !dice_.Chance(time_loss_)) {
          EXPECT_OK(Env::Real().SetModified(child, times[dice_.Below(times.size())]));
        } else if (kept_ == Kept::kSome && dice_.Chance(time_loss_)) {
          EXPECT_OK(Env::Real().SetModified(child, 0));
        }
      }
    }
  }

  // The first `n` writes of a file.
  std::vector<uint8_t> After(Node node, size_t n) {
    std::vector<uint8_t> bytes;
    for (size_t i = 0; i < n; ++i) {
      Apply(bytes, writes_[node][i]->offset, writes_[node][i]->bytes);
    }
    return bytes;
  }

  std::vector<uint8_t> Bytes(Node node) {
    const size_t count = writes_[node].size();
    std::vector<uint8_t> bytes = After(node, count);
    if (kept_ == Kept::kNames) bytes.clear();
    if (kept_ == Kept::kSizes) std::fill(bytes.begin(), bytes.end(), uint8_t{0});
    if (kept_ != Kept::kSome) return bytes;
    for (size_t from = 0; from < bytes.size(); from += kPage) {
      if (dice_.Chance(data_loss_)) {
        LosePage(node, std::span(bytes).subspan(from, std::min(kPage, bytes.size() - from)), from);
      }
    }
    if (dice_.Chance(size_loss_)) {
      const size_t size = dice_.Chance(0.5) ? 0 : After(node, dice_.Below(count + 1)).size();
      bytes.resize(std::min(size, bytes.size()));
    }
    return bytes;
  }

  // What was there before: zeros, an earlier write of this file, or what another
  // file had; all of it, or some sectors.
  void LosePage(Node node, std::span<uint8_t> page, size_t from) {
    std::vector<uint8_t> old(kPage, 0);
    const size_t kind = dice_.Below(3);
    if (kind == 1) {
      const std::vector<uint8_t> before = After(node, dice_.Below(writes_[node].size() + 1));
      if (before.size() > from) {
        std::memcpy(old.data(), before.data() + from, std::min(kPage, before.size() - from));
      }
    } else if (kind == 2) {
      auto other = writes_.begin();
      std::advance(other, dice_.Below(writes_.size()));
      if (!other->second.empty()) {
        const Write& write = *other->second[dice_.Below(other->second.size())];
        const size_t at = kPage * dice_.Below(write.bytes.size() / kPage + 1);
        const size_t n = std::min(kPage, write.bytes.size() - at);
        if (n > 0) std::memcpy(old.data(), write.bytes.data() + at, n);
      }
    }
    const double sectors = dice_.Chance(0.5) ? 1 : 0.5;
    for (size_t at = 0; at < page.size(); at += kSector) {
      if (!dice_.Chance(sectors)) continue;
      std::memcpy(page.data() + at, old.data() + at, std::min(kSector, page.size() - at));
    }
  }

  const PowerCutEnv& env_;
  const Kept kept_;
  Dice dice_;
  double data_loss_ = 0;
  double size_loss_ = 0;
  double time_loss_ = 0;
  std::map<Node, std::vector<Entry>> names_;          // by directory
  std::map<Node, std::vector<const Write*>> writes_;  // by file
  std::map<Node, std::vector<uint64_t>> times_;
  std::map<Node, std::string> made_;  // under which path first
};

size_t PowerCutEnv::changes() const {
  const std::lock_guard lock(mutex_);
  return changes_.size();
}

std::string PowerCutEnv::Name(size_t n) const {
  const std::lock_guard lock(mutex_);
  return n == 0 ? "nothing" : changes_[n - 1].name;
}

void PowerCutEnv::Restore(size_t cut, Kept kept, uint64_t seed, const std::string& target) const {
  const std::lock_guard lock(mutex_);
  Remains(*this, cut, kept, seed).Make(target);
}

std::optional<PowerCutEnv::Place> PowerCutEnv::PlaceOf(const std::string& path) const {
  if (path.compare(0, root_.size() + 1, root_ + "/") != 0) return std::nullopt;
  const size_t slash = path.find_last_of('/');
  const Node directory = Find(path.substr(0, slash));
  if (directory == kNone) return std::nullopt;
  return Place{directory, path.substr(slash + 1)};
}

PowerCutEnv::Node PowerCutEnv::Find(const std::string& path) const {
  if (path == root_) return kRoot;
  const std::optional<Place> place = PlaceOf(path);
  if (!place.has_value()) return kNone;
  const auto& entries = nodes_[place->directory].entries;
  const auto found = entries.find(place->name);
  return found == entries.end() ? kNone : found->second;
}

void PowerCutEnv::Put(Change& change, const Place& place, Node node) {
  change.entries.push_back({place, node});
  if (node == kNone) {
    nodes_[place.directory].entries.erase(place.name);
  } else {
    nodes_[place.directory].entries[place.name] = node;
  }
}

PowerCutEnv::Node PowerCutEnv::MakeIfMissing(const std::string& path, bool is_directory) {
  if (const Node there = Find(path); there != kNone) return there;
  const std::optional<Place> place = PlaceOf(path);
  if (!place.has_value()) return kNone;  // not below the root
  nodes_.push_back({is_directory, {}});
  Change change{"make " + path, {}};
  Put(change, *place, nodes_.size() - 1);
  changes_.push_back(std::move(change));
  return nodes_.size() - 1;
}

template <typename Open>
Result<Fd> PowerCutEnv::NoteOpened(const std::string& path, Open open) {
  const std::lock_guard lock(mutex_);
  Result<Fd> opened = open();
  if (opened.ok()) open_[opened.value()] = MakeIfMissing(path, /*is_directory=*/false);
  return opened;
}

Result<Fd> PowerCutEnv::OpenWrite(const std::string& path, bool direct) {
  return NoteOpened(path, [&] { return FaultEnv::OpenWrite(path, direct); });
}

Result<Fd> PowerCutEnv::OpenLocked(const std::string& path, bool create) {
  return NoteOpened(path, [&] { return FaultEnv::OpenLocked(path, create); });
}

Result<Fd> PowerCutEnv::OpenDirectory(const std::string& path) {
  const std::lock_guard lock(mutex_);
  Result<Fd> opened = FaultEnv::OpenDirectory(path);
  if (opened.ok()) open_[opened.value()] = Find(path);
  return opened;
}

Status PowerCutEnv::Close(Fd fd) {
  const std::lock_guard lock(mutex_);
  open_.erase(fd);
  return FaultEnv::Close(fd);
}

Status PowerCutEnv::WriteFull(Fd fd, std::span<iovec> parts, uint64_t offset) {
  std::vector<uint8_t> bytes;
  for (const iovec& part : parts) {
    const auto* const begin = static_cast<const uint8_t*>(part.iov_base);
    bytes.insert(bytes.end(), begin, begin + part.iov_len);
  }
  const std::lock_guard lock(mutex_);
  Status written = FaultEnv::WriteFull(fd, parts, offset);
  const auto open = open_.find(fd);
  if (written.ok() && open != open_.end() && open->second != kNone) {
    const std::string name =
        "write " + std::to_string(bytes.size()) + " bytes at " + std::to_string(offset);
    changes_.push_back({name, {}, Write{open->second, offset, std::move(bytes)}});
  }
  return written;
}

Status PowerCutEnv::SetModified(const std::string& path, uint64_t modified_ns) {
  const std::lock_guard lock(mutex_);
  Status set = FaultEnv::SetModified(path, modified_ns);
  if (const Node node = Find(path); set.ok() && node != kNone) {
    changes_.push_back({"set times of " + path, {}, {}, std::pair(node, modified_ns)});
  }
  return set;
}

Status PowerCutEnv::Rename(const std::string& from, const std::string& to) {
  const std::lock_guard lock(mutex_);
  return NoteRename(from, PlaceOf(to), FaultEnv::Rename(from, to));
}

Status PowerCutEnv::RenameNew(const std::string& from, Fd directory, const std::string& name) {
  const std::lock_guard lock(mutex_);
  return NoteRename(from, Place{open_.at(directory), name},
                    FaultEnv::RenameNew(from, directory, name));
}

Status PowerCutEnv::NoteRename(const std::string& from, const std::optional<Place>& to,
                               Status moved) {
  const Node node = Find(from);
  if (moved.ok() && node != kNone && to.has_value()) {
    Change change{"rename " + from + " to " + to->name, {}};
    Put(change, *to, node);
    Put(change, *PlaceOf(from), kNone);
    changes_.push_back(std::move(change));
  }
  return moved;
}

Status PowerCutEnv::Unlink(const std::string& path) {
  const std::lock_guard lock(mutex_);
  Status removed = FaultEnv::Unlink(path);
  if (removed.ok() && Find(path) != kNone) {
    Change change{"remove " + path, {}};
    Put(change, *PlaceOf(path), kNone);
    changes_.push_back(std::move(change));
  }
  return removed;
}

Status PowerCutEnv::MakeDirectory(const std::string& path) {
  const std::lock_guard lock(mutex_);
  Status made = FaultEnv::MakeDirectory(path);
  if (made.ok()) (void)MakeIfMissing(path, /*is_directory=*/true);
  return made;
}

Status PowerCutEnv::RemoveDirectory(const std::string& path) {
  const std::lock_guard lock(mutex_);
  Status removed = FaultEnv::RemoveDirectory(path);
  if (removed.ok() && Find(path) != kNone) {
    Change change{"remove " + path, {}};
    Put(change, *PlaceOf(path), kNone);
    changes_.push_back(std::move(change));
  }
  return removed;
}

}  // namespace cachestore::test
