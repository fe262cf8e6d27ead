// The limit of copies: pages between the host pool and a buffer that is mapped
// as the cache's is, by a few threads that wait for each turn as copy workers
// do. See copy_limit.py for what is counted.
//
// The threads take pages one by one from a counter. There is no queue, no slot
// table and no request.

#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/shared_memory.h"
#include "host_copy/affinity.h"
#include "host_copy/copy_kernel.h"
#include "host_copy/system.h"

namespace cachestore {
namespace {

enum Way : int { kMemcpy, kStreaming, kStreamingChecksummed };

class Probe {
 public:
  Status Open(const char* directory, uint64_t bytes, int threads) {
    if (directory != nullptr) {
      const std::string path =
          std::string(directory) + "/cachestore-bench-" + std::to_string(getpid());
      const Result<Fd> file = OpenSharedFile(path, /*create=*/true);
      if (!file.ok()) return file.status();
      fd_ = file.value();
      (void)Env::Real().Unlink(path);
      if (Status reserved = ReserveSharedFile(fd_, bytes); !reserved.ok()) return reserved;
    }
    std::string huge;
    const Result<uint8_t*> mapped = MapMemory(fd_, bytes, huge);
    if (!mapped.ok()) return mapped.status();
    memory_ = mapped.value();
    bytes_ = bytes;
    const CpuTopology topology = ReadTopology(Env::Real(), kNodeDirectory, AllowedCpus());
    const Result<std::vector<int>> cpus = CpusFor("auto", topology, NodeOfAddress(memory_));
    for (int i = 0; i < threads; ++i) {
      threads_.push_back(StartThread("bench-copy", [this] { Work(); }));
      if (cpus.ok() && !cpus.value().empty()) (void)PinThread(threads_.back(), cpus.value());
    }
    return Status::Ok();
  }

  ~Probe() {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    if (memory_ != nullptr) UnmapMemory(memory_, bytes_);
    if (fd_ >= 0) CloseSharedFile(fd_);
  }

  // Page i is the `tensors` ranges from parts[i * tensors] on, and lies in slot
  // (first + i) of the buffer, whose slots are `slot_size` apart.
  void Run(size_t pages, const iovec* parts, size_t tensors, size_t first, size_t slot_size,
           bool into_buffer, Way way) {
    const size_t slots = bytes_ / slot_size;
    std::unique_lock lock(mutex_);
    page_ = [=, this](size_t i) {
      uint8_t* at = memory_ + (first + i) % slots * slot_size;
      for (const iovec* part = parts + i * tensors; part != parts + (i + 1) * tensors; ++part) {
        uint8_t* const host = static_cast<uint8_t*>(part->iov_base);
        Copy(into_buffer ? at : host, into_buffer ? host : at, part->iov_len, way);
        at += part->iov_len;
      }
    };
    pages_ = pages;
    next_.store(0, std::memory_order_relaxed);
    running_ = threads_.size();
    ++turn_;
    work_.notify_all();
    done_.wait(lock, [&] { return running_ == 0; });
  }

 private:
  static void Copy(uint8_t* to, const uint8_t* from, size_t n, Way way) {
    if (way == kStreamingChecksummed) {
      (void)CopyBytesChecksummed(to, from, n, 0, CopyKernel::kStreaming);
    } else {
      CopyBytes(to, from, n, way == kMemcpy ? CopyKernel::kMemcpy : CopyKernel::kStreaming);
    }
  }

  void Work() {
    std::unique_lock lock(mutex_);
    for (uint64_t seen = 0;;) {
      work_.wait(lock, [&] { return stopped_ || turn_ != seen; });
      if (stopped_) return;
      seen = turn_;
      lock.unlock();
      for (size_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < pages_;) page_(i);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  Fd fd_ = -1;  // none: private memory
  uint8_t* memory_ = nullptr;
  uint64_t bytes_ = 0;
  std::atomic<size_t> next_{0};
  // Written under the mutex while no thread is in a turn.
  std::function<void(size_t)> page_;
  size_t pages_ = 0;

  std::mutex mutex_;  // guards all below, but for threads_
  std::condition_variable work_;
  std::condition_variable done_;
  uint64_t turn_ = 0;
  size_t running_ = 0;
  bool stopped_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace
}  // namespace cachestore

// Null, with the reason in `error`: there is no such memory. `directory` null:
// private memory; else a file of a tmpfs there, which has no name.
extern "C" void* cs_copy_open(const char* directory, uint64_t bytes, int threads, char* error,
                              size_t error_size) {
  auto probe = std::make_unique<cachestore::Probe>();
  const cachestore::Status opened = probe->Open(directory, bytes, threads);
  if (opened.ok()) return probe.release();
  if (error_size > 0) {
    const size_t length = opened.text().copy(error, error_size - 1);
    error[length] = '\0';
  }
  return nullptr;
}

extern "C" void cs_copy_run(void* probe, size_t pages, const iovec* parts, size_t tensors,
                            size_t first, size_t slot_size, int into_buffer, int way) {
  static_cast<cachestore::Probe*>(probe)->Run(pages, parts, tensors, first, slot_size,
                                              into_buffer != 0, static_cast<cachestore::Way>(way));
}

extern "C" void cs_copy_close(void* probe) { delete static_cast<cachestore::Probe*>(probe); }
