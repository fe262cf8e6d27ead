// The C interface: its rules (c_api.h) as a caller in C would meet them.
#include "cachestore/c_api.h"

#include <cstring>
#include <functional>
#include <string>
#include <thread>

#include "fault_env.h"
#include "fixture.h"
#include "harness.h"

namespace cachestore::test {
namespace {

class Handle {
 public:
  explicit Handle(const StoreSetup& setup) {
    const cs_config config = setup.Config();
    EXPECT_EQ(cs_open(&config, &store_), CS_OK);
  }
  ~Handle() { cs_close(store_); }
  cs_store* get() const { return store_; }

 private:
  cs_store* store_ = nullptr;
};

void ExpectInLastError(const char* part) {
  const std::string text = cs_last_error();
  if (text.find(part) != std::string::npos) return;
  Fail(__FILE__, __LINE__, std::string(part) + " isn't in the error text: " + text);
}

// Opens with one thing changed, which must be refused by its name.
void ExpectRefused(const StoreSetup& setup, const std::function<void(cs_config&)>& change,
                   std::initializer_list<const char*> named) {
  cs_config config = setup.Config();
  change(config);
  cs_store* store = reinterpret_cast<cs_store*>(1);
  EXPECT_EQ(cs_open(&config, &store), CS_INVALID);
  EXPECT_TRUE(store == nullptr);
  for (const char* part : named) ExpectInLastError(part);
}

}  // namespace

TEST(CApi, DumpsLooksUpAndLoads) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  const Handle store(setup);
  Pages pages(setup, 0, 3);
  pages.Fill();
  const cs_batch batch = pages.batch();
  cs_task task = 0;
  int32_t results[3] = {-1, -1, -1};
  ASSERT_EQ(cs_dump(store.get(), &batch, &task), CS_OK);
  EXPECT_NE(task, 0u);
  EXPECT_EQ(cs_wait(store.get(), task, 10000, results, 3), CS_OK);
  for (const int32_t result : results) EXPECT_EQ(result, CS_OK);
  uint8_t present[3] = {};
  EXPECT_EQ(cs_lookup(store.get(), 0, 3, batch.block_ids, present), CS_OK);
  EXPECT_EQ(present[0] + present[1] + present[2], 3);
  size_t length = 0;
  EXPECT_EQ(cs_lookup_prefix(store.get(), 0, 3, batch.block_ids, &length), CS_OK);
  EXPECT_EQ(length, 3u);
  pages.Poison();
  ASSERT_EQ(cs_load(store.get(), &batch, &task), CS_OK);
  EXPECT_EQ(cs_wait(store.get(), task, 10000, results, 3), CS_OK);
  EXPECT_TRUE(pages.HoldsAll());
  cs_stats stats = {};
  EXPECT_EQ(cs_get_stats(store.get(), &stats), CS_OK);
  EXPECT_EQ(stats.load_ok, 3u);
  EXPECT_EQ(cs_clear(store.get()), CS_OK);
  EXPECT_EQ(cs_lookup(store.get(), 0, 3, batch.block_ids, present), CS_OK);
  EXPECT_EQ(present[0] + present[1] + present[2], 0);
}

