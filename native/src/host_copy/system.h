// The system calls of host_copy, but for files: threads, CPUs, nodes.
#ifndef CACHESTORE_HOST_COPY_SYSTEM_H_
#define CACHESTORE_HOST_COPY_SYSTEM_H_

#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace cachestore {

// A thread that blocks all signals: those of the process are for its own
// threads. `name` is shown by ps and top, cut to 15 characters. Throws
// std::system_error when the system has no thread for it.
std::thread StartThread(const std::string& name, std::function<void()> body);

// Lets a thread run on these CPUs alone; false if the system refuses.
[[nodiscard]] bool PinThread(std::thread& thread, const std::vector<int>& cpus);

// The CPUs that the calling thread may run on, ascending; empty if the system
// doesn't say.
std::vector<int> AllowedCpus();

// The NUMA node of the page at an address, which is brought into memory; none
// if the system doesn't say (some containers forbid the call).
std::optional<int> NodeOfAddress(const void* address);

}  // namespace cachestore

#endif  // CACHESTORE_HOST_COPY_SYSTEM_H_
