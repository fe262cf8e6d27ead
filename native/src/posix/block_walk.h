// BlockWalk: looks at all block files below a storage root, a bounded piece at a
// time, and knows what they take together.
//
// A directory of block files whose time hasn't changed since it was listed still
// has the same files: a pass that isn't `whole` doesn't list it again. Nothing is
// followed out of the root, and what isn't a block file by place, name and type
// is neither counted nor shown.
//
// Not thread-safe.
#ifndef CACHESTORE_POSIX_BLOCK_WALK_H_
#define CACHESTORE_POSIX_BLOCK_WALK_H_

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/env.h"
#include "posix/oldest.h"
#include "tier/geometry.h"

namespace cachestore {

class BlockWalk {
 public:
  BlockWalk(Env& env, std::string root);

  // Begins a pass. `oldest`: shown every file of a whole pass; may be null.
  void Start(bool whole, Oldest* oldest);
  // Goes on with it for about `entries` system calls. True: the pass has ended.
  bool Step(size_t entries);
  void Stop() { stage_ = Stage::kEnded; }
  bool running() const { return stage_ != Stage::kEnded; }
  // Of the pass that has ended: whether the root could be listed, and why something
  // couldn't be looked at.
  bool has_listed() const { return has_listed_; }
  const Status& status() const { return status_; }

  // What is there, as it was last seen, less what was evicted since.
  uint64_t bytes() const { return bytes_; }
  uint64_t files() const { return files_; }
  // The size of the largest file seen since the root was opened.
  uint64_t largest() const { return largest_; }
  // Entries looked at since Start: what the pass has cost.
  uint64_t entries() const { return entries_; }

  std::string PathOf(const OldFile& file) const;
  // What other identities of the same family may have of its block: the names of
  // their directories are the same up to the last dot (docs/format.md). Whether
  // there is such a file isn't looked at.
  std::vector<OldFile> PartsBeside(const OldFile& file) const;
  void NoteEvicted(const OldFile& file);

 private:
  static constexpr size_t kFanOut = 4096;

  struct Sum {
    uint64_t modified_ns = 0;  // of the directory, before it was listed; 0: list it again
    uint64_t bytes = 0;
    uint32_t files = 0;
    uint32_t pass = 0;  // that has seen it
  };
  struct Identity {
    std::string name;
    std::unique_ptr<std::array<Sum, kFanOut>> sums;
    uint32_t pass = 0;
  };
  enum class Stage : uint8_t { kEnded, kRoot, kIdentity, kDirectory, kFile };

  void StepRoot();
  void StepIdentity();
  void StepDirectory();
  void StepFile();
  void EndIdentity();
  void EndPass();
  void Forget(Sum& sum);
  void Note(const Status& failed);
  Identity& IdentityOf(const std::string& name);

  Env& env_;
  const std::string root_;
  std::vector<Identity> identities_;  // OldFile::identity is the index
  uint64_t bytes_ = 0;
  uint64_t files_ = 0;
  uint64_t largest_ = 0;

  // The pass at hand.
  Stage stage_ = Stage::kEnded;
  bool whole_ = false;
  Oldest* oldest_ = nullptr;
  uint32_t pass_ = 0;
  uint64_t entries_ = 0;
  Status status_;
  bool has_listed_ = false;
  std::vector<size_t> to_do_;          // identities, the next one last
  std::vector<uint16_t> directories_;  // of the identity at hand, the next one last
  std::vector<BlockId> names_;         // of the directory at hand, the next one last
  uint64_t listed_modified_ns_ = 0;
  Sum listing_;  // of the directory at hand, so far
};

}  // namespace cachestore

#endif  // CACHESTORE_POSIX_BLOCK_WALK_H_