// Rule 7.
TEST(CApi, NullsAreInvalid) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  const Handle handle(setup);
  cs_store* const store = handle.get();
  const cs_config config = setup.Config();
  cs_store* out = nullptr;
  EXPECT_EQ(cs_open(nullptr, &out), CS_INVALID);
  EXPECT_EQ(cs_open(&config, nullptr), CS_INVALID);
  ExpectInLastError("null");

  uint8_t ids[16] = {};
  uint8_t present = 9;
  size_t length = 9;
  EXPECT_EQ(cs_lookup(nullptr, 0, 1, ids, &present), CS_INVALID);
  EXPECT_EQ(cs_lookup(store, 0, 1, nullptr, &present), CS_INVALID);
  EXPECT_EQ(cs_lookup(store, 0, 1, ids, nullptr), CS_INVALID);
  EXPECT_EQ(cs_lookup(store, 0, 0, nullptr, nullptr), CS_OK);
  EXPECT_EQ(cs_lookup_prefix(nullptr, 0, 1, ids, &length), CS_INVALID);
  EXPECT_EQ(cs_lookup_prefix(store, 0, 1, nullptr, &length), CS_INVALID);
  EXPECT_EQ(cs_lookup_prefix(store, 0, 1, ids, nullptr), CS_INVALID);
  EXPECT_EQ(cs_lookup_prefix(store, 0, 0, nullptr, &length), CS_OK);
  EXPECT_EQ(length, 0u);

  const Pages pages(setup, 0, 1);
  const cs_batch batch = pages.batch();
  cs_task task = 9;
  for (const auto start : {&cs_load, &cs_dump}) {
    EXPECT_EQ(start(nullptr, &batch, &task), CS_INVALID);
    EXPECT_EQ(start(store, nullptr, &task), CS_INVALID);
    EXPECT_EQ(start(store, &batch, nullptr), CS_INVALID);
    for (const auto& spoil :
         {+[](cs_batch& b) { b.block_ids = nullptr; }, +[](cs_batch& b) { b.addresses = nullptr; },
          +[](cs_batch& b) { b.sizes = nullptr; }}) {
      cs_batch spoilt = batch;
      spoil(spoilt);
      task = 9;
      EXPECT_EQ(start(store, &spoilt, &task), CS_INVALID);
      EXPECT_EQ(task, 0u);
      ExpectInLastError("null");
    }
  }
  int32_t result = 0;
  EXPECT_EQ(cs_wait(nullptr, 1, 0, &result, 1), CS_INVALID);
  EXPECT_EQ(cs_wait(store, 1, 0, nullptr, 1), CS_INVALID);
  EXPECT_EQ(cs_clear(nullptr), CS_INVALID);
  cs_stats stats = {};
  EXPECT_EQ(cs_get_stats(nullptr, &stats), CS_INVALID);
  EXPECT_EQ(cs_get_stats(store, nullptr), CS_INVALID);
  char text[8];
  int32_t level = 0;
  EXPECT_EQ(cs_next_event(nullptr, text, sizeof text, &level), 0);
  EXPECT_EQ(cs_next_event(store, nullptr, 8, &level), 0);
  EXPECT_EQ(cs_next_event(store, text, 0, &level), 0);
  EXPECT_EQ(cs_next_event(store, text, sizeof text, nullptr), 0);
  cs_shutdown(nullptr);
  cs_close(nullptr);
}

// Rule 8.
TEST(CApi, StructSizeMustBeRight) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  for (const size_t size : {size_t{0}, sizeof(cs_config) - 8, sizeof(cs_config) + 8}) {
    ExpectRefused(setup, [&](cs_config& c) { c.struct_size = size; },
                  {"struct_size", std::to_string(size).c_str()});
  }
}

// Rule 4: the text names the field and what it had.
TEST(CApi, BadFieldsAreNamed) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  const auto refused = [&](const std::function<void(cs_config&)>& change,
                           std::initializer_list<const char*> named) {
    ExpectRefused(setup, change, named);
  };
  refused([](cs_config& c) { c.pipeline = nullptr; }, {"pipeline"});
  refused([](cs_config& c) { c.pipeline = "Pozix"; }, {"pipeline", "Pozix"});
  refused([](cs_config& c) { c.storage_backends = nullptr; }, {"storage_backends"});
  refused([](cs_config& c) { c.storage_backend_count = 0; }, {"storage_backends"});
  static const char* const relative[] = {"not/absolute"};
  refused([](cs_config& c) { c.storage_backends = relative; },
          {"storage_backends", "not/absolute", "absolute"});
  static const char* const none[] = {nullptr};
  refused([](cs_config& c) { c.storage_backends = none; }, {"storage_backends"});
  static const char* const empty[] = {""};
  refused([](cs_config& c) { c.storage_backends = empty; }, {"storage_backends"});
  refused([](cs_config& c) { c.identity_name = nullptr; }, {"identity_name"});
  for (const char* const name : {"", ".", "..", "a/b", "/"}) {
    refused([&](cs_config& c) { c.identity_name = name; }, {"identity_name", name});
  }
  refused([](cs_config& c) { c.identity_manifest = nullptr; }, {"identity_manifest"});
  refused([](cs_config& c) { c.tensor_sizes = nullptr; }, {"tensor_sizes"});
  refused([](cs_config& c) { c.tensor_count = 0; }, {"tensor_sizes"});
  static const uint64_t zero[] = {100, 0};
  refused([](cs_config& c) { c.tensor_sizes = zero; }, {"tensor_sizes", "0"});
  static const uint64_t huge[] = {100, uint64_t{1} << 63};
  refused([](cs_config& c) { c.tensor_sizes = huge; }, {"tensor_sizes"});
  refused([](cs_config& c) { c.shard_size = 136; }, {"shard_size", "136", "137"});
  refused([](cs_config& c) { c.shard_size = c.block_size = 4097; }, {"shard_size", "4097", "4096"});
  refused([](cs_config& c) { c.shard_size = 0; }, {"shard_size", "0"});
  refused([](cs_config& c) { c.block_size = 0; }, {"block_size", "0"});
  refused([](cs_config& c) { c.block_size = 138; }, {"block_size", "138", "multiple"});
  refused([](cs_config& c) { c.block_size = 136; }, {"block_size", "136"});
  refused([](cs_config& c) { c.block_size = UINT64_MAX; }, {"block_size"});
  refused([](cs_config& c) { c.block_size = 137 * 100000; }, {"shards a block"});
  refused([](cs_config& c) { c.posix_load_worker_number = 0; }, {"posix_load_worker_number", "0"});
  refused([](cs_config& c) { c.posix_load_worker_number = 1025; },
          {"posix_load_worker_number", "1025", "1024"});
  refused([](cs_config& c) { c.posix_dump_worker_number = 0; }, {"posix_dump_worker_number", "0"});
  refused([](cs_config& c) { c.posix_dump_worker_number = UINT32_MAX; },
          {"posix_dump_worker_number"});
  refused([](cs_config& c) { c.posix_queue_depth = 0; }, {"posix_queue_depth", "0"});
  refused([](cs_config& c) { c.io_direct = 3; }, {"io_direct", "3"});
  refused([](cs_config& c) { c.verify = 3; }, {"verify", "3"});
  refused([](cs_config& c) { c.posix_high_watermark_percent = 101; },
          {"posix_high_watermark_percent", "101"});
  refused([](cs_config& c) { c.posix_low_watermark_percent = 0; },
          {"posix_low_watermark_percent", "0"});
  refused([](cs_config& c) { c.posix_low_watermark_percent = 98; },
          {"posix_low_watermark_percent", "98", "97"});
  refused([](cs_config& c) { c.posix_zero_copy = 3; }, {"posix_zero_copy", "3"});
  refused([](cs_config& c) { c.timeout_ms = 0; }, {"timeout_ms", "0"});
  // None of these made anything.
  EXPECT_TRUE(Env::Real().List(root.path()).value().empty());
}

