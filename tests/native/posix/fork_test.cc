// A process that forks without exec, as Python's multiprocessing may: what its
// child inherits keeps nobody from taking over.
#include <signal.h>
#include <unistd.h>

#include <string>

#include "cache/processes.h"
#include "fixture.h"
#include "harness.h"

namespace cachestore::test {
namespace {

StoreSetup SetupOf(const std::string& root) {
  StoreSetup setup({root});
  setup.capacities = {1 << 20};
  return setup;
}

bool Collects(Store& store) { return store.Stats().posix_collecting == 1; }

// Forks when told to, closes when told to. The child lives until the test ends it,
// whatever becomes of its parent.
ROLE(Forking) {
  auto store = OpenOrFail(SetupOf(arguments[0]));
  if (store == nullptr || !Eventually([&] { return Collects(*store); })) return 1;
  TellParent("collects");
  while (const auto line = HearParent()) {
    if (*line == "fork") {
      const pid_t child = fork();
      if (child == 0) {
        alarm(60);
        for (;;) pause();
      }
      TellParent(std::to_string(child));
    } else {
      store.reset();
      TellParent("closed");
    }
  }
  return 0;
}

}  // namespace

TEST(Fork, AChildIsNotItsParent) {
  for (const bool closes : {false, true}) {
    const TempDir root;
    const StoreSetup setup = SetupOf(root.path());
    Process forking("Forking", {root.path()});
    ASSERT_EQ(forking.Hear(), "collects");
    const pid_t child = std::stoi(forking.Ask("fork"));
    ASSERT_GT(child, 0);
    const auto before = OpenOrFail(setup);
    ASSERT_TRUE(before != nullptr);
    EXPECT_FALSE(Collects(*before));
    if (closes) {
      EXPECT_EQ(forking.Ask("close"), "closed");
    } else {
      forking.Kill();
    }
    EXPECT_TRUE(Eventually([&] { return Collects(*before); }));
    // Whoever opens next reclaims what it left.
    const auto next = OpenOrFail(setup);
    EXPECT_TRUE(Eventually([&] {
      const auto instances = Env::Real().List(TemporaryRoot(setup));
      return instances.ok() && instances.value().size() == 2;
    }));
    EXPECT_EQ(kill(child, SIGKILL), 0);
  }
}

}  // namespace cachestore::test
