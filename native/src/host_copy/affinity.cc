#include "host_copy/affinity.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <utility>

namespace cachestore {
namespace {

// So that "0-4000000000" doesn't fill the memory.
constexpr int kHighestCpu = 65535;

// Takes a number off the front of `text`.
std::optional<int> TakeNumber(std::string_view& text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < 0 || number > kHighestCpu) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return number;
}

std::vector<int> Common(const std::vector<int>& a, const std::vector<int>& b) {
  std::vector<int> common;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(common));
  return common;
}

// The first line of a file of one page at most, as sysfs has them; none if
// it can't be read.
std::optional<std::string> ReadLine(Env& env, const std::string& path) {
  const Result<std::string> text = env.ReadText(path, 4096);
  if (!text.ok()) return std::nullopt;
  return text.value().substr(0, text.value().find('\n'));
}

}  // namespace

Result<std::vector<int>> ParseCpuList(std::string_view text) {
  const auto wrong = [&, whole = text] {
    return Status(CS_INVALID, "\"" + std::string(whole) +
                                  "\" is no list of CPUs; one looks like \"0-3,8\", its numbers "
                                  "go up to " +
                                  std::to_string(kHighestCpu));
  };
  std::vector<int> cpus;
  while (!text.empty()) {
    const std::optional<int> first = TakeNumber(text);
    if (!first) return wrong();
    std::optional<int> last = first;
    if (text.starts_with('-')) {
      text.remove_prefix(1);
      last = TakeNumber(text);
      if (!last || *last < *first) return wrong();
    }
    for (int cpu = *first; cpu <= *last; ++cpu) cpus.push_back(cpu);
    if (text.empty()) break;
    if (!text.starts_with(',') || text.size() == 1) return wrong();
    text.remove_prefix(1);
  }
  std::sort(cpus.begin(), cpus.end());
  cpus.erase(std::unique(cpus.begin(), cpus.end()), cpus.end());
  return cpus;
}

std::string FormatCpuList(const std::vector<int>& cpus) {
  std::string text;
  for (size_t i = 0; i < cpus.size();) {
    size_t last = i;
    while (last + 1 < cpus.size() && cpus[last + 1] == cpus[last] + 1) ++last;
    if (!text.empty()) text += ',';
    text += std::to_string(cpus[i]);
    if (last > i) text += '-' + std::to_string(cpus[last]);
    i = last + 1;
  }
  return text;
}

CpuTopology ReadTopology(Env& env, const std::string& node_directory, std::vector<int> allowed) {
  CpuTopology topology;
  topology.allowed = std::move(allowed);
  // Numbers of nodes have gaps; those that work are listed.
  const std::optional<std::string> online = ReadLine(env, node_directory + "/online");
  if (!online) return topology;
  const Result<std::vector<int>> ids = ParseCpuList(*online);
  if (!ids.ok()) return topology;
  for (const int id : ids.value()) {
    const std::optional<std::string> line =
        ReadLine(env, node_directory + "/node" + std::to_string(id) + "/cpulist");
    Result<std::vector<int>> cpus = ParseCpuList(line.value_or(""));
    if (cpus.ok()) topology.nodes.push_back({id, std::move(cpus.value())});
  }
  return topology;
}

Result<std::vector<int>> CpusFor(const std::string& setting, const CpuTopology& topology,
                                 std::optional<int> node) {
  if (setting == "none") return std::vector<int>{};
  if (setting == "auto") {
    if (!node || topology.nodes.size() < 2) return std::vector<int>{};
    const auto found = std::find_if(topology.nodes.begin(), topology.nodes.end(),
                                    [&](const auto& candidate) { return candidate.id == *node; });
    if (found == topology.nodes.end()) return std::vector<int>{};
    return Common(found->cpus, topology.allowed);
  }
  const std::string allowed =
      "; allowed: \"auto\", \"none\" or a list such as \"0-3,8\" of the "
      "CPUs this process may use (" +
      FormatCpuList(topology.allowed) + ")";
  Result<std::vector<int>> cpus = ParseCpuList(setting);
  if (!cpus.ok() || cpus.value().empty()) {
    return Status(CS_INVALID, "cache_h2h_cpu_affinity is \"" + setting + "\"" + allowed);
  }
  if (topology.allowed.empty()) return cpus;  // the system will say
  std::vector<int> usable = Common(cpus.value(), topology.allowed);
  if (usable.empty()) {
    return Status(CS_INVALID, "cache_h2h_cpu_affinity is \"" + setting +
                                  "\", none of which is usable" + allowed);
  }
  return usable;
}

}  // namespace cachestore