// What SGLang's users write: spaces, unicode, a trailing slash (F32).
TEST(CApi, OddPathsWork) {
  const TempDir root;
  for (const char* name : {"/with space", "/ünïcode-页", "/trailing/", "/col:on", "/a//b", "/~"}) {
    StoreSetup setup({root.path() + name});
    setup.identity = "Llama 3.1 – 8B";
    const Handle store(setup);
    ASSERT_TRUE(store.get() != nullptr);
    Pages pages(setup, 0, 1);
    const cs_batch batch = pages.batch();
    cs_task task = 0;
    int32_t result = -1;
    ASSERT_EQ(cs_dump(store.get(), &batch, &task), CS_OK);
    EXPECT_EQ(cs_wait(store.get(), task, 10000, &result, 1), CS_OK);
    EXPECT_EQ(result, CS_OK);
  }
}

TEST(CApi, UnusableDirectoryIsAnErrorWithItsPath) {
  const TempDir root;
  WriteFile(root.path() + "/file", {1});
  const StoreSetup setup({root.path() + "/file/below"});
  const cs_config config = setup.Config();
  cs_store* store = nullptr;
  const int code = cs_open(&config, &store);
  EXPECT_NE(code, CS_OK);
  EXPECT_TRUE(store == nullptr);
  ExpectInLastError("/file");
}

TEST(CApi, TasksAreKnownOnceAndByTheirCount) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  const Handle store(setup);
  int32_t results[3] = {};
  EXPECT_EQ(cs_wait(store.get(), 0, 0, results, 1), CS_INVALID);
  ExpectInLastError("task 0");
  EXPECT_EQ(cs_wait(store.get(), 77, 0, results, 1), CS_INVALID);
  ExpectInLastError("task 77");
  const Pages pages(setup, 0, 2);
  const cs_batch batch = pages.batch();
  cs_task task = 0;
  ASSERT_EQ(cs_load(store.get(), &batch, &task), CS_OK);
  EXPECT_EQ(cs_wait(store.get(), task, 10000, results, 3), CS_INVALID);
  ExpectInLastError("n is 3");
  EXPECT_EQ(cs_wait(store.get(), task, 10000, results, 2), CS_OK);
  EXPECT_EQ(results[0], CS_NOT_FOUND);
  EXPECT_EQ(cs_wait(store.get(), task, 10000, results, 2), CS_INVALID);
  ExpectInLastError("waited for already");
  const cs_batch nothing = {0, nullptr, nullptr, 2, nullptr, nullptr, nullptr, 0};
  ASSERT_EQ(cs_dump(store.get(), &nothing, &task), CS_OK);
  EXPECT_EQ(cs_wait(store.get(), task, 0, nullptr, 0), CS_OK);
}

// Rule 5.
TEST(CApi, RefusedRequestHasNoTask) {
  const TempDir root;
  StoreSetup setup({root.path()});
  setup.queue_depth = 2;
  const Handle store(setup);
  const Pages pages(setup, 0, 3);
  const cs_batch batch = pages.batch();
  cs_task task = 9;
  EXPECT_EQ(cs_dump(store.get(), &batch, &task), CS_REFUSED);
  EXPECT_EQ(task, 0u);
  ExpectInLastError("3 shards");
}

