// A process that forks without exec, as Python's multiprocessing may: the
// child's handle is inert, and nothing that it inherits keeps the parent alive.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <vector>

#include "cache/processes_store.h"
#include "cachestore/c_api.h"

namespace cachestore::test {
namespace {

// Bits of what a child found not to be inert; no allocation that matters, no
// output: it is a copy of a process with threads.
int NotInert(cs_store* store, const Pages& pages) {
  int wrong = 0;
  const cs_batch batch = pages.batch();
  cs_task task = 0;
  if (cs_load(store, &batch, &task) == CS_OK) wrong |= 1;
  if (cs_dump(store, &batch, &task) == CS_OK) wrong |= 2;
  std::vector<uint8_t> present(pages.size(), 0);
  if (cs_lookup(store, 0, pages.size(), batch.block_ids, present.data()) == CS_OK) wrong |= 4;
  size_t length = 0;
  if (cs_lookup_prefix(store, 0, pages.size(), batch.block_ids, &length) == CS_OK) wrong |= 8;
  if (cs_clear(store) == CS_OK) wrong |= 16;
  std::vector<int32_t> results(pages.size());
  if (cs_wait(store, 1, 10, results.data(), results.size()) == CS_OK) wrong |= 32;
  cs_stats stats;
  (void)cs_get_stats(store, &stats);
  char text[100];
  int32_t level;
  while (cs_next_event(store, text, sizeof text, &level) == 1) {
  }
  cs_shutdown(store);
  cs_close(store);
  return wrong;
}

// Opens a store; dumps, and leaves a child that lives until the test lets go of
// the socket, whatever becomes of its parent.
int ForkingProcess(const std::vector<std::string>& arguments) {
  const StoreSetup setup = SetupOf(arguments, 1);
  StorageWatch watch(arguments[0]);
  FaultEnv env;
  watch.Install(env, setup);
  const auto store = OpenOrFail(setup, env);
  if (store == nullptr) return 1;
  TellParent("open");
  while (HearParent()) {
    Pages pages(setup, 0, 5);
    pages.Fill();
    EXPECT_TRUE(DumpAll(*store, pages) == Repeated(5, CS_OK));
    const pid_t child = fork();
    if (child == 0) {
      // The end of the stream is the end of the test.
      while (HearParent()) {
      }
      _exit(0);
    }
    TellParent(child > 0 ? "forked" : "fork failed");
  }
  return 0;
}

ROLE(Forking) { return ForkingProcess(arguments); }

class Cache {
 public:
  explicit Cache(const StoreSetup& setup) {
    const cs_config config = setup.Config();
    EXPECT_EQ(cs_open(&config, &store_), CS_OK);
  }
  ~Cache() { cs_close(store_); }
  cs_store* get() const { return store_; }

 private:
  cs_store* store_ = nullptr;
};

void ExpectInertChild(const StoreSetup& setup) {
  const Cache cache(setup);
  Pages pages(setup, 0, 5);
  pages.Fill();
  const cs_batch batch = pages.batch();
  std::vector<int32_t> results(5);
  cs_task task = 0;
  EXPECT_EQ(cs_dump(cache.get(), &batch, &task), CS_OK);
  EXPECT_EQ(cs_wait(cache.get(), task, 10000, results.data(), 5), CS_OK);
  const pid_t child = fork();
  if (child == 0) _exit(NotInert(cache.get(), pages));
  ASSERT_GT(child, 0);
  int status = 0;
  EXPECT_TRUE(Eventually([&] { return waitpid(child, &status, WNOHANG) == child; }));
  (void)kill(child, SIGKILL);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  // The parent's is what it was.
  pages.Poison();
  EXPECT_EQ(cs_load(cache.get(), &batch, &task), CS_OK);
  EXPECT_EQ(cs_wait(cache.get(), task, 10000, results.data(), 5), CS_OK);
  EXPECT_TRUE(pages.HoldsAll());
}

}  // namespace

TEST(Fork, ChildsHandleIsInert) {
  Place place;
  ExpectInertChild(place.setup);
  place.setup.share_buffer = false;
  ExpectInertChild(place.setup);
  place.setup.pipeline = "Posix";
  ExpectInertChild(place.setup);
  EXPECT_TRUE(place.IsClean());
}

// The parent is dead for the others, though a child of it lives.
TEST(Fork, ChildDoesNotKeepItsParentAlive) {
  Place place;
  StoreProcess other(place.setup, place.watch);
  std::vector<std::string> words = WordsOf(place.setup);
  words.insert(words.begin(), place.watch.path());
  Process forking("Forking", words);
  EXPECT_EQ(forking.Hear(), "open");
  place.watch.HoldWrites(true);
  EXPECT_EQ(forking.Ask("dump and fork"), "forked");
  EXPECT_TRUE(place.watch.WaitWritesInside(1));
  forking.Kill();
  place.watch.HoldWrites(false);
  // What it hadn't stored is adopted, and its place is free.
  const StoreProcess next(place.setup, place.watch);
  EXPECT_TRUE(Eventually([&] { return place.Stored(0, 5) == 5; }));
  const auto region = AttachOrFail(place.setup);
  if (region == nullptr) return;
  EXPECT_EQ(CountsOf(*region).processes, 3u);
}

}  // namespace cachestore::test
