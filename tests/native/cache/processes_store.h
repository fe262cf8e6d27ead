// A store in a process of its own, driven by the test; and what all of them do
// to the storage, counted and held in memory that they share.
#ifndef CACHESTORE_TESTS_CACHE_PROCESSES_STORE_H_
#define CACHESTORE_TESTS_CACHE_PROCESSES_STORE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cache/processes.h"
#include "cache/processes_region.h"
#include "fixture.h"

namespace cachestore::test {

// Counts the system calls that read and write each block file, over all
// processes: what the page cache has, or a process remembers, makes no
// difference. Holds them, so that a process can be caught inside one.
class StorageWatch {
 public:
  static constexpr size_t kBlocks = 4096;  // IdOf(0) to IdOf(kBlocks - 1)

  StorageWatch();
  explicit StorageWatch(const std::string& path);  // joins another process's
  ~StorageWatch();
  StorageWatch(const StorageWatch&) = delete;
  StorageWatch& operator=(const StorageWatch&) = delete;

  const std::string& path() const { return path_; }

  uint32_t reads(size_t block) const { return shared_->reads[block]; }
  uint64_t reads() const;
  uint64_t writes() const { return shared_->writes; }
  void Reset();
  // From now on reads (writes) of block files wait inside the system call.
  void HoldReads(bool hold) { shared_->reads_held = hold ? 1 : 0; }
  void HoldWrites(bool hold) { shared_->writes_held = hold ? 1 : 0; }
  // How many have come to wait since Reset.
  [[nodiscard]] bool WaitReadsInside(uint32_t n) const;
  [[nodiscard]] bool WaitWritesInside(uint32_t n) const;
  // Writes of this process fail.
  void FailWritesOf(pid_t pid) { shared_->failing = static_cast<uint32_t>(pid); }

  // The process's side: every block file's calls come through here.
  void Install(FaultEnv& env, const StoreSetup& setup);

 private:
  struct Shared {
    std::atomic<uint32_t> reads_held, writes_held, reads_inside, writes_inside, failing;
    std::atomic<uint64_t> writes;
    std::array<std::atomic<uint32_t>, kBlocks> reads;
  };

  void Map();

  std::unique_ptr<TempDir> directory_;  // of who made it
  std::string path_;
  Shared* shared_ = nullptr;
};

// A setup as arguments of a role, and back: what tests of several processes
// vary. No path may have a space.
std::vector<std::string> WordsOf(const StoreSetup& setup);
StoreSetup SetupOf(const std::vector<std::string>& words, size_t from = 0);

// What became of the pages of a load.
struct Loaded {
  size_t right = 0;
  size_t wrong = 0;  // success, with other bytes
  size_t failed = 0;
};

class StoreProcess {
 public:
  // Starts it, and opens its store unless told not to.
  StoreProcess(const StoreSetup& setup, const StorageWatch& watch, bool open = true,
               const std::vector<std::string>& prefix = {});

  // "" or the error's text.
  std::string Open();
  // Blocks IdOf(first), ...; each page's bytes are those of its block id.
  Loaded Load(size_t first, size_t n);
  void StartLoad(size_t first, size_t n);  // returns when the store has it
  Loaded EndLoad();
  size_t Dump(size_t first, size_t n);  // how many succeeded
  void StartDump(size_t first, size_t n);
  size_t EndDump();
  size_t Lookup(size_t first, size_t n);  // how many are there
  bool Clear() { return process_.Ask("clear") == "cleared"; }
  cs_stats Stats();
  // What the store has reported, all in one line.
  std::string Events() { return process_.Ask("events"); }

  // Takes the region's lock, on an attachment of its own, and keeps it; leaves
  // the metadata in that state first.
  [[nodiscard]] bool TakeLock(Damage damage = Damage::kNothing);
  // Gives back the lock and the attachment.
  [[nodiscard]] bool GiveLock() { return process_.Ask("unlock") == "unlocked"; }
  // Starts a load (dump) of one block whose copy can't go on: it is between
  // its first and its last byte when this returns. "" or why it can't be done
  // here.
  std::string HoldCopy(bool load, size_t block);
  // Lets the copy go on.
  bool LetCopyGo() { return process_.Ask("letgo") == "gone"; }

  void Close() { (void)process_.Ask("close"); }
  void Kill() { process_.Kill(); }
  void Stop() { process_.Stop(); }
  void Continue() { process_.Continue(); }
  Process& process() { return process_; }

 private:
  Process process_;
};

using StoreProcesses = std::vector<std::unique_ptr<StoreProcess>>;

// Where the processes of a test meet: a storage, a directory for the region,
// and the setup of their stores.
struct Place {
  Place();

  // Blocks first, first + 1, ... in the storage and in no cache.
  void Fill(size_t first, size_t n);
  // How many of these are in the storage, with the right bytes.
  size_t Stored(size_t first, size_t n) const;
  // Makes the region one of at least so many slots, and not many more.
  void SetSlots(size_t slots);
  StoreProcesses Start(size_t n) const;
  // Nothing is left in the region's directory.
  bool IsClean() const;

  TempDir root{SharedMemoryParent()};
  TempDir shared{SharedMemoryParent()};
  StorageWatch watch;
  StoreSetup setup{{root.path()}};
};

}  // namespace cachestore::test

#endif  // CACHESTORE_TESTS_CACHE_PROCESSES_STORE_H_