// A count beyond all memory is an error, not a crash.
TEST(CApi, AbsurdCountsAreErrors) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  const Handle store(setup);
  const Pages pages(setup, 0, 1);
  for (const size_t n : {SIZE_MAX, SIZE_MAX / 2 + 1, SIZE_MAX / 16, SIZE_MAX / 32 + 1}) {
    cs_batch batch = pages.batch();
    batch.n = n;
    cs_task task = 9;
    EXPECT_NE(cs_load(store.get(), &batch, &task), CS_OK);
    EXPECT_NE(cs_dump(store.get(), &batch, &task), CS_OK);
    EXPECT_EQ(task, 0u);
  }
}

// Rule 4: the text is the calling thread's own, and success leaves it.
TEST(CApi, LastErrorIsTheThreadsOwn) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  const Handle store(setup);
  int32_t result = 0;
  EXPECT_EQ(cs_wait(store.get(), 1234, 0, &result, 1), CS_INVALID);
  std::thread other([&] {
    EXPECT_EQ(std::string(cs_last_error()), "");
    EXPECT_EQ(cs_wait(store.get(), 5678, 0, &result, 1), CS_INVALID);
    ExpectInLastError("5678");
  });
  other.join();
  ExpectInLastError("1234");
  cs_stats stats = {};
  EXPECT_EQ(cs_get_stats(store.get(), &stats), CS_OK);
  ExpectInLastError("1234");
}

// Decision 9: events are cut to the caller's room and always terminated.
TEST(CApi, EventsAreCutAndTerminated) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  const Handle store(setup);
  Pages pages(setup, 0, 3);
  pages.Fill();
  const cs_batch batch = pages.batch();
  cs_task task = 0;
  int32_t results[3];
  ASSERT_EQ(cs_dump(store.get(), &batch, &task), CS_OK);
  EXPECT_EQ(cs_wait(store.get(), task, 10000, results, 3), CS_OK);
  for (uint64_t i = 0; i < 3; ++i) WriteFile(BlockPath(setup, IdOf(i)), {1});
  ASSERT_EQ(cs_load(store.get(), &batch, &task), CS_OK);
  EXPECT_EQ(cs_wait(store.get(), task, 10000, results, 3), CS_OK);
  for (const int32_t result : results) EXPECT_EQ(result, CS_CORRUPT);
  char text[200];
  int32_t level = -1;
  std::memset(text, 'x', sizeof text);
  ASSERT_EQ(cs_next_event(store.get(), text, 8, &level), 1);
  EXPECT_EQ(std::string(text), "damaged");
  EXPECT_EQ(text[8], 'x');
  EXPECT_EQ(level, CS_EVENT_WARNING);
  ASSERT_EQ(cs_next_event(store.get(), text, 1, &level), 1);
  EXPECT_EQ(std::string(text), "");
  ASSERT_EQ(cs_next_event(store.get(), text, sizeof text, &level), 1);
  EXPECT_NE(std::string(text).find("/blocks/"), std::string::npos);
  EXPECT_EQ(cs_next_event(store.get(), text, sizeof text, &level), 0);
}

TEST(CApi, ShutdownThenClose) {
  const TempDir root;
  const StoreSetup setup({root.path()});
  cs_config config = setup.Config();
  cs_store* store = nullptr;
  ASSERT_EQ(cs_open(&config, &store), CS_OK);
  const Pages pages(setup, 0, 2);
  const cs_batch batch = pages.batch();
  cs_task task = 0;
  ASSERT_EQ(cs_dump(store, &batch, &task), CS_OK);
  cs_shutdown(store);
  cs_shutdown(store);
  int32_t results[2] = {-1, -1};
  EXPECT_EQ(cs_wait(store, task, 0, results, 2), CS_OK);
  for (const int32_t result : results) EXPECT_TRUE(result == CS_OK || result == CS_CLOSED);
  cs_task refused = 9;
  EXPECT_EQ(cs_load(store, &batch, &refused), CS_CLOSED);
  EXPECT_EQ(refused, 0u);
  cs_stats stats = {};
  EXPECT_EQ(cs_get_stats(store, &stats), CS_OK);
  cs_close(store);
}

TEST(CApi, ChecksumIsCrc32c) {
  EXPECT_EQ(cs_crc32c(0, "123456789", 9), 0xe3069283u);
  EXPECT_EQ(cs_crc32c(cs_crc32c(0, "1234", 4), "56789", 5), 0xe3069283u);
  EXPECT_EQ(cs_crc32c(0, nullptr, 0), 0u);
}

}  // namespace cachestore::test
