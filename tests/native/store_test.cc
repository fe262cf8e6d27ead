// What every caller of a Store relies on that isn't a pipeline's own.
#include "store.h"

#include "fault_env.h"
#include "fixture.h"
#include "harness.h"

namespace cachestore::test {

// The whole way once, before anything finer.
TEST(Store, DumpThenLoadGivesTheBytesBack) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  const auto store = OpenOrFail(setup);
  ASSERT_TRUE(store != nullptr);
  Pages pages(setup, 0, 5);
  pages.Fill();
  EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(5, 0));
  EXPECT_TRUE(DumpAll(*store, pages) == Repeated(5, CS_OK));
  EXPECT_TRUE(LookupAll(*store, pages) == std::vector<uint8_t>(5, 1));
  pages.Poison();
  EXPECT_TRUE(LoadAll(*store, pages) == Repeated(5, CS_OK));
  EXPECT_TRUE(pages.HoldsAll());
  EXPECT_TRUE(pages.GuardsIntact());
}

}  // namespace cachestore::test
