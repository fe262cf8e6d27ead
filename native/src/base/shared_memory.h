// The system calls of memory that processes share: files mapped into memory,
// locks that the kernel gives back, futexes. Like Env, EINTR and close-on-exec
// are handled here once.
#ifndef CACHESTORE_BASE_SHARED_MEMORY_H_
#define CACHESTORE_BASE_SHARED_MEMORY_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/status.h"

namespace cachestore {

// Of a file that is about to be trusted.
struct SharedFileInfo {
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t size = 0;
  bool is_ours = false;  // a regular file of this user, mode 0600, one name or none
};

// The user whose files this process makes.
uint32_t UserId();
// Opens (or creates, mode 0600) a file to map. Never follows a link.
Result<Fd> OpenSharedFile(const std::string& path, bool create);
Result<SharedFileInfo> StatSharedFile(Fd fd);
void CloseSharedFile(Fd fd);
// Makes the file `size` bytes long and reserves all of its memory.
Status ReserveSharedFile(Fd fd, uint64_t size);
// Removes a file that nobody uses, and gives back its memory at once, though
// somebody may have it open.
Status RemoveSharedFile(Fd fd, const std::string& path);
// Free bytes of the filesystem at `path`.
Result<uint64_t> FreeBytes(const std::string& path);
// What this process may still allocate: the least of the system's available
// memory and the headroom of its cgroups; UINT64_MAX if nothing tells.
uint64_t MemoryHeadroom();

// Maps a file, or (fd -1) private memory that is reserved at once. Asks for huge
// pages: `huge` says in words what came of it, to be shown.
Result<uint8_t*> MapMemory(Fd fd, uint64_t size, std::string& huge);
void UnmapMemory(uint8_t* memory, uint64_t size);
// A child made by fork doesn't get the memory.
void KeepFromChildren(uint8_t* memory, uint64_t size);

// Locks on one byte of a file, owned by the open file description: they end
// with its last descriptor, whatever becomes of the process. A forked child has
// none of it (fork.h).
bool TryLockByte(Fd fd, uint64_t byte);
void UnlockByte(Fd fd, uint64_t byte);
// Whether another open file description holds any of `count` bytes.
bool IsLockedByOthers(Fd fd, uint64_t first, uint64_t count);

// Waits until *word is not `seen`, somebody wakes us, or the time is over.
void FutexWait(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::milliseconds at_most);
void FutexWake(std::atomic<uint32_t>& word);

}  // namespace cachestore

#endif  // CACHESTORE_BASE_SHARED_MEMORY_H_
