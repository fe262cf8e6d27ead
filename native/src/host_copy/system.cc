#include "host_copy/system.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>

namespace cachestore {
namespace {

// A set of any size: cpu_set_t ends at 1024.
class CpuSet {
 public:
  explicit CpuSet(size_t cpus) : cpus_(cpus), set_(CPU_ALLOC(cpus)) {
    if (set_ != nullptr) CPU_ZERO_S(bytes(), set_.get());
  }

  cpu_set_t* get() const { return set_.get(); }  // null: no memory
  size_t cpus() const { return cpus_; }
  size_t bytes() const { return CPU_ALLOC_SIZE(cpus_); }
  void Add(int cpu) { CPU_SET_S(static_cast<size_t>(cpu), bytes(), set_.get()); }
  bool Has(size_t cpu) const { return CPU_ISSET_S(cpu, bytes(), set_.get()); }

 private:
  struct Free {
    void operator()(cpu_set_t* set) const { CPU_FREE(set); }
  };
  size_t cpus_;
  std::unique_ptr<cpu_set_t, Free> set_;
};

}  // namespace

std::thread StartThread(const std::string& name, std::function<void()> body) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);  // a new thread inherits the mask
  std::thread thread;
  try {
    thread = std::thread(std::move(body));
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  constexpr size_t kLongestName = 15;
  pthread_setname_np(thread.native_handle(), name.substr(0, kLongestName).c_str());
  return thread;
}

bool PinThread(std::thread& thread, const std::vector<int>& cpus) {
  if (cpus.empty()) return false;
  CpuSet set(static_cast<size_t>(*std::max_element(cpus.begin(), cpus.end())) + 1);
  if (set.get() == nullptr) return false;
  for (const int cpu : cpus) set.Add(cpu);
  return pthread_setaffinity_np(thread.native_handle(), set.bytes(), set.get()) == 0;
}

std::vector<int> AllowedCpus() {
  constexpr size_t kMost = size_t{1} << 20;
  // EINVAL: the kernel's own set is larger.
  for (size_t cpus = 1024; cpus <= kMost; cpus *= 2) {
    const CpuSet set(cpus);
    if (set.get() == nullptr) return {};
    if (sched_getaffinity(0, set.bytes(), set.get()) == 0) {
      std::vector<int> allowed;
      for (size_t cpu = 0; cpu < cpus; ++cpu) {
        if (set.Has(cpu)) allowed.push_back(static_cast<int>(cpu));
      }
      return allowed;
    }
    if (errno != EINVAL) return {};
  }
  return {};
}

std::optional<int> NodeOfAddress(const void* address) {
#if defined(SYS_get_mempolicy)
  // As <numaif.h> has them, which comes with a library we don't need.
  constexpr unsigned long kNode = 1;
  constexpr unsigned long kOfAddress = 2;
  int node = -1;
  if (syscall(SYS_get_mempolicy, &node, nullptr, 0UL, address, kNode | kOfAddress) != 0) {
    return std::nullopt;
  }
  return node;
#else
  (void)address;
  return std::nullopt;
#endif
}

}  // namespace cachestore
