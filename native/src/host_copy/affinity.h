// The CPUs of the copy workers: what `cache_h2h_cpu_affinity` stands for.
#ifndef CACHESTORE_HOST_COPY_AFFINITY_H_
#define CACHESTORE_HOST_COPY_AFFINITY_H_

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/env.h"
#include "base/status.h"

namespace cachestore {

// All lists of CPUs are ascending, without repeats.

struct CpuTopology {
  struct Node {
    int id = 0;
    std::vector<int> cpus;  // empty: a node of memory alone
  };
  std::vector<Node> nodes;   // ascending; empty: unknown
  std::vector<int> allowed;  // the CPUs this process may use; empty: unknown
};

inline constexpr const char* kNodeDirectory = "/sys/devices/system/node";

// What the kernel says in `node_directory` of its NUMA nodes; without an answer
// there are none. `allowed` is the caller's, as AllowedCpus() gives it.
CpuTopology ReadTopology(Env& env, const std::string& node_directory, std::vector<int> allowed);

// "0-3,8": the kernel's own notation. "" is the empty list. CS_INVALID: not in
// that notation, a range that falls, a number over 65535.
Result<std::vector<int>> ParseCpuList(std::string_view text);
std::string FormatCpuList(const std::vector<int>& cpus);

// The CPUs for workers that copy to or from memory on `node`; none: anywhere,
// leave the workers as they are.
//   "auto"   where there are several nodes: those CPUs of `node` that the process may use;
//            anywhere if there are none, or if either is unknown
//   "none"   anywhere
//   a list   as given, less the CPUs that the process may not use (processes of
//            one configuration may be bound to different CPUs)
// CS_INVALID, with the value and what is allowed: anything else, or a list of
// which nothing is left.
Result<std::vector<int>> CpusFor(const std::string& setting, const CpuTopology& topology,
                                 std::optional<int> node);

}  // namespace cachestore

#endif  // CACHESTORE_HOST_COPY_AFFINITY_H_
