// PowerCutEnv: an Env that notes every change of a directory, and makes from
// that what a power cut may leave of it.
//
// The store never syncs, so no change is sure to reach the disk and none waits
// for another: a name may be there without its file's bytes, a rename without
// the name's end at the old place, half of a page of 4096 bytes, what another
// file had there before. Some filesystems are kinder; none is worse.
#ifndef CACHESTORE_TESTS_POSIX_POWER_CUT_ENV_H_
#define CACHESTORE_TESTS_POSIX_POWER_CUT_ENV_H_

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "fault_env.h"

namespace cachestore::test {

// Thread-safe.
class PowerCutEnv final : public FaultEnv {
 public:
  // Of the changes before the cut, what is on the disk.
  enum class Kept : uint8_t {
    kAll,    // everything: so it looks when only the process was killed
    kNames,  // names, of empty files
    kSizes,  // names and sizes, of files of zeros
    kSome,   // any part of names, sizes, bytes and times, by the seed
  };

  // Notes what happens below `root`, which must be empty.
  explicit PowerCutEnv(std::string root) : root_(std::move(root)), nodes_(2) {
    nodes_[kRoot].is_directory = true;
  }

  // How many changes there were: a cut can come after each, or before all.
  size_t changes() const;
  // The n-th change from 1 on, in words.
  std::string Name(size_t n) const;
  // Makes in `target`, an empty directory, what is left of `root` by a cut after
  // `cut` changes.
  void Restore(size_t cut, Kept kept, uint64_t seed, const std::string& target) const;

  Result<Fd> OpenWrite(const std::string& path, bool direct) override;
  Result<Fd> OpenLocked(const std::string& path, bool create) override;
  Result<Fd> OpenDirectory(const std::string& path) override;
  Status Close(Fd fd) override;
  Status WriteFull(Fd fd, std::span<iovec> parts, uint64_t offset) override;
  Status SetModified(const std::string& path, uint64_t modified_ns) override;
  Status Rename(const std::string& from, const std::string& to) override;
  Status RenameNew(const std::string& from, Fd directory, const std::string& name) override;
  Status Unlink(const std::string& path) override;
  Status MakeDirectory(const std::string& path) override;
  Status RemoveDirectory(const std::string& path) override;

 private:
  using Node = size_t;  // a file or directory, whatever its name
  static constexpr Node kNone = 0;
  static constexpr Node kRoot = 1;

  struct NodeState {
    bool is_directory = false;
    std::map<std::string, Node> entries;
  };
  struct Place {  // of a name
    Node directory = kNone;
    std::string name;
    bool operator==(const Place&) const = default;
  };
  struct Entry {
    Place place;
    Node node;  // kNone: the name ends
  };
  struct Write {
    Node node;
    uint64_t offset;
    std::vector<uint8_t> bytes;
  };
  struct Change {
    std::string name;
    std::vector<Entry> entries;
    std::optional<Write> write = std::nullopt;
    std::optional<std::pair<Node, uint64_t>> modified = std::nullopt;
  };
  class Remains;  // what is left by one cut

  // With mutex_ held.
  Node Find(const std::string& path) const;
  std::optional<Place> PlaceOf(const std::string& path) const;
  Node MakeIfMissing(const std::string& path, bool is_directory);
  void Put(Change& change, const Place& place, Node node);
  Status NoteRename(const std::string& from, const std::optional<Place>& to, Status moved);
  template <typename Open>
  Result<Fd> NoteOpened(const std::string& path, Open open);

  const std::string root_;
  mutable std::mutex mutex_;      // guards all below; held across each changing call
  std::vector<NodeState> nodes_;  // as they are now
  std::vector<Change> changes_;
  std::map<Fd, Node> open_;
};

}  // namespace cachestore::test

#endif  // CACHESTORE_TESTS_POSIX_POWER_CUT_ENV_H_
