#include "host_copy/affinity.h"

#include <sys/stat.h>

#include <fstream>
#include <string>
#include <vector>

#include "fault_env.h"
#include "harness.h"
#include "host_copy/system.h"

namespace cachestore::test {
namespace {

using Cpus = std::vector<int>;

// A directory as the kernel has it for NUMA nodes.
class FakeNodes {
 public:
  explicit FakeNodes(const std::string& online) { Write("online", online); }

  void Add(int id, const std::string& cpulist) {
    const std::string node = "node" + std::to_string(id);
    mkdir((path() + "/" + node).c_str(), 0700);
    Write(node + "/cpulist", cpulist);
  }
  const std::string& path() const { return directory_.path(); }

 private:
  void Write(const std::string& name, const std::string& line) {
    std::ofstream(path() + "/" + name) << line << '\n';
  }

  TempDir directory_;
};

CpuTopology TwoNodes(Cpus allowed) {
  return {{{0, {0, 1, 4, 5}}, {1, {2, 3, 6, 7}}}, std::move(allowed)};
}

}  // namespace

TEST(Affinity, ParsesTheKernelsLists) {
  const auto parsed = [](const char* text) {
    const Result<Cpus> cpus = ParseCpuList(text);
    return cpus.ok() ? cpus.value() : Cpus{-1};
  };
  EXPECT_TRUE(parsed("") == Cpus{});
  EXPECT_TRUE(parsed("0") == Cpus{0});
  EXPECT_TRUE(parsed("0-3,8") == (Cpus{0, 1, 2, 3, 8}));
  EXPECT_TRUE(parsed("8,2-3,3,2-2") == (Cpus{2, 3, 8}));
  EXPECT_TRUE(parsed("65535") == Cpus{65535});
}

TEST(Affinity, RefusesOtherTexts) {
  for (const char* text : {" ", ",", "-", "-1", "0-", "3-1", "0,", ",0", "0,,1", "a", "0x1",
                           "0-3-5", "1 ", " 1", "1;2", "65536", "0-99999999999", "+1", "all"}) {
    const Result<Cpus> cpus = ParseCpuList(text);
    EXPECT_FALSE(cpus.ok());
    EXPECT_EQ(cpus.status().code(), CS_INVALID);
    EXPECT_NE(cpus.status().text().find("\"" + std::string(text) + "\""), std::string::npos);
  }
}

TEST(Affinity, FormatsAsItParses) {
  for (const char* text : {"", "0", "0-3,8", "2-3,5,7-9", "0,2,4"}) {
    EXPECT_EQ(FormatCpuList(ParseCpuList(text).value()), text);
  }
}

// Numbers with a gap, a node of memory alone.
TEST(Affinity, ReadsTheNodes) {
  FakeNodes nodes("0,2-3");
  nodes.Add(0, "0-3,8");
  nodes.Add(2, "4-7");
  nodes.Add(3, "");
  nodes.Add(4, "9");  // offline
  const CpuTopology topology = ReadTopology(Env::Real(), nodes.path(), {1, 2});
  ASSERT_EQ(topology.nodes.size(), 3u);
  EXPECT_EQ(topology.nodes[0].id, 0);
  EXPECT_TRUE(topology.nodes[0].cpus == (Cpus{0, 1, 2, 3, 8}));
  EXPECT_EQ(topology.nodes[1].id, 2);
  EXPECT_TRUE(topology.nodes[1].cpus == (Cpus{4, 5, 6, 7}));
  EXPECT_EQ(topology.nodes[2].id, 3);
  EXPECT_TRUE(topology.nodes[2].cpus.empty());
  EXPECT_TRUE(topology.allowed == (Cpus{1, 2}));
}

TEST(Affinity, WithoutAnAnswerThereAreNoNodes) {
  TempDir empty;
  EXPECT_TRUE(ReadTopology(Env::Real(), empty.path(), {}).nodes.empty());
  EXPECT_TRUE(ReadTopology(Env::Real(), FakeNodes("what?").path(), {}).nodes.empty());

  FakeNodes nodes("0");
  nodes.Add(0, "0-3");
  FaultEnv env;
  env.Before(Op::kReadFull, Failing(CS_IO));
  EXPECT_TRUE(ReadTopology(env, nodes.path(), {}).nodes.empty());
}

TEST(Affinity, AutoTakesTheNodesCpus) {
  const auto cpus = [](const CpuTopology& topology, std::optional<int> node) {
    return CpusFor("auto", topology, node).value();
  };
  const CpuTopology two = TwoNodes({0, 1, 2, 3, 4, 5, 6, 7});
  EXPECT_TRUE(cpus(two, 1) == (Cpus{2, 3, 6, 7}));
  EXPECT_TRUE(cpus(TwoNodes({1, 2, 3}), 1) == (Cpus{2, 3}));
  // Anywhere: bound to another node, unknown nodes, one node alone.
  EXPECT_TRUE(cpus(TwoNodes({0, 1}), 1).empty());
  EXPECT_TRUE(cpus(two, std::nullopt).empty());
  EXPECT_TRUE(cpus(two, 2).empty());
  EXPECT_TRUE(cpus({{{0, {0, 1}}}, {0, 1}}, 0).empty());
  EXPECT_TRUE(cpus({}, 0).empty());
}

TEST(Affinity, NoneIsAnywhere) {
  EXPECT_TRUE(CpusFor("none", TwoNodes({0, 1}), 0).value().empty());
}

TEST(Affinity, AListIsTakenLessWhatIsNotAllowed) {
  EXPECT_TRUE(CpusFor("0-3,6", TwoNodes({2, 3, 4, 6}), 0).value() == (Cpus{2, 3, 6}));
  EXPECT_TRUE(CpusFor("5", CpuTopology{}, 0).value() == Cpus{5});
}

TEST(Affinity, WrongSettingsNameTheValueAndWhatIsAllowed) {
  for (const char* setting : {"", "Auto", "0-", "4-5", "numa"}) {
    const Result<Cpus> cpus = CpusFor(setting, TwoNodes({0, 1, 2, 7}), 0);
    ASSERT_FALSE(cpus.ok());
    EXPECT_EQ(cpus.status().code(), CS_INVALID);
    const std::string text = cpus.status().text();
    for (const std::string part : {"cache_h2h_cpu_affinity", "\"auto\"", "\"none\"", "0-2,7"}) {
      EXPECT_NE(text.find(part), std::string::npos);
    }
    EXPECT_NE(text.find("\"" + std::string(setting) + "\""), std::string::npos);
  }
}

// On this machine, whatever it is.
TEST(Affinity, TheSystemAnswers) {
  const Cpus allowed = AllowedCpus();
  ASSERT_FALSE(allowed.empty());
  const CpuTopology topology = ReadTopology(Env::Real(), kNodeDirectory, allowed);
  const int on_stack = 0;
  const std::optional<int> node = NodeOfAddress(&on_stack);
  if (!node || topology.nodes.empty()) SKIP("the system doesn't tell nodes");
  EXPECT_TRUE(std::any_of(topology.nodes.begin(), topology.nodes.end(),
                          [&](const auto& known) { return known.id == *node; }));
  EXPECT_FALSE(NodeOfAddress(nullptr).has_value());
}

}  // namespace cachestore::test
